"""The decoder's side of `EncoderService.Attach`: an encoder on another host, or in another server on this one.

One thread reads what the encoder sends and writes rows directly into the handoff's memory; gRPC's own thread iterates
over `_Session.messages`, which yields no more pixels than the encoder's window allows. After a lost connection the
reader reconnects, after a pause that grows with each failure.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from encoder.item import DTYPE_BYTES
from saccade.v1 import encoder_pb2, encoder_pb2_grpc
from service.common.option import is_local
from service.encoding.encoder_pool import LinkOwner
from service.encoding.entries import EncodingFailed, Work
from service.encoding.items import bytes_of, item_to_proto, pieces, write_bytes
from service.encoding.largest_item import Largest
from service.encoding.partner import Partner, PartnerRefused

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
FRESH = 1.0
"""Seconds for which an encoder's reported load is valid: it reports nothing while nothing is sent to it."""
MAX_MESSAGE = 8 << 20
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    # Keepalive detects hosts that vanish; an encoder that is only slow is handled by its lease.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Each link has its own connection, and decides itself when to reconnect.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # also the time that one connection attempt may take
]
REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Statuses that retrying cannot change."""


def partner_to_proto(partner: Partner) -> encoder_pb2.Partner:
    return encoder_pb2.Partner(**vars(partner))


def partner_from_proto(message: encoder_pb2.Partner) -> Partner:
    return Partner(**{field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields})


class GrpcLink:
    """The connection to one encoder."""

    def __init__(
        self, address: str, partner: Partner, largest: Largest, *,
        credentials: Callable[[], grpc.ChannelCredentials | None] = lambda: None, api_key: str | None = None,
    ) -> None:  # fmt: skip
        """`largest`: bounds on the images and videos that may be sent. `credentials`: those of the next connection;
        None: no TLS."""
        self.name = address
        self._partner, self._largest = partner, largest
        self._credentials = credentials
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._session: _Session | None = None
        self._window = 0
        """Bytes of pixels that the encoder takes at a time."""
        self._reason = "never connected"
        self._closing = threading.Event()
        self._first: Future[None] = Future()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._call: Any = None
        self._counts = dict.fromkeys(("connections", "sent_pixel_bytes_total", "received_row_bytes_total"), 0)
        """Each is written by one thread: the pixels' by gRPC's, the others by the reader."""

    @property
    def alive(self) -> bool:
        session = self._session
        return session is not None and session.open

    @property
    def reason(self) -> str:
        return "" if self.alive else self._reason

    @property
    def in_progress(self) -> int:
        session = self._session
        return session.in_progress if session is not None else 0

    @property
    def load(self) -> int:
        session = self._session
        return max(session.in_progress, session.elsewhere) if session is not None else 0

    def start(self, owner: LinkOwner) -> None:
        self._owner = owner
        self._thread = threading.Thread(target=self._loop, name=f"saccade-link-{self.name}", daemon=True)
        self._thread.start()
        self._first.result()

    def send(self, work: Work, seconds_left: float | None) -> None:
        session = self._session
        if session is not None and (size := work.image.nbytes) > self._window:
            message = f"the image has {size} bytes of pixels, but encoder {self.name} takes {self._window} at a time"
            self._owner.failed(self, work, ValueError(message))
        elif session is None or not session.add(work, seconds_left):
            # The connection has ended since this link was chosen: reported like all images of a lost connection.
            self._owner.lost(self, [work], self._reason)

    def revoke(self, work: Work) -> bool:
        session = self._session
        return session is not None and session.revoke(work)

    def abandon(self) -> None:
        with self._lock:
            if self._call is not None:
                self._call.cancel()

    def stats(self) -> dict[str, float]:
        return {**self._counts, "in_progress_tokens_now": self.in_progress}

    def close(self) -> None:
        self._closing.set()
        self.abandon()
        if self._thread is not None:
            self._thread.join()

    # -- the reader ----------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        pause = FIRST_PAUSE
        while not self._closing.is_set():
            connections = self._counts["connections"]
            try:
                self._attach()
                self._reason = "the encoder ended the connection"
            except grpc.RpcError as error:
                self._reason = _words(error)
                if error.code() in REFUSALS:
                    self._refuse(PartnerRefused(f"encoder {self.name}: {self._reason}"))
            except PartnerRefused as error:
                self._reason = str(error)
                self._refuse(error)
            except Exception as error:  # an invalid message: the connection cannot be trusted any more
                log.exception("encoder %s", self.name)
                self._reason = f"{type(error).__name__}: {error}"
            self._end()
            pause = FIRST_PAUSE if self._counts["connections"] > connections else min(pause * 2, LONGEST_PAUSE)
            self._closing.wait(pause)

    def _refuse(self, error: PartnerRefused) -> None:
        if self._first.done():
            log.error("%s", error)
        else:
            self._first.set_exception(error)

    def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            lost = session.end()
            if not self._closing.is_set():
                self._owner.lost(self, lost, self._reason)
        if not self._first.done():
            self._first.set_result(None)

    def _attach(self) -> None:
        """Runs one connection from start to end. Raises RpcError or PartnerRefused."""
        options = [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)] if is_local(self.name) else CHANNEL_OPTIONS
        if (credentials := self._credentials()) is None:
            channel = grpc.insecure_channel(self.name, options=options)
        else:
            channel = grpc.secure_channel(self.name, credentials, options=options)
        with channel:
            session = _Session(self._partner, self._count)
            stub = encoder_pb2_grpc.EncoderServiceStub(channel)
            call = stub.Attach(session.messages(), metadata=self._metadata)
            with self._lock:
                self._call = call
                if self._closing.is_set():
                    call.cancel()
            overdue = threading.Timer(CONNECT_SECONDS, call.cancel)
            overdue.daemon = True
            overdue.start()
            try:
                if (first := next(call, None)) is None:  # the encoder is stopping
                    return
                self._welcome(first)
                overdue.cancel()
                session.opened(self._window)
                self._counts["connections"] += 1
                self._session = session
                if not self._first.done():
                    self._first.set_result(None)
                log.info("encoder %s is attached", self.name)
                self._owner.changed(self)
                for message in call:
                    self._take(session, message)
            finally:
                overdue.cancel()
                session.shut()
                call.cancel()
                with self._lock:
                    self._call = None

    def _welcome(self, message: encoder_pb2.AttachResponse) -> None:
        """Checks the encoder's first message. Raises PartnerRefused."""
        name = f"encoder {self.name}"
        welcome = message.welcome
        self._partner.check(partner_from_proto(welcome.partner), name)
        tokens, pixel_bytes = self._largest
        if welcome.window_bytes < pixel_bytes:
            raise PartnerRefused(
                f"{name} takes {welcome.window_bytes} bytes of pixels, but the largest image or video here may have "
                f"{pixel_bytes}; raise its max_inflight_bytes to that for each of its max_decoders"
            )
        if welcome.max_tokens < tokens:
            least = tokens * self._partner.hidden_size * DTYPE_BYTES[self._partner.dtype]
            raise PartnerRefused(
                f"{name} takes images and videos of {welcome.max_tokens} tokens, but the largest here may have "
                f"{tokens}; handoff_bytes {least} would work there"
            )
        self._window = welcome.window_bytes

    def _take(self, session: _Session, message: encoder_pb2.AttachResponse) -> None:
        owner = self._owner
        match message.WhichOneof("message"):
            case "rows":
                session.write(message.rows.ticket, message.rows.data)
                self._count("received_row_bytes_total", len(message.rows.data))
            case "encoded":
                counts = tuple(message.encoded.counts)
                if (work := session.finish(message.encoded.ticket, counts)) is not None:
                    if _finite(work.rows):
                        owner.written(self, work, counts)
                    else:
                        words = f"encoder {self.name} sent numbers that are not finite"
                        log.error("%s, for an image of %d tokens", words, work.image.tokens)
                        owner.failed(self, work, EncodingFailed(words))
            case "failure":
                failure = message.failure
                if (work := session.drop(failure.ticket)) is not None:
                    kind: type[Exception] = ValueError if failure.invalid else EncodingFailed
                    owner.failed(self, work, kind(failure.message))
            case "credit":
                session.credit(message.credit.bytes, message.credit.waiting_tokens)
            case "draining":
                self._reason = "it is draining"
                owner.lost(self, session.drain(), self._reason)
        owner.changed(self)

    def _count(self, name: str, amount: int) -> None:
        self._counts[name] += amount


