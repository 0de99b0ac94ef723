"""Answers that satisfy a format, from a random model whose logits favour other tokens: over gRPC and in process."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import numpy as np
import pydantic
import pytest
import tritonclient.grpc as triton
from running import RunningServer
from tritonclient.utils import InferenceServerException
from waiting import stop

import saccade
from benchmarks.hostile_formats import HOSTILE
from benchmarks.schemas import random_schema
from saccade import cli, errors
from saccade.types import TopLogprob

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 999}, "b": {"enum": ["x", "é"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Point(pydantic.BaseModel):
    x: int = pydantic.Field(ge=0, le=99)
    kind: str = pydantic.Field(pattern="^[pq]$")


class Shape(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=4)
    corners: list[Point] = pydantic.Field(min_length=1, max_length=2)


@pytest.fixture(params=["client", "local"])
def either(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


FORMATS: dict[str, tuple[Any, str]] = {
    "schema": (SCHEMA, r'\{"a": \d+, "b": "[xé]"\}'),
    "object": ("json_object", r"\{.*\}"),
    "regex": (saccade.Regex("(€|[ab]){3}/"), "(€|[ab]){3}/"),
    "lark": (saccade.Lark('start: "<" x ">"\nx: "a" | "b" x'), "<b*a>"),
    "choice": (["red", "rosé", "r"], "red|rosé|r"),
    "openai": ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, r'\{"a": \d+, "b": "[xé]"\}'),
    "tags": (
        saccade.StructuralTags([saccade.Tag("<f>", {"type": "boolean"}, "</f>")]),
        "((?!<f>).|\n|<f>(true|false)</f>)*",
    ),
}


@pytest.mark.parametrize("name", list(FORMATS))
def test_what_ends_by_itself_keeps_to_its_format(name: str, either: Any) -> None:
    format, pattern = FORMATS[name]
    ended = 0
    for temperature in (0, 1.0):
        answer = either.generate(
            "Go", response_format=format, max_tokens=80, n=2, seed=4, temperature=temperature, logit_bias={2: 3.0}
        )
        for sample in answer.samples:
            assert sample.finish_reason in ("stop", "length")
            if sample.finish_reason == "stop":
                ended += 1
                assert re.fullmatch(pattern, sample.text, re.DOTALL), sample.text
    assert ended or name in ("object", "tags")


def test_all_ways_to_ask_give_the_same_answer(client: saccade.Client, local: saccade.LocalClient, server: Any) -> None:
    ask: dict[str, Any] = {"response_format": SCHEMA, "max_tokens": 60, "temperature": 1.0, "seed": 9}

    async def through_async() -> saccade.Generation:
        async with saccade.AsyncClient(server.address) as other:
            return await other.generate("Go", **ask)

    with client.stream("Go", **ask) as stream:
        pieces = "".join(delta.text for delta in stream)
    answers = [client.generate("Go", **ask), local.generate("Go", **ask), stream.final(), asyncio.run(through_async())]
    assert [answer.text for answer in answers] == [pieces] * 4
    whole = answers[0]
    jsonschema.validate(json.loads(whole.text), SCHEMA)
    for kept in (1, 5, len(whole.token_ids) - 1):
        rest = client.generate("Go", continued_token_ids=whole.token_ids[:kept], **ask)
        assert rest.token_ids == whole.token_ids[kept:]
    over = client.generate("Go", continued_token_ids=whole.token_ids, **ask)
    assert (over.finish_reason, over.token_ids) == ("stop", [])


def test_a_continuation_that_breaks_the_format_is_refused(either: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="continued_token_ids: only the first 1 of the 2 ids"):
        either.generate("Go", response_format=saccade.Regex("a+"), continued_token_ids=[*ids(either, "a"), 2 + 100])
    assert (
        either.generate("Go", response_format=saccade.Regex("a{3}"), continued_token_ids=ids(either, "a")).text == "aa"
    )


def ids(client: Any, text: str) -> list[int]:
    return list(client.tokenize(text, raw=True).token_ids)


def test_parse_gives_objects(either: Any) -> None:
    options: dict[str, Any] = {"max_tokens": 300, "temperature": 1.0, "seed": 3, "logit_bias": {2: 5.0}}
    shape = either.parse("Go", response_format=Shape, **options)
    assert isinstance(shape, Shape) and 1 <= len(shape.corners) <= 2
    adapter = pydantic.TypeAdapter(list[Point])
    made = either.parse("Go", response_format={"type": "array", "items": {"type": "integer"}, "maxItems": 2}, **options)
    assert isinstance(made, list)
    assert all(isinstance(point, Point) for point in either.parse("Go", response_format=adapter, **options))
    assert either.parse("Go", response_format=["yes", "no"], **options) in ("yes", "no")
    assert re.fullmatch("[ab]{2}", either.parse("Go", response_format=saccade.Regex("[ab]{2}"), **options))
    with pytest.raises(errors.OutOfRange, match="ended by length after 3 tokens") as cut:
        either.parse("Go", response_format=SCHEMA, max_tokens=3)
    assert cut.value.reason == "ANSWER_TRUNCATED"
    with pytest.raises(errors.OutOfRange, match="a stop string"):
        either.parse("Go", response_format=saccade.Regex("ab+"), stop=["b"], max_tokens=9)


def test_the_async_client_parses_too(server: RunningServer) -> None:
    async def run() -> Any:
        async with saccade.AsyncClient(server.address) as client:
            return await client.parse("Go", response_format=["left", "right"], max_tokens=20)

    assert asyncio.run(run()) in ("left", "right")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"response_format": {"type": "array", "uniqueItems": True}}, "json_schema: .*uniqueItems"),
        ({"response_format": saccade.Regex("(")}, "regex: .*unclosed"),
        ({"response_format": saccade.Lark("start: nothing")}, "lark: .*nothing"),
        ({"response_format": []}, "choice has 0 entries"),
        ({"response_format": SCHEMA, "ignore_eos": True}, "cannot be combined"),
        ({"response_format": saccade.Regex("yes"), "bad_words": ["es"]}, "no token is allowed"),
        ({"allowed_token_ids": [7, 288]}, "allowed_token_ids: token id 288 is not below .* 288"),
        ({"bad_words": [""]}, r"bad_words\[0\] has 0 characters"),
    ],
)
def test_what_cannot_be_served_is_an_error_of_its_own_request(options: Any, words: str, either: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match=words):
        either.generate("Go", max_tokens=20, **options)
    assert either.generate("Go", max_tokens=2).usage.completion_tokens == 2


def test_hostile_formats_end_and_others_go_on(client: saccade.Client) -> None:
    """All are sent at once: each is served or rejected, and an unconstrained answer at the same time is the same as
    alone."""
    plain: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    alone = client.generate("Go", **plain).token_ids

    def ask(name: str) -> str:
        try:
            options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 1, "timeout": 60}
            return client.generate("Go", response_format=HOSTILE[name], **options).finish_reason
        except errors.InvalidArgument:
            return "refused"

    with ThreadPoolExecutor(len(HOSTILE) + 4) as pool:
        ends = pool.map(ask, HOSTILE)
        beside = [pool.submit(client.generate, "Go", **plain) for _ in range(4)]
        assert all(answer.result().token_ids == alone for answer in beside)
        assert set(ends) <= {"refused", "stop", "length"}


def test_the_field_at_fault_is_in_the_details(client: saccade.Client) -> None:
    with pytest.raises(errors.InvalidArgument) as error:
        client.generate("Go", response_format=saccade.Regex("("))
    assert isinstance(error.value.__cause__, grpc.RpcError)
    details = dict(error.value.__cause__.trailing_metadata())["grpc-status-details-bin"]
    assert b"sampling.response_format.regex" in details


def test_allowed_ids_and_bad_words(either: Any) -> None:
    letters = ids(either, "abc")
    answer = either.generate("Go", allowed_token_ids=letters, max_tokens=60, temperature=1.0, seed=1, min_tokens=60)
    assert set(answer.text) <= set("abc") and "ab" in answer.text and "cc" in answer.text
    less = either.generate(
        "Go", allowed_token_ids=letters, bad_words=["ab", "cc"], max_tokens=60, temperature=1.0, seed=1, min_tokens=60
    )
    assert len(less.text) == 60 and "ab" not in less.text and "cc" not in less.text


def test_tokens_of_log_probabilities_have_texts(either: Any) -> None:
    answer = either.generate("Go", response_format=["€"], logprobs=2, max_tokens=9, prompt_logprobs=0)
    assert b"".join(item.token for item in answer.logprobs[:3]).decode() == "€"
    assert answer.logprobs[3].token == b"<|im_end|>"
    top = answer.logprobs[0].top[0]
    assert isinstance(top, TopLogprob) and tuple(top) == (top.token_id, top.logprob)
    assert top.token or top.token_id >= 263
    assert answer.prompt_logprobs[1].token
    # log-probabilities before the constraint: the drawn token need not be likely
    assert answer.logprobs[0].top[0].logprob > answer.logprobs[0].logprob


def test_random_schemas_are_kept_to(either: Any) -> None:
    """The whole of these is `python -m benchmarks.structured`."""
    requests = [
        {
            "prompt": "Go", "custom_id": str(seed), "response_format": random_schema(random.Random(seed)),
            "max_tokens": 150, "temperature": 1.0, "seed": seed, "logit_bias": {2: 6.0, 44: 2.0},
        }
        for seed in range(40)
    ]  # fmt: skip
    ended = 0
    for outcome in either.map(requests, concurrency=16):
        answer = outcome.result()
        if answer.finish_reason == "stop":
            ended += 1
            schema = requests[outcome.index]["response_format"]
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(answer.text))
    assert ended >= 20


def test_batch_rows_and_the_command(server: RunningServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    formats: list[Any] = [
        {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}},
        {"type": "choice", "choices": ["left", "right"]},
        {"type": "regex", "regex": "[ab]{4}"},
        {"type": "lark", "lark": 'start: "p"'},
        {"type": "text"},
        {"type": "structural_tags", "tags": [{"begin": "<t>", "regex": "a", "end": "<"}], "triggers": ["<t"]},
        {"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}},
    ]
    body = {"messages": [{"role": "user", "content": "Go"}], "max_tokens": 60, "logprobs": True}
    rows = [{"custom_id": str(i), "body": {**body, "response_format": f}} for i, f in enumerate(formats)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with saccade.Client(server.address) as client:
        client.run_batch(source, output, ordered=True)
    *lines, refused = [json.loads(line) for line in output.read_text().splitlines()]
    texts = [line["response"]["body"]["choices"][0] for line in lines]
    jsonschema.validate(json.loads(texts[0]["message"]["content"]), SCHEMA)
    assert texts[0]["logprobs"]["content"][0]["token"] == "{" and texts[0]["logprobs"]["content"][0]["bytes"] == [123]
    assert texts[1]["message"]["content"] in ("left", "right")
    assert re.fullmatch("[ab]{4}", texts[2]["message"]["content"]) and texts[3]["message"]["content"] == "p"
    assert "uniqueItems" in refused["response"]["body"]["error"]["message"]
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    asked = [
        "ask",
        "--server",
        server.address,
        "--max-tokens",
        "60",
        "--json-schema",
        str(tmp_path / "schema.json"),
        "Go",
    ]
    assert cli.main(asked) == 0
    jsonschema.validate(json.loads(capfd.readouterr().out), SCHEMA)
    assert cli.main([*asked[:-2], str(tmp_path / "none.json"), "Go"]) == 1


def test_kserve_parameters(server: RunningServer) -> None:
    question = triton.InferInput("text_input", [1], "BYTES")
    question.set_data_from_numpy(np.array([b"Go"], dtype=object))
    client = triton.InferenceServerClient(server.address)

    def asked(format: Any) -> str:
        parameters = {"response_format": json.dumps(format)} if format else {}
        parameters |= {"max_tokens": 60, "temperature": 0.0}
        name = client.get_model_repository_index().models[0].name
        return str(client.infer(name, [question], parameters=parameters).as_numpy("text_output")[0].decode())

    jsonschema.validate(json.loads(asked({"type": "json_schema", "json_schema": {"schema": SCHEMA}})), SCHEMA)
    jsonschema.validate(json.loads(asked({"json_schema": json.dumps(SCHEMA)})), SCHEMA)
    assert asked({"type": "choice", "choices": ["left"]}) == "left"
    assert asked({"type": "text"}) == asked(None)
    with pytest.raises(InferenceServerException, match="response_format cannot be"):
        asked({"type": "nothing"})


def test_a_continued_answer_with_prompt_logprobs_and_drafts_keeps_its_order(text_model: Path) -> None:
    """The prompt's scores come with the first new token, and accepted drafts with them: a chunk of one token, the last
    one, may have drafts."""
    asked: dict[str, Any] = {
        "response_format": saccade.Regex("(abc){6}"), "max_tokens": 20, "temperature": 0, "prompt_logprobs": 0
    }  # fmt: skip
    limits: dict[str, Any] = {"max_seqs": 2, "max_len": 128}
    with RunningServer(str(text_model), **limits) as plain, saccade.Client(plain.address) as client:
        ids = client.generate("?", **asked).token_ids
    limits |= {"speculative": "ngram", "draft_policy": "fixed", "max_chunk": 1}
    with RunningServer(str(text_model), **limits) as running, saccade.Client(running.address) as client:
        for cut in (6, 7, 8):
            assert client.generate("?", **asked, continued_token_ids=ids[:cut]).token_ids == ids[cut:]


def test_a_format_whose_request_has_ended_is_not_compiled(text_model: Path) -> None:
    """Formats are compiled one after the other, so those that nobody needs would delay the others."""
    with RunningServer(str(text_model), max_seqs=4, max_len=200) as running, saccade.Client(running.address) as client:

        def ask(pattern: str) -> Any:
            return client.stream("?", response_format=saccade.Regex(pattern), max_tokens=1)

        ask("a").final()
        constraining = running.engine._engine._constraining  # type: ignore[attr-defined]
        stop(constraining._trials.pid)
        try:
            with ask("b") as first:
                running.until(lambda stats: stats["live"] == 1)
                with ask("c"):
                    running.until(lambda stats: stats["live"] == 2)
                running.until(lambda stats: stats["live"] == 1)
                os.kill(constraining._trials.pid, signal.SIGCONT)
                first.final()
        finally:
            os.kill(constraining._trials.pid, signal.SIGCONT)
        ask("d").final()
        assert [format.source for format in constraining._grammars._cached] == ["a", "b", "d"]
