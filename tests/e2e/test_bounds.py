"""Limits on the memory that callers can make the server hold: slow bodies, one key's share, endless streams."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from images import png
from keys import bearer, fails, key_file
from raw_http2 import RawClient
from rpc import Stubs, ask, connect, reason, upload
from running import RunningServer

from saccade.v1 import inference_pb2, media_pb2
from service.answers import door
from service.rpc import interceptor, kserve_messages
from service.servers import exposure

MESSAGE = 2**18
GENERATE = "/saccade.v1.InferenceService/Generate"
UPLOAD = "/saccade.v1.MediaService/UploadMedia"
CHECK = "/grpc.health.v1.Health/Check"


@pytest.fixture(scope="module")
def bounded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = key_file(tmp_path_factory.mktemp("keys") / "keys.toml")
    with RunningServer(
        str(model), max_seqs=8, max_len=9000, api_keys=keys, max_message_bytes=MESSAGE, max_inflight_bytes=6 * MESSAGE,
        max_queue=6, max_tenant_calls=12,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def stubs(bounded: RunningServer) -> Iterator[Stubs]:
    with connect(bounded.address) as stubs:
        yield stubs
    bounded.drained()
    assert held(bounded, 0) == 0


def held(running: RunningServer, size: int) -> int:
    """Bytes in the budget, once they are `size`."""

    async def wait() -> int:
        async with asyncio.timeout(60):
            while running.server.budget.used != size:
                await asyncio.sleep(0.005)
        return running.server.budget.used

    return running.run(wait())


def test_a_body_that_is_long_in_coming_is_on_the_account_and_one_key_gets_half(
    bounded: RunningServer, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC buffers a message without reporting its size, so its largest possible size is counted."""
    monkeypatch.setattr(door, "QUICK_SECONDS", 0.2)
    with RawClient(bounded.address) as one, RawClient(bounded.address) as other:
        first = [one.begin(GENERATE, MESSAGE - 10, b"\n", key="sk-secret-one") for _ in range(5)]
        assert held(bounded, 3 * MESSAGE) == 3 * MESSAGE
        # the two calls beyond one key's share are rejected, however much is free otherwise
        assert set(one.answers(2)) < set(first)
        assert stubs.inference.Generate(ask(max_tokens=1), metadata=bearer("two")).samples
        other.begin(UPLOAD, MESSAGE, key="sk-secret-two")
        assert held(bounded, 4 * MESSAGE) == 4 * MESSAGE
    assert held(bounded, 0) == 0


def test_probes_without_a_key_take_nothing_from_the_budget(
    bounded: RunningServer, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptor, "OPEN_SECONDS", 0.5)
    monkeypatch.setattr(door, "QUICK_SECONDS", 0.0)
    with RawClient(bounded.address) as raw, ThreadPoolExecutor(1) as beside:
        probes = [raw.begin(CHECK, MESSAGE - 10, b"\n") for _ in range(8)]
        ended = beside.submit(raw.answers, 8)
        while not ended.done():
            assert stubs.inference.Generate(ask(max_tokens=1), metadata=bearer("one")).samples
        assert set(ended.result()) == set(probes)
    health = health_pb2_grpc.HealthStub(stubs.channel)
    for method in (health.Check, lambda request: next(health.Watch(request))):
        with pytest.raises(grpc.RpcError) as error:
            method(health_pb2.HealthCheckRequest(service="x" * interceptor.OPEN_BYTES))
        assert reason(error.value) == ("INVALID_ARGUMENT", "MESSAGE_TOO_LARGE")


def test_a_body_has_a_time_to_arrive_in(text_model: Path) -> None:
    with RunningServer(str(text_model), max_seqs=2, max_len=100, receive_timeout=0.3, stall_timeout=0.3) as running:
        with RawClient(running.address) as raw:
            numbers = [raw.begin(method, 1000, b"\n") for method in (GENERATE, UPLOAD)]
            assert sorted(raw.answers(2)) == numbers
        with connect(running.address) as stubs:
            call = stubs.inference.Generate(ask(max_tokens=50))  # the timeout is that of the message, not of the call
            assert len(call.samples[0].token_ids) == 50


def test_a_connection_has_a_time_to_begin_in(text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposure, "HANDSHAKE_SECONDS", 0.3)
    certificate, key = map(str, Authority.create(tmp_path / "ca").issue("server"))
    for options in ({}, {"tls_cert": certificate, "tls_key": key}):
        with RunningServer(str(text_model), max_seqs=1, max_len=100, **options) as running:
            host, port = running.address.split(":")
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                while connection.recv(2**10):  # without TLS gRPC's own settings arrive first
                    pass


def test_a_call_without_a_message_is_refused(bounded: RunningServer) -> None:
    with grpc.insecure_channel(bounded.address) as channel:
        for method, metadata in ((GENERATE, bearer("one")), (CHECK, ())):
            call = channel.stream_unary(method)
            assert fails(call, iter([]), metadata=metadata) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")


def test_messages_of_a_stream_are_given_back_one_by_one(bounded: RunningServer, stubs: Stubs) -> None:
    data = png(5, (900, 700))
    assert len(data) > 7 * MESSAGE
    media = stubs.media.UploadMedia(upload(data, chunk=100_000), metadata=bearer("one")).media
    assert media.size_bytes == len(data)
    stubs.media.DeleteMedia(media_pb2.DeleteMediaRequest(media_id=media.media_id), metadata=bearer("one"))


