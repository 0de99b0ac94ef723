"""The encoder's side of `EncoderService.Attach`: images in, rows out, one session per decoder.

The encoder has a handoff of its own, with the same properties: memory for the rows is reserved before an image is
encoded, an image is encoded once however many decoders request its key, rows are cached, images are ordered by deadline
and priority. A session leases what its decoder requested, sends the rows when they are ready, and then releases them.
Rows that a decoder does not read stay leased; when the memory is full, nothing is encoded, no decoder gets a larger
window, and the decoders keep their images.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from saccade.v1 import encoder_pb2, encoder_pb2_grpc
from service.common import errors
from service.encoding.entries import Lease
from service.encoding.grpc_link import partner_from_proto, partner_to_proto
from service.encoding.handoff import Handoff
from service.encoding.items import bytes_of, empty_pixels, item_from_proto, pieces, write_bytes
from service.encoding.partner import Partner, PartnerRefused

log = logging.getLogger(__name__)

Response = encoder_pb2.AttachResponse
MAX_KEY = 64
"""Limit on the bytes of an image's key, which stays as long as its rows are cached."""

MAX_OUTGOING = 1024
"""Messages for a decoder that may wait. Nothing more is read from it meanwhile, since most answer what it has sent."""


class EncoderServicer(encoder_pb2_grpc.EncoderServiceServicer):
    """Accepts decoders of the same model. Used on one event loop."""

    def __init__(self, handoff: Handoff, partner: Partner, *, window_bytes: int, max_sessions: int) -> None:
        """`window_bytes`: pixels of one decoder that may be in progress."""
        self._handoff, self._partner = handoff, partner
        self._window_bytes, self._max_sessions = window_bytes, max_sessions
        self.sessions: set[_Session] = set()
        self.idle = asyncio.Event()
        """Set while no decoder is connected."""
        self.idle.set()
        self._draining = False

    async def Attach(
        self, requests: AsyncIterator[encoder_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[encoder_pb2.AttachResponse]:
        self._check_room()
        peer = context.peer()  # now: gRPC reads freed memory if it is asked after the end of the call
        hello = await anext(aiter(requests), None)
        if hello is None or hello.WhichOneof("message") != "hello":
            raise errors.InvalidArgument("the first message must be hello", field="hello")
        # Sent before the decoder's message is checked, so that both sides can report the differences.
        yield Response(
            welcome=encoder_pb2.Welcome(
                partner=partner_to_proto(self._partner), window_bytes=self._window_bytes,
                max_tokens=self._handoff.max_tokens,
            )
        )  # fmt: skip
        try:
            self._partner.check(partner_from_proto(hello.hello), f"the decoder at {peer}")
        except PartnerRefused as error:
            raise errors.FailedPrecondition(str(error), reason="PARTNER_REFUSED") from None
        self._check_room()  # another session may have started, or the server may be stopping, since
        session = _Session(self._handoff, self._window_bytes)
        self.sessions.add(session)
        self.idle.clear()
        log.info("a decoder at %s is attached", peer)
        reader = asyncio.create_task(session.read(requests))
        try:
            async for response in session.responses(reader):
                yield response
        finally:
            reader.cancel()
            session.close()
            self.sessions.discard(session)
            if not self.sessions:
                self.idle.set()
            log.info("the decoder at %s has disconnected", peer)

    def _check_room(self) -> None:
        """Raises Unavailable if no further decoder is accepted."""
        if self._draining:
            raise errors.Unavailable("the encoder is stopping", reason="DRAINING", retry_after=1.0)
        if len(self.sessions) >= self._max_sessions:
            raise errors.Unavailable(
                f"{len(self.sessions)} decoders are attached, the most that max_inflight_bytes allows",
                reason="QUEUE_FULL", metadata={"limit": str(self._max_sessions)}, retry_after=5.0,
            )  # fmt: skip

    def poll(self) -> None:
        """To be called when the handoff has changed: rows may be ready."""
        for session in self.sessions:
            session.wake.set()

    def drain(self) -> None:
        """Tells all decoders to send nothing more. Each receives the rows that it still waits for, and disconnects."""
        self._draining = True
        for session in self.sessions:
            session.put(Response(draining=True))

    @property
    def in_progress(self) -> int:
        return sum(session.in_progress for session in self.sessions)


@dataclass
class _Arriving:
    """An image whose pixels are being received."""

    item: encoder_pb2.EncodeItem
    pixels: torch.Tensor
    offset: int = 0

    @property
    def size(self) -> int:
        return self.pixels.numel() * self.pixels.itemsize


class _Session:
    """The session of one decoder."""

    def __init__(self, handoff: Handoff, window: int) -> None:
        self.wake = asyncio.Event()
        self._handoff, self._window = handoff, window
        self._arriving: dict[int, _Arriving] = {}
        self._leases: dict[int, tuple[Lease, int]] = {}
        self._outgoing: list[encoder_pb2.AttachResponse] = []
        self._sent = asyncio.Event()
        """Set when a message has been taken from those that wait."""

    @property
    def in_progress(self) -> int:
        return len(self._arriving) + len(self._leases)

    def put(self, response: encoder_pb2.AttachResponse) -> None:
        self._outgoing.append(response)
        self.wake.set()

    async def read(self, requests: AsyncIterator[encoder_pb2.AttachRequest]) -> None:
        """Reads until the decoder has nothing more to send. Raises StatusError for invalid messages."""
        try:
            async for request in requests:
                match request.WhichOneof("message"):
                    case "item":
                        self._begin(request.item)
                    case "pixels":
                        self._add(request.pixels)
                    case "cancel":
                        self._cancel(request.cancel)
                    case other:
                        raise errors.InvalidArgument(f"a message of kind {other!r} in mid-stream")
                while len(self._outgoing) >= MAX_OUTGOING:
                    self._sent.clear()
                    await self._sent.wait()
        finally:
            self.wake.set()

    def _begin(self, item: encoder_pb2.EncodeItem) -> None:
        if item.ticket in self._arriving or item.ticket in self._leases:
            raise errors.InvalidArgument(f"ticket {item.ticket} is in use", field="item.ticket")
        if not 0 < len(item.key) <= MAX_KEY:
            raise errors.InvalidArgument(f"a key of {len(item.key)} bytes; expected 1 to {MAX_KEY}", field="item.key")
        if item.HasField("seconds_left") and not 0 <= item.seconds_left < math.inf:
            raise errors.InvalidArgument(
                f"{item.seconds_left:g} seconds left; expected a finite number of 0 or more", field="item.seconds_left"
            )
        try:
            pixels = empty_pixels(item, self._window)
        except ValueError as error:
            raise errors.InvalidArgument(str(error), field="item") from None
        self._window -= pixels.numel() * pixels.itemsize
        self._arriving[item.ticket] = _Arriving(item, pixels)

    def _add(self, piece: encoder_pb2.Piece) -> None:
        if (arriving := self._arriving.get(piece.ticket)) is None:
            raise errors.InvalidArgument(
                f"pixels of ticket {piece.ticket}, which is not expected", field="pixels.ticket"
            )
        try:
            arriving.offset = write_bytes(arriving.pixels, arriving.offset, piece.data)
        except ValueError as error:
            raise errors.InvalidArgument(str(error), field="pixels") from None
        if arriving.offset == arriving.size:
            del self._arriving[piece.ticket]
            self._lease(arriving)

    def _lease(self, arriving: _Arriving) -> None:
        item = arriving.item
        deadline = time.monotonic() + item.seconds_left if item.HasField("seconds_left") else None
        try:
            image = item_from_proto(item, arriving.pixels)
            lease = self._handoff.lease(item.key, image, item.priority, deadline)
        except ValueError as error:
            self._fail(item.ticket, error, arriving.size)
        else:
            self._leases[item.ticket] = lease, arriving.size

    def _cancel(self, ticket: int) -> None:
        if (arriving := self._arriving.pop(ticket, None)) is not None:
            self._credit(arriving.size)
        elif (entry := self._leases.pop(ticket, None)) is not None:
            entry[0].release()
            self._credit(entry[1])

    def _fail(self, ticket: int, error: Exception, size: int) -> None:
        invalid = isinstance(error, ValueError)
        failure = encoder_pb2.EncodeFailure(ticket=ticket, message=str(error)[:1000], invalid=invalid)
        self.put(Response(failure=failure))
        self._credit(size)

    def _credit(self, size: int) -> None:
        """Enlarges the decoder's window by the pixels that have been freed here."""
        self._window += size
        self.put(Response(credit=encoder_pb2.Credit(bytes=size, waiting_tokens=self._handoff.pending_tokens())))

    async def responses(self, reader: asyncio.Task[None]) -> AsyncIterator[encoder_pb2.AttachResponse]:
        """Yields the messages to the decoder, until it has everything that it requested and requests no more. Raises
        the errors of `reader`."""
        while True:
            await self.wake.wait()
            self.wake.clear()
            while self._outgoing:
                self._sent.set()
                yield self._outgoing.pop(0)
            for ticket, (lease, size) in list(self._leases.items()):
                if ticket not in self._leases:  # cancelled while the rows of another image were sent
                    continue
                if lease.error is not None:
                    del self._leases[ticket]
                    lease.release()
                    self._fail(ticket, lease.error, size)
                elif lease.ready:
                    for response in self._rows(ticket, lease):
                        yield response
            if reader.done():
                reader.result()
                if not self._leases and not self._outgoing:
                    return

    def _rows(self, ticket: int, lease: Lease) -> Iterator[encoder_pb2.AttachResponse]:
        """Yields the rows in pieces; stops between two pieces if they are no longer wanted."""
        for data in pieces(bytes_of(lease.rows())):
            yield Response(rows=encoder_pb2.Piece(ticket=ticket, data=data))
            if ticket not in self._leases:
                return
        _, size = self._leases.pop(ticket)
        encoded = encoder_pb2.Encoded(ticket=ticket, counts=lease.counts)
        lease.release()  # before the message: a decoder that disconnects meanwhile ends this generator there
        yield Response(encoded=encoded)
        self._credit(size)

    def close(self) -> None:
        for lease, _ in self._leases.values():
            lease.release()
        self._leases.clear()
        self._arriving.clear()
