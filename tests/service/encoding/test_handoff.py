"""The handoff queue: bounds, joining, leases, failures, eviction, liveness."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from clock import Clock
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from encoder.item import EncoderItem
from service.encoding.entries import MAX_ATTEMPTS, EncoderUnavailable, Lease, Work
from service.encoding.handoff import Handoff

HIDDEN = 4
ROW = HIDDEN * 4


def image(tokens: int) -> EncoderItem:
    return EncoderItem((2, 2 * tokens), torch.zeros(4 * tokens, 3))


def encode(handoff: Handoff, max_tokens: int | None = None) -> list[bytes]:
    work = handoff.take(max_tokens)
    for item in work:
        item.rows.fill_(item.key[0])
    handoff.publish(work)
    return [item.key for item in work]


def test_one_encoding_however_many_wait() -> None:
    handoff = Handoff(100 * ROW, HIDDEN, torch.float32)
    leases = [handoff.lease(b"a", image(5)) for i in range(1000)]
    assert encode(handoff) == [b"a"]
    assert encode(handoff) == []
    assert all(lease.ready and lease.rows().shape == (5, HIDDEN) for lease in leases)
    for lease in leases:
        lease.release()
        lease.release()
    handoff.check_integrity(idle=True)
    assert handoff.stats()["cached_bytes"] == 5 * ROW
    assert handoff.lease(b"a", image(5)).ready
    assert handoff.stats()["hits"] == 1 and handoff.stats()["misses"] == 1 and handoff.stats()["joins"] == 999


def test_an_image_above_the_bound_is_refused_with_both_numbers() -> None:
    handoff = Handoff(10 * ROW, HIDDEN, torch.float32)
    with pytest.raises(ValueError, match=r"11 tokens .*10 tokens"):
        handoff.lease(b"a", image(11))
    handoff.check_integrity(idle=True)


def test_space_is_granted_in_order_and_small_ones_do_not_overtake() -> None:
    handoff = Handoff(10 * ROW, HIDDEN, torch.float32)
    first = handoff.lease(b"a", image(6))
    large = handoff.lease(b"b", image(8))
    small = handoff.lease(b"c", image(1))
    assert encode(handoff) == [b"a"]
    assert not large.ready and not small.ready
    first.release()
    assert encode(handoff) == [b"b", b"c"]
    assert handoff.stats()["evictions"] == 1
    large.release()
    small.release()
    handoff.check_integrity(idle=True)


def test_a_lease_in_runs_has_its_rows_until_each_of_them_is_released() -> None:
    handoff = Handoff(10 * ROW, HIDDEN, torch.float32)
    whole = handoff.lease(b"a", image(5))
    first, second = handoff.split(whole, [(3, 0, 2), (7, 2, 3)])
    (work,) = handoff.take()
    work.rows.copy_(torch.arange(5.0)[:, None].expand(5, HIDDEN))
    handoff.publish([work])
    assert [(part.start, part.end, part.complete) for part in (first, second)] == [(3, 5, False), (7, 10, True)]
    assert [part.rows()[:, 0].tolist() for part in (first, second)] == [[0, 1], [2, 3, 4]]
    assert len({whole.key, first.key, second.key}) == 3 and whole.key == b"a"
    whole.release()  # its runs replace it
    second.release()
    assert handoff.stats()["leases"] == 1 and first.rows().shape == (2, HIDDEN)
    first.release()
    handoff.check_integrity(idle=True)


def test_runs_of_an_image_that_fails_have_errors_of_their_own() -> None:
    handoff = Handoff(10 * ROW, HIDDEN, torch.float32)
    parts = handoff.split(handoff.lease(b"a", image(5)), [(0, 0, 2), (3, 2, 3)])
    handoff.fail(handoff.take()[0], ValueError("bad"))
    later = handoff.split(parts[0], [(0, 0, 1), (1, 1, 1)])
    found = [part.error for part in (*parts, *later)]
    assert all(isinstance(error, ValueError) and str(error) == "bad" for error in found)
    assert len(set(map(id, found))) == 4
    handoff.check_integrity(idle=True)


def test_least_recently_used_rows_go_first() -> None:
    handoff = Handoff(10 * ROW, HIDDEN, torch.float32)
    for key in (b"a", b"b"):
        lease = handoff.lease(key, image(4))
        encode(handoff)
        lease.release()
    handoff.lease(b"a", image(4)).release()
    lease = handoff.lease(b"c", image(4))
    encode(handoff)
    lease.release()
    assert handoff.lease(b"a", image(4)).ready
    assert not handoff.lease(b"b", image(4)).ready


def test_without_memory_cached_rows_go_and_then_requests_get_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may have less memory than the handoff may take."""
    left, real = 10, torch.empty

    def empty(tokens: int, *sizes: int, **options: Any) -> torch.Tensor:
        nonlocal left
        if tokens > left:
            raise RuntimeError("can't allocate memory")
        left -= tokens
        made: torch.Tensor = real(tokens, *sizes, **options)
        weakref.finalize(made, give_back, tokens)
        return made

    def give_back(tokens: int) -> None:
        nonlocal left
        left += tokens

    monkeypatch.setattr(torch, "empty", empty)
    handoff = Handoff(100 * ROW, HIDDEN, torch.float32)
    first = handoff.lease(b"a", image(6))
    encode(handoff)
    first.release()
    kept = handoff.lease(b"b", image(6))
    assert encode(handoff) == [b"b"] and kept.ready and handoff.stats()["evictions"] == 1
    failed = handoff.lease(b"c", image(6))
    assert isinstance(failed.error, EncoderUnavailable) and "6 tokens (96 bytes" in str(failed.error)
    small = handoff.lease(b"d", image(4))
    assert encode(handoff) == [b"d"] and small.ready
    for lease in (kept, failed, small):
        lease.release()
    again = handoff.lease(b"c", image(6))
    assert encode(handoff) == [b"c"] and again.ready
    again.release()
    handoff.check_integrity(idle=True)


