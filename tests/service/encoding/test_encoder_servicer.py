"""Sessions of decoders at an encoder: their admission, several at once and while the encoder stops, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from saccade.v1 import encoder_pb2
from service.common import errors
from service.encoding.encoder_servicer import MAX_OUTGOING, EncoderServicer
from service.encoding.grpc_link import partner_to_proto
from service.encoding.handoff import Handoff
from service.encoding.partner import PROTOCOL, Partner

PARTNER = Partner(PROTOCOL, "tiny", "revision", "digest", "patches", "float32", 8)


class Peer:
    def __init__(self) -> None:
        self.gone = False

    def peer(self) -> str:
        assert not self.gone, "gRPC's own context would crash"
        return "ipv4:127.0.0.1:1"


def attach(servicer: EncoderServicer, *messages: encoder_pb2.AttachRequest, peer: Peer | None = None) -> Any:
    async def requests() -> AsyncIterator[encoder_pb2.AttachRequest]:
        yield encoder_pb2.AttachRequest(hello=partner_to_proto(PARTNER))
        for message in messages:
            yield message
        await asyncio.Event().wait()

    return servicer.Attach(requests(), peer or Peer())


def test_a_call_that_has_ended_is_not_asked_for_its_peer() -> None:
    async def body() -> None:
        handoff, peer = Handoff(1000, 8, torch.float32), Peer()
        servicer = EncoderServicer(handoff, PARTNER, window_bytes=1000, max_sessions=1)
        session = attach(servicer, peer=peer)
        await anext(session)
        attached = asyncio.ensure_future(anext(session))
        while not servicer.sessions:
            await asyncio.sleep(0)
        peer.gone = True
        attached.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attached

    asyncio.run(body())


@pytest.mark.parametrize(("then", "reason"), [("attach", "QUEUE_FULL"), ("drain", "DRAINING")])
def test_what_has_changed_since_the_hello_counts(then: str, reason: str) -> None:
    async def body() -> None:
        handoff = Handoff(1000, 8, torch.float32)
        servicer = EncoderServicer(handoff, PARTNER, window_bytes=1000, max_sessions=1)
        first, second = attach(servicer), attach(servicer)
        assert (await anext(first)).HasField("welcome") and (await anext(second)).HasField("welcome")
        attached = asyncio.ensure_future(anext(first))
        while not servicer.sessions:
            await asyncio.sleep(0)
        if then == "drain":
            servicer.drain()
        with pytest.raises(errors.Unavailable) as refused:
            await anext(second)
        assert refused.value.reason == reason and len(servicer.sessions) == 1
        attached.cancel()
        await asyncio.wait({attached})
        await first.aclose()
        assert servicer.idle.is_set() and not servicer.sessions

    asyncio.run(body())


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("key", b"", "a key of 0 bytes; expected 1 to 64"),
        ("key", bytes(65), "a key of 65 bytes; expected 1 to 64"),
        ("seconds_left", -1.0, "-1 seconds left"),
        ("seconds_left", float("inf"), "inf seconds left"),
        ("seconds_left", float("nan"), "nan seconds left"),
    ],
)
def test_keys_and_deadlines_out_of_range_end_the_session(field: str, value: Any, words: str) -> None:
    options = {"ticket": 5, "key": bytes(64), "grid_rows": 2, "grid_columns": 2, "merge_size": 2, "dtype": "float32"}
    message = encoder_pb2.AttachRequest(item=encoder_pb2.EncodeItem(**{**options, "shape": (4, 3), field: value}))

    async def body() -> None:
        handoff = Handoff(1000, 8, torch.float32)
        call = attach(EncoderServicer(handoff, PARTNER, window_bytes=1000, max_sessions=1), message)
        assert (await anext(call)).HasField("welcome")
        with pytest.raises(errors.InvalidArgument, match=words) as refused:
            await anext(call)
        assert refused.value.field == f"item.{field}"
        handoff.check_integrity(idle=True)

    asyncio.run(body())


@pytest.mark.parametrize("last", ["rows", "encoded", "credit"])
def test_a_decoder_that_leaves_while_a_message_is_sent_leaves_no_lease(last: str) -> None:
    item = encoder_pb2.EncodeItem(
        ticket=5, key=b"k", grid_rows=2, grid_columns=2, merge_size=2, shape=(4, 3), dtype="float32"
    )
    pixels = encoder_pb2.Piece(ticket=5, data=bytes(4 * 3 * 4))

    async def body() -> None:
        handoff = Handoff(1000, 8, torch.float32)
        servicer = EncoderServicer(handoff, PARTNER, window_bytes=1000, max_sessions=1)
        call = attach(servicer, encoder_pb2.AttachRequest(item=item), encoder_pb2.AttachRequest(pixels=pixels))
        assert (await anext(call)).HasField("welcome")
        message = asyncio.ensure_future(anext(call))
        while not (works := handoff.take()):
            await asyncio.sleep(0)
        handoff.publish(works)
        servicer.poll()
        while not (await message).HasField(last):
            message = asyncio.ensure_future(anext(call))
        await call.aclose()
        handoff.check_integrity(idle=True)

    asyncio.run(body())


def test_a_decoder_that_does_not_read_is_read_no_further() -> None:
    """Each image that it cancels is answered with a credit."""
    item = encoder_pb2.EncodeItem(
        ticket=5, key=b"k", grid_rows=2, grid_columns=2, merge_size=2, shape=(4, 3), dtype="float32"
    )
    cancelled, sent = 3 * MAX_OUTGOING, 0

    async def requests() -> AsyncIterator[encoder_pb2.AttachRequest]:
        nonlocal sent
        yield encoder_pb2.AttachRequest(hello=partner_to_proto(PARTNER))
        for _ in range(cancelled):
            yield encoder_pb2.AttachRequest(item=item)
            yield encoder_pb2.AttachRequest(cancel=5)
            sent += 1
            await asyncio.sleep(0)

    async def body() -> None:
        servicer = EncoderServicer(Handoff(1000, 8, torch.float32), PARTNER, window_bytes=1000, max_sessions=1)
        call = servicer.Attach(requests(), Peer())
        assert (await anext(call)).HasField("welcome")
        assert (await anext(call)).HasField("credit")
        for _ in range(2 * cancelled):  # enough for all messages
            await asyncio.sleep(0)
        assert sent <= MAX_OUTGOING + 2
        left = [message async for message in call]
        assert len(left) == cancelled - 1 and all(message.HasField("credit") for message in left)

    asyncio.run(body())
