"""Converts a request's text and images to the token ids of the decoder, and finds the positions of images among them.

Text has one placeholder for each image or slice, and for each temporal patch of a clip. Each placeholder is repeated
for every row. Clips use the placeholder of images unless the family has another one for them.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, count, pairwise, repeat, takewhile
from typing import Any

from encoder.item import IMAGE, VIDEO
from families import SlicingRule
from service.answers.bounds import too_long
from service.answers.tool_calls import with_written_calls
from service.common import errors
from service.common.types import ChatInput, GenerateSpec, MediaLayout, Message, RawInput, TokensInput
from service.engine.types import EngineInfo
from service.media.prepared import PreparedItem
from service.model.assets import ModelAssets
from service.model.chat import ChatTemplate, Clip, Marked, NotContinued
from service.model.tokenizer import NotEncodable, Tokenizer, literal, substitute

SYSTEM_ROLES = ("system", "developer")
KEPT_PROMPTS = 64
"""Number of rendered system messages whose ids are kept."""
KEPT_CHARACTERS = 64 << 10
"""Longest of them in characters, including the arguments of the template."""


class Prompt:
    """The prompt of a request: token ids, and images with their positions."""

    def __init__(
        self, ids: list[int], images: tuple[PreparedItem, ...], narrow_ids: tuple[int, ...], frames: int = 0
    ) -> None:
        """`ids`: for the decoder; of a pruned clip, it is not known yet how the rows are distributed over its temporal
        patches. `narrow_ids`: with one image token id for each image and each temporal patch. `frames`: number of
        frames of all clips."""
        self.ids, self.narrow_ids, self.frames = ids, narrow_ids, frames
        self._images = images
        items = [image.layout for image in images]
        self.tokens_per_image = tuple(item.tokens for item in items if item.kind == IMAGE)
        self.tokens_per_video = tuple(item.tokens for item in items if item.kind == VIDEO)
        self.media = tuple(
            MediaLayout(
                image.layout.grid, image.layout.merge_size, image.layout.tokens, image.layout.slices,
                image.layout.slice_grid, image.frames, image.layout.slices_first,
            )
            for image in images
        )  # fmt: skip
        self.pixel_bytes = sum(item.nbytes for item in items)
        self.system_end = 0
        """Tokens of the system prompt, which other requests are likely to share; 0 if there is none."""

    def take_images(self) -> tuple[PreparedItem, ...]:
        """Returns the images and drops them here, so that their pixels are not held while the answer is generated."""
        images, self._images = self._images, ()
        return images

    @property
    def image_tokens(self) -> int:
        return sum(self.tokens_per_image)

    @property
    def video_tokens(self) -> int:
        return sum(self.tokens_per_video)


def prompt_ids(spec: GenerateSpec, media: Sequence[PreparedItem], assets: ModelAssets) -> list[int]:
    """Prompt ids with one image token id for each image and each temporal patch (token ids may have one for a clip).
    Raises StatusError."""
    try:
        return _prompt_ids(spec, media, assets)
    except NotEncodable as error:
        raise errors.InvalidArgument(f"input: {error}", field="input") from None


def _prompt_ids(spec: GenerateSpec, media: Sequence[PreparedItem], assets: ModelAssets) -> list[int]:
    if isinstance(spec.input, TokensInput):
        check_ids("tokens.ids", spec.input.ids, assets)
        return _with_words(list(spec.input.ids), media, assets)
    if assets.tokenizer is None:
        raise errors.FailedPrecondition(f"{assets.config.name} has no tokenizer: send token ids", field="input")
    if isinstance(spec.input, RawInput):
        ids = _raw_ids(spec.input.text, media, assets, assets.tokenizer)
        return assets.tokenizer.with_special_tokens(ids) if spec.input.special_tokens else ids
    assert isinstance(spec.input, ChatInput)
    words = _words(media, assets)
    chat = with_written_calls(spec.input, assets)
    for name in chat.needed:
        if name not in assets.template.names:
            field = "chat.messages.tool_calls" if name == "tool_calls" else f"chat.{name}"
            raise errors.FailedPrecondition(
                f"{field}: the chat template of {assets.config.name} does not use it", field=field
            )
    # Placeholders of clips for the template: their own token, or text.
    known = None if assets.video_token is None else Clip(assets.video_token)
    clips = [(known or part) if item.labels else None for item, part in zip(media, words, strict=True)]
    try:
        text = _rendered(replace(chat, messages=_with_clips(chat.messages, clips)), assets.template)
    except NotContinued as error:
        field = "chat.continue_final_message"
        raise errors.InvalidArgument(f"{field}: {error}", field=field) from None
    except ValueError as error:
        raise errors.InvalidArgument(str(error), field="chat") from None
    return assets.wrap_images(assets.tokenizer.encode(_placed(text, media, words, assets)))


def _rendered(chat: ChatInput, template: ChatTemplate) -> str:
    """Raises ValueError if the template rejects the chat, also with late system messages as the user's if it has asked
    for that."""
    options: dict[str, Any] = {"arguments": chat.template_arguments, "continue_final": chat.continue_final}
    try:
        return template.render(chat.messages, **options)
    except ValueError:
        changed = _late_system_as_user(chat.messages) if chat.late_system_as_user else chat.messages
        if changed == chat.messages:
            raise
        return template.render(changed, **options)


def _late_system_as_user(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages with the user as the author of the system messages that come after others."""
    first = next((i for i, message in enumerate(messages) if message.role not in SYSTEM_ROLES), len(messages))
    late = (replace(m, role="user") if m.role in SYSTEM_ROLES else m for m in messages[first:])
    return (*messages[:first], *late)