def test_a_failure_reaches_each_waiter_and_the_next_request_tries_again() -> None:
    handoff = Handoff(10 * ROW, HIDDEN, torch.float32)
    leases = [handoff.lease(b"a", image(6)) for i in range(3)]
    other = handoff.lease(b"b", image(6))
    (work,) = handoff.take()
    handoff.fail(work, RuntimeError("broken"))
    assert all(str(lease.error) == "broken" and not lease.ready for lease in leases)
    assert len({id(lease.error) for lease in leases}) == 3, "each has an error of its own"
    assert encode(handoff) == [b"b"] and other.ready and other.error is None
    for lease in (*leases, other):
        lease.release()
    again = handoff.lease(b"a", image(6))
    assert again.error is None
    assert encode(handoff) == [b"a"]
    again.release()
    handoff.check_integrity(idle=True)


def test_a_cancelled_waiter_leaves_the_others_alone_and_the_last_one_cancels_the_encoding() -> None:
    handoff = Handoff(10 * ROW, HIDDEN, torch.float32)
    one, two = handoff.lease(b"a", image(6)), handoff.lease(b"a", image(6))
    one.release()
    assert handoff.stats()["reserved"] == 1
    two.release()
    assert handoff.take() == []
    handoff.check_integrity(idle=True)
    assert handoff.stats()["used_bytes"] == 0


def test_cancelled_while_being_written_becomes_cached() -> None:
    handoff = Handoff(10 * ROW, HIDDEN, torch.float32)
    lease = handoff.lease(b"a", image(6))
    (work,) = handoff.take()
    lease.release()
    assert handoff.unwanted() == [work]
    handoff.publish([work])
    handoff.check_integrity(idle=True)
    assert handoff.lease(b"a", image(6)).ready


def test_the_encoder_takes_at_most_its_step_but_always_one() -> None:
    handoff = Handoff(100 * ROW, HIDDEN, torch.float32)
    for key in (b"a", b"b", b"c"):
        handoff.lease(key, image(10))
    assert encode(handoff, 5) == [b"a"]
    assert encode(handoff, 20) == [b"b", b"c"]