@dataclass
class _Expected:
    """An image whose rows have not all arrived."""

    work: Work
    written: int = 0
    """Bytes of its rows that have arrived."""


class _Session:
    """The images in progress on one connection. Thread-safe."""

    def __init__(self, partner: Partner, count: Callable[[str, int], None]) -> None:
        self.open = False
        self._partner, self._count = partner, count
        self._changed = threading.Condition()
        self._sending_ended = False
        self._window = 0
        self._reported = (0, 0.0)
        self._expected: dict[int, _Expected] = {}
        """By ticket, also those that have not been sent."""
        self._unsent: deque[tuple[Work, float | None]] = deque()
        self._cancels: deque[int] = deque()

    @property
    def in_progress(self) -> int:
        """Image tokens in progress."""
        with self._changed:
            return sum(expected.work.image.tokens for expected in self._expected.values())

    @property
    def elsewhere(self) -> int:
        """Image tokens in progress in the encoder for all its decoders, if reported recently."""
        tokens, moment = self._reported
        return tokens if time.monotonic() - moment < FRESH else 0

    def opened(self, window: int) -> None:
        with self._changed:
            self.open, self._window = True, window
            self._changed.notify_all()

    def add(self, work: Work, seconds_left: float | None) -> bool:
        with self._changed:
            if not self.open:
                return False
            self._expected[work.ticket] = _Expected(work)
            self._unsent.append((work, seconds_left))
            self._changed.notify_all()
            return True

    def revoke(self, work: Work) -> bool:
        with self._changed:
            if self._expected.pop(work.ticket, None) is None:
                return False
            unsent = [entry for entry in self._unsent if entry[0] is not work]
            if len(unsent) == len(self._unsent):
                self._cancels.append(work.ticket)
            self._unsent = deque(unsent)
            self._changed.notify_all()
            return True

    def write(self, ticket: int, data: bytes) -> None:
        """Writes received rows, holding the lock, so that revoked images are not written. Raises ValueError for more
        bytes than rows."""
        with self._changed:
            if (expected := self._expected.get(ticket)) is not None:
                expected.written = write_bytes(expected.work.rows, expected.written, data)

    def finish(self, ticket: int, counts: Sequence[int]) -> Work | None:
        """Ends an image; None if it has been revoked. Raises ValueError if rows are missing, or if `counts`, the rows
        of each of its sequences, do not add up to all its rows: prompts are laid out by them."""
        with self._changed:
            if (expected := self._expected.get(ticket)) is None:
                return None
            work, size = expected.work, expected.work.rows.numel() * expected.work.rows.itemsize
            if expected.written != size:
                raise ValueError(f"the encoder sent {expected.written} of the {size} bytes of ticket {ticket}")
            if (len(counts), sum(counts)) != (work.image.num_sequences, work.image.tokens):
                raise ValueError(
                    f"the encoder counts {sum(counts)} rows of {len(counts)} sequences in ticket {ticket}, which has "
                    f"{work.image.tokens} of {work.image.num_sequences}"
                )
            del self._expected[ticket]
            return work

    def drop(self, ticket: int) -> Work | None:
        with self._changed:
            expected = self._expected.pop(ticket, None)
            return None if expected is None else expected.work

    def credit(self, size: int, elsewhere: int) -> None:
        with self._changed:
            self._window += size
            self._reported = elsewhere, time.monotonic()
            self._changed.notify_all()

    def drain(self) -> list[Work]:
        """Stops sending after the current image; the rows of images that were sent are still received. Returns the
        unsent images."""
        with self._changed:
            self.open = False
            unsent = [work for work, _ in self._unsent]
            self._unsent.clear()
            for work in unsent:
                del self._expected[work.ticket]
            self._sending_ended = True
            self._changed.notify_all()
            return unsent

    def shut(self) -> None:
        """Stops sending and receiving."""
        with self._changed:
            self.open, self._sending_ended = False, True
            self._changed.notify_all()

    def end(self) -> list[Work]:
        """Ends the session and returns the images in progress, none of which is written after this."""
        self.shut()
        with self._changed:
            lost = [expected.work for expected in self._expected.values()]
            self._expected.clear()
            return lost

    def messages(self) -> Iterator[encoder_pb2.AttachRequest]:
        """The messages to the encoder. gRPC's thread iterates over them."""
        yield encoder_pb2.AttachRequest(hello=partner_to_proto(self._partner))
        while (what := self._next()) is not None:
            if isinstance(what, int):
                yield encoder_pb2.AttachRequest(cancel=what)
            else:
                yield from self._item_messages(*what)

    def _next(self) -> int | tuple[Work, float | None] | None:
        """The ticket of an image to cancel, or the next image that the window has space for; None at the end."""
        with self._changed:
            while not self._sending_ended:
                if self._cancels:
                    return self._cancels.popleft()
                if self._unsent:
                    size = self._unsent[0][0].image.nbytes
                    if size <= self._window:
                        self._window -= size
                        return self._unsent.popleft()
                self._changed.wait()
            return None

    def _item_messages(self, work: Work, seconds_left: float | None) -> Iterator[encoder_pb2.AttachRequest]:
        item = item_to_proto(work.image.description)
        item.ticket, item.key, item.priority = work.ticket, work.key, work.priority
        if seconds_left is not None:
            item.seconds_left = max(seconds_left, 0.0)
        yield encoder_pb2.AttachRequest(item=item)
        for data in pieces(bytes_of(work.image.patches)):
            if work.ticket not in self._expected:  # revoked: its cancellation is sent next
                return
            self._count("sent_pixel_bytes_total", len(data))
            yield encoder_pb2.AttachRequest(pixels=encoder_pb2.Piece(ticket=work.ticket, data=data))


def _finite(rows: torch.Tensor) -> bool:
    """Whether rows have neither NaN nor infinities, which would be cached and make tokens of answers arbitrary. Takes
    one pass over the rows: 0.4 ms for 1,000 rows of 2,048 numbers on one core."""
    least, most = torch.aminmax(rows)
    return math.isfinite(least.item()) and math.isfinite(most.item())


def _words(error: grpc.RpcError) -> str:
    """Status and details in one line."""
    code: grpc.StatusCode = error.code()
    if code is grpc.StatusCode.CANCELLED:
        return "it did not answer in time"
    return f"{error.details() or 'no details'} ({code.name})"
