"""Converting a request to the decoder's ids, and the end of a chat's system prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from served import make_served
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from encoder.item import EncoderItem
from service.answers.prompts import KEPT_CHARACTERS, prompt_ids, system_end, widen
from service.answers.sampling import make_sampling
from service.common import errors
from service.common.types import ChatInput, GenerateSpec, Message, RawInput, TokensInput
from service.engine.types import EngineInfo
from service.media.prepared import PreparedItem
from service.model.assets import ModelAssets
from service.model.chat import ChatTemplate
from service.model.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> ModelAssets:
    tiny = make_served(tmp_path_factory.mktemp("prompts") / "model")
    config = open_checkpoint(str(tiny.path)).config
    return ModelAssets(config, config.vision)


def chat(*messages: tuple[str, str]) -> GenerateSpec:
    return GenerateSpec("r", "", ChatInput(tuple(Message(role, (text,)) for role, text in messages)))


def end(spec: GenerateSpec, assets: ModelAssets) -> tuple[int, str]:
    """The number of ids, and their text."""
    ids = prompt_ids(spec, [], assets)
    length = system_end(spec, ids, assets)
    assert assets.tokenizer is not None
    return length, assets.tokenizer.decode(ids[:length])


def test_the_system_prompt_ends_where_the_question_begins(assets: ModelAssets) -> None:
    length, text = end(chat(("system", "be brief"), ("user", "what is it?")), assets)
    assert length > 8 and text.endswith("user\n") and "be brief" in text and "what" not in text


def test_a_question_that_begins_like_the_stand_in_is_told_apart(assets: ModelAssets) -> None:
    assert end(chat(("system", "be"), ("user", "x")), assets) == end(chat(("system", "be"), ("user", "q")), assets)


def test_later_turns_are_not_shared(assets: ModelAssets) -> None:
    first = chat(("system", "be brief"), ("user", "one"))
    more = chat(("system", "be brief"), ("user", "one"), ("assistant", "two"), ("user", "three"))
    assert end(more, assets) == end(first, assets)


SYSTEM_FIRST = """{% for m in messages %}
{%- if m.role == "system" and not loop.first %}{{ raise_exception("system first") }}{% endif -%}
<{{ m.role }}>{{ m.content }}{% endfor %}"""
"""Qwen's templates reject late system messages so."""