def test_two_requests_with_two_large_images_each_do_not_lock_each_other_out() -> None:
    """Twice 11,844 tokens with a capacity of 16,384: each request holds one image and waits for the memory of the
    other."""
    handoff = Handoff(16_384 * ROW, HIDDEN, torch.float32)
    leases: dict[str, list[Lease]] = {}
    for owner, keys in (("r1", (b"a", b"b")), ("r2", (b"b", b"a"))):
        leases[owner] = [handoff.lease(key, image(11_844)) for key in keys]
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


def test_the_most_urgent_is_taken_first() -> None:
    """Deadlines and priorities are those of the requests that wait at present."""
    clock = Clock(0.0)
    handoff = Handoff(100 * ROW, HIDDEN, torch.float32, clock=clock)
    handoff.lease(b"a", image(10))
    hurried = handoff.lease(b"b", image(10), deadline=1.0)
    handoff.lease(b"b", image(10))
    handoff.lease(b"c", image(10), deadline=2.0)
    assert encode(handoff, 1) == [b"b"]
    handoff.lease(b"d", image(10), deadline=0.5).release()
    hurried.release()
    handoff.lease(b"e", image(10), priority=9)
    assert [encode(handoff, 1) for _ in range(3)] == [[b"e"], [b"c"], [b"a"]]


def test_the_space_of_a_writer_that_is_late_is_not_used_until_it_is_over() -> None:
    clock = Clock(0.0)
    handoff = Handoff(10 * ROW, HIDDEN, torch.float32, clock=clock)
    lease = handoff.lease(b"a", image(6))
    (late,) = handoff.take(lease=5.0)
    assert handoff.next_expiry() == 5.0 and handoff.expire() == []
    clock.now = 5.0
    assert handoff.expire() == [late] and handoff.next_expiry() is None
    stats = handoff.stats()
    assert (stats["quarantined"], stats["quarantined_bytes"], stats["used_bytes"]) == (1, 6 * ROW, 6 * ROW)
    assert handoff.take() == [] and not handoff.unblock(), "no room for another copy"
    late.rows.fill_(7)
    handoff.publish([late])
    assert not lease.ready and handoff.stats()["late"] == 1
    (again,) = handoff.take(lease=5.0)
    again.rows.fill_(3)
    late.rows.fill_(8)
    handoff.publish([again])
    assert lease.ready and (lease.rows() == 3).all()
    lease.release()
    handoff.check_integrity(idle=True)


def test_what_is_taken_back_from_late_writers_goes_on_in_order_of_arrival() -> None:
    """Two that were being written and one that waited for their memory: the oldest is first, the newest last."""
    clock = Clock(0.0)
    handoff = Handoff(12 * ROW, HIDDEN, torch.float32, clock=clock)
    leases = []
    for clock.now, key in enumerate((b"a", b"b", b"c")):  # type: ignore[assignment]
        leases.append(handoff.lease(key, image(6)))
    late = handoff.take(lease=5.0)
    assert [work.key for work in late] == [b"a", b"b"]
    clock.now = 7.0
    assert {work.key for work in handoff.expire()} == {b"a", b"b"}
    order = []
    for work in late:
        handoff.publish([work])  # its memory is now free for the first that waits
        order += encode(handoff)
    assert order == [b"a", b"b"] and not leases[2].ready
    for lease in leases:
        lease.release()
    assert handoff.take() == []
    handoff.check_integrity(idle=True)


def test_only_a_lease_that_has_run_out_is_taken_back() -> None:
    clock = Clock(0.0)
    handoff = Handoff(20 * ROW, HIDDEN, torch.float32, clock=clock)
    for key, seconds in ((b"a", 2.0), (b"b", 5.0), (b"c", None)):
        handoff.lease(key, image(3))
        assert len(handoff.take(lease=seconds)) == 1
    assert handoff.next_expiry() == 2.0
    clock.now = 1.999
    assert handoff.expire() == []
    clock.now = 2.0
    assert [work.key for work in handoff.expire()] == [b"a"] and handoff.next_expiry() == 5.0
    assert (handoff.stats()["writing"], handoff.stats()["quarantined"]) == (2, 1)


