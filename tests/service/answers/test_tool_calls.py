"""Tool calls of an answer, with the vocabulary of the embedded model: streamed, whole, resumed, beside reasoning."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from scripted import END, answered, ids, split
from tool_texts import TOOLS, random_text, xml

from families import falcon_h1, lfm2, lfm2_vl, olmo_hybrid
from families.tool_calls import (
    CALL_LIST,
    HERMES,
    HERMES_LIST,
    PYTHON_LINES,
    PYTHON_LIST,
    XML,
    CallScanner,
    TextPiece,
    ToolMarkup,
)
from service.answers.convert import ResponseBuilder, event_to_proto
from service.answers.reasoning import ReasoningSplit
from service.answers.relay import SampleState, Shown, merged
from service.answers.tool_calls import CallSplit, calls_format
from service.common import errors
from service.common.config import ServerOptions
from service.common.types import (
    CallDelta,
    ChatInput,
    ConstraintSpec,
    Delta,
    Event,
    Finished,
    Message,
    TextFormat,
    Tool,
    ToolCall,
    ToolUse,
)
from service.engine.constraining import Constraining
from service.model.assets import ModelAssets
from service.model.chat import ChatTemplate
from service.model.tokenizer import literal
from service.servers.from_options import load_assets

TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call><function={{ call.function.name }}>"
    "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}{{ '<think>\n' if enable_thinking }}"
)
WEATHER = json.dumps({"name": "weather", "arguments": {"city": "Köln", "days": 2}}, ensure_ascii=False)
BEGIN = 979
"""The first id that the embedded model's vocabulary has no entry for."""
CALLS = [("weather", {"city": "Köln", "days": 2}), ("now", {})]
WRITTEN = {
    XML: f"{xml('weather', city='Köln', days='2')}\n{xml('now')}",
    HERMES: f'<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
    CALL_LIST: f'<TOOLCALL>[{WEATHER}, {{"name": "now", "arguments": {{}}}}]</TOOLCALL>',
    PYTHON_LIST: "<|tool_call_start|>[weather(city='Köln', days=2), now()]<|tool_call_end|>",
    PYTHON_LINES: '<function_calls>weather(city="Köln", days=2)\nnow()</function_calls>',
}


def made_assets(markup: ToolMarkup = XML, options: ServerOptions | None = None) -> ModelAssets:
    assets = load_assets(options or ServerOptions())
    family = replace(assets.config.family, tool_markups=(markup,))
    assets = ModelAssets(replace(assets.config, family=family), assets.vision)
    text = TEMPLATE.replace("<tool_call><function=", markup.sign)
    assets.template = ChatTemplate(text, image_token=assets.image_token, special_tokens={})
    return assets


@pytest.fixture(scope="module")
def assets() -> ModelAssets:
    return made_assets()


def using(*, thinking: bool = False, **options: Any) -> dict[str, Any]:
    tools = tuple(Tool(name, "", schema) for name, schema in TOOLS.items())
    arguments = {"tools": [{"name": tool.name} for tool in tools], "enable_thinking": thinking}
    return {"input": ChatInput((Message("user", ("a",)),), arguments, ("tools",), ToolUse(tools, **options))}


def calls_of(events: Sequence[Event]) -> list[tuple[str, Any]]:
    """The tool calls of a stream, which are compared with those of the whole answer."""
    parts: dict[int, list[Any]] = {}
    builder = ResponseBuilder()
    for event in events:
        builder.add(event)
        for part in event_to_proto(event).delta.tool_calls if isinstance(event, Delta) else ():
            assert (part.index in parts) != bool(part.id and part.name), "the first part of a call names it"
            parts.setdefault(part.index, []).append(part)
    found = [(mine[0].id, mine[0].name, "".join(part.arguments for part in mine)) for mine in parts.values()]
    assert list(parts) == list(range(len(parts)))
    (sample,) = builder.response().samples
    assert found == [(call.id, call.name, call.arguments) for call in sample.tool_calls]
    assert (sample.reasoning, sample.text) == split(list(events))
    return [(name, arguments) for _, name, arguments in found]


def parsed(events: Sequence[Event]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls_of(events)]