def test_late_system_messages_are_the_users_if_the_template_rejects_them(assets: ModelAssets) -> None:
    strict = copy.copy(assets)
    strict.template = ChatTemplate(SYSTEM_FIRST, image_token=None, special_tokens={})
    late = chat(("system", "a"), ("user", "b"), ("system", "c"), ("assistant", "d"), ("developer", "e"))
    with pytest.raises(errors.InvalidArgument, match="system first"):
        prompt_ids(late, [], strict)

    assert isinstance(late.input, ChatInput)
    asked = replace(late, input=replace(late.input, late_system_as_user=True))
    users = chat(("system", "a"), ("user", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"))
    assert prompt_ids(asked, [], strict) == prompt_ids(users, [], strict)
    assert prompt_ids(asked, [], assets) == prompt_ids(late, [], assets)  # whose template accepts them

    two = chat(("system", "a"), ("system", "b"), ("user", "c"))
    assert isinstance(two.input, ChatInput)
    with pytest.raises(errors.InvalidArgument, match="system first"):  # they come before all others
        prompt_ids(replace(two, input=replace(two.input, late_system_as_user=True)), [], strict)


def test_an_image_ends_it(assets: ModelAssets) -> None:
    spec = GenerateSpec("r", "", ChatInput((Message("system", ("look", None)), Message("user", ("at",)))))
    assert system_end(spec, [7] * 40, assets) == 0
    assert system_end(spec, prompt_ids(spec, [prepared()], assets), assets) == 0


@pytest.mark.parametrize("size", [3, KEPT_CHARACTERS])
def test_it_depends_on_the_arguments_of_the_template(assets: ModelAssets, size: int) -> None:
    """Also when the same system message has been seen with others."""
    source = "{{ mode }}|{% for m in messages %}{{ m.content }}|{% endfor %}"
    other = copy.copy(assets)
    other.template = ChatTemplate(source, image_token=None, special_tokens={})
    messages = Message("system", ("s" * size,)), Message("user", ("what?",))
    for mode in ("a", "abcdef", "a"):
        spec = GenerateSpec("r", "", ChatInput(messages, {"mode": mode}))
        assert end(spec, other)[1] == f"{mode}|{'s' * size}|"


def test_raw_text_has_none(assets: ModelAssets) -> None:
    spec = GenerateSpec("r", "", RawInput("be brief"))
    assert system_end(spec, prompt_ids(spec, [], assets), assets) == 0


def test_an_image_in_the_question_ends_it(assets: ModelAssets) -> None:
    """Even if the placeholder question would have the same ids."""
    spec = GenerateSpec("r", "", ChatInput((Message("system", ("be",)), Message("user", (None, "what?")))))
    ids = prompt_ids(spec, [prepared()], assets)
    assert assets.image_token_id in ids
    assert system_end(spec, ids, assets) <= ids.index(assets.image_token_id)


def prepared(tokens: int = 4, labels: tuple[str, ...] = ()) -> PreparedItem:
    """An image of `tokens` tokens in two rows of the grid, or a clip with one group for each label."""
    groups = max(1, len(labels))
    item = EncoderItem((4, 2 * tokens // groups // 2), torch.zeros(4 * tokens, 3), num_sequences=groups)
    return PreparedItem(item, None, "prompt.images[0]", b"key", labels, len(labels))


def info(max_len: int = 100, max_image_tokens: int = 50) -> EngineInfo:
    return EngineInfo("m", "r", max_len, 4, max_image_tokens, "float32")


def test_a_larger_number_of_tokens_than_fit_is_an_error_or_reduced(assets: ModelAssets) -> None:
    asked = GenerateSpec("r", "", TokensInput((7, 8)), sampling={"max_tokens": 9, "min_tokens": 8})
    assert make_sampling(asked, 2, assets, info(max_len=11)).max_tokens == 9
    with pytest.raises(errors.InvalidArgument, match="max_tokens 9 and a prompt of 2 tokens .* at most 8 would fit"):
        make_sampling(asked, 2, assets, info(max_len=10))
    clamped = replace(asked, clamp_max_tokens=True)
    assert [make_sampling(clamped, 2, assets, info(max_len=most)).max_tokens for most in (10, 11, 12)] == [8, 9, 9]
    with pytest.raises(errors.InvalidArgument, match="min_tokens 8 .* at most 7 would fit"):
        make_sampling(clamped, 2, assets, info(max_len=9))


def test_ids_are_below_the_vocabulary(assets: ModelAssets) -> None:
    size = assets.config.decoder.vocab_size
    assert prompt_ids(GenerateSpec("r", "", TokensInput((0, size - 1))), [], assets) == [0, size - 1]
    for bad in (size, size + 9):
        with pytest.raises(errors.InvalidArgument, match=f"{bad}.*{size}"):
            prompt_ids(GenerateSpec("r", "", TokensInput((0, bad))), [], assets)


def test_prompt_and_answer_share_the_context(assets: ModelAssets) -> None:
    """The prompt, its continuation and one more token fit exactly."""
    ids = [7, 8, assets.image_token_id, 9]
    wide = [7, 8, *[assets.image_token_id] * 4, 9]
    assert widen(ids, [prepared()], 2, assets, info(max_len=10)).ids == wide
    said = "input: the prompt is too long: 7 tokens, images included"
    for continued, most in ((3, 10), (2, 9)):
        shown = f"{said}, and continued_token_ids {continued}; the maximum context length is {most},"
        with pytest.raises(errors.InvalidArgument, match=shown) as refused:
            widen(ids, [prepared()], continued, assets, info(max_len=most))
        assert refused.value.reason == "CONTEXT_LENGTH_EXCEEDED"
        assert refused.value.metadata == {"limit": str(most), "got": str(7 + continued)}
    with pytest.raises(errors.InvalidArgument, match=f"{said}; the maximum context length is 7,"):
        widen(ids, [prepared()], 0, assets, info(max_len=7))
    widen(ids, [prepared()], 0, assets, info(max_image_tokens=4))
    with pytest.raises(errors.InvalidArgument, match="takes 4 tokens; the server's handoff holds 3"):
        widen(ids, [prepared()], 0, assets, info(max_image_tokens=3))


def test_there_is_a_place_for_each_image_and_an_image_for_each_place(assets: ModelAssets) -> None:
    image = assets.image_token_id
    for ids in ([7], [image, 7, image, 8]):
        with pytest.raises(errors.InvalidArgument, match=f"has {ids.count(image)} image tokens .* 1 images"):
            widen(ids, [prepared()], 0, assets, info())
    two = widen([image, 7, image, 8], [prepared(), prepared()], 0, assets, info())
    assert [i.start for i in two.take_images()] == [0, 5] and two.ids == [*[image] * 4, 7, *[image] * 4, 8]


def test_a_clip_has_a_place_for_each_temporal_patch_or_one_for_all(assets: ModelAssets) -> None:
    image = assets.image_token_id
    clip = prepared(8, ("one", "two"))
    split = widen([5, image, 6, 7, image, 8], [clip], 0, assets, info())
    (placed,) = split.take_images()
    assert placed.between == ((6, 7),) and placed.start == 1 and split.take_images() == ()
    assert len(split.ids) == 1 + 8 + 2 + 1 and split.ids[-1] == 8
    whole = widen([5, image, 8], [clip], 0, assets, info())
    assert whole.ids == [5, *[image] * 8, 8] and whole.frames == 2


def test_image_tokens_in_raw_text_are_places_only_where_there_are_as_many_images(assets: ModelAssets) -> None:
    image, token = assets.image_token_id, assets.image_token
    for text, images, places in (
        (f"a{token}b", 0, 0),
        (f"a{token}b", 1, 1),
        ("ab", 1, 1),
        (f"{token}a{token}b", 1, 2),
        (f"{token}a{token}b", 2, 2),
        (f"a\ufdd0b{token}c", 1, 1),  # a marker of this module, which no text may contain
    ):
        spec = GenerateSpec("r", "", RawInput(text))
        assert prompt_ids(spec, [prepared()] * images, assets).count(image) == places, (text, images)


@pytest.fixture
def unigrams(tmp_path: Path) -> ModelAssets:
    """A model whose vocabulary is letters of the chat template, without a token for unknown characters."""
    tiny = make_served(tmp_path / "model")
    raw = RawTokenizer(models.Unigram([(chr(code), -1.0) for code in range(9, 127)]))
    raw.decoder = decoders.Sequence([decoders.Fuse()])
    raw.save(str(tiny.path / "tokenizer.json"))
    config = open_checkpoint(str(tiny.path)).config
    return ModelAssets(config, config.vision)


@pytest.mark.parametrize("make", [lambda text: RawInput(text), lambda text: chat(("user", text)).input])
def test_a_character_without_a_token_is_named(
    unigrams: ModelAssets, make: Callable[[str], RawInput | ChatInput]
) -> None:
    assert prompt_ids(GenerateSpec("r", "", make("ab")), [], unigrams)
    with pytest.raises(errors.InvalidArgument, match=r"input: 'é' \(U\+00E9\) cannot be encoded") as caught:
        prompt_ids(GenerateSpec("r", "", make("abcdé" + "ü" * 100 + "é")), [], unigrams)
    assert caught.value.field == "input"
