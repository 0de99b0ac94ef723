"""Spans as a collector gets them: a real OTLP receiver on its own port."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from rpc import ask, connect
from running import RunningServer

from saccade.v1 import inference_pb2

ROOT = Path(__file__).resolve().parents[2]
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def Export(self, request: Any, context: Any) -> Any:
        self.requests.put(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self) -> list[Any]:
        """The spans received so far."""
        found = []
        while not self.requests.empty():
            for resource in self.requests.get().resource_spans:
                names = {a.key: a.value.string_value for a in resource.resource.attributes}
                assert names["service.name"] == "saccade"
                found += [span for scope in resource.scope_spans for span in scope.spans]
        return found


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    server, servicer = grpc.server(futures.ThreadPoolExecutor(2)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


def attributes(span: Any) -> dict[str, Any]:
    return {
        a.key: a.value.int_value if a.value.HasField("int_value") else a.value.string_value for a in span.attributes
    }


def test_each_generation_is_a_span_with_its_stages(model: Path, collector: tuple[Collector, str]) -> None:
    received, endpoint = collector
    with RunningServer(str(model), max_seqs=2, max_len=300, otlp_endpoint=endpoint) as server:
        with connect(server.address) as stubs:
            recorded, unrecorded = ((("traceparent", CALLER + flag),) for flag in "10")
            stubs.inference.Generate(ask("secret", max_tokens=5, request_id="one"), metadata=recorded)
            stubs.inference.Generate(
                ask(max_tokens=2, request_id="unrecorded"), metadata=(("traceparent", CALLER + "0"),)
            )
            stream = inference_pb2.StreamGenerateRequest(request=ask(max_tokens=7, request_id="two"))
            assert list(stubs.inference.StreamGenerate(stream))
            with pytest.raises(grpc.RpcError):
                stubs.inference.Generate(ask(max_tokens=9999, request_id="refused"))
    spans = received.spans()  # stopping the server has sent the remaining spans
    roots = {attributes(span)["saccade.request_id"]: span for span in spans if span.name == "saccade.generate"}
    assert set(roots) == {"one", "two", "refused"}
    one, two, refused = roots["one"], roots["two"], roots["refused"]
    assert (one.trace_id.hex(), one.parent_span_id.hex()) == (CALLER[3:35], CALLER[36:52])
    assert two.trace_id != one.trace_id and not two.parent_span_id
    assert attributes(one)["saccade.completion_tokens"] == 5 and attributes(two)["saccade.completion_tokens"] == 7
    assert refused.status.message == "CONTEXT_LENGTH_EXCEEDED" and one.status.code == 0
    for root, names in (
        (one, ["prepare", "first", "decode"]),
        (two, ["prepare", "first", "decode"]),
        (refused, ["prepare"]),
    ):
        stages = sorted((s for s in spans if s.parent_span_id == root.span_id), key=lambda s: s.start_time_unix_nano)
        assert [stage.name for stage in stages] == [f"saccade.{name}" for name in names]
        assert stages[0].start_time_unix_nano == root.start_time_unix_nano
        for before, after in zip(stages, stages[1:], strict=False):
            assert before.end_time_unix_nano == after.start_time_unix_nano
        assert stages[-1].end_time_unix_nano == root.end_time_unix_nano
    assert b"secret" not in b"".join(span.SerializeToString() for span in spans)


def test_a_collector_that_is_away_costs_no_answer(model: Path) -> None:
    with RunningServer(str(model), max_seqs=2, max_len=300, otlp_endpoint="127.0.0.1:9") as server:
        with connect(server.address) as stubs:
            assert stubs.inference.Generate(ask(max_tokens=5)).samples


def test_without_the_packages_the_server_says_what_to_install(model: Path) -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from service.telemetry.tracing import Spans\nfrom service.common.config import ConfigError\n"
        "try: Spans('127.0.0.1:1', version='0')\nexcept ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "pip install opentelemetry-sdk" in done.stdout, done.stderr
    loaded = "import sys, service.servers.server; sys.exit(any(m.startswith('opentelemetry') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, timeout=60).returncode == 0
