"""Admission of decoders to an encoder: several at once, and while the encoder stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from saccade.v1 import encoder_pb2
from service.common import errors
from service.encoding.encoder_servicer import EncoderServicer
from service.encoding.grpc_link import partner_to_proto
from service.encoding.handoff import Handoff
from service.encoding.partner import PROTOCOL, Partner

PARTNER = Partner(PROTOCOL, "tiny", "revision", "digest", "patches", "float32", 8)


class Peer:
    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


def attach(servicer: EncoderServicer) -> Any:
    async def requests() -> AsyncIterator[encoder_pb2.AttachRequest]:
        yield encoder_pb2.AttachRequest(hello=partner_to_proto(PARTNER))
        await asyncio.Event().wait()

    return servicer.Attach(requests(), Peer())


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