def reason(events: Sequence[Event]) -> str:
    end = events[-1]
    assert isinstance(end, Finished)
    return end.reason


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_a_message_that_ends_within_a_call_is_not_continued(assets: ModelAssets, choice: str) -> None:
    (begin, end), asked = (XML.begin, XML.end), using(choice=choice)["input"]

    def continuing(text: str) -> dict[str, Any]:
        messages = (Message("user", ("a",)), Message("assistant", (text,)))
        return {"input": replace(asked, messages=messages, continue_final=True)}

    calls = f"So:\n{WRITTEN[XML]}\n<|im_end|>"
    events, _ = answered(assets, calls, **continuing(f"b {begin} c {end} d"))
    assert choice == "none" or parsed(events) == CALLS
    if choice != "none":
        with pytest.raises(errors.InvalidArgument, match="the last message ends within a tool call") as error:
            answered(assets, calls, **continuing(f"b {begin}\n<function=weather>"))
        assert error.value.field == "chat.continue_final_message"


@pytest.mark.parametrize("markup", WRITTEN, ids=lambda markup: markup.body)
def test_calls_are_apart_from_text(markup: ToolMarkup) -> None:
    events, _ = answered(made_assets(markup), f"So:\n{WRITTEN[markup]}\n<|im_end|>", **using())
    assert parsed(events) == CALLS and split(events) == ("", "So:") and reason(events) == "tool_calls"
    ids = {part.id for event in events if isinstance(event, Delta) for part in event.calls if part.id}
    assert len(ids) == 2 and all(len(i) == 29 for i in ids)


def test_without_tools_markup_is_text(assets: ModelAssets) -> None:
    output = WRITTEN[XML]
    assert split(answered(assets, output, "a")[0]) == ("", output)
    use = using(choice="none")
    assert split(answered(assets, output, **use)[0]) == ("", output)


def test_what_is_cut_off_or_broken_does_not_wait_for_results(assets: ModelAssets) -> None:
    events, _ = answered(assets, WRITTEN[XML][:70], **using())
    assert reason(events) == "length"
    for written, calls in (
        ("so <tool_call><function=wea", []), ("so <tool_call><function=weather><parameter=days>2", [("weather", "{")]),
        ("so <tool_call><function=now></function></tool", [("now", "{}")]),
    ):  # fmt: skip
        for thinking in (False, True):
            events, _ = answered(assets, written, **using(thinking=thinking))
            assert split(events) == (("so", "") if thinking else ("", "so")) and reason(events) == "length"
            assert calls_of(events) == calls
    events, _ = answered(assets, "<tool_call><function=weather><parameter=city>Kö<|im_end|>", **using())
    assert calls_of(events) == [("weather", '{"city": "Kö')] and reason(events) == "stop"
    for choice, text in (("required", ""), ("auto", "\n<tool_ca")):
        events, _ = answered(assets, "\n<tool_ca", **using(choice=choice))
        assert split(events) == ("", text) and reason(events) == "length"
    events, _ = answered(assets, f"{WRITTEN[XML]}<tool_call><function=now>!<|im_end|>", **using())
    assert len(calls_of(events)) == 3 and split(events) == ("", "!") and reason(events) == "stop"


def test_only_one_call_ends_the_answer(assets: ModelAssets) -> None:
    events, _ = answered(assets, f"a{WRITTEN[XML]}b<|im_end|>", **using(parallel=False))
    assert parsed(events) == CALLS[:1] and split(events) == ("", "a") and reason(events) == "tool_calls"
    end = events[-1]
    assert isinstance(end, Finished) and end.usage.completion_tokens < len(ids(assets, "a" + WRITTEN[XML]))
    long = {"sampling": {"max_tokens": 200, "min_tokens": 190}}
    events, _ = answered(assets, f"a{WRITTEN[XML]}b<|im_end|>", **using(parallel=False), **long)
    assert parsed(events) == CALLS[:1] and split(events) == ("", "a"), "stop conditions wait for min_tokens"


def test_stop_strings_are_looked_for_in_text_only(assets: ModelAssets) -> None:
    events, _ = answered(assets, f"a{WRITTEN[XML]}b\nc", **using(), stop=("\n", "ab"))
    assert parsed(events) == CALLS and split(events) == ("", "ab")
    end = events[-1]
    assert isinstance(end, Finished) and (end.stop_string, end.reason) == ("\n", "tool_calls")


def test_calls_within_reasoning_are_not_lost(assets: ModelAssets) -> None:
    output = f"so {xml('weather', city='Köln', days='2')} well</think>\n\nred{xml('now')}<|im_end|>"
    events, _ = answered(assets, output, **using(thinking=True))
    assert parsed(events) == CALLS and split(events) == ("so well", "red") and reason(events) == "tool_calls"
    broken = "so <tool_call> is how\n<tool_call><function=now></think>red<|im_end|>"
    events, _ = answered(assets, broken, **using(thinking=True))
    assert split(events)[1] == "red" and split(events)[0].startswith("so <tool_call> is how")
    assert calls_of(events) == [("now", "{")] and reason(events) == "stop"


