"""Assignment of images to encoders, and handling of encoders that are late, full or gone. Links are fakes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from encoder.item import EncoderItem
from service.encoding.encoder_pool import DEPTH, EncoderPool, LinkOwner
from service.encoding.entries import EncoderUnavailable, Lease, Work
from service.encoding.handoff import Handoff

ROW = 16
FOREVER = 1000.0


class FakeLink:
    """A scripted encoder."""

    def __init__(self, name: str, elsewhere: int = 0) -> None:
        self.name, self.alive, self.reason, self.elsewhere = name, True, "", elsewhere
        self.works: list[Work] = []
        self.seconds: list[float | None] = []
        self.revoked: list[Work] = []
        self.abandoned = self.closed = 0

    @property
    def in_progress(self) -> int:
        return sum(work.image.tokens for work in self.works)

    @property
    def load(self) -> int:
        return self.in_progress + self.elsewhere

    def start(self, owner: LinkOwner) -> None:
        self.owner = owner

    def send(self, work: Work, seconds_left: float | None) -> None:
        self.works.append(work)
        self.seconds.append(seconds_left)

    def revoke(self, work: Work) -> bool:
        if work not in self.works:
            return False
        self.works.remove(work)
        self.revoked.append(work)
        return True

    def abandon(self) -> None:
        self.abandoned += 1

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.closed += 1

    def write(self) -> None:
        work = self.works.pop(0)
        self.owner.written(self, work, (work.image.tokens,))

    @property
    def keys(self) -> list[bytes]:
        return [work.key for work in self.works]


def image(tokens: int) -> EncoderItem:
    return EncoderItem((2, 2 * tokens), torch.zeros(4 * tokens, 3))


def make(*links: FakeLink, lease: float = FOREVER, step: int = 10) -> tuple[EncoderPool, Handoff]:
    handoff = Handoff(1000 * ROW, 4, torch.float32)
    return EncoderPool(handoff, links, lease=lease, step_tokens=step), handoff


def ask(handoff: Handoff, names: str, tokens: int = 10) -> list[Lease]:
    return [handoff.lease(name.encode(), image(tokens)) for name in names]


def test_the_encoder_with_the_least_to_do_gets_the_next_image() -> None:
    """Work from its other decoders counts."""
    one, two = FakeLink("one", elsewhere=15), FakeLink("two")
    pool, handoff = make(one, two)
    ask(handoff, "abcd")
    pool._give()
    assert (two.keys, one.keys) == ([b"a", b"b"], [b"c", b"d"])
    pool.check_integrity()


def test_so_much_is_in_progress_in_one_encoder_and_the_rest_waits_where_the_most_urgent_goes_first() -> None:
    link = FakeLink("one")
    pool, handoff = make(link)
    leases = ask(handoff, "abcde")
    pool._give()
    assert link.in_progress == DEPTH * 10 and link.keys == [b"a", b"b"]
    handoff.lease(b"z", image(10), priority=9)
    link.write()
    assert leases[0].ready and handoff.stats()["reserved"] == 4
    pool._give()
    assert link.keys == [b"b", b"z"]
    assert pool.stats()["given"] == 3 and pool.stats()["written"] == 1 and pool.histogram() == {10: 1}


@pytest.mark.parametrize(("patience", "left"), [(None, None), (50.0, 50.0)])
def test_an_encoder_hears_how_long_somebody_waits(patience: float | None, left: float | None) -> None:
    link = FakeLink("one")
    pool, handoff = make(link)
    handoff.lease(b"a", image(5), deadline=None if patience is None else time.monotonic() + patience)
    pool._give()
    assert link.seconds == ([None] if left is None else [pytest.approx(left, abs=5)])


def test_an_image_goes_from_a_late_encoder_to_another_and_the_late_one_is_not_used() -> None:
    late, other = FakeLink("late"), FakeLink("other", elsewhere=5)
    pool, handoff = make(late, other, lease=0.0)
    (lease,) = ask(handoff, "a")
    pool._give()
    (work,) = late.works
    pool._lease = FOREVER
    pool._take_back()
    assert late.revoked == [work] and pool.stats()["late"] == 1 and lease.error is None
    ask(handoff, "b")
    pool._give()
    assert (late.keys, other.keys) == ([], [b"a", b"b"])
    other.write()
    assert lease.ready
    pool.changed(late)
    ask(handoff, "c")
    pool._give()
    assert late.keys == [b"c"], "it has been heard of"
    assert late.abandoned == other.abandoned == 0


def test_an_encoder_that_is_late_for_a_second_lease_is_given_up_once() -> None:
    late = FakeLink("late")
    pool, handoff = make(late, lease=0.0)
    ask(handoff, "a")
    pool._give()
    pool._take_back()
    pool._give()
    pool._give()
    assert late.abandoned == 1
    pool.changed(late)
    pool._give()
    assert late.abandoned == 1


def test_an_encoder_that_dies_after_it_was_late_may_take_its_time_to_start_again() -> None:
    """It was ended once more while it loaded its model, a lease after it had been late."""
    late = FakeLink("late")
    pool, handoff = make(late, lease=0.0)
    ask(handoff, "a")
    pool._give()
    pool._take_back()
    late.alive = False
    pool.lost(late, [], "killed")
    pool._give()
    assert late.abandoned == 0 and not pool.stats()["encoders"]["late"]["late_now"]


def test_what_nobody_waits_for_any_more_is_taken_back() -> None:
    link = FakeLink("one")
    pool, handoff = make(link)
    kept, given_up = ask(handoff, "ab")
    pool._give()
    given_up.release()
    pool._take_back()
    assert [work.key for work in link.revoked] == [b"b"] and link.keys == [b"a"]
    assert pool.stats()["cancelled"] == 1 and handoff.stats()["writing"] == 1
    link.write()
    kept.release()
    handoff.check_integrity(idle=True)


def test_what_was_in_progress_in_an_encoder_that_died_is_taken_by_another() -> None:
    dead, other = FakeLink("dead"), FakeLink("other", elsewhere=100)
    pool, handoff = make(dead, other)
    leases = ask(handoff, "ab")
    pool._give()
    works: Sequence[Work] = dead.works
    dead.works, dead.alive = [], False
    pool.lost(dead, works, "killed")
    pool._give()
    assert other.keys == [b"a", b"b"] and pool.stats()["lost"] == 2
    other.write()
    other.write()
    assert all(lease.ready for lease in leases)
    pool.check_integrity()


@pytest.mark.parametrize("encoders", [1, 2])
def test_an_image_that_kills_its_encoders_is_the_end_of_its_own_request_only(encoders: int) -> None:
    """Its last attempt is with an encoder that has no other image, as are those of the images that were lost together
    with it."""
    links = [FakeLink(str(number)) for number in range(encoders)]
    pool, handoff = make(*links, step=40)
    leases = ask(handoff, "abPcdefgh")
    poison = leases[2]
    for _ in range(40):
        pool._give()
        for link in links:
            if b"P" in link.keys:
                works, link.works = link.works, []
                pool.lost(link, works, "killed")
            elif link.works:
                link.write()
    assert all(lease.ready for lease in leases if lease is not poison)
    assert "3 attempts" in str(poison.error) and pool.stats()["in_progress_now"] == 0
    for lease in leases:
        lease.release()
    handoff.check_integrity(idle=True)


def test_a_last_attempt_waits_for_an_encoder_and_keeps_it() -> None:
    """It goes before other images, which would keep all encoders busy, and no other is sent after it."""
    one, two = FakeLink("one"), FakeLink("two", elsewhere=100)
    pool, handoff = make(one, two)
    for _ in range(2):
        (lease,) = ask(handoff, "a")
        pool._give()
        works, one.works = one.works, []
        pool.lost(one, works, "killed")
    ask(handoff, "bcdef")
    handoff.lease(b"z", image(10), priority=9)
    pool._give()
    assert (one.keys, two.keys) == ([b"a"], [b"z", b"b"])
    one.write()
    assert lease.ready
    pool._give()
    assert one.keys == [b"c", b"d"]


def test_an_encoder_s_refusal_is_the_image_s_end() -> None:
    link = FakeLink("one")
    pool, handoff = make(link)
    (lease,) = ask(handoff, "a")
    pool._give()
    pool.failed(link, link.works.pop(), ValueError("not an image"))
    assert isinstance(lease.error, ValueError) and pool.stats()["failed"] == 1
    assert not pool.histogram() and not pool._given


def test_without_an_encoder_those_who_wait_are_told_after_a_lease_and_not_before() -> None:
    link = FakeLink("one")
    link.alive, link.reason = False, "refused"
    pool, handoff = make(link)
    (lease,) = ask(handoff, "a")
    pause = pool._give()
    assert lease.error is None and pause is not None and 0 < pause <= FOREVER
    pool._lease = 0.0
    pool._give()
    assert isinstance(lease.error, EncoderUnavailable) and "one: refused" in str(lease.error)
    link.alive = True
    (again,) = ask(handoff, "b")
    pool._lease = FOREVER
    pool._give()
    assert again.error is None and link.keys == [b"b"] and pool._nobody_since is None


def test_a_pool_closes_its_links_also_where_one_refuses() -> None:
    class Refusing(FakeLink):
        def start(self, owner: LinkOwner) -> None:
            raise ValueError("another model")

    links = [FakeLink("one"), Refusing("two")]
    with pytest.raises(ValueError, match="another model"):
        make(*links)
    assert [link.closed for link in links] == [1, 1]