def check_ids(field: str, ids: Sequence[int], assets: ModelAssets) -> None:
    """Raises InvalidArgument for an id that is not in the vocabulary."""
    vocabulary = assets.config.decoder.vocab_size
    bad = next((i for i in ids if not 0 <= i < vocabulary), None)
    if bad is not None:
        raise errors.InvalidArgument(f"token id {bad} is not below the vocabulary size of {vocabulary}", field=field)


def system_end(spec: GenerateSpec, ids: Sequence[int], assets: ModelAssets) -> int:
    """Number of a chat's first ids that other questions after the same system message have too, up to the first image.
    0 if there are none, or no template to find them."""
    if not isinstance(spec.input, ChatInput) or not assets.template.present or assets.tokenizer is None:
        return 0
    system = list(takewhile(lambda message: message.role in SYSTEM_ROLES, spec.input.messages))
    if any(part is None for message in system for part in message.parts):
        return 0
    question = next((message for message in spec.input.messages[len(system) :]), None)
    begin = next(iter(question.parts), None) if question is not None else None
    other = Message("user", ("y" if begin and begin.startswith("x") else "x",))
    key = assets.template, assets.tokenizer, (*system, other), json.dumps(dict(spec.input.template_arguments))
    characters = sum(len(part or "") for message in system for part in message.parts) + len(key[-1])
    timed = "strftime_now" in assets.template.names
    with_other = (_rendered_ids if timed or characters > KEPT_CHARACTERS else _kept_ids)(*key)
    length = next((i for i, (a, b) in enumerate(zip(ids, with_other, strict=False)) if a != b), len(with_other))
    return next((place for place in _places(ids[:length], assets)), length)


def _rendered_ids(
    template: ChatTemplate, tokenizer: Tokenizer, messages: tuple[Message, ...], arguments: str
) -> Sequence[int]:
    """Ids of a chat without images. `arguments`: of the template, a JSON object. Empty if the template rejects the
    chat."""
    try:
        return array("q", tokenizer.encode(template.render(messages, json.loads(arguments))))
    except ValueError:  # for example, a template that needs more than one question
        return ()


_kept_ids = lru_cache(KEPT_PROMPTS)(_rendered_ids)
"""Many requests have the same system message, or none."""


def _places(ids: Sequence[int], assets: ModelAssets) -> list[int]:
    """Indices of placeholders of images and clips."""
    known = {assets.image_token_id, assets.video_token_id} - {None}
    return [place for place, token in enumerate(ids) if token in known]


def _placeholder(item: PreparedItem, assets: ModelAssets) -> int:
    """The id that stands for each row of an image or clip."""
    own = assets.video_token_id if item.labels else None
    found = assets.image_token_id if own is None else own
    assert found is not None, "an image of a model that takes none"
    return found


def _in_order(
    of_clips: Sequence[bool], media: Sequence[PreparedItem], runs: Sequence[int] | None = None
) -> Sequence[PreparedItem]:
    """The media in the order of their placeholders, for families in which clips have one of their own: media are listed
    with images before clips. `of_clips`: for each placeholder of a prompt, whether it is one of a clip. `runs`: number
    of placeholders of each item; None: one each. If placeholders and media do not match, the media are returned as they
    are."""
    counted = list(zip(media, runs or [1] * len(media), strict=True))
    clips, images = ([pair for pair in counted if bool(pair[0].labels) is kind] for kind in (True, False))
    found: list[PreparedItem] = []
    place = 0
    while place < len(of_clips):
        waiting = clips if of_clips[place] else images
        if not waiting:
            return media
        item, taken = waiting.pop(0)
        found.append(item)
        place += taken
    return media if clips or images else found