@pytest.mark.parametrize(
    ("output", "options", "end"),  # the reason, the stop string, the text of the stop token
    [
        # The beginning of a call's marker is held back until the end shows that it is text.
        ("so <tool_ca", {"stop": ("_",)}, ("stop", "_", None)),
        ("so <tool_ca<|im_end|>", {"stop": ("_", "x")}, ("stop", "_", None)),
        ("so <tool_ca", {"stop": ("x",)}, ("length", None, None)),
        ("so<|im_end|>", {"thinking": True}, ("stop", None, None)),
        (WRITTEN[XML], {"stop": ("x",)}, ("length", None, None)),
        (f"{WRITTEN[XML]}<|im_end|>", {"stop": ("x",)}, ("tool_calls", None, None)),
        ("so red", {"stop": ("redder",)}, ("stop", None, "red")),
        ("so red", {"stop": ("d",)}, ("stop", None, "red")),
    ],
)
def test_an_answer_ends_at_once_and_resumed_after_its_last_token_in_the_same_way(
    assets: ModelAssets, output: str, options: dict[str, Any], end: tuple[str, str | None, str | None]
) -> None:
    tokens = ids(assets, output)
    sampling = {"max_tokens": len(tokens)} | ({"stop_token_ids": frozenset({tokens[-1]})} if end[2] else {})
    given = {**using(thinking=options.get("thinking", False)), "stop": options.get("stop", ()), "sampling": sampling}
    whole, _ = answered(assets, tokens, **given, end=tokens[-1] if end[2] else END)
    resumed, requests = answered(assets, tokens, **given, continued=tuple(tokens))
    assert not requests and split(resumed) == ("", "")
    for events in (whole, resumed):
        last = events[-1]
        assert isinstance(last, Finished)
        assert (last.reason, last.stop_string, last.stop_token) == (*end[:2], tokens[-1] if end[2] else None)
        assert last.usage.completion_tokens == len(tokens)
        assert last.usage.reasoning_tokens == (len(ids(assets, "so")) if "thinking" in options else 0)


def test_samples_have_calls_of_their_own(assets: ModelAssets) -> None:
    events, _ = answered(assets, f"a{WRITTEN[XML]}<|im_end|>", **using(), n=3)
    found = [[e.calls for e in events if isinstance(e, Delta) and e.index == i and e.calls] for i in range(3)]
    names = {part.id for sample in found for calls in sample for part in calls if part.id}
    assert len(names) == 6 and len({json.dumps([[p.arguments for p in c] for c in s]) for s in found}) == 1


def test_any_output_is_the_same_streamed_in_chunks_and_resumed_at_any_token() -> None:
    rng = random.Random(5)
    models = {markup: made_assets(markup) for markup in WRITTEN}
    for _ in range(60):
        markup, output = random_text(rng)
        tokens, use = ids(models[markup], output)[:190], using(thinking=rng.random() < 0.3)
        if not tokens:
            continue
        assert models[markup].tokenizer is not None
        text = models[markup].tokenizer.decode(tokens)
        events, _ = answered(models[markup], tokens, **use)
        whole, calls = split(events), calls_of(events)
        scanner = CallScanner(markup, TOOLS)
        pieces = scanner.feed(text) + scanner.finish(cut=reason(events) == "length")
        if "think>" not in output and not use["input"].template_arguments["enable_thinking"]:
            assert (
                whole == ("", "".join(p.text for p in pieces if isinstance(p, TextPiece)))
                and len(calls) == scanner.calls
            )
        chunked = answered(models[markup], tokens, chunk=rng.randint(2, 5), **use)[0]
        assert (split(chunked), calls_of(chunked), reason(chunked)) == (whole, calls, reason(events))
        cut = rng.randrange(len(tokens))
        resumed, _ = answered(models[markup], tokens, **use, continued=tuple(tokens[:cut]))
        before = sent_before(models[markup], use["input"], tokens[:cut])
        rest = split(resumed)
        assert (before.reasoning + rest[0], before.text + rest[1]) == whole and reason(resumed) == reason(events)
        assert joined_calls([*before.calls, *call_parts(resumed)]) == joined_calls(call_parts(events))


