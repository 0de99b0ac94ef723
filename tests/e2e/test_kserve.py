"""Triton's own client, unmodified, against a real server in the same process."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from images import png
from rpc import ask, connect
from running import RunningServer
from tritonclient.utils import InferenceServerException

from service.answers.calls import current_call


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as client:
        yield client
    server.drained()


@pytest.fixture
def name(model: Path) -> str:
    return model.name


def tensor(name: str, values: list[Any], datatype: str = "BYTES", module: Any = triton) -> Any:
    kind = {"BYTES": np.object_, "BOOL": np.bool_}[datatype]
    result = module.InferInput(name, [len(values)], datatype)
    result.set_data_from_numpy(np.array(values, dtype=kind))
    return result


def inputs(text: str, images: list[bytes] = (), *, stream: bool = False, module: Any = triton) -> list[Any]:  # type: ignore[assignment]
    found = [tensor("text_input", [text.encode()], module=module)]
    if images:
        found.append(tensor("image", images, module=module))
    if stream:
        found.append(tensor("stream", [True], "BOOL", module=module))
    return found


GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


class Collector:
    """A stream's callback: results and errors in order of arrival."""

    def __init__(self) -> None:
        self.items: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def __call__(self, result: Any, error: Any) -> None:
        self.items.put((result, error))

    def take(self) -> tuple[Any, Any]:
        return self.items.get(timeout=60)


def final(result: Any) -> bool:
    flag: bool = result.get_response().parameters["triton_final_response"].bool_param
    return flag


def text_of(result: Any) -> str:
    value: bytes = result.as_numpy("text_output")[0]
    return value.decode()


def expected(server: RunningServer, text: str, images: list[bytes], max_tokens: int = 12) -> Any:
    with connect(server.address) as stubs:
        request = ask(text, images=[{"data": i} for i in images], max_tokens=max_tokens)
        return stubs.inference.Generate(request).samples[0]


@pytest.mark.parametrize("count", [0, 2])
def test_infer_says_what_our_own_service_says(server: RunningServer, client: Any, name: str, count: int) -> None:
    images = [png(20 + i) for i in range(count)]
    result = client.infer(name, inputs("what?", images), request_id="mine", parameters=GREEDY)
    ours = expected(server, "what?", images)
    assert text_of(result) == ours.text and list(result.as_numpy("token_ids")) == list(ours.token_ids)
    assert result.as_numpy("finish_reason")[0] == b"length"
    response = result.get_response()
    assert response.id == "mine" and response.model_name == name
    assert response.parameters["image_tokens"].int64_param == ours.usage.image_tokens
    assert response.parameters["completion_tokens"].int64_param == 12


def test_chat_messages_and_sampling_as_json(server: RunningServer, client: Any, name: str) -> None:
    image = png(31)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    sent = [
        tensor("messages", [json.dumps(messages).encode()]),
        tensor("image", [image]),
        tensor("sampling_parameters", [json.dumps({**GREEDY, "stop": ["\0never"]}).encode()]),
    ]
    wanted = [triton.InferRequestedOutput("token_ids"), triton.InferRequestedOutput("text_output")]
    result = client.infer(name, sent, outputs=wanted)
    assert text_of(result) == expected(server, "what?", [image]).text
    assert [o.name for o in result.get_response().outputs] == ["token_ids", "text_output"]
    assert result.as_numpy("finish_reason") is None


def test_the_input_before_the_output_where_it_is_asked_for(client: Any, name: str) -> None:
    texts = [
        text_of(client.infer(name, [*inputs("what is it?"), *more], parameters=GREEDY))
        for more in ([], [tensor("exclude_input_in_output", [True], "BOOL")],
                     [tensor("exclude_input_in_output", [False], "BOOL")])
    ]  # fmt: skip
    assert texts == [texts[0], texts[0], "what is it?" + texts[0]]
    # a unary call gets the whole answer, whatever its input `stream` is
    assert text_of(client.infer(name, inputs("what is it?", stream=True), parameters=GREEDY)) == texts[0]
    assert "exclude_input_in_output" in [i.name for i in client.get_model_metadata(name).inputs]


