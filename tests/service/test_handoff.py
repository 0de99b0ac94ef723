"""The handoff queue: bounds, joining, leases, failures, eviction, liveness."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from encoder.preprocess import ImagePatches
from service.handoff import Handoff, Lease

HIDDEN = 4
ROW = HIDDEN * 4


def image(tokens: int) -> ImagePatches:
    return ImagePatches((2, 2 * tokens), torch.zeros(4 * tokens, 3))


def encode(handoff: Handoff, max_tokens: int | None = None) -> list[bytes]:
    work = handoff.take(max_tokens)
    for item in work:
        item.rows.fill_(item.key[0])
    handoff.publish([item.key for item in work])
    return [item.key for item in work]


def test_one_encoding_however_many_wait() -> None:
    handoff = Handoff(100 * ROW, HIDDEN, torch.float32)
    leases = [handoff.lease(b"a", image(5), f"r{i}") for i in range(1000)]
    assert encode(handoff) == [b"a"]
    assert encode(handoff) == []
    assert all(lease.ready and lease.rows().shape == (5, HIDDEN) for lease in leases)
    for lease in leases:
        lease.release()
        lease.release()
    handoff.check_integrity(idle=True)
    assert handoff.stats()["cached_bytes"] == 5 * ROW
    assert handoff.lease(b"a", image(5), "late").ready
    assert handoff.counters["hits"] == 1 and handoff.counters["misses"] == 1 and handoff.counters["joins"] == 999


def test_a_picture_above_the_bound_is_refused_with_both_numbers() -> None:
    handoff = Handoff(10 * ROW, HIDDEN, torch.float32)
    with pytest.raises(ValueError, match=r"11 tokens .*10 tokens"):
        handoff.lease(b"a", image(11), "r")
    handoff.check_integrity(idle=True)


def test_space_is_granted_in_order_and_small_ones_do_not_overtake() -> None:
    handoff = Handoff(10 * ROW, HIDDEN, torch.float32)
    first = handoff.lease(b"a", image(6), "r1")
    large = handoff.lease(b"b", image(8), "r2")
    small = handoff.lease(b"c", image(1), "r3")
    assert encode(handoff) == [b"a"]
    assert not large.ready and not small.ready
    first.release()
    assert encode(handoff) == [b"b", b"c"]
    assert handoff.counters["evictions"] == 1
    large.release()
    small.release()
    handoff.check_integrity(idle=True)


def test_least_recently_used_rows_go_first() -> None:
    handoff = Handoff(10 * ROW, HIDDEN, torch.float32)
    for key in (b"a", b"b"):
        lease = handoff.lease(key, image(4), "r")
        encode(handoff)
        lease.release()
    handoff.lease(b"a", image(4), "r").release()
    lease = handoff.lease(b"c", image(4), "r")
    encode(handoff)
    lease.release()
    assert handoff.lease(b"a", image(4), "r").ready
    assert not handoff.lease(b"b", image(4), "r").ready


def test_a_failure_reaches_each_waiter_and_the_next_request_tries_again() -> None:
    handoff = Handoff(10 * ROW, HIDDEN, torch.float32)
    leases = [handoff.lease(b"a", image(6), f"r{i}") for i in range(3)]
    other = handoff.lease(b"b", image(6), "r3")
    (work,) = handoff.take()
    error = RuntimeError("broken")
    handoff.fail(work.key, error)
    assert all(lease.error is error and not lease.ready for lease in leases)
    assert encode(handoff) == [b"b"] and other.ready and other.error is None
    for lease in (*leases, other):
        lease.release()
    again = handoff.lease(b"a", image(6), "r4")
    assert again.error is None
    assert encode(handoff) == [b"a"]
    again.release()
    handoff.check_integrity(idle=True)


def test_a_cancelled_waiter_leaves_the_others_alone_and_the_last_one_cancels_the_encoding() -> None:
    handoff = Handoff(10 * ROW, HIDDEN, torch.float32)
    one, two = handoff.lease(b"a", image(6), "r1"), handoff.lease(b"a", image(6), "r2")
    one.release()
    assert handoff.stats()["reserved"] == 1
    two.release()
    assert handoff.take() == []
    handoff.check_integrity(idle=True)
    assert handoff.stats()["used_bytes"] == 0


def test_cancelled_while_being_written_becomes_cached() -> None:
    handoff = Handoff(10 * ROW, HIDDEN, torch.float32)
    lease = handoff.lease(b"a", image(6), "r1")
    (work,) = handoff.take()
    lease.release()
    handoff.publish([work.key])
    handoff.check_integrity(idle=True)
    assert handoff.lease(b"a", image(6), "r2").ready


def test_the_encoder_takes_at_most_its_step_but_always_one() -> None:
    handoff = Handoff(100 * ROW, HIDDEN, torch.float32)
    for key in (b"a", b"b", b"c"):
        handoff.lease(key, image(10), "r")
    assert encode(handoff, 5) == [b"a"]
    assert encode(handoff, 20) == [b"b", b"c"]


def test_two_requests_with_two_large_pictures_each_do_not_lock_each_other_out() -> None:
    """11,844 tokens twice against a bound of 16,384: each request holds one picture and waits for the other's room."""
    handoff = Handoff(16_384 * ROW, HIDDEN, torch.float32)
    leases: dict[str, list[Lease]] = {}
    for owner, keys in (("r1", (b"a", b"b")), ("r2", (b"b", b"a"))):
        leases[owner] = [handoff.lease(key, image(11_844), owner) for key in keys]
    consumed: list[tuple[str, int]] = []
    for _ in range(20):
        encode(handoff)
        for owner, held in leases.items():
            if held and held[0].ready:
                held.pop(0).release()
                consumed.append((owner, len(held)))
                break
        else:
            if not handoff.unblock():
                break
    assert sorted(consumed) == [("r1", 0), ("r1", 1), ("r2", 0), ("r2", 1)]
    handoff.check_integrity(idle=True)


