"""No request blocks the event loop and thereby other requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_engine import FakeEngine
from images import png
from rpc import Stubs, ask, connect, reason, upload
from running import RunningServer
from served import VOCAB
from stalls import watched

from saccade.v1 import inference_pb2, media_pb2, types_pb2
from service.answers.weigh import MAX_FIELDS
from service.rpc.kserve_messages import SERVICE, message

LONGEST = 0.020
MAX_LEN = 20_000


@pytest.fixture(scope="module")
def quick(model: Path) -> Iterator[RunningServer]:
    engine = FakeEngine(vocabulary=VOCAB, max_len=MAX_LEN)
    # Decoding images in this process would slow its event loop down.
    with RunningServer(str(model), engine=engine, image_workers=1) as running:
        engine.loop = running.loop
        yield running


def of_messages(count: int) -> inference_pb2.GenerateRequest:
    message = inference_pb2.GenerateRequest()
    message.chat.messages.add(role=types_pb2.ROLE_USER)
    return inference_pb2.GenerateRequest.FromString(message.SerializeToString() * count)


def of_ids(count: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(tokens=inference_pb2.TokensInput(ids=[100] * count))


def of_kserve(stubs: Stubs, text: str) -> Any:
    request = message("ModelInferRequest")(model_name="tiny")
    entries = [{"role": "user", "content": "a"}] * 10_000
    request.inputs.add(name="messages", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
        json.dumps(entries).encode()
    )
    call = stubs.channel.unary_unary(f"/{SERVICE}/ModelInfer")
    return call(request.SerializeToString())


def continued(count: int, token: int, **fields: Any) -> inference_pb2.GenerateRequest:
    request = ask("go on", max_tokens=count + 4, continued_token_ids=[token] * count)
    request.sampling.stop.append("nothing of the kind")
    return request


HEAVY: dict[str, tuple[Callable[[], inference_pb2.GenerateRequest], str]] = {
    "empty messages": (lambda: of_messages(80_000), "MESSAGE_TOO_LARGE"),
    "messages that fit": (lambda: of_messages(MAX_LEN + 1), "CONTEXT_LENGTH_EXCEEDED"),
    "messages": (lambda: of_messages(5_000), "CONTEXT_LENGTH_EXCEEDED"),
    "ids": (lambda: of_ids(4_000_000), "MESSAGE_TOO_LARGE"),
    "ids that parse": (lambda: of_ids(60_000), "CONTEXT_LENGTH_EXCEEDED"),
    "ids that fit": (lambda: of_ids(MAX_LEN - 100), ""),
    "text": (lambda: ask("word " * 500_000), "CONTEXT_LENGTH_EXCEEDED"),
    "text that is read": (lambda: ask("word " * 45_000), "CONTEXT_LENGTH_EXCEEDED"),
    "text that fits": (lambda: ask("word " * 3_900), ""),
    "an answer to go on with": (lambda: continued(8_000, 100), ""),
    "an answer of nothing": (lambda: continued(2_000, 1), ""),
    "an answer of half a character": (lambda: continued(2_000, 200), ""),
    "definitions of tools": (lambda: with_tools(2_000), ""),
    "definitions of too many tools": (lambda: with_tools(9_000), "INVALID_ARGUMENT"),
    "biases": (lambda: with_biases(20_000), "INVALID_ARGUMENT"),
}


def with_tools(count: int) -> inference_pb2.GenerateRequest:
    """This model's template does not print them."""
    request = ask("hi")
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": {"a": [1, 2, 3]}}} for n in range(count)]
    request.prompt.chat_template_kwargs_json = json.dumps({"tools": tools})
    return request


def with_biases(count: int) -> inference_pb2.GenerateRequest:
    request = ask()
    for i in range(count):
        request.sampling.logit_bias[i] = 1.0
    return request


@pytest.mark.parametrize("name", HEAVY)
def test_no_request_holds_up_the_others(quick: RunningServer, name: str) -> None:
    """In the middle of two streams. What a request causes, it causes each time; a busy machine does not."""
    make, refusal = HEAVY[name]
    request = make()
    request.sampling.max_tokens = request.sampling.max_tokens or 4
    ended = threading.Event()

    def go_on(stubs: Stubs) -> None:
        while not ended.is_set():
            for _ in stubs.inference.StreamGenerate(inference_pb2.StreamGenerateRequest(request=ask(max_tokens=20))):
                pass

    def attempt(stubs: Stubs) -> tuple[float, str]:
        with watched(quick.loop) as pauses:
            if refusal:
                with pytest.raises(grpc.RpcError) as refused:
                    stubs.inference.Generate(request)
                assert reason(refused.value) == ("INVALID_ARGUMENT", refusal)
            else:
                assert stubs.inference.Generate(request).samples
        assert pauses.callbacks > 5
        return pauses.longest, pauses.what

    with connect(quick.address) as stubs:
        stubs.inference.Generate(ask())
        others = [threading.Thread(target=go_on, args=(stubs,)) for _ in range(2)]
        for other in others:
            other.start()
        try:
            for _ in range(3):
                longest, what = attempt(stubs)
                if longest < LONGEST:
                    break
        finally:
            ended.set()
            for other in others:
                other.join()
    assert longest < LONGEST, f"{1e3 * longest:.0f} ms in {what}"


def test_files_hold_up_nobody(quick: RunningServer) -> None:
    data = png(3, (1400, 1400))
    with connect(quick.address) as stubs, watched(quick.loop) as pauses:
        media = stubs.media.UploadMedia(upload(data)).media
        stubs.media.GetMedia(media_pb2.GetMediaRequest(media_id=media.media_id))
        assert stubs.inference.Generate(ask(images=[{"media_id": media.media_id}])).samples
        assert stubs.inference.Generate(ask(images=[{"data": data}])).samples
    assert pauses.longest < LONGEST, f"{1e3 * pauses.longest:.0f} ms in {pauses.what}"


def test_fields_are_counted_wherever_they_are() -> None:
    from service.answers.weigh import weigh
    from service.common import errors

    kind = inference_pb2.StreamGenerateRequest.DESCRIPTOR

    def weighed(request: inference_pb2.GenerateRequest, max_ids: int = 1000) -> None:
        weigh(inference_pb2.StreamGenerateRequest(request=request).SerializeToString(), kind, max_ids)

    fits = (MAX_FIELDS - 2) // 2  # a message and its role, in a chat in a request
    weighed(of_messages(fits))
    with pytest.raises(errors.InvalidArgument, match="more than 65536 fields"):
        weighed(of_messages(fits + 1))
    weighed(ask("x" * 200_000, images=[{"data": bytes(200_000)}]))
    weighed(of_ids(10_000))
    with pytest.raises(errors.InvalidArgument, match="ids has 10001 bytes, more than 1000 numbers can take"):
        weighed(of_ids(10_001))
    for torn in (b"\x0a", b"\x0a\xff\xff\xff\xff\x0f", b"\x80" * 20, b"\x0b\x0c", b"\x09", b"\xff" * 70_000):
        weigh(torn, kind, 10)


def test_the_detector_sees_a_pause(quick: RunningServer) -> None:
    async def busy() -> None:
        sum(range(2_000_000))

    with watched(quick.loop) as pauses:
        quick.run(busy())
    assert pauses.longest > 0.002 and "busy" in pauses.what