def sent_before(assets: ModelAssets, value: ChatInput, tokens: Sequence[int]) -> Shown:
    """What a client has received with the first tokens of an answer."""
    assert value.tool_use is not None and assets.tool_markup is not None
    opened = value.template_arguments["enable_thinking"]
    state = SampleState(
        assets.tokenizer, (), 0, ReasoningSplit(assets.reasoning, "opened" if opened else "possible"),
        calls=CallSplit(assets.tool_markup, value.tool_use, {}, "r/0"),
    )  # fmt: skip
    return merged(map(state.push, tokens))


def call_parts(events: Sequence[Event]) -> list[CallDelta]:
    return [part for event in events if isinstance(event, Delta) for part in event.calls]


def joined_calls(parts: Sequence[CallDelta]) -> dict[int, str]:
    """Ids, names and arguments, each as often as it was sent."""
    told: dict[int, str] = {}
    for part in parts:
        told[part.index] = told.get(part.index, "") + f"{part.id}{part.name}{part.arguments}"
    return told


# -- constraints -------------------------------------------------------------------------------------------------------


def test_calls_that_keep_to_a_schema_have_a_constraint_after_the_reasoning(assets: ModelAssets) -> None:
    def constraint(**fields: Any) -> Any:
        return answered(assets, "x", **fields)[1][0].constraint

    assert constraint(**using()) is None, "nothing to enforce"
    required = constraint(**using(choice="required", allowed=("now",)))
    source = json.loads(required.format.source)
    assert required.format.kind == "tool_calls" and source["required"] and source["parallel"]
    assert source["tools"] == [{"name": "now", "schema": TOOLS["now"]}]
    some = json.loads(constraint(**using(allowed=("now",))).format.source)
    assert not some["required"] and some["tools"] == [{"name": "now", "schema": None}]
    thinking = constraint(**using(choice="required", thinking=True))
    assert thinking.reasoning is not None and thinking.format.kind == "tool_calls"
    given = ConstraintSpec(TextFormat("json_object"), bad_words=("x",))
    both = constraint(**using(), constraint=given)
    assert json.loads(both.format.source)["answer"] == ["json_object", ""] and both.bad_words == ("x",)
    assert {tool["schema"] is None for tool in json.loads(both.format.source)["tools"]} == {True}
    assert both.format.calls_or_answer
    only = constraint(**using(choice="required"), constraint=given).format
    assert json.loads(only.source)["required"] and not only.calls_or_answer, "the format has no text to apply to"


def test_a_text_in_the_required_format_is_no_call_and_kept_as_it_is(assets: ModelAssets) -> None:
    quoting = json.dumps({"a": f"{XML.begin}<function=now></function>{XML.end}"})
    for text_format, text in ((TextFormat("json_object"), quoting), (TextFormat("regex", "\\n+a"), "\n\na")):
        fields: dict[str, Any] = {**using(thinking=True), "constraint": ConstraintSpec(text_format)}
        events, _ = answered(assets, f"so</think>{text}<|im_end|>", **fields)
        assert (split(events), calls_of(events), reason(events)) == (("so", text), [], "stop")
        events, _ = answered(assets, f"so</think>{WRITTEN[XML]}<|im_end|>", **fields)
        assert (split(events), parsed(events), reason(events)) == (("so", ""), CALLS, "tool_calls")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({**using(), "constraint": ConstraintSpec(TextFormat("structural_tags", "{}"))}, "sampling.response_format"),
        ({**using(choice="required"), "constraint": ConstraintSpec(TextFormat("structural_tags", "{}"))},
         "sampling.response_format"),
        ({**using(choice="required"), "sampling": {"ignore_eos": True}}, "sampling.ignore_eos"),
    ],
)  # fmt: skip
def test_what_excludes_each_other_is_refused(fields: dict[str, Any], field: str, assets: ModelAssets) -> None:
    with pytest.raises(errors.InvalidArgument) as error:
        answered(assets, "x", **fields)
    assert error.value.field == field


# -- markers that are special tokens -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> ModelAssets:
    """The same model, with special tokens for both markers and for a tag."""
    path = tmp_path_factory.mktemp("special") / "model"
    shutil.copytree(load_assets(ServerOptions()).config.path, path)
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for token, content in ((BEGIN, "<tool_call>"), (BEGIN + 1, "</tool_call>"), (BEGIN + 2, "<function=")):
        tokenizer["model"]["vocab"][content] = token
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokenizer["added_tokens"].append({"id": token, "content": content, **plain})
    file.write_text(json.dumps(tokenizer))
    return made_assets(options=ServerOptions(model=str(path)))


