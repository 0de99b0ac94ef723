"""Tool calls by a model of random weights, whose logits favour tokens outside of the grammar: every form of an answer,
over gRPC and in process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tritonclient.grpc as triton
from calling import SCHEMA, make_calling
from running import RunningServer

import saccade
from saccade import cli, errors

TOOLS: Any = [saccade.Tool("weather", "of a city", SCHEMA), {"type": "function", "function": {"name": "now"}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_calling(tmp_path_factory.mktemp("calling") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    with RunningServer(str(model), dtype="float32", threads=1, max_seqs=4, max_len=900) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[saccade.Client]:
    with saccade.Client(server.address) as made:
        yield made


@pytest.fixture(scope="module", params=["client", "local"])
def either(request: pytest.FixtureRequest, model: Path) -> Iterator[Any]:
    if request.param == "client":
        yield request.getfixturevalue("client")
    else:
        with saccade.LocalClient(model, dtype="float32", threads=1, max_seqs=4, max_len=900) as made:
            yield made


OPTIONS: dict[str, Any] = {"tools": TOOLS, "max_tokens": 400, "temperature": 1.0, "seed": 3}


def check(sample: saccade.Sample) -> None:
    assert sample.finish_reason == "tool_calls" and sample.text == "" and sample.tool_calls
    for call in sample.tool_calls:
        schema = {"weather": SCHEMA, "now": {"type": "object", "maxProperties": 0}}[call.name]
        jsonschema.validate(call.parsed(), schema)


def test_named_calls_are_valid_in_every_form_of_an_answer(either: Any) -> None:
    options = {**OPTIONS, "tool_choice": "weather", "parallel_tool_calls": False, "n": 2}
    answer = either.generate("?", **options)
    for sample in answer.samples:
        check(sample)
        assert [call.name for call in sample.tool_calls] == ["weather"]
    assert len({call.id for sample in answer.samples for call in sample.tool_calls}) == 2
    with either.stream("?", **options, request_id=answer.request_id) as stream:
        deltas = [delta for delta in stream if delta.index == 0 and delta.tool_calls]
        assert stream.final() == answer
    assert len(deltas) > 1, "arguments come as they are written"
    (call,) = answer.tool_calls
    assert "".join(part.arguments for delta in deltas for part in delta.tool_calls) == call.arguments


def test_a_call_is_continued_where_it_broke_off(either: Any) -> None:
    options = {**OPTIONS, "tool_choice": "weather", "parallel_tool_calls": False, "request_id": "again", "logprobs": 1}
    whole = either.generate("?", **options)
    assert whole.logprobs is not None and len(whole.logprobs) == len(whole.token_ids)
    (call,) = whole.tool_calls
    for cut in (1, 9, 40, len(whole.token_ids) - 3, len(whole.token_ids)):
        rest = either.generate("?", **options, continued_token_ids=whole.token_ids[:cut])
        assert whole.token_ids[cut:] == rest.token_ids and rest.finish_reason == "tool_calls"
        again = "".join(part.arguments for part in rest.tool_calls)
        assert call.arguments.endswith(again) and {part.name for part in rest.tool_calls} <= {"weather", ""}


def test_required_calls_and_cut_ones(either: Any) -> None:
    check(either.generate("?", **OPTIONS, tool_choice="required", parallel_tool_calls=False).samples[0])
    cut = either.generate("?", **{**OPTIONS, "max_tokens": 30}, tool_choice="weather")
    assert cut.finish_reason == "length"


def test_tools_and_results_with_images_are_in_the_prompt(either: Any) -> None:
    from images import png

    plain = either.generate("?", max_tokens=1).usage.prompt_tokens
    told = either.generate("?", max_tokens=1, tools=TOOLS, tool_choice="none")
    assert told.usage.prompt_tokens > plain + 100 and not told.tool_calls
    asked = {"role": "assistant", "content": "", "tool_calls": [saccade.ToolCall("c", "weather", '{"city": "é"}')]}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "image", "image": png(1)}, "warm"]}
    messages = [{"role": "user", "content": "?"}, asked, result]
    answer = either.generate(messages, max_tokens=1, tools=TOOLS)
    assert answer.usage.image_tokens > 0
    with pytest.raises(errors.InvalidArgument, match=r"messages\[1\] is the result of a tool"):
        either.generate([messages[0], result], max_tokens=1)
    with pytest.raises(errors.InvalidArgument, match="'minProperties' is not implemented"):
        tool = saccade.Tool("f", parameters={"minProperties": 1})
        either.generate("?", max_tokens=1, tools=[tool], tool_choice="required")


def test_ask_prints_calls(server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([{"name": "weather", "parameters": SCHEMA}]))
    options = ["--server", server.address, "--seed", "3", "--max-tokens", "400"]
    assert cli.main(["ask", *options, "--tools", str(file), "--tool-choice", "weather", "?"]) == 0
    calls = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"id": "call_')]
    assert calls and all(call["name"] == "weather" for call in calls)
    file.write_text("{}")
    assert cli.main(["ask", *options, "--tools", str(file), "?"]) == 1
    assert "expected a JSON list in " in (said := capsys.readouterr().err) and "got a dict" in said


def test_batch_rows_have_calls(client: saccade.Client, server: RunningServer, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    body = {
        "messages": [{"role": "user", "content": "?"}], "tools": tools, "seed": 3, "max_tokens": 400,
        "tool_choice": {"type": "function", "function": {"name": "weather"}}, "parallel_tool_calls": False,
    }  # fmt: skip
    (tmp_path / "in.jsonl").write_text(json.dumps({"custom_id": "a", "method": "POST",
                                                   "url": "/v1/chat/completions", "body": body}))  # fmt: skip
    assert cli.main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--server", server.address,
                     "--quiet"]) == 0  # fmt: skip
    choice = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_kserve_has_calls(server: RunningServer, client: saccade.Client) -> None:
    asking = triton.InferenceServerClient(server.address)
    try:
        import numpy as np

        def tensor(name: str, value: Any) -> Any:
            made = triton.InferInput(name, [1], "BYTES")
            made.set_data_from_numpy(np.array([json.dumps(value).encode()], dtype=object))
            return made

        tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
        inputs = [tensor("messages", [{"role": "user", "content": "?"}]), tensor("tools", tools)]
        parameters = {"tool_choice": "weather", "parallel_tool_calls": False, "max_tokens": 400, "seed": 3}
        (name,) = [model.name for model in client.models()]
        answer = asking.infer(name, inputs, parameters=parameters)
        (call,) = json.loads(answer.as_numpy("tool_calls")[0])
        assert answer.as_numpy("finish_reason")[0] == b"tool_calls" and call["name"] == "weather"
        jsonschema.validate(json.loads(call["arguments"]), SCHEMA)
    finally:
        asking.close()