def test_pixels_are_kept_while_they_may_be_needed_and_freed_once_the_rows_are_cached() -> None:
    handoff = Handoff(20 * ROW, HIDDEN, torch.float32)

    def waiting() -> tuple[Lease, weakref.ref[EncoderItem]]:
        pixels = image(6)
        return handoff.lease(b"a", pixels), weakref.ref(pixels)

    lease, first = waiting()
    encode(handoff)
    assert first() is not None, "somebody still holds the rows, which may be taken back and encoded again"
    lease.release()
    assert first() is None, "cached rows need no pixels"
    lease, second = waiting()
    assert lease.ready and second() is not None
    lease.release()
    assert second() is None
    handoff.flush()
    lease, third = waiting()
    lease.release()
    assert third() is None, "given up before it was encoded"
    lease, fourth = waiting()
    (work,) = handoff.take()
    handoff.fail(work, RuntimeError("broken"))
    del work
    assert fourth() is None, "failed"


def test_a_second_encoding_keeps_the_first_one_s_counts() -> None:
    """Prompts have been laid out by them: other counts would move rows."""
    handoff = Handoff(12 * ROW, HIDDEN, torch.float32)
    clip, other = handoff.lease(b"a", image(6)), handoff.lease(b"b", image(6))
    blocked = handoff.lease(b"c", image(6))
    assert clip.counts is None
    for work in handoff.take():
        handoff.publish([work], [(2, 4)])
    assert clip.counts == other.counts == (2, 4)
    assert handoff.unblock(), "rows are taken back for the image that waits longest"
    assert not clip.ready and clip.counts == (2, 4)
    assert encode(handoff) == [b"c"] and blocked.counts == (6,)
    blocked.release()
    (again,) = handoff.take()
    assert again.key == b"a"
    handoff.publish([again], [(5, 1)])
    assert clip.ready and clip.counts == (2, 4)


def test_another_encoder_gets_other_space_while_the_late_one_may_still_write() -> None:
    clock = Clock(0.0)
    handoff = Handoff(20 * ROW, HIDDEN, torch.float32, clock=clock)
    lease = handoff.lease(b"a", image(6))
    (late,) = handoff.take(lease=1.0)
    clock.now = 1.0
    handoff.expire()
    assert encode(handoff) == [b"a"] and lease.ready
    late.rows.fill_(99)
    assert (lease.rows() == ord("a")).all()
    lease.release()
    with pytest.raises(AssertionError, match="a writer has not ended"):
        handoff.check_integrity(idle=True)
    handoff.fail(late, RuntimeError("too late to matter"))
    assert lease.error is None and handoff.stats()["cached"] == 1
    handoff.check_integrity(idle=True)


def test_a_writer_that_is_over_twice_is_a_bug() -> None:
    handoff = Handoff(20 * ROW, HIDDEN, torch.float32)
    handoff.lease(b"a", image(6))
    (work,) = handoff.take()
    handoff.publish([work])
    with pytest.raises(AssertionError, match="not in progress"):
        handoff.publish([work])


def test_writers_that_die_are_followed_by_others_but_not_for_ever() -> None:
    handoff = Handoff(20 * ROW, HIDDEN, torch.float32)
    poison = handoff.lease(b"a", image(6))
    other = handoff.lease(b"b", image(6))
    for _ in range(MAX_ATTEMPTS):
        assert poison.error is None
        for work in handoff.take():
            if work.key == b"a":
                handoff.retry(work, RuntimeError("gone"))
            else:
                handoff.publish([work])
    assert "3 attempts" in str(poison.error) and "gone" in str(poison.error)
    assert other.ready and handoff.stats()["retries"] == MAX_ATTEMPTS - 1
    poison.release()
    other.release()
    handoff.check_integrity(idle=True)
    assert handoff.lease(b"a", image(6)).error is None


def test_what_nobody_waits_for_is_not_tried_again() -> None:
    handoff = Handoff(20 * ROW, HIDDEN, torch.float32)
    lease = handoff.lease(b"a", image(6))
    (work,) = handoff.take()
    lease.release()
    handoff.retry(work, RuntimeError("gone"))
    handoff.check_integrity(idle=True)
    assert handoff.stats()["used_bytes"] == 0 and handoff.stats()["failures"] == 0