def test_markers_that_are_special_tokens_are_found_by_their_ids(special: ModelAssets) -> None:
    output = f"é{WRITTEN[XML]}<tool_call>x<|im_end|>"
    assert {BEGIN, BEGIN + 1, BEGIN + 2} <= {*ids(special, output)}
    events, _ = answered(special, output, **using())
    assert parsed(events) == CALLS and split(events) == ("", "é<tool_call>x")
    assert split(answered(special, output, "a")[0])[1].count("<tool_call>") == 0, "special tokens have no text"
    _, (request,) = answered(special, "x", **using(choice="none"))
    assert request.sampling.logit_bias[BEGIN] <= -1e9, "no call can begin"


def test_text_that_looks_like_a_special_marker_begins_no_call_of_a_strict_tool(
    special: ModelAssets,
) -> None:
    """It would be a call that is not checked against the tool's schema."""
    tokenizer = special.tokenizer
    assert tokenizer is not None
    schema = {"properties": {"n": {"const": 7}}, "required": ["n"]}
    spec = ConstraintSpec(calls_format(XML, ToolUse((Tool("strict", "", schema, strict=True),))))
    constraining = Constraining(special.config.path / "tokenizer.json", 1024, frozenset({END}))
    try:
        made = constraining.begin(spec, frozenset({END}), frozenset(), ()).result(timeout=60)
    finally:
        constraining.close()
    for text, fine in (("a <tool> <tool_call", True), ("a <tool_call>", False)):
        tokens = tokenizer.encode(literal(text, XML.begin))
        assert BEGIN not in tokens and (made.valid_prefix(tokens) == len(tokens)) == fine
    tokens = tokenizer.encode(f"a {xml('strict', n='7')} b")
    assert BEGIN in tokens and made.valid_prefix([*tokens, END]) == len(tokens) + 1


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_tools_calls_and_results_go_through_the_template(assets: ModelAssets) -> None:
    call = ToolCall("c1", "weather", {"city": "<image>", "days": [1]})
    asked, answer = Message("assistant", (), tool_calls=(call,)), Message("tool", ("warm",), answered=call)
    history = (Message("user", ("a",)), asked, answer)
    tools = [{"type": "function", "function": {"name": "weather", "description": "of <image>"}}]
    value = ChatInput(history, {"tools": tools}, ("tools", "tool_calls"))
    _, (request,) = answered(assets, "x", input=value)
    assert assets.tokenizer is not None and assets.image_token_id not in request.prompt_ids, "a text is no image"
    text = assets.tokenizer.decode(request.prompt_ids)
    assert '"description": "of <image>"' in text and '{"city": "<image>", "days": [1]}[tool]warm' in text


@pytest.mark.parametrize("text", ["<image>", "a\ufdd0b"])
def test_names_and_ids_of_calls_and_arguments_of_the_template_are_texts(text: str) -> None:
    """They are not images, and the text after them is tokenized as before, including its special tokens."""
    hearing = made_assets()
    asked, answer = "messages[0].tool_calls[0]", "messages[1]"
    printed = ["x.y[0]", f"{asked}.id", f"{asked}.function.name", f"{answer}.tool_call_id", f"{answer}.name"]
    source = "".join(f"{{{{ {text} }}}}" for text in printed) + "<|im_end|>"
    hearing.template = ChatTemplate(source, image_token=hearing.image_token, special_tokens={})
    call = ToolCall(text, text, {})
    history = Message("assistant", (), tool_calls=(call,)), Message("tool", ("warm",), answered=call)
    value = ChatInput(history, {"x": {"y": [text]}}, ("tool_calls",))
    _, (request,) = answered(hearing, "x", input=value)
    assert hearing.tokenizer is not None
    assert hearing.tokenizer.decode(request.prompt_ids) == text.replace("\ufdd0", "") * 5
    assert request.prompt_ids[-1] == END


