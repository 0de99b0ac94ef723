"""Observability of a running server: metrics over HTTP, a log line per request, and its trace."""

from __future__ import annotations

import json
import logging
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from images import png
from rpc import Stubs, ask, connect
from running import RunningServer

import saccade
from saccade.v1 import inference_pb2

METRIC = re.compile(r"saccade_\w+")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def observed(model: Path) -> Iterator[RunningServer]:
    options: dict[str, Any] = {"metrics_port": 0, "log_json": True, "graphs": "on"}
    with RunningServer(str(model), max_seqs=4, max_len=100_000, **options) as running:
        yield running


@pytest.fixture
def stubs(observed: RunningServer) -> Iterator[Stubs]:
    with connect(observed.address) as stubs:
        yield stubs


def scrape(running: RunningServer) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{running.server.metrics_port}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def lines(running: RunningServer, caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The access log so far; a call's line is written on the server's loop, after the client has its answer."""
    running.drained()
    return [json.loads(r.getMessage()) for r in caplog.records if r.name == "service.access"]


def test_metrics_follow_the_traffic(observed: RunningServer, stubs: Stubs) -> None:
    before = scrape(observed)
    data = png(900)
    for _ in range(3):
        stubs.inference.Generate(ask(images=[{"data": data}], max_tokens=6))
    with pytest.raises(grpc.RpcError):
        stubs.inference.Generate(ask(max_tokens=-1))
    observed.drained()
    after = scrape(observed)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    method = "/saccade.v1.InferenceService/Generate"
    assert grown(f'saccade_calls_total{{code="OK",method="{method}"}}') == 3
    assert grown(f'saccade_calls_total{{code="INVALID_ARGUMENT",method="{method}"}}') == 1
    assert grown('saccade_generations_total{code="OK"}') == 3
    assert grown('saccade_tokens_total{kind="generated"}') == 18 == grown("saccade_decoder_output_tokens_total")
    assert grown("saccade_time_to_first_token_seconds_count") == 3 == grown("saccade_queue_seconds_count")
    assert grown("saccade_inter_token_seconds_count") <= 15  # tokens that arrive together with the first have no gap
    assert grown("saccade_encoder_images_total") == 1 and grown("saccade_handoff_hits_total") == 2
    assert sum(grown(name) for name in after if name.startswith("saccade_encoder_replays_total")) == 1
    assert after["saccade_engine_up"] == 1 and after["saccade_live_requests"] == 0
    assert grown("saccade_decoder_cache_hits_total") == 2 and grown("saccade_decoder_cache_misses_total") == 1
    assert grown("saccade_decoder_cache_hit_tokens_total") == grown('saccade_tokens_total{kind="cached"}') > 0
    assert after["saccade_decoder_cache_checkpoints"] > 0 and after["saccade_decoder_cache_bytes"] > 0
    replays = sum(grown(name) for name in after if name.startswith("saccade_decoder_replays_total"))
    assert replays == grown("saccade_decoder_steps_total") > 0
    assert after["saccade_handoff_used_bytes"] > 0 and after["saccade_decoder_arena_bytes"] > 0


def test_gaps_between_tokens_are_counted(observed: RunningServer, stubs: Stubs) -> None:
    """Of a long answer, since the tokens of a short one may all arrive with the first."""
    name = "saccade_inter_token_seconds_count"
    before = scrape(observed)[name]
    request = ask("a long answer", max_tokens=500)
    request.sampling.ignore_eos = True
    stubs.inference.Generate(request)
    observed.drained()
    assert 0 < scrape(observed)[name] - before < 500


def test_prompts_of_embeddings_are_counted(
    observed: RunningServer, stubs: Stubs, caplog: pytest.LogCaptureFixture
) -> None:
    before = scrape(observed)
    request = inference_pb2.EmbedRequest(prompt=ask("a prompt", images=[{"data": png(40)}]).prompt)
    with caplog.at_level(logging.INFO, "service.access"):
        answer = stubs.inference.Embed(request)
        (line,) = lines(observed, caplog)
    after = scrape(observed)
    for kind, tokens in (("prompt", answer.prompt_tokens), ("image", answer.image_tokens)):
        name = f'saccade_tokens_total{{kind="{kind}"}}'
        assert after[name] - before.get(name, 0.0) == tokens > 0
    assert (line["prompt_tokens"], line["image_tokens"]) == (answer.prompt_tokens, answer.image_tokens)


def test_samples_of_one_call_count_their_prompt_once(observed: RunningServer, stubs: Stubs) -> None:
    before = scrape(observed)
    request = ask("three ways to say so", max_tokens=6)
    request.sampling.n = 3
    answer = stubs.inference.Generate(request)
    observed.drained()
    after = scrape(observed)
    usage = answer.samples[0].usage

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown('saccade_tokens_total{kind="prompt"}') == usage.prompt_tokens
    assert grown("saccade_decoder_batched_tokens_total") == usage.prompt_tokens - usage.cached_tokens + 3 * 5
    assert grown("saccade_decoder_forks_total") == 2


def test_the_dashboard_asks_for_metrics_that_are_there(observed: RunningServer, stubs: Stubs) -> None:
    stubs.inference.Generate(ask(images=[{"data": png(901)}]))
    told = {name.partition("{")[0] for name in scrape(observed)}
    board = json.loads((Path(__file__).resolve().parents[2] / "docs" / "grafana.json").read_text())
    asked = {
        name for panel in board["panels"] for target in panel["targets"] for name in METRIC.findall(target["expr"])
    }
    # with graphs on, nothing runs eagerly, and only the counter of replays exists
    assert len(asked) > 20 and asked - told == {"saccade_encoder_eager_total"}


def test_one_line_for_each_request(observed: RunningServer, stubs: Stubs, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "service.access"):
        trace = (("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"),)
        stubs.inference.Generate(ask("words of a prompt", max_tokens=6, request_id="first"), metadata=trace)
        with pytest.raises(grpc.RpcError):
            stubs.inference.Generate(ask(max_tokens=0, request_id="second"))
        call = stubs.inference.StreamGenerate(
            inference_pb2.StreamGenerateRequest(request=ask("words of a prompt", max_tokens=99_000, request_id="third"))
        )
        next(call)
        cached = next(call).delta.cached_tokens
        call.cancel()
        stubs.inference.Tokenize(inference_pb2.TokenizeRequest(prompt=ask().prompt))
        first, second, third, fourth = lines(observed, caplog)
    assert first["request_id"] == "first" and first["trace_id"] == TRACE and first["code"] == "OK"
    assert first["finish"] == "length" and first["completion_tokens"] == 6 and first["prompt_tokens"] > 6
    assert 0 < first["first_token_seconds"] <= first["seconds"]
    assert (second["request_id"], second["code"]) == ("second", "INVALID_ARGUMENT")
    assert (third["request_id"], third["code"]) == ("third", "CANCELLED")
    assert third["cached_tokens"] == cached > 0
    assert fourth["method"].endswith("/Tokenize") and "finish" not in fourth
    assert "words of a prompt" not in caplog.text


def test_a_deadline_is_logged_as_one_even_if_the_client_is_faster(
    observed: RunningServer, stubs: Stubs, caplog: pytest.LogCaptureFixture
) -> None:
    """The server's timer, gRPC's, or the client's, which is the first for times that gRPC rounds up."""
    before = scrape(observed)
    with caplog.at_level(logging.INFO, "service.access"):
        calls = [
            stubs.inference.Generate.future(ask(max_tokens=99_000, request_id=f"late-{number}"), timeout=seconds)
            for number, seconds in enumerate(
                [0.1 + 0.03 * i for i in range(16)] + [1.001 + 0.01 * i for i in range(16)]
            )
        ]
        for call in calls:
            assert call.exception().code() is grpc.StatusCode.DEADLINE_EXCEEDED
        logged = lines(observed, caplog)
    assert len(logged) == 32 and {(line["code"], line["reason"]) for line in logged} == {("DEADLINE_EXCEEDED",) * 2}
    after = scrape(observed)
    counted = {name for name in after if name.startswith("saccade_calls_total") and after[name] > before.get(name, 0)}
    assert {name.partition('"')[2].partition('"')[0] for name in counted} == {"DEADLINE_EXCEEDED"}


def test_the_plain_form_has_the_same_values(text_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        RunningServer(str(text_model), max_seqs=4, max_len=600) as server,
        caplog.at_level(logging.INFO, "service.access"),
        connect(server.address) as stubs,
    ):
        stubs.inference.Generate(ask(max_tokens=3, request_id='odd "name"'))
        server.drained()
        (line,) = [r.getMessage() for r in caplog.records if r.name == "service.access"]
    assert 'code="OK"' in line and r'request_id="odd \"name\""' in line and "completion_tokens=3" in line


def test_the_time_in_the_queue_ends_with_the_first_scheduled_step(text_model: Path) -> None:
    """Of two requests for one batch slot, the second waits until the first has ended."""
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    limits: dict[str, Any] = {"max_seqs": 1, "max_len": 9000}
    with (
        RunningServer(str(text_model), engine_process=True, **limits) as server,  # here it would slow the client down
        saccade.Client(server.address) as client,
    ):
        client.generate("warm", max_tokens=2, **options)
        begin = time.monotonic()
        with client.stream("first", max_tokens=4000, **options) as first, ThreadPoolExecutor(1) as pool:
            next(iter(first))
            waiting = pool.submit(client.generate, "second", max_tokens=2, **options)
            server.until(lambda stats: stats["decoder"]["waiting"] == 1)
            apart = time.monotonic() - begin  # at least the time between the two arrivals
            ahead, second = first.final().usage, waiting.result().usage
    assert ahead.queue_time < ahead.time_to_first_token < ahead.time_to_last_token
    assert (ahead.time_to_last_token - apart) / 2 < second.queue_time < second.time_to_first_token


def test_a_request_that_waits_is_seen_before_its_end(observed: RunningServer) -> None:
    endless: dict[str, Any] = {"max_tokens": 90_000, "ignore_eos": True}
    with saccade.Client(observed.address) as client:
        with ExitStack() as streams:
            for _ in range(4):
                next(streams.enter_context(client.stream("x", **endless)))
            before = scrape(observed)
            assert before["saccade_oldest_wait_seconds"] == 0, "all have a token"
            with client.stream("x", max_tokens=1):
                observed.until(lambda stats: stats["decoder"]["waiting"] == 1)
                first, second = scrape(observed), scrape(observed)
                assert 0 < first["saccade_oldest_wait_seconds"] < second["saccade_oldest_wait_seconds"] < 60
                assert second["saccade_decoder_waiting"] == 1
                for name in ("queue", "time_to_first_token"):
                    count = f"saccade_{name}_seconds_count"
                    assert second[count] == before[count], "at their end"
        observed.drained()
        assert scrape(observed)["saccade_oldest_wait_seconds"] == 0