def test_without_an_encoder_those_who_wait_are_told_and_what_is_there_stays() -> None:
    handoff = Handoff(20 * ROW, HIDDEN, torch.float32)
    ready = handoff.lease(b"a", image(6))
    encode(handoff)
    reserved, waiting = handoff.lease(b"b", image(10)), handoff.lease(b"c", image(10))
    assert handoff.fail_reserved(EncoderUnavailable("none")) == 2
    assert all(isinstance(lease.error, EncoderUnavailable) for lease in (reserved, waiting))
    assert ready.ready and ready.error is None
    for lease in (ready, reserved, waiting):
        lease.release()
    handoff.check_integrity(idle=True)


class HandoffMachine(RuleBasedStateMachine):
    """Random clients and random encoders, some of them late, dead or wrong; at the end everything is consumed in order.
    Every row that a client reads belongs to its own image."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(0.0)
        self.handoff = Handoff(20 * ROW, HIDDEN, torch.float32, clock=self.clock)
        self.leases: list[tuple[int, Lease]] = []
        self.writing: list[Work] = []
        self.late: list[Work] = []

    @rule(key=st.integers(0, 7), priority=st.integers(0, 2), patience=st.one_of(st.none(), st.integers(0, 9)))
    def lease(self, key: int, priority: int, patience: int | None) -> None:
        deadline = None if patience is None else self.clock() + patience
        item = image(1 + key * 2)
        self.leases.append((key, self.handoff.lease(bytes([key]), item, priority, deadline)))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        self.leases.pop(which % len(self.leases))[1].release()

    @rule(limit=st.integers(1, 30), lease=st.one_of(st.none(), st.integers(1, 4)))
    def take(self, limit: int, lease: int | None) -> None:
        self.writing += self.handoff.take(limit, lease=lease)

    @precondition(lambda self: self.writing or self.late)
    @rule(how=st.sampled_from(["publish", "fail", "retry"]), which=st.integers(0, 100))
    def end(self, how: str, which: int) -> None:
        work = (self.writing + self.late)[which % len(self.writing + self.late)]
        (self.writing if work in self.writing else self.late).remove(work)
        if how == "publish":
            work.rows.fill_(work.key[0])
            self.handoff.publish([work])
        else:
            getattr(self.handoff, how)(work, RuntimeError("x"))

    @rule(seconds=st.integers(1, 3))
    def expire(self, seconds: int) -> None:
        self.clock.now += seconds
        for work in self.handoff.expire():
            self.writing.remove(work)
            self.late.append(work)

    @precondition(lambda self: self.late)
    @rule()
    def scribble(self) -> None:
        """Writes as a late writer does."""
        for work in self.late:
            work.rows.fill_(-1)

    @rule()
    def unblock(self) -> None:
        self.handoff.unblock()

    @rule()
    def flush(self) -> None:
        self.handoff.flush()

    @rule()
    def lose_every_encoder(self) -> None:
        self.handoff.fail_reserved(EncoderUnavailable("x"))

    @invariant()
    def integrity(self) -> None:
        self.handoff.check_integrity()
        stats = self.handoff.stats()
        assert stats["quarantined"] == len(self.late) and stats["writing"] == len(self.writing)
        for key, lease in self.leases:
            assert not lease.ready or (lease.rows() == key).all()
            assert not (lease.ready and lease.error)
        for work in self.handoff.unwanted():
            assert work in self.writing

    def teardown(self) -> None:
        while self.writing or self.late:
            self.end("publish", 0)
        for _ in range(200):
            self.writing += self.handoff.take()
            while self.writing:
                self.end("publish", 0)
            done = [x for x in self.leases if x[1].ready or x[1].error]
            if not done and not self.handoff.unblock():
                break
            for entry in done[:1]:
                self.leases.remove(entry)
                entry[1].release()
        assert not self.leases, "a request that is never served"
        self.handoff.check_integrity(idle=True)


TestHandoffMachine = HandoffMachine.TestCase
TestHandoffMachine.settings = settings(max_examples=100, stateful_step_count=40)
