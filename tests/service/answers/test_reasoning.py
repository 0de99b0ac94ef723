"""Reasoning apart from the answer, with the vocabulary of the embedded model, whose family has markers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from scripted import END, answered, ids, split

from service.answers.reasoning import ReasoningSplit, phase_of
from service.answers.relay import SampleState, merged
from service.common import errors
from service.common.config import ServerOptions
from service.common.types import (
    ChatInput,
    ConstraintSpec,
    Event,
    Finished,
    Message,
    ReasoningSpec,
    TextFormat,
    TokensInput,
)  # fmt: skip
from service.engine.constraining import Constraining
from service.model.assets import ModelAssets
from service.model.chat import ChatTemplate
from service.servers.from_options import load_assets


@pytest.fixture(scope="module")
def assets() -> ModelAssets:
    return load_assets(ServerOptions())


def usage(events: list[Event]) -> tuple[int, int]:
    end = events[-1]
    assert isinstance(end, Finished)
    return end.usage.completion_tokens, end.usage.reasoning_tokens


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ("a<think>\n", "it is é\n</think>\n\nred", ("it is é\n", "red")),
        ("a<think>", "it is red", ("it is red", "")),
        ("a<think>\n", "</think>red", ("", "red")),
        ("a<think>\n", "<think>\nso</think>\nred", ("so", "red")),  # some models repeat the marker
        ("a", "<think>\nso</think>\nred", ("so", "red")),
        ("a", "red", ("", "red")),
        ("a", "\nred", ("", "\nred")),
        ("a", "red<think>so</think>blue", ("", "redsoblue")),  # not at the beginning
        ("a<think>\n\n</think>\n\n", "<think>so</think>red", ("", "sored")),  # the prompt has closed it
        ("a<think>\n", "so</think>red</think>blue", ("so", "redblue")),
        ("<think>a", "red", ("", "red")),  # in a user's message
        ("<think><|im_end|>", "red", ("", "red")),
    ],
)
def test_reasoning_is_apart_from_text(prompt: str, output: str, expected: tuple[str, str], assets: ModelAssets) -> None:
    events, _ = answered(assets, output, prompt)
    assert split(events) == expected
    tokens, reasoning = usage(events)
    assert tokens == len(ids(assets, output))
    assert bool(reasoning) == bool(expected[0]) and reasoning <= len(ids(assets, expected[0])) + 2


def test_a_prompt_of_token_ids_is_split_as_its_text(assets: ModelAssets) -> None:
    tokens = TokensInput(tuple(ids(assets, "a<think>\n")))
    assert split(answered(assets, "so</think>red", input=tokens)[0]) == ("so", "red")


def test_stop_strings_and_the_end_token_belong_to_the_text(assets: ModelAssets) -> None:
    events, _ = answered(assets, "one\n\ntwo</think>\n\nred\nblue", stop=("\n",))
    assert split(events) == ("one\n\ntwo", "red")
    assert isinstance(events[-1], Finished) and events[-1].stop_string == "\n"
    events, _ = answered(assets, "so<|im_end|>")
    assert split(events) == ("so", "") and usage(events)[1] == len(ids(assets, "so"))


def test_newlines_after_the_marker_are_text_where_a_format_counts_them(assets: ModelAssets) -> None:
    given = ConstraintSpec(TextFormat("regex", "\n+red"))
    assert split(answered(assets, "so</think>\n\nred", constraint=given)[0]) == ("so", "\n\nred")


PIECES = ("<think>", "</think>", "\n", "so ", "é", "写真", "red", "<", "think>", "</", "😀", "{}", " ")


def test_any_output_is_the_same_streamed_in_chunks_and_resumed_at_any_token(assets: ModelAssets) -> None:
    rng = random.Random(3)
    for _ in range(60):
        prompt = rng.choice(["a", "a<think>\n", "a<think></think>\n"])
        output = "".join(rng.choices(PIECES, k=rng.randint(1, 12)))
        tokens = ids(assets, output)
        events, _ = answered(assets, output, prompt)
        whole = split(events)
        assert assets.tokenizer is not None
        told = assets.tokenizer.decode(tokens).replace("\n", "")
        assert (whole[0] + whole[1]).replace("\n", "") == told, "nothing is lost"
        chunked = answered(assets, output, prompt, chunk=rng.randint(2, 5))[0]
        assert split(chunked) == whole and usage(chunked) == usage(events)
        cut = rng.randrange(len(tokens))
        state = SampleState(
            assets.tokenizer, (), 0, ReasoningSplit(assets.reasoning, phase_of(ids(assets, prompt), assets))
        )
        shown = merged(map(state.push, tokens[:cut]))
        resumed, _ = answered(assets, output, prompt, continued=tuple(tokens[:cut]))
        rest = split(resumed)
        assert (shown.reasoning + rest[0], shown.text + rest[1]) == whole and usage(resumed) == usage(events)


# -- budgets and constraints -------------------------------------------------------------------------------------------


def test_a_constraint_begins_after_the_reasoning(assets: ModelAssets) -> None:
    markers = assets.reasoning
    assert markers is not None
    given = ConstraintSpec(TextFormat("json_object"))

    def constraint(prompt: str, **fields: Any) -> ConstraintSpec | None:
        return answered(assets, "x", prompt, **fields)[1][0].constraint

    assert constraint("a<think>\n", constraint=given) == replace(given, reasoning=ReasoningSpec(markers.close))
    assert constraint("a", constraint=given) == given, "nothing asks for reasoning"
    opening = ReasoningSpec(markers.close, markers.open, 3)
    assert constraint("a", constraint=given, max_reasoning_tokens=3) == replace(given, reasoning=opening)
    assert constraint("a", max_reasoning_tokens=3) == ConstraintSpec(reasoning=opening)
    assert constraint("a<think></think>", constraint=given, max_reasoning_tokens=3) == given
    assert constraint("a<think>") is None


def test_the_budget_closes_the_reasoning_and_the_format_follows(assets: ModelAssets) -> None:
    markers = assets.reasoning
    assert markers is not None and assets.tokenizer is not None
    made = Constraining(assets.config.path / "tokenizer.json", 1024, frozenset({END}))
    try:
        spec = ConstraintSpec(TextFormat("regex", "red"), reasoning=ReasoningSpec(markers.close, None, 2))
        thought, answer = ids(assets, "ab"), ids(assets, "red")
        constraint = made.begin(spec, frozenset({END}), frozenset(), thought[:1]).result(timeout=60)
        assert constraint.valid_prefix([END]) == 0, "the answer is missing"
        rest = [markers.open, markers.close, *answer, END]
        assert constraint.valid_prefix([markers.open, thought[0]]) == 1, "the budget is spent"
        assert constraint.valid_prefix(rest) == len(rest)
        assert constraint.valid_prefix([markers.close, *thought]) == 1
        special = frozenset({assets.tokenizer.token_id("<pad>")})
        constraint = made.begin(spec, frozenset({END}), special | {markers.close}, ()).result(timeout=60)
        assert [constraint.valid_prefix([token]) for token in (*special, markers.close)] == [0, 1]
        assert constraint.valid_prefix([markers.close, *answer, *special]) == len(answer) + 2
        bare = made.begin(ConstraintSpec(reasoning=ReasoningSpec(markers.close, None, 0)), frozenset({END}),
                          frozenset(), ()).result(timeout=60)  # fmt: skip
        assert bare.forced() == [markers.close]
    finally:
        made.close()


@pytest.mark.parametrize("value", [-1, 2**31])
def test_a_budget_out_of_range_is_refused(value: int, assets: ModelAssets) -> None:
    with pytest.raises(errors.InvalidArgument, match="from 0 to 2147483647") as error:
        answered(assets, "x", max_reasoning_tokens=value)
    assert error.value.field == "sampling.max_reasoning_tokens"


# -- templates ---------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% endfor %}{% set on = enable_thinking if enable_thinking is defined else true %}"
    "{{ '<think>\n' if on else '<think></think>' }}"
)


def chat(**fields: Any) -> dict[str, Any]:
    return {"input": ChatInput((Message("user", ("a",)),), **fields)}


@pytest.fixture(scope="module")
def thinking(assets: ModelAssets) -> ModelAssets:
    """The same model with a template that opens reasoning."""
    made = load_assets(ServerOptions())
    made.template = ChatTemplate(TEMPLATE, image_token=assets.image_token, special_tokens={})
    return made


def test_the_template_decides_and_the_request_may_ask(thinking: ModelAssets) -> None:
    output = "so</think>red"
    assert split(answered(thinking, output, **chat())[0]) == ("so", "red")
    off = chat(template_arguments={"enable_thinking": False})
    assert split(answered(thinking, output, thinking=False, **off)[0]) == ("", "sored")


def test_what_the_template_does_not_read_is_refused(assets: ModelAssets, thinking: ModelAssets) -> None:
    for name, value in (("enable_thinking", True), ("reasoning_effort", "low")):
        asked = chat(template_arguments={name: value}, needed=(name,))
        with pytest.raises(errors.FailedPrecondition, match=f"chat.{name}: .* does not use it") as error:
            answered(assets, "x", **asked)
        assert error.value.field == f"chat.{name}"
    fixed = load_assets(ServerOptions())
    fixed.template = ChatTemplate("{{ messages[0].content }}<think>", image_token=None, special_tokens={})
    with pytest.raises(errors.FailedPrecondition, match="begins reasoning anyway"):
        answered(fixed, "x", thinking=False, **chat(template_arguments={"enable_thinking": False}))


def test_reasoning_of_earlier_messages_goes_through_the_template(thinking: ModelAssets) -> None:
    history = (Message("user", ("a",)), Message("assistant", ("b",), "so <image>"), Message("user", ("c",)))
    _, (request,) = answered(thinking, "x", input=ChatInput(history))
    expected = thinking.template.render(history, {})
    assert "<think>so " in expected and "</think>b" in expected
    assert thinking.tokenizer is not None and request.prompt_ids == thinking.tokenizer.encode(expected)
    assert thinking.image_token_id not in request.prompt_ids, "a user's text is no image"


@pytest.mark.parametrize(
    ("said", "reasoned", "output", "expected"),
    [
        ("It is", "", " red", ("", " red")),
        ("It is", "so", " <think>a</think>red", ("", " ared")),  # after its reasoning
        ("It is", "", "<think>so</think>red", ("", "sored")),
        ("", "", "<think>so</think>red", ("so", "red")),  # nothing to continue
        ("<think>\nit", "", "\nis</think>\n\nred", ("\nis", "red")),
        ("<think>\nit", "", "<think>is</think>red", ("is", "red")),
        ("<think>", "", "\nso</think>red", ("so", "red")),
        ("<think>so</think>It", "", "\nred", ("", "\nred")),
    ],
)
def test_a_continued_message_goes_on_with_its_reasoning_or_has_none(
    assets: ModelAssets, said: str, reasoned: str, output: str, expected: tuple[str, str]
) -> None:
    thinking = ModelAssets(assets.config, assets.vision)
    thinking.template = ChatTemplate(
        TEMPLATE.replace("[{{ m.role }}]", "<|im_start|>{{ m.role }}\n"), image_token=None, special_tokens={}
    )
    messages = (Message("user", ("is <think> a word?",)), Message("assistant", (said,), reasoned))
    events, (request,) = answered(thinking, output, input=ChatInput(messages, continue_final=True))
    assert split(events) == expected
    assert request.prompt_ids == ids(thinking, thinking.template.render(messages, continue_final=True))
    limited = answered(thinking, output, input=ChatInput(messages, continue_final=True), max_reasoning_tokens=3)[1][0]
    limits = [None if limited.constraint is None else limited.constraint.reasoning]
    markers = thinking.reasoning
    assert markers is not None
    opening = markers.open if not said and not reasoned else None
    assert limits == [ReasoningSpec(markers.close, opening, 3) if expected[0] else None]


def test_a_model_without_markers_has_no_budget(assets: ModelAssets, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = ModelAssets(replace(assets.config, family=replace(assets.config.family, reasoning=None)), assets.vision)
    with pytest.raises(errors.FailedPrecondition, match="does not mark its reasoning"):
        answered(bare, "x", max_reasoning_tokens=3)
    assert split(answered(bare, "so</think>red")[0]) == ("", "sored")