def test_one_key_cannot_fill_the_server(bounded: RunningServer, stubs: Stubs) -> None:
    """Neither its queue nor, with calls of any kind, its limit on calls; another key is served meanwhile."""
    long = inference_pb2.StreamGenerateRequest(request=ask(max_tokens=8000))
    calls = [stubs.inference.StreamGenerate(long, metadata=bearer("one")) for _ in range(3)]
    for call in calls:
        next(call)
    full = ("RESOURCE_EXHAUSTED", "TENANT_QUEUE_FULL")
    assert fails(stubs.inference.Generate, ask(), metadata=bearer("one")) == full
    tokenize = inference_pb2.TokenizeRequest(prompt=ask().prompt)
    embed = inference_pb2.EmbedRequest(prompt=ask().prompt)
    assert fails(stubs.inference.Tokenize, tokenize, metadata=bearer("one")) == full
    assert fails(stubs.inference.Embed, embed, metadata=bearer("one")) == full
    assert stubs.inference.Tokenize(tokenize, metadata=bearer("two")).prompt_tokens
    assert stubs.inference.Generate(ask(max_tokens=1), metadata=bearer("two")).samples
    more = [stubs.inference.StreamGenerate(long, metadata=bearer("two")) for _ in range(3)]
    for call in more:
        next(call)
    boss = bearer("boss")
    assert fails(stubs.inference.Tokenize, tokenize, metadata=boss) == ("UNAVAILABLE", "QUEUE_FULL")
    for call in calls + more:
        call.cancel()
    bounded.drained()
    assert stubs.inference.Generate(ask(max_tokens=1), metadata=bearer("one")).samples

    go_on = threading.Event()

    def endless() -> Iterator[Any]:
        yield next(upload(b"12345"))
        go_on.wait(60)

    open_calls = [stubs.media.UploadMedia.future(endless(), metadata=bearer("one")) for _ in range(12)]
    while bounded.run(_calls(bounded, "one")) < 12:
        assert not any(call.done() for call in open_calls)
    assert fails(stubs.inference.Generate, ask(), metadata=bearer("one")) == full
    assert stubs.inference.Generate(ask(max_tokens=1), metadata=bearer("two")).samples
    go_on.set()
    for call in open_calls:
        assert call.exception(timeout=60) is not None
    assert stubs.inference.Generate(ask(max_tokens=1), metadata=bearer("one")).samples


async def _calls(running: RunningServer, name: str) -> int:
    return running.server._door._places._held.get(name, 0)


def test_tokens_are_paid_for_while_they_come(bounded: RunningServer, stubs: Stubs) -> None:
    """The key may use 60 tokens per minute: a running stream uses them up, so that its other calls are rejected."""
    long = inference_pb2.StreamGenerateRequest(request=ask(max_tokens=8000))
    call = stubs.inference.StreamGenerate(long, metadata=bearer("slow"))
    seen = 0
    while seen < 60:
        seen += len(next(call).delta.token_ids)
    limited = ("RESOURCE_EXHAUSTED", "RATE_LIMITED")
    tokenize = inference_pb2.TokenizeRequest(prompt=ask().prompt)
    assert fails(stubs.inference.Tokenize, tokenize, metadata=bearer("slow")) == limited
    assert next(call).delta.token_ids, "and still goes on"
    call.cancel()


def test_each_request_of_a_stream_is_one_for_the_key_s_rate(bounded: RunningServer, model: Path) -> None:
    """The first of them is counted as the call."""
    message = kserve_messages.message
    with grpc.insecure_channel(bounded.address) as channel:
        stream = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer", message("ModelInferRequest").SerializeToString,
            message("ModelStreamInferResponse").FromString,
        )  # fmt: skip
        requests = []
        for number in range(5):
            request = message("ModelInferRequest")(model_name=model.name, id=str(number))
            request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"x")
            request.parameters["max_tokens"].int64_param = 2
            requests.append(request)
        answers = list(stream(iter(requests), metadata=bearer("metered")))
    refused = [a.error_message for a in answers if a.error_message]
    assert len(answers) == 5 and len(refused) == 2 and all("requests per minute" in words for words in refused)


def test_reflection_needs_a_key_and_health_does_not(bounded: RunningServer) -> None:
    with grpc.insecure_channel(bounded.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        denied = fails(lambda **kw: list(stub.ServerReflectionInfo(iter([request]), **kw)))
        assert denied == ("UNAUTHENTICATED", "UNAUTHENTICATED")
        (answer,) = stub.ServerReflectionInfo(iter([request]), metadata=bearer("one"))
        assert "saccade.v1.InferenceService" in [s.name for s in answer.list_services_response.service]
        health = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        assert health.Check(health_pb2.HealthCheckRequest()).status == serving
        assert next(health.Watch(health_pb2.HealthCheckRequest(), timeout=60)).status == serving
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(CHECK)(b"\xff\xff")
        assert reason(error.value) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")
        with pytest.raises(grpc.RpcError) as error:
            health.Check(health_pb2.HealthCheckRequest(service="no.such"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
