"""Questions that ask for JSON and requests with tools: right answers, in the form that the chat template renders."""

from __future__ import annotations

import functools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from demo import data, json_questions, tool_questions
from demo.conversations import Renderer
from demo.json_questions import JSON_KINDS, json_example
from demo.tokenizer import (
    CHAT_TEMPLATE,
    IMAGE_ID,
    MORE_WORDS,
    TOOL_TOKENS,
    VOCAB_SIZE,
    extended,
    render_response,
    train_tokenizer,
)
from demo.tool_questions import TOOL_KINDS, tool_example, tool_question

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
IMAGE = {"type": "image"}


@functools.cache
def compiled_template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # as transformers has it
    return environment.from_string(CHAT_TEMPLATE)


def template(messages: list[dict[str, Any]], **arguments: Any) -> str:
    return compiled_template().render(messages=messages, **arguments)


@pytest.mark.parametrize("kind", JSON_KINDS)
def test_answers_are_json_in_one_style_about_what_is_shown(kind: str) -> None:
    questions = set()
    for seed in range(150):
        example = json_example(seed, kind)
        assert example == json_example(seed, kind)
        (turn,) = example.turns
        questions.add(turn.question)
        assert turn.kind == kind and "JSON" in turn.question
        assert json.dumps(json.loads(turn.answer)) == turn.answer
        shown = [thing for picture in example.pictures for thing in picture.things]
        assert all(any(thing is other for other in shown) for thing in turn.about)
        for start, end, things in turn.focus():
            assert 0 <= start < end <= len(turn.answer)
            if len(things) == 1 and not turn.counts and not (part := turn.answer[start:end]).isdigit():
                [thing] = things
                assert any(word in part for word in (thing.glyph, thing.colour, thing.place) if word)
    assert len(questions) > 100


def test_the_keys_are_those_that_the_question_names_in_its_order() -> None:
    named = 0
    for kind in JSON_KINDS:
        for seed in range(100):
            (turn,) = json_example(seed, kind).turns
            if found := re.search(r"with (?:the )?keys? (.*)\.$", turn.question):
                value = json.loads(turn.answer)
                keys = re.split(r", | and ", found[1].replace('"', ""))
                assert all(list(item) == keys for item in (value if isinstance(value, list) else [value])), turn
                named += 1
    assert named > 200


def test_values_are_the_things_of_the_picture() -> None:
    for seed in range(100):
        example = json_example(seed, "json_picture")
        value = json.loads(example.turns[0].answer)
        things = example.pictures[0].things
        for name, of in (("color", "colour"), ("shape", "glyph"), ("place", "place")):
            expected = [getattr(thing, of) for thing in things]
            rows = value if isinstance(value, list) else value.get("shapes")
            if isinstance(rows, list) and isinstance(rows[0], dict):
                assert name not in rows[0] or [row[name] for row in rows] == expected
            elif isinstance(value, dict):
                for key in (name, f"{name}s"):
                    assert key not in value or value[key] in (expected, expected[0])
                assert value.get("count", len(things)) == len(things)


def test_training_with_tools_shows_nothing_that_is_held_out() -> None:
    rng = random.Random(3)
    for _ in range(150):
        example = tool_example(rng)
        assert not any(thing.novel for picture in example.pictures for thing in picture.things)
        mixed = json_questions.with_json(rng, data.scene_example(rng, 4), 1.0)
        assert len(mixed.turns) == 4 and all("JSON" in turn.question for turn in mixed.turns)
        assert not any(turn.novel for turn in mixed.turns)


