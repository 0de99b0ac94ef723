"""Messages that are sent without blocking: in order, and each is sent or reported as lost."""

from __future__ import annotations

import os
import threading
from multiprocessing import Pipe
from typing import Any

import pytest
from descriptors import NO_MORE, limited_descriptors
from threads import scarce_threads

from service.common.channel import Outbox, receive_descriptor, receive_descriptors, send


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_nobody_waits_for_a_reader_and_the_order_stays() -> None:
    ours, theirs = Pipe()
    outbox = Outbox(ours)
    for number in range(200):
        outbox.put((number, bytes(10_000)))  # more than any socket's buffer
    assert [theirs.recv()[0] for _ in range(200)] == list(range(200))
    descriptor, other = (os.memfd_create("x") for _ in range(2))
    os.ftruncate(descriptor, 1)
    os.ftruncate(other, 2)
    outbox.put("with descriptors", (descriptor, other))
    assert theirs.recv() == "with descriptors"
    for size in (1, 2):
        arrived = receive_descriptor(theirs)
        assert os.fstat(arrived).st_size == size, "they come in their order"
        os.close(arrived)
    outbox.put("last")
    outbox.close()
    assert theirs.recv() == "last" and not is_open(descriptor) and not is_open(other)


def test_a_message_is_sent_once_there_is_a_thread_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    outbox = Outbox(ours)
    with scarce_threads(monkeypatch, "saccade-outbox", 1), pytest.raises(RuntimeError, match="new thread"):
        outbox.put(bytes(10**6))
    outbox.put("last")
    assert theirs.poll(10) and theirs.recv() == bytes(10**6) and theirs.recv() == "last"
    outbox.close()


def test_all_descriptors_of_a_message_arrive_or_none_stays_open() -> None:
    """As when a process has reached its limit: the system then drops the descriptors of a message."""
    ours, theirs = Pipe()
    near, far = os.pipe()
    send(ours, "two", (near, far))
    assert theirs.recv() == "two"
    both = receive_descriptors(theirs, 2)
    assert len(both) == 2 and all(map(is_open, both))
    send(ours, "one is missing", (far,))
    os.write(ours.fileno(), b"x")
    for descriptor in (far, *both):
        os.close(descriptor)
    assert theirs.recv() == "one is missing"
    with pytest.raises(RuntimeError):
        receive_descriptors(theirs, 2)
    assert os.read(near, 1) == b"", "nobody holds the other end"
    os.close(near)


def test_descriptors_are_sent_without_a_further_one() -> None:
    """Otherwise a message would have been sent without the descriptors that belong to it."""
    ours, theirs = Pipe()
    near, far = os.pipe()
    with limited_descriptors(NO_MORE):
        send(ours, "with one", (far,))
    assert theirs.recv() == "with one"
    for descriptor in (far, receive_descriptor(theirs)):
        os.close(descriptor)
    assert os.read(near, 1) == b""
    os.close(near)
    send(ours, "last")
    assert theirs.recv() == "last", "both connections are still open"


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "saccade-outbox"}


def test_a_small_message_is_sent_by_the_caller_where_it_fits() -> None:
    before = threads()
    ours, theirs = Pipe()
    outbox = Outbox(ours)
    for number in range(100):
        outbox.put(number)
        assert theirs.recv() == number
    assert not threads() - before, "no thread was needed"
    outbox.put("many numbers", numbers=10**6)
    outbox.put("behind it")
    assert [theirs.recv(), theirs.recv()] == ["many numbers", "behind it"] and len(threads() - before) == 1
    for number in range(3000):  # until the socket is full, and then more
        outbox.put((number, bytes(1000)))
    for number in range(6000):
        assert theirs.recv()[0] == number
        if number < 3000:
            outbox.put((3000 + number, bytes(1000)))
    outbox.close()


def test_what_cannot_be_sent_is_told() -> None:
    ours, theirs = Pipe()
    lost: list[Any] = []
    told = threading.Semaphore(0)

    def on_lost(message: Any) -> None:
        lost.append(message)
        told.release()

    outbox = Outbox(ours, on_lost)
    theirs.close()
    descriptors = [os.memfd_create("x") for _ in range(2)]
    outbox.put("to nobody", (descriptors[0],))
    assert told.acquire(timeout=30) and lost == ["to nobody"]
    outbox.close()
    outbox.put("after the end", (descriptors[1],))
    assert lost == ["to nobody", "after the end"] and not any(map(is_open, descriptors))
    outbox.close()


def test_the_end_waits_for_a_reader_as_long_as_it_was_told() -> None:
    ours, theirs = Pipe()
    outbox = Outbox(ours)
    outbox.put(bytes(10_000_000))
    outbox.close(timeout=0.01)
    assert len(theirs.recv()) == 10_000_000
    with pytest.raises(EOFError):
        outbox.close()
        ours.close()
        theirs.recv()