def test_what_the_model_or_its_template_cannot_do_is_refused(assets: ModelAssets) -> None:
    plain = made_assets()
    plain.template = ChatTemplate("{{ tools }}{{ messages[0].content }}", image_token=None, special_tokens={})
    with pytest.raises(errors.FailedPrecondition, match="the format of .*'s tool calls is not known") as error:
        answered(plain, "x", **using())
    assert error.value.field == "chat.tools"
    deaf = made_assets()
    deaf.template = ChatTemplate("<function= {{ messages[0].content }}", image_token=None, special_tokens={})
    with pytest.raises(errors.FailedPrecondition, match="chat.tools: .* does not use it"):
        answered(deaf, "x", **using())
    history = ChatInput((Message("assistant", (), tool_calls=(ToolCall("", "f", {}),)),), {}, ("tool_calls",))
    with pytest.raises(errors.FailedPrecondition, match="chat.messages.tool_calls: .* does not use it"):
        answered(deaf, "x", input=history)


@pytest.mark.parametrize(
    ("markup", "written"),
    [
        (HERMES, 'So\n<tool_call>\n{"name": "weather", "arguments": {"on": true, "city": "a"}}\n</tool_call>\n'
                 '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
        (CALL_LIST, 'So\n<TOOLCALL>[{"name": "weather", "arguments": {"on": true, "city": "a"}}, '
                    '{"name": "now", "arguments": {}}]</TOOLCALL>'),
        (PYTHON_LIST, 'So\n<|tool_call_start|>[weather(on=True, city="a"), now()]<|tool_call_end|>'),
        (PYTHON_LINES, 'So\n<function_calls>weather(on=True, city="a")\nnow()</function_calls>'),
    ],
    ids=lambda value: value.body if isinstance(value, ToolMarkup) else "",
)  # fmt: skip
def test_calls_are_part_of_the_text_if_the_template_prints_none(markup: ToolMarkup, written: str) -> None:
    deaf = made_assets(markup)
    source = f"{markup.sign}{{% for m in messages %}}[{{{{ m.role }}}}]{{{{ m.content }}}}{{% endfor %}}"
    deaf.template = ChatTemplate(source, image_token=deaf.image_token, special_tokens={})
    calls = ToolCall("a", "weather", {"on": True, "city": "a"}), ToolCall("b", "now", {})
    result = Message("tool", ("warm",), answered=calls[0])
    history = Message("user", ("a",)), Message("assistant", ("So\n",), tool_calls=calls), result
    _, (request,) = answered(deaf, "x", input=ChatInput(history, {}, ("tool_calls",)))
    text = f"{markup.sign}[user]a[assistant]{written}[tool]warm"
    assert deaf.tokenizer is not None and deaf.tokenizer.decode(request.prompt_ids) == text


@pytest.mark.parametrize("field", ["m.tool_calls", "m['tool_calls']", "m.get('tool_calls')"])
def test_templates_read_calls_as_attributes_and_as_items(field: str) -> None:
    hearing = made_assets(PYTHON_LIST)
    source = PYTHON_LIST.sign + "{% for m in messages %}{{ m.role }}{{ m.content }}{{ " + field
    source += "[0].function.name }}{% endfor %}"
    hearing.template = ChatTemplate(source, image_token=None, special_tokens={})
    history = ChatInput((Message("assistant", (), tool_calls=(ToolCall("", "f", {}),)),), {}, ("tool_calls",))
    _, (request,) = answered(hearing, "x", input=history)
    assert hearing.tokenizer is not None
    assert hearing.tokenizer.decode(request.prompt_ids) == f"{PYTHON_LIST.sign}assistantf"


def test_the_template_decides_between_markups_of_a_family() -> None:
    family = replace(load_assets(ServerOptions()).config.family, tool_markups=(XML, HERMES, CALL_LIST))
    assert family.tool_markup("x <tool_call>\n<function=a>") == XML
    assert family.tool_markup("x <tool_call>\n{json}") == HERMES
    assert family.tool_markup("x <TOOLCALL>") == CALL_LIST
    assert family.tool_markup("x") is None
    falcon = falcon_h1.FAMILY.tool_markup
    assert falcon('<tool_call>\n[\n{"name": "function_name", "arguments": {}}') == HERMES_LIST
    assert falcon("<tool_call>\n{'arguments': <args-dict>") == HERMES
    assert olmo_hybrid.FAMILY.tool_markup("{{ '<function_calls>' }}") == PYTHON_LINES
    for made in (lfm2.FAMILY, lfm2.MOE_FAMILY, lfm2_vl.FAMILY):
        for listed in (
            '"List of tools: ["',
            '"List of tools: <|tool_list_start|>["',
            '"\n\nList of tools: " + (tools | tojson)',
        ):
            assert made.tool_markup(listed) == PYTHON_LIST
