"""A request's words and images -> the ids that the decoder reads, and where images lie among them.

Text holds one image token for each image and one for each temporal patch of a clip, each of which becomes as many as
it has rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, takewhile

from encoder.item import IMAGE, VIDEO
from service.common import errors
from service.common.types import ChatInput, GenerateSpec, Message, RawInput, TokensInput
from service.engine.types import EngineImage, EngineInfo
from service.media.images import Prepared
from service.model.assets import ModelAssets
from service.model.chat import Marked
from service.model.tokenizer import Tokenizer, literal

SYSTEM_ROLES = ("system", "developer")


class Prompt:
    """What a request's input becomes."""

    def __init__(
        self, ids: list[int], images: tuple[EngineImage, ...], narrow_ids: tuple[int, ...], frames: int = 0
    ) -> None:
        """`ids`: as the decoder reads them; of a pruned clip, which of its rows go where is not known yet.
        `narrow_ids`: with one image token id for each image and each temporal patch. `frames`: of all clips."""
        self.ids, self.narrow_ids, self.frames = ids, narrow_ids, frames
        self._images = images
        items = [image.patches for image in images]
        self.tokens_per_image = tuple(item.tokens for item in items if item.kind == IMAGE)
        self.tokens_per_video = tuple(item.tokens for item in items if item.kind == VIDEO)
        self.pixel_bytes = sum(item.nbytes for item in items)
        self.system_end = 0
        """Tokens of the system prompt, which other requests are likely to begin with too; 0 for none."""

    def take_images(self) -> tuple[EngineImage, ...]:
        """Its images, once: their pixels must not live for as long as the answer is written."""
        images, self._images = self._images, ()
        return images

    @property
    def image_tokens(self) -> int:
        return sum(self.tokens_per_image)

    @property
    def video_tokens(self) -> int:
        return sum(self.tokens_per_video)


def read(spec: GenerateSpec, media: Sequence[Prepared], assets: ModelAssets) -> list[int]:
    """Prompt ids with one image token id for each image and each temporal patch (token ids may have one for a clip).
    Raises StatusError."""
    if isinstance(spec.input, TokensInput):
        check_ids("tokens.ids", spec.input.ids, assets)
        return list(spec.input.ids)
    if assets.tokenizer is None:
        raise errors.FailedPrecondition(f"{assets.config.name} has no tokenizer: send token ids", field="input")
    clips = [_words(item, assets) for item in media]
    if isinstance(spec.input, RawInput):
        return _raw_ids(spec.input.text, clips, assets, assets.tokenizer)
    assert isinstance(spec.input, ChatInput)
    try:
        text = assets.template.render(_with_clips(spec.input.messages, clips), spec.input.template_arguments)
    except ValueError as error:
        raise errors.InvalidArgument(str(error), field="chat") from None
    return assets.wrap_images(assets.tokenizer.encode(text))


def check_ids(field: str, ids: Sequence[int], assets: ModelAssets) -> None:
    """Raises InvalidArgument for an id that the model does not have."""
    vocabulary = assets.config.decoder.vocab_size
    if bad := next((i for i in ids if not 0 <= i < vocabulary), None):
        raise errors.InvalidArgument(
            f"token id {bad} is not below the vocabulary size of {vocabulary}", field=field
        )  # fmt: skip


def system_end(spec: GenerateSpec, ids: Sequence[int], assets: ModelAssets) -> int:
    """How many of a chat's ids come before the first words of its user: what it shares with the same system messages
    and another question. Images end it. 0 where there are no such tokens, or no template to tell.
    """
    if not isinstance(spec.input, ChatInput) or not assets.template.present or assets.tokenizer is None:
        return 0
    system = list(takewhile(lambda message: message.role in SYSTEM_ROLES, spec.input.messages))
    if any(part is None for message in system for part in message.parts):
        return 0
    question = next((message for message in spec.input.messages[len(system) :]), None)
    begin = next(iter(question.parts), None) if question is not None else None
    other = Message("user", ("y" if begin and begin.startswith("x") else "x",))
    try:
        text = assets.template.render([*system, other], spec.input.template_arguments)
    except ValueError:  # a template that wants more than one question
        return 0
    shared = [a == b for a, b in zip(ids, assets.tokenizer.encode(text))]
    length = shared.index(False) if False in shared else len(shared)
    return ids.index(assets.image_token_id) if assets.image_token_id in ids[:length] else length


