"""Where the system prompt of a chat ends, in tokens."""

from __future__ import annotations

import pytest
from served import make_served

from service.assets import ModelAssets
from service.chat import Message
from service.checkpoint import open_checkpoint
from service.prompts import read, system_end
from service.types import ChatInput, GenerateSpec, RawInput


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> ModelAssets:
    tiny = make_served(tmp_path_factory.mktemp("prompts") / "model")
    config = open_checkpoint(str(tiny.path)).config
    return ModelAssets(config, config.vision)


def chat(*messages: tuple[str, str]) -> GenerateSpec:
    return GenerateSpec("r", "", ChatInput(tuple(Message(role, (text,)) for role, text in messages)))


def end(spec: GenerateSpec, assets: ModelAssets) -> tuple[int, str]:
    """The number, and the text of so many tokens."""
    ids = read(spec, [], assets)
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


def test_a_picture_ends_it(assets: ModelAssets) -> None:
    spec = GenerateSpec("r", "", ChatInput((Message("system", ("look", None)), Message("user", ("at",)))))
    assert system_end(spec, [7] * 40, assets) == 0


def test_raw_text_has_none(assets: ModelAssets) -> None:
    spec = GenerateSpec("r", "", RawInput("be brief"))
    assert system_end(spec, read(spec, [], assets), assets) == 0