def _runs(media: Sequence[PreparedItem], assets: ModelAssets) -> list[int]:
    """Number of placeholders of each item: one for each attention sequence, but one for an image whose slices have no
    text between them."""
    apart = assets.vision is not None and isinstance(assets.vision.image_rule, SlicingRule)
    return [item.runs if item.labels or apart else 1 for item in media]


def _words(media: Sequence[PreparedItem], assets: ModelAssets) -> list[Marked | None]:
    """The text that replaces the placeholder of each clip, and of each image of a model that cuts images into slices;
    None for other images."""
    images, clips = count(), count()
    return [
        _clip_words(item, next(clips), assets) if item.labels else _image_words(item, next(images), assets)
        for item in media
    ]


def _clip_words(item: PreparedItem, number: int, assets: ModelAssets) -> Marked:
    rule = None if assets.vision is None else assets.vision.video_rule
    assert rule is not None, "a clip of a model without a rule for them"
    start, end = assets.image_wrappers
    token = assets.video_token or assets.image_token or ""
    return Marked(rule.text(item.layout, item.labels, number, start=start, token=token, end=end))


def _image_words(item: PreparedItem, number: int, assets: ModelAssets) -> Marked | None:
    rule = None if assets.vision is None else assets.vision.image_rule
    if not isinstance(rule, SlicingRule):
        return None
    return Marked(rule.text(item.layout, number, token=assets.image_token or ""))


def _placed(text: str, media: Sequence[PreparedItem], words: Sequence[Marked | None], assets: ModelAssets) -> str:
    """A rendered template's text, in which the token of each image, and of each clip if clips have a token of their
    own, is replaced by its words."""
    if assets.image_token is None:
        return text
    parts = list(zip(media, words, strict=True))
    if assets.video_token is not None:
        text = substitute(text, assets.video_token, [part for item, part in parts if item.labels])
        parts = [(item, part) for item, part in parts if not item.labels]
    # Clips without a token of their own are already in the text, with a token for each temporal patch.
    images = (repeat(None, len(item.labels)) if item.labels else (part,) for item, part in parts)
    return substitute(text, assets.image_token, chain.from_iterable(images))


def _with_words(ids: list[int], media: Sequence[PreparedItem], assets: ModelAssets) -> list[int]:
    """Adds to token ids, in which one placeholder stands for each image and clip, the words that the model expects
    around it: those of slices, and those of clips if the family has a token for them. Words that are there already are
    kept."""
    places = _places(ids, assets)
    if assets.tokenizer is None or len(places) != len(media):
        return ids
    media = _in_order([ids[place] == assets.video_token_id for place in places], media)
    found: list[int] = []
    previous = 0
    for place, item, text in zip(places, media, _words(media, assets), strict=True):
        placeholder = _placeholder(item, assets)
        named = text is not None and (not item.labels or assets.video_token is not None)
        own = assets.tokenizer.encode(text) if named and text is not None else [placeholder]
        begin = place - own.index(placeholder)
        here = placeholder if item.labels else ids[place]  # clips may have been sent with the placeholder of images
        around = [*ids[max(0, begin) : place], here, *ids[place + 1 : begin + len(own)]]
        found += ids[previous:place]
        found += [here] if len(own) == 1 or (begin >= 0 and around == own) else own
        previous = place + 1
    return found + ids[previous:]


def _with_clips(messages: Sequence[Message], clips: Sequence[Marked | None]) -> tuple[Message, ...]:
    words = iter(clips)
    return tuple(
        replace(message, parts=tuple(next(words, None) if part is None else part for part in message.parts))
        for message in messages
    )


