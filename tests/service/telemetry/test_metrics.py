"""Metrics: what is counted, under which names, and without an engine."""

from __future__ import annotations

import contextlib
import socket
import urllib.request
from concurrent.futures import Future
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from waiting import until

from service.common.config import ConfigError
from service.telemetry import metrics_port
from service.telemetry.metrics import GAPS, Metrics, engine_metrics


def values(metrics: Metrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def test_generations_and_calls() -> None:
    metrics = Metrics()
    metrics.generation(
        "OK", prompt=10, image=4, video=0, cached=3, generated=5, queue=0.1, first_token=0.2, seconds=1.0
    )
    metrics.generation(
        "CANCELLED", prompt=0, image=0, video=0, cached=0, generated=0, queue=None, first_token=None, seconds=1.0
    )
    metrics.token_gap(0.3, 3)
    metrics.call("/a/B", "OK", 100)
    found = values(metrics)
    assert found['saccade_generations_total{code="OK"}'] == found['saccade_generations_total{code="CANCELLED"}'] == 1
    assert found['saccade_tokens_total{kind="generated"}'] == 5 and found['saccade_tokens_total{kind="cached"}'] == 3
    assert found["saccade_inter_token_seconds_count"] == 3
    assert found["saccade_inter_token_seconds_sum"] == pytest.approx(0.3)
    assert found["saccade_time_to_first_token_seconds_count"] == found["saccade_queue_seconds_count"] == 1
    assert found["saccade_generation_seconds_count"] == 1
    assert found['saccade_calls_total{code="OK",method="/a/B"}'] == 1 and found["saccade_request_bytes_total"] == 100


def test_the_engines_counters_keep_their_kind() -> None:
    stats = {
        "live": 2,
        "decode_seconds": 1.5,
        "decoder": {"steps": 7, "used_slots": 3, "waited_prompt_logprobs": 2, "waited_swap": 0},
        "encoder": {"replays_64": 2, "replays_128": 1, "eager_too_large": 4, "position_hits": 9},
        "handoff": {"hits": 5, "used_bytes": 1000, "waiting": 1},
    }
    families = {family.name: family for family in engine_metrics(stats)}
    kinds = {name: family.type for name, family in families.items()}
    assert kinds["saccade_engine_live"] == kinds["saccade_decoder_used_slots"] == "gauge"
    assert kinds["saccade_handoff_used_bytes"] == kinds["saccade_handoff_waiting"] == "gauge"
    assert kinds["saccade_decoder_steps"] == kinds["saccade_engine_decode_seconds"] == "counter"
    assert kinds["saccade_encoder_position_hits"] == kinds["saccade_handoff_hits"] == "counter"
    assert {s.labels["budget"]: s.value for s in families["saccade_encoder_replays"].samples} == {"64": 2, "128": 1}
    assert {s.labels["reason"]: s.value for s in families["saccade_encoder_eager"].samples} == {"too_large": 4}
    waited = {s.labels["reason"]: s.value for s in families["saccade_decoder_waited"].samples}
    assert waited == {"prompt_logprobs": 2, "swap": 0}


def test_a_dead_engine_is_a_zero_and_not_an_error() -> None:
    metrics, future = Metrics(), Future[dict[str, Any]]()
    future.set_exception(RuntimeError("gone"))
    metrics.watch_engine(lambda: future, lambda: {"live_requests": 1.0})
    found = values(metrics)
    assert found["saccade_engine_up"] == 0 and found["saccade_live_requests"] == 1


def test_the_port_is_logged_and_a_taken_one_is_a_configuration_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "service")
    port, stop = Metrics().serve("127.0.0.1", 0)
    try:
        assert f"port {port}" in caplog.text, "with 0, nothing else says which port it is"
        with pytest.raises(ConfigError, match="metrics_port"):
            Metrics().serve("127.0.0.1", port)
    finally:
        stop()


def test_connections_to_the_port_are_few_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one takes a thread, also before it has sent a request."""
    port, stop = Metrics().serve("127.0.0.1", 0)

    def opened() -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), 60)

    def is_scraped() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return b"saccade_request_bytes_total 0.0" in answer.read()
        return False

    try:
        with contextlib.ExitStack() as open_ones:
            idle = [open_ones.enter_context(opened()) for _ in range(metrics_port.MAX_SCRAPES + 1)]
            assert idle.pop().recv(1) == b""
            for connection in idle:
                connection.setblocking(False)
                with pytest.raises(BlockingIOError):
                    connection.recv(1)
        until(is_scraped)
        monkeypatch.setattr(metrics_port, "READ_SECONDS", 0.3)
        with opened() as slow:
            assert slow.recv(1) == b""
        with opened() as steady:
            steady.sendall(b"GET /")
            steady.settimeout(0.1)
            with pytest.raises(ConnectionError):  # the server has closed it, although the client did not pause
                for _ in range(100):
                    steady.sendall(b"x")
                    with contextlib.suppress(TimeoutError):
                        steady.recv(1)
    finally:
        stop()


def test_a_client_that_does_not_read_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    metrics = Metrics()
    Counter("long", "x" * 2**23, registry=metrics.registry)  # more than the system holds for it
    monkeypatch.setattr(metrics_port, "READ_SECONDS", 0.3)
    port, stop = metrics.serve("127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", port), 60) as unread:
            unread.sendall(b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n")
            until(lambda: bool(caplog.records))
    finally:
        stop()
    assert [record.getMessage()[:36] for record in caplog.records] == ["a client has not read its metrics fo"]
    assert capfd.readouterr().err == ""


def test_encoders_elsewhere_are_a_label() -> None:
    one = {"up_now": 1.0, "connections": 2, "received_row_bytes_total": 10, "quarantined_bytes": 0}
    stats = {"encoder": {"given": 3, "encoders": {"a:1": one, "b:2": {**one, "up_now": 0.0}}}}
    families = {family.name: family for family in engine_metrics(stats)}
    assert {s.labels["encoder"]: s.value for s in families["saccade_encoders_up"].samples} == {"a:1": 1, "b:2": 0}
    assert families["saccade_encoders_up"].type == families["saccade_encoders_quarantined_bytes"].type == "gauge"
    assert families["saccade_encoders_connections"].type == "counter"
    assert (
        families["saccade_encoders_received_row_bytes"].samples[0].name == "saccade_encoders_received_row_bytes_total"
    )
    assert families["saccade_encoder_given"].type == "counter"


def test_gaps_are_counted_as_prometheus_would_one_by_one() -> None:
    ours, theirs = Metrics(), CollectorRegistry()
    one_by_one = Histogram(
        "saccade_inter_token_seconds", "between two tokens of a sample", buckets=GAPS, registry=theirs
    )
    for seconds, tokens in [*((bound, 1) for bound in GAPS), (0.0, 2), (0.0011, 1), (30.0, 3), (0.2, 4)]:
        ours.token_gap(seconds, tokens)
        for _ in range(tokens):
            one_by_one.observe(seconds / tokens)

    def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
        found = [s for family in registry.collect() for s in family.samples if "inter_token" in s.name]
        return {(s.name, s.labels.get("le", "")): round(s.value, 9) for s in found if not s.name.endswith("_created")}

    assert samples(ours.registry) == samples(theirs)
