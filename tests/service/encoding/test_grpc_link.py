"""The messages that a decoder sends to a remote encoder: pixels never beyond its window, and every revocation."""

from __future__ import annotations

import math
import queue
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
import torch

from encoder.item import VIDEO, EncoderItem
from saccade.v1 import encoder_pb2, encoder_pb2_grpc
from service.encoding.encoder_pool import Link
from service.encoding.entries import Work
from service.encoding.grpc_link import GrpcLink, _Session, partner_to_proto
from service.encoding.handoff import Handoff
from service.encoding.items import PIECE_BYTES, bytes_of
from service.encoding.largest_item import Largest
from service.encoding.partner import PROTOCOL, Partner

PARTNER = Partner(PROTOCOL, "tiny", "revision", "digest", "patches", "float32", 2)
SMALL = 3 * 4 * 4
"""Bytes of pixels of an image of one token."""


def work_for(ticket: int, tokens: int = 1, width: int = 3) -> Work:
    pixels = torch.arange(4.0 * tokens * width).view(4 * tokens, width)
    return Work(bytes([ticket]), EncoderItem((2, 2 * tokens), pixels), torch.zeros(tokens, 2), ticket)


def opened(window: int) -> tuple[_Session, Iterator[encoder_pb2.AttachRequest], Counter[str]]:
    counts: Counter[str] = Counter()
    session = _Session(PARTNER, lambda name, amount: counts.update({name: amount}))
    messages = session.messages()
    assert next(messages).hello.model == "tiny"
    session.opened(window)
    return session, messages, counts


def told(message: encoder_pb2.AttachRequest) -> tuple[str, int]:
    kind = message.WhichOneof("message")
    return kind, message.cancel if kind == "cancel" else getattr(message, kind).ticket