class HandoffMachine(RuleBasedStateMachine):
    """Random clients and a random encoder; afterwards everything is consumed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.handoff = Handoff(20 * ROW, HIDDEN, torch.float32)
        self.leases: list[Lease] = []
        self.writing: list[bytes] = []
        self.owner = 0

    @rule(key=st.integers(0, 7))
    def lease(self, key: int) -> None:
        self.owner += 1
        self.leases.append(self.handoff.lease(bytes([key]), image(1 + key * 2), f"r{self.owner}"))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        self.leases.pop(which % len(self.leases)).release()

    @rule(limit=st.integers(1, 30))
    def take(self, limit: int) -> None:
        self.writing += [work.key for work in self.handoff.take(limit)]

    @precondition(lambda self: self.writing)
    @rule(fails=st.booleans())
    def end(self, fails: bool) -> None:
        key = self.writing.pop(0)
        if fails:
            self.handoff.fail(key, RuntimeError("x"))
        else:
            self.handoff.publish([key])

    @rule()
    def unblock(self) -> None:
        self.handoff.unblock()

    @invariant()
    def integrity(self) -> None:
        self.handoff.check_integrity()

    def teardown(self) -> None:
        while self.writing:
            self.end(False)
        for _ in range(200):
            self.writing += [work.key for work in self.handoff.take()]
            while self.writing:
                self.end(False)
            done = [x for x in self.leases if x.ready or x.error]
            if not done and not self.handoff.unblock():
                break
            for lease in done[:1]:
                self.leases.remove(lease)
                lease.release()
        assert not self.leases, "a request that is never served"
        self.handoff.check_integrity(idle=True)


TestHandoffMachine = HandoffMachine.TestCase
TestHandoffMachine.settings = settings(max_examples=60, stateful_step_count=40)