def _words(item: Prepared, assets: ModelAssets) -> Marked | None:
    """What stands for a clip in text; None for an image."""
    if not item.labels:
        return None
    rule = None if assets.vision is None else assets.vision.video_rule
    assert rule is not None, "a clip of a model without a rule for them"
    start, end = assets.image_wrappers
    ones = [1] * len(item.labels)
    return Marked(rule.text(item.labels, ones, start=start, token=assets.image_token or "", end=end))


def _with_clips(messages: Sequence[Message], clips: Sequence[Marked | None]) -> list[Message]:
    words = iter(clips)
    return [
        replace(message, parts=tuple(next(words, None) if part is None else part for part in message.parts))
        for message in messages
    ]


def _raw_ids(text: str, clips: Sequence[Marked | None], assets: ModelAssets, tokenizer: Tokenizer) -> list[int]:
    """Raw text may hold image tokens of its own; where it holds none, images and clips come first."""
    token, image_id = assets.image_token, assets.image_token_id
    if token is None or image_id is None:
        return tokenizer.encode(literal(text))
    if not clips:
        return tokenizer.encode(literal(text, token))
    pieces = literal(text).split(token)
    if len(pieces) == 1:
        before = [tokenizer.encode(words) if words is not None else [image_id] for words in clips]
        return [*assets.wrap_images([i for ids in before for i in ids]), *tokenizer.encode(pieces[0])]
    if len(pieces) - 1 == len(clips):
        filled = [piece + (words or token) for piece, words in zip(pieces, clips)]
        return tokenizer.encode("".join((*filled, pieces[-1])))
    return tokenizer.encode(literal(text))


def widen(ids: list[int], media: Sequence[Prepared], continued: int, assets: ModelAssets, info: EngineInfo) -> Prompt:
    """Each image token id becomes as many as its image has tokens. `continued`: tokens of output that are there
    already. Raises InvalidArgument."""
    places = [i for i, token in enumerate(ids) if token == assets.image_token_id]
    runs = [max(1, len(item.labels)) for item in media]
    if len(places) == len(media) != sum(runs):  # token ids with one for each clip
        runs = [1] * len(media)
    if len(places) != sum(runs):
        raise errors.InvalidArgument(
            f"the prompt holds {len(places)} image tokens (id {assets.image_token_id}) for {_needed(media, runs)}",
            field="input",
        )
    widened: list[int] = []
    images: list[EngineImage] = []
    previous, taken = 0, 0
    for item, count in zip(media, runs, strict=True):
        check_room(item, info)
        mine = places[taken : taken + count]
        widened += ids[previous : mine[0]]
        between = tuple(tuple(ids[a + 1 : b]) for a, b in pairwise(mine))
        image = EngineImage(len(widened), item.key, item.item, between)
        images.append(image)
        # Where the words between stand is for the engine to say: here only the length counts.
        widened += [ids[mine[0]]] * item.item.tokens + [i for words in between for i in words]
        previous, taken = mine[-1] + 1, taken + count
    widened += ids[previous:]
    if not widened:
        raise errors.InvalidArgument("the prompt is empty", field="input")
    if len(widened) + continued >= info.max_len:
        raise errors.InvalidArgument(
            f"the prompt takes {len(widened)} tokens with its images; the context holds {info.max_len}, answer "
            "included", reason="CONTEXT_LENGTH_EXCEEDED", field="input",
            metadata={"limit": str(info.max_len), "got": str(len(widened))},
        )  # fmt: skip
    return Prompt(widened, tuple(images), tuple(ids), sum(item.frames for item in media))


def _needed(media: Sequence[Prepared], runs: Sequence[int]) -> str:
    clips = sum(bool(item.labels) for item in media)
    if not clips:
        return f"{len(media)} images"
    return f"{len(media) - clips} images and {clips} videos of {sum(runs) - len(media) + clips} temporal patches"


def check_room(item: Prepared, info: EngineInfo) -> None:
    """Raises InvalidArgument for an image or clip that the handoff can never hold."""
    if item.item.tokens > info.max_image_tokens:
        raise errors.InvalidArgument(
            f"{item.field} takes {item.item.tokens} tokens and the server's handoff holds {info.max_image_tokens}",
            field=item.field, reason="VIDEO_TOO_LARGE" if item.labels else "IMAGE_TOO_LARGE",
        )  # fmt: skip