def called(answer: str) -> list[dict[str, Any]]:
    """The calls of an answer in OpenAI's form."""
    calls = []
    for name, body in re.findall(r"<tool_call>\n<function=(\w+)>\n(.*?)</function>\n</tool_call>", answer, re.DOTALL):
        arguments = dict(re.findall(r"<parameter=(\w+)>\n(.*?)\n</parameter>\n", body))
        calls.append({"type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


@pytest.mark.parametrize("kind", TOOL_KINDS)
def test_training_renders_tools_as_the_template_does(kind: str) -> None:
    tokenizer = extended(Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    rng = random.Random(kind)
    kinds = set()
    for seed in range(20):
        example = tool_question(seed, kind) if seed < 10 else tool_example(rng, kind=kind)
        turn = example.turns[0]
        content = [IMAGE, {"type": "text", "text": turn.question}]
        calls = called(turn.answer)
        answer = {"role": "assistant", "content": None if calls else turn.answer, "tool_calls": calls}
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}, answer]
        for done in example.turns[1:]:
            responses = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", done.question)
            assert len(responses) == len(calls) and render_response(responses) == done.question
            messages += [{"role": "tool", "content": response} for response in responses]
            messages.append({"role": "assistant", "content": done.answer})
        tools = [{"type": "function", "function": tool} for tool in example.tools]
        ids = Renderer(tokenizer).render(example).ids
        text = re.sub("(<image>)+", "<image>", tokenizer.decode(ids, skip_special_tokens=False))
        assert text + "\n" == template(messages, tools=tools)
        kinds.add(bool(calls))
        names = {tool["name"]: tool["parameters"]["properties"] for tool in example.tools}
        for call in calls:
            assert list(call["function"]["arguments"]) == list(names[call["function"]["name"]])
    assert kinds == {kind != "tool_none"}


def test_the_template_takes_what_requests_hold() -> None:
    """A system message, images in a result, plain functions without parameters, text before a call, other values."""
    tool = {"name": "look", "description": " Looks. "}
    more = {
        "name": "f",
        "parameters": {"properties": {"x": {}, "y": True, "z": {"type": ["string", "null"], "enum": ["a", 1]}}},
    }
    call = {"name": "f", "arguments": {"x": 1, "y": {"a": [True, None]}, "z": "text"}}
    text = template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": "Well.", "tool_calls": [{"function": {"name": "look"}}, call]},
            {"role": "tool", "content": [IMAGE, {"type": "text", "text": "here"}]},
            {"role": "tool", "content": "2"},
        ],
        tools=[tool, more],
        add_generation_prompt=True,
    )
    assert text == (
        "<|im_start|>system\nBe brief.\n\n# Tools\n\n<tools>\n"
        "<function>\n<name>look</name>\n<description>Looks.</description>\n<parameters>\n</parameters>\n</function>\n"
        "<function>\n<name>f</name>\n<parameters>\n<parameter>\n<name>x</name>\n</parameter>\n"
        "<parameter>\n<name>y</name>\n</parameter>\n<parameter>\n<name>z</name>\n<type>['string', 'null']</type>\n"
        '<enum>["a", 1]</enum>\n</parameter>\n</parameters>\n</function>\n</tools><|im_end|>\n'
        "<|im_start|>user\nLook.<|im_end|>\n"
        "<|im_start|>assistant\nWell.\n<tool_call>\n<function=look>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n"
        '<parameter=y>\n{"a": [true, null]}\n</parameter>\n<parameter=z>\ntext\n</parameter>\n'
        "</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n<img><image></img>here\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_more_tokens_leave_other_text_as_it_was() -> None:
    shipped = extended(Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    assert extended(shipped).to_str() == shipped.to_str()
    assert (MODEL / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert shipped.get_vocab_size() <= VOCAB_SIZE
    for word in (*MORE_WORDS, *TOOL_TOKENS):
        ids = shipped.encode(word, add_special_tokens=False).ids
        assert len(ids) == 1 and shipped.decode(ids, skip_special_tokens=True) == word
    trained = train_tokenizer(data.sentences(300))
    assert trained.get_vocab_size() <= VOCAB_SIZE
    before = json.loads(shipped.to_str())["model"]["merges"]
    for text in data.sentences(100):
        assert max(shipped.encode(text).ids) < 943, "a token of JSON or tools in an old sentence"
        assert shipped.decode(shipped.encode(text).ids) == text
    assert len(before) == len({tuple(merge) for merge in before})


@pytest.mark.parametrize("kind", [*JSON_KINDS, *TOOL_KINDS])
def test_attention_is_taught_at_the_words_that_are_copied(kind: str) -> None:
    """For keys and names, the tokens to attend to are those of the same word in the conversation."""
    renderer = Renderer(extended(Tokenizer.from_file(str(MODEL / "tokenizer.json"))))
    words = 0
    for seed in range(25):
        example = json_example(seed, kind) if kind in JSON_KINDS else tool_question(seed, kind)
        (turn,) = example.turns
        conversation = renderer.render(example)
        shown = {conversation.ids.index(IMAGE_ID) + n for n in range(conversation.ids.count(IMAGE_ID))} | {0}
        looked_at = {
            renderer.tokenizer.decode([conversation.ids[token] for token in tokens]).strip(' "')
            for _, tokens, _ in conversation.focus
            if tokens and not shown.issuperset(tokens) and len(example.pictures) == 1
        }
        named = {patterns[-1] for _, _, patterns in turn.copied}
        assert len(example.pictures) == 2 or len(looked_at) == len(named)
        for word in looked_at - {".", "</parameters>"}:
            assert f'"{word}": ' in turn.answer or f"={word}>" in turn.answer
            words += 1
    assert words > 10 or kind in ("json_pair", "tool_none")


def test_calls_name_tools_that_were_given() -> None:
    for kind in TOOL_KINDS:
        for seed in range(30):
            example = tool_questions.tool_question(seed, kind)
            names = {tool["name"] for tool in example.tools}
            assert names and {call["function"]["name"] for call in called(example.turns[0].answer)} <= names