def test_a_revocation_reaches_the_encoder() -> None:
    """After the pixels have been sent, and in the middle of them: the rest is not sent, but the cancellation is."""
    session, messages, counts = opened(1 << 30)
    whole, large, last = work_for(1), work_for(2, 4, PIECE_BYTES // 16), work_for(3)
    for work in (whole, large, last):
        assert session.add(work, None)
    assert [told(next(messages)) for _ in range(4)] == [("item", 1), ("pixels", 1), ("item", 2), ("pixels", 2)]
    assert session.revoke(large) and session.revoke(whole) and session.in_progress == last.image.tokens
    assert [told(next(messages)) for _ in range(4)] == [("cancel", 2), ("cancel", 1), ("item", 3), ("pixels", 3)]
    assert counts["sent_pixel_bytes_total"] == 2 * SMALL + PIECE_BYTES
    assert not session.revoke(large), "it has ended, and is told of by somebody else"
    session.shut()
    assert next(messages, None) is None


def test_what_was_never_sent_needs_no_cancellation() -> None:
    session, messages, _ = opened(SMALL)
    first, second, third = work_for(1), work_for(2), work_for(3)
    for work in (first, second, third):
        session.add(work, None)
    assert [told(next(messages)) for _ in range(2)] == [("item", 1), ("pixels", 1)]
    assert session.revoke(second) and session.in_progress == 2
    session.credit(SMALL, 0)
    assert [told(next(messages)) for _ in range(2)] == [("item", 3), ("pixels", 3)]
    session.shut()
    assert next(messages, None) is None


def test_the_window_bounds_what_is_sent() -> None:
    """Exactly and in order: a small image does not overtake a large one that waits."""
    session, messages, _ = opened(3 * SMALL - 1)
    for work in (work_for(1, 1), work_for(2, 2), work_for(3, 1)):
        session.add(work, None)
    assert [told(next(messages)) for _ in range(2)] == [("item", 1), ("pixels", 1)]
    session.credit(1, 7)
    assert session.elsewhere == 7
    assert [told(next(messages)) for _ in range(2)] == [("item", 2), ("pixels", 2)]
    session.credit(SMALL, 0)
    assert [told(next(messages)) for _ in range(2)] == [("item", 3), ("pixels", 3)]


def test_rows_of_what_was_revoked_are_not_written() -> None:
    session, _, _ = opened(1 << 20)
    kept, revoked = work_for(1), work_for(2)
    session.add(kept, None)
    session.add(revoked, None)
    row = torch.ones(2).numpy().tobytes()
    session.write(1, row[:4])
    session.write(2, row[:4])
    assert session.revoke(revoked)
    session.write(2, row[4:])
    session.write(1, row[4:])
    assert revoked.rows.tolist() == [[1.0, 0.0]] and kept.rows.tolist() == [[1.0, 1.0]]
    assert session.finish(2, (1,)) is None and session.drop(2) is None
    assert session.finish(1, (1,)) is kept and session.finish(1, (1,)) is None and session.in_progress == 0


def test_an_encoder_that_sends_too_little_or_too_much_is_not_believed() -> None:
    session, _, _ = opened(1 << 20)
    session.add(work_for(1), None)
    session.write(1, bytes(7))
    with pytest.raises(ValueError, match="sent 7 of the 8 bytes of ticket 1"):
        session.finish(1, (1,))
    with pytest.raises(ValueError, match="9 bytes for a tensor of 8"):
        session.write(1, bytes(2))


@pytest.mark.parametrize("counts", [(), (3, 1), (1, 1, 3), (2**32 - 1, 0, 0), (0, 0, 0)])
def test_an_encoder_that_counts_other_rows_than_it_sent_is_not_believed(counts: tuple[int, ...]) -> None:
    """The counts of a pruned clip determine where its rows are placed in a prompt, which must not be longer than the
    rows."""
    clip = EncoderItem((2, 4), torch.zeros(24, 3), kind=VIDEO, num_sequences=3, num_frames=5, pruning_rate=0.3)
    assert clip.tokens == 4
    session, _, _ = opened(1 << 20)
    session.add(Work(b"clip", clip, torch.zeros(4, 2), 1), None)
    session.write(1, bytes(32))
    with pytest.raises(ValueError, match=rf"{sum(counts)} rows of {len(counts)} sequences .* has 4 of 3"):
        session.finish(1, counts)
    assert session.finish(1, (2, 2, 0)) is not None


class Encoder(encoder_pb2_grpc.EncoderServiceServicer):
    """Answers the images that it gets with `rows`, one after the other."""

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        self._rows = iter(rows)

    def Attach(
        self, requests: Iterator[encoder_pb2.AttachRequest], context: grpc.ServicerContext
    ) -> Iterator[encoder_pb2.AttachResponse]:
        welcome = encoder_pb2.Welcome(partner=partner_to_proto(PARTNER), window_bytes=1 << 20, max_tokens=100)
        yield encoder_pb2.AttachResponse(welcome=welcome)
        for request in requests:
            if request.WhichOneof("message") == "pixels":
                ticket, rows = request.pixels.ticket, next(self._rows)
                data = bytes(bytes_of(rows))
                yield encoder_pb2.AttachResponse(rows=encoder_pb2.Piece(ticket=ticket, data=data))
                yield encoder_pb2.AttachResponse(encoded=encoder_pb2.Encoded(ticket=ticket, counts=[len(rows)]))


@contextmanager
def serving(servicer: Encoder) -> Iterator[str]:
    """The address of a server with `servicer`."""
    server = grpc.server(ThreadPoolExecutor(2))
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


class Owner:
    """What a link reports: tickets, and the error of those that failed."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def written(self, link: Link, work: Work, counts: tuple[int, ...]) -> None:
        self.events.put((work.ticket, "written"))

    def failed(self, link: Link, work: Work, error: Exception) -> None:
        self.events.put((work.ticket, f"{type(error).__name__}: {error}"))

    def lost(self, link: Link, works: Sequence[Work], reason: str) -> None:
        self.events.put((0, reason))

    def changed(self, link: Link) -> None:
        pass


def test_rows_that_are_not_finite_are_an_error_of_their_image() -> None:
    """They would be cached, and the tokens after them would be arbitrary. Other images of the connection go on."""
    bad = [torch.tensor([[1.0, value]]) for value in (math.nan, math.inf, -math.inf)]
    with serving(Encoder([*bad, torch.tensor([[1.0, 2.0]])])) as address:
        link, owner = GrpcLink(address, PARTNER, Largest(1, SMALL)), Owner()
        link.start(owner)
        try:
            for ticket in (1, 2, 3):
                link.send(work_for(ticket), None)
                words = f"EncodingFailed: encoder {address} sent numbers that are not finite"
                assert owner.events.get(timeout=60) == (ticket, words)
            good = work_for(4)
            link.send(good, None)
            assert owner.events.get(timeout=60) == (4, "written") and good.rows.tolist() == [[1.0, 2.0]]
        finally:
            link.close()


def test_an_encoder_that_ends_the_connection_at_once_is_no_fault() -> None:
    class Stopping(Encoder):
        def Attach(self, requests: object, context: object) -> Iterator[encoder_pb2.AttachResponse]:
            return iter(())

    with serving(Stopping([])) as address:
        link = GrpcLink(address, PARTNER, Largest(1, SMALL))
        link.start(Owner())
        alive, reason = link.alive, link.reason
        link.close()
        assert (alive, reason) == (False, "the encoder ended the connection")


def test_an_encoder_on_this_machine_is_not_reached_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with serving(Encoder([])) as address:
        for name in (address, address.replace("127.0.0.1", "localhost")):
            link = GrpcLink(name, PARTNER, Largest(1, SMALL))
            link.start(Owner())
            alive, reason = link.alive, link.reason
            link.close()
            assert alive, reason


def test_an_encoder_that_drains_keeps_what_it_has_been_sent() -> None:
    session, messages, _ = opened(1 << 20)
    sent, unsent = work_for(1), work_for(2)
    session.add(sent, None)
    assert [told(next(messages)) for _ in range(2)] == [("item", 1), ("pixels", 1)]
    session.add(unsent, None)
    assert session.drain() == [unsent]
    assert next(messages, None) is None and not session.add(work_for(3), None)
    session.write(1, bytes(8))
    assert session.finish(1, (1,)) is sent and session.end() == []


def test_a_connection_that_ends_takes_with_it_what_was_in_progress() -> None:
    session, _, _ = opened(1 << 20)
    works = [work_for(1), work_for(2)]
    for work in works:
        session.add(work, 2.5)
    assert session.end() == works and session.end() == []
    session.write(1, bytes(8))
    assert session.finish(1, (1,)) is None and not session.revoke(works[0])


def test_an_encoder_is_told_the_highest_priority_of_those_who_wait_for_an_image() -> None:
    handoff = Handoff(1 << 20, 2, torch.float32)
    wanted = work_for(1).image
    for priority in (-3, 7, 2):
        handoff.lease(b"a", wanted, priority)
    handoff.lease(b"b", wanted, -5)
    session, messages, _ = opened(1 << 20)
    for work in handoff.take():
        session.add(work, None)
    items = [message.item for message in (next(messages) for _ in range(4)) if message.HasField("item")]
    assert {item.key: item.priority for item in items} == {b"a": 7, b"b": -5}


def test_nobody_is_hurried_by_a_deadline_that_has_passed() -> None:
    session, messages, _ = opened(1 << 20)
    for ticket, left in ((1, 2.5), (2, -1.0), (3, None)):
        session.add(work_for(ticket), left)
    items = [message.item for message in (next(messages) for _ in range(6)) if message.HasField("item")]
    assert [(item.HasField("seconds_left"), item.seconds_left) for item in items] == [
        (True, 2.5),
        (True, 0),
        (False, 0),
    ]