def _raw_ids(text: str, media: Sequence[PreparedItem], assets: ModelAssets, tokenizer: Tokenizer) -> list[int]:
    """Tokenises raw text. If it has no placeholders, images and clips come first."""
    tokens = [token for token in (assets.image_token, assets.video_token) if token is not None]
    if not tokens or assets.image_token is None:
        return tokenizer.encode(literal(text))
    if not media:
        return tokenizer.encode(literal(text, *tokens))
    pieces = re.split("(" + "|".join(map(re.escape, tokens)) + ")", literal(text))
    media = _in_order([piece == assets.video_token for piece in pieces[1::2]], media)
    words = _words(media, assets)
    if len(pieces) == 1:
        start, end = assets.image_wrappers if assets.video_token is not None else ("", "")
        before: list[int] = []
        for item, part in zip(media, words, strict=True):
            own = part or assets.image_token
            before += tokenizer.encode(start + own + end if item.labels else own)
        return [*assets.wrap_images(before), *tokenizer.encode(pieces[0])]
    if len(pieces) // 2 == len(media):
        filled = [piece + (part or token) for piece, token, part in zip(pieces[::2], pieces[1::2], words)]
        return tokenizer.encode("".join((*filled, pieces[-1])))
    return tokenizer.encode(literal(text))


def widen(
    ids: list[int], media: Sequence[PreparedItem], continued: int, assets: ModelAssets, info: EngineInfo
) -> Prompt:
    """Repeats each image token id as often as its image has tokens. `continued`: number of output tokens that the
    request continues. Raises InvalidArgument."""
    ids, places = list(ids), _places(ids, assets)
    runs = _runs(media, assets)
    one_each = len(places) == len(media) != sum(runs)  # token ids with one placeholder for each clip
    if one_each:
        runs = [1] * len(media)
    if len(places) != sum(runs):
        raise errors.InvalidArgument(
            f"the prompt has {len(places)} image tokens (id {assets.image_token_id}) for {_needed(media, runs)}",
            field="input",
        )
    media = _in_order([ids[place] == assets.video_token_id for place in places], media, runs)
    runs = [1] * len(media) if one_each else _runs(media, assets)
    widened: list[int] = []
    images: list[PreparedItem] = []
    previous, taken = 0, 0
    for item, parts in zip(media, runs, strict=True):
        check_room(item, info)
        mine = places[taken : taken + parts]
        for place in mine:
            _settle(ids, place, item, assets)
        widened += ids[previous : mine[0]]
        between = tuple(tuple(ids[a + 1 : b]) for a, b in pairwise(mine))
        images.append(replace(item, start=len(widened), between=between))
        for rows, words in zip(_rows(item, len(mine)), (*between, ()), strict=True):
            widened += [ids[mine[0]]] * rows
            widened += words
        previous, taken = mine[-1] + 1, taken + parts
    widened += ids[previous:]
    if not widened:
        raise errors.InvalidArgument("the prompt is empty", field="input")
    if (total := len(widened) + continued) >= info.max_len:
        more = f", and continued_token_ids {continued}" if continued else ""
        raise too_long(
            f"input: the prompt is too long: {len(widened)} tokens, images included{more}; the maximum context length "
            f"is {info.max_len}, including the answer", "input", info.max_len, total,
        )  # fmt: skip
    return Prompt(widened, tuple(images), tuple(ids), sum(item.frames for item in media))


def _settle(ids: list[int], place: int, item: PreparedItem, assets: ModelAssets) -> None:
    """Replaces the placeholder by the item's own. Raises InvalidArgument for an image in the place of a clip's
    placeholder."""
    if ids[place] != assets.image_token_id and not item.labels:
        raise errors.InvalidArgument(
            f"{item.field} is an image, but the prompt has the video token (id {ids[place]}) in its place",
            field=item.field,
        )
    ids[place] = _placeholder(item, assets)


def _rows(item: PreparedItem, runs: int) -> tuple[int, ...]:
    """Rows of each run. For a pruned clip only the total is known before encoding: the first run gets all of them."""
    layout = item.layout
    if runs == layout.num_sequences and sum(layout.sequence_tokens) == layout.tokens:
        return layout.sequence_tokens
    return (layout.tokens, *[0] * (runs - 1))


def _needed(media: Sequence[PreparedItem], runs: Sequence[int]) -> str:
    clips = sum(bool(item.labels) for item in media)
    if not clips:
        return f"{len(media)} images" + (f" in {sum(runs)} parts" if sum(runs) > len(media) else "")
    return f"{len(media) - clips} images and {clips} videos of {sum(runs) - len(media) + clips} temporal patches"


def check_room(item: PreparedItem, info: EngineInfo) -> None:
    """Raises InvalidArgument for an image or clip that is too large for the handoff."""
    if item.layout.tokens > info.max_image_tokens:
        raise errors.InvalidArgument(
            f"{item.field} takes {item.layout.tokens} tokens; the server's handoff holds {info.max_image_tokens}",
            field=item.field, reason="VIDEO_TOO_LARGE" if item.labels else "IMAGE_TOO_LARGE",
        )  # fmt: skip