def test_tensors_in_contents_instead_of_raw(server: RunningServer, name: str) -> None:
    """As `buf curl` and other generic clients send them."""
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    request = service_pb2.ModelInferRequest(model_name=name)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hi")
    for key, value in (("max_tokens", 5), ("seed", 3)):
        request.parameters[key].int64_param = value
    with grpc.insecure_channel(server.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ModelInfer(request).parameters["completion_tokens"].int64_param <= 5
        request.raw_input_contents.append(b"\x02\0\0\0hi")
        with pytest.raises(grpc.RpcError) as error:
            stub.ModelInfer(request)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("empty_final", [False, True])
def test_a_stream_in_pieces_with_its_final_flag(
    server: RunningServer, client: Any, name: str, empty_final: bool
) -> None:
    got = Collector()
    client.start_stream(got)
    client.async_stream_infer(
        name, inputs("tell", stream=True), request_id="s", parameters=GREEDY,
        enable_empty_final_response=empty_final,
    )  # fmt: skip
    results = []
    while not results or not final(results[-1]):
        result, error = got.take()
        assert error is None and result.get_response().id == "s"
        results.append(result)
    client.stop_stream()
    assert got.items.empty()
    if empty_final:
        assert not results[-1].get_response().outputs
        results.pop()
    # the number of pieces depends on timing: tokens that are waiting together are sent together
    assert results[-1].as_numpy("finish_reason")[0] == b"length"
    ours = expected(server, "tell", [])
    assert "".join(map(text_of, results)) == ours.text
    assert [int(i) for r in results for i in r.as_numpy("token_ids")] == list(ours.token_ids)


def test_many_requests_on_one_stream_and_errors_of_their_own(server: RunningServer, client: Any, name: str) -> None:
    got = Collector()
    client.start_stream(got)
    for i in range(20):
        bad = i % 4 == 3
        parameters = {**GREEDY, "temperature": -1.0} if bad else GREEDY
        client.async_stream_infer(name, inputs(f"question {i}"), request_id=str(i), parameters=parameters)
    client.async_stream_infer("unknown", inputs("x"), request_id="20")
    answers: dict[int, str] = {}
    failed: set[int] = set()
    for _ in range(21):
        result, error = got.take()
        number = int(result.get_response().id if result is not None else _id_of(error))
        if error is not None:
            failed.add(number)
        else:
            assert final(result)
            answers[number] = text_of(result)
    client.stop_stream()
    assert failed == {3, 7, 11, 15, 19, 20}
    assert answers == {i: expected(server, f"question {i}", []).text for i in range(20) if i not in failed}


def _id_of(error: Any) -> str:
    """Triton's client drops the response of an error, so the id is in the message."""
    return str(error).partition("[request id: ")[2].partition("]")[0]


def test_each_request_of_a_stream_has_a_line_in_the_log(
    server: RunningServer, client: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent = [("first", name, {}), ("none", "unknown", {}), ("bad\nline", name, {"temperature": "x"}), ("last", name, {})]
    got = Collector()
    with caplog.at_level(logging.INFO, "service.access"):
        client.start_stream(got)
        for request_id, model, parameters in sent:
            client.async_stream_infer(model, inputs("q"), request_id=request_id, parameters={**GREEDY, **parameters})
            got.take()
        client.stop_stream()
        server.drained()
    lines = [record.getMessage() for record in caplog.records if record.name == "service.access"]
    codes = [code for line in lines for code in re.findall(r'code="(\w+)"', line)]
    assert codes == ["OK", "NOT_FOUND", "INVALID_ARGUMENT", "OK"] and len(lines) == 4
    assert 'request_id="none"' in lines[1] and r'request_id="bad\nline"' in lines[2]
    sizes = [int(line.partition("request_bytes=")[2].partition(" ")[0]) for line in lines]
    assert sizes[0] - len("first") == sizes[3] - len("last") < 1.5 * min(sizes), "of the request, not of the stream"


def test_what_a_request_of_a_stream_has_fetched_is_given_back_at_its_end(
    server: RunningServer, client: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only at the end of the stream, which may last for days."""

    async def resolve(spec: Any, salt: bytes) -> Any:
        current_call().hold_bytes(server.options.max_inflight_bytes - 10_000)
        return replace(spec, media=tuple(replace(source, uri=None, data=png(1)) for source in spec.media))

    monkeypatch.setattr(server.server.frontend, "resolve", resolve)
    got = Collector()
    client.start_stream(got)
    for i in range(3):
        sent = [*inputs("x"), tensor("image_url", [b"https://example.org/a.png"])]
        client.async_stream_infer(name, sent, request_id=str(i), parameters=GREEDY)
        result, error = got.take()
        assert error is None and final(result)
    client.stop_stream()


def test_leaving_a_stream_ends_its_requests(server: RunningServer, client: Any, name: str) -> None:
    got = Collector()
    client.start_stream(got)
    for i in range(5):
        endless = {**GREEDY, "max_tokens": 500}
        client.async_stream_infer(name, inputs("x", stream=True), request_id=str(i), parameters=endless)
    got.take()
    client.stop_stream(cancel_requests=True)
    assert server.drained()["decoder"]["used_slots"] == 0


def test_a_request_of_its_own_time(client: Any, name: str) -> None:
    with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
        client.infer(name, inputs("x"), parameters={**GREEDY, "max_tokens": 500}, timeout=1000)


@pytest.mark.parametrize(
    ("sent", "parameters", "message"),
    [
        ([], {}, "text_input"),
        ([tensor("text_input", [b"a"]), tensor("messages", [b"[]"])], {}, "one of"),
        ([tensor("text_input", [b"a", b"b"])], {}, "2 elements"),
        ([tensor("text_input", [b"\xff"])], {}, "UTF-8"),
        ([tensor("words", [b"a"])], {}, "words"),
        ([tensor("text_input", [b"a"])], {"colour": "red"}, "colour"),
        ([tensor("text_input", [b"a"])], {"n": 2}, "'n'"),
        ([tensor("text_input", [b"a"])], {"logprobs": 2}, "'logprobs'"),
        ([tensor("text_input", [b"a"])], {"prompt_logprobs": 2}, "'prompt_logprobs'"),
        ([tensor("text_input", [b"a"])], {"max_tokens": "many"}, "max_tokens"),
        ([tensor("text_input", [b"a"])], {"top_p": 7.0}, "top_p"),
        ([tensor("text_input", [True], "BOOL")], {}, "BYTES"),
        ([tensor("text_input", [b"a"]), tensor("image", [b"none"])], {}, "image is recognised"),
        ([tensor("messages", [b'[{"role": "user", "content": [{"type": "image"}]}]'])], {}, "more image parts"),
        ([tensor("messages", [b"{"])], {}, "JSON"),
        ([tensor("messages", [b'[{"role": "cat"}]'])], {}, "role"),
    ],
)  # fmt: skip
def test_requests_that_make_no_sense(client: Any, name: str, sent: Any, parameters: Any, message: str) -> None:
    with pytest.raises(InferenceServerException, match=message) as error:
        client.infer(name, sent, parameters=parameters)
    assert "INVALID_ARGUMENT" in str(error.value.status())


def test_what_is_told_about_server_and_model(client: Any, name: str) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(name)
    assert not client.is_model_ready("unknown") and not client.is_model_ready(name, "7")
    assert "statistics" in client.get_server_metadata().extensions
    metadata = client.get_model_metadata(name)
    assert [t.name for t in metadata.outputs] == [
        "text_output",
        "token_ids",
        "finish_reason",
        "reasoning",
        "tool_calls",
    ]
    assert {t.name: list(t.shape) for t in metadata.inputs}["image"] == [-1]
    config = client.get_model_config(name).config
    assert config.model_transaction_policy.decoupled and config.max_batch_size == 0
    assert {i.name: i.data_type for i in config.input}["stream"] == 1
    assert [(m.name, m.state) for m in client.get_model_repository_index().models] == [(name, "READY")]
    with pytest.raises(InferenceServerException, match="id has 1025 characters; at most 1024 are allowed"):
        client.infer(name, inputs("x"), request_id="i" * 1025, parameters=GREEDY)  # each response would repeat it
    with pytest.raises(InferenceServerException, match="unknown"):
        client.get_model_metadata("unknown")
    for call in (
        lambda: client.load_model(name),
        lambda: client.get_system_shared_memory_status(),
        lambda: client.get_trace_settings(),
    ):
        with pytest.raises(InferenceServerException) as error:
            call()
        assert "UNIMPLEMENTED" in str(error.value.status())


def test_statistics_count(client: Any, name: str) -> None:
    def counts() -> tuple[int, int]:
        entry = client.get_inference_statistics(name).model_stats[0]
        assert entry.inference_stats.success.ns >= entry.inference_stats.queue.ns
        return entry.inference_stats.success.count, entry.inference_stats.fail.count

    success, fail = counts()
    client.infer(name, inputs("x"), parameters=GREEDY)
    with pytest.raises(InferenceServerException):
        client.infer(name, [])
    assert counts() == (success + 1, fail + 1)


def test_the_asyncio_client(server: RunningServer, name: str) -> None:
    async def run() -> tuple[str, list[str]]:
        async with triton_aio.InferenceServerClient(server.address) as client:
            assert await client.is_model_ready(name)
            whole = await client.infer(name, inputs("tell", module=triton_aio), parameters=GREEDY)

            async def requests() -> Any:
                yield {
                    "model_name": name, "inputs": inputs("tell", stream=True, module=triton_aio), "request_id": "a",
                    "parameters": GREEDY,
                }  # fmt: skip

            pieces = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                pieces.append(result)
            assert [final(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
            return text_of(whole), [text_of(piece) for piece in pieces]

    whole, pieces = asyncio.run(run())
    assert "".join(pieces) == whole
    server.drained()


def test_the_async_call_of_the_sync_client_can_be_cancelled(server: RunningServer, client: Any, name: str) -> None:
    done = threading.Event()
    context = client.async_infer(
        name, inputs("x"), callback=lambda result, error: done.set(), parameters={**GREEDY, "max_tokens": 500}
    )
    context.cancel()
    assert done.wait(60)
    server.drained()


def test_reflection_describes_it(server: RunningServer) -> None:
    from google.protobuf.descriptor_pool import DescriptorPool
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel(server.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "inference.GRPCInferenceService" in database.get_services()
        service = DescriptorPool(database).FindServiceByName("inference.GRPCInferenceService")
    assert len(service.methods) == 20
