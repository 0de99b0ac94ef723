"""Encoders in other processes: which of them gets an image, and what happens when one is late, wrong or gone.

An image goes to the encoder with the fewest tokens under way. What each has under way is bounded, so that images
wait in the handoff, where the most urgent goes first, and not in front of an encoder. A writer has a lease on its
space: one that keeps it longer is passed over until it is heard of again, and the image goes to another. An image
whose encoder died is taken again by another. Where there has been no encoder for as long as a lease, whoever waits
for one is told, and so is whoever comes until there is one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from service.encoding.entries import EncoderUnavailable, EncodingFailed, Work
from service.encoding.handoff import Handoff

log = logging.getLogger(__name__)

DEPTH = 2
"""Encoder steps that one encoder may have under way: one to work on and one to go on with."""


class LinkOwner(Protocol):
    """Whom a link tells. From any thread, and holding none of the link's locks."""

    def written(self, link: Link, work: Work, counts: tuple[int, ...]) -> None:
        """All rows of `work` are in place; `counts` of them in each attention sequence."""

    def failed(self, link: Link, work: Work, error: Exception) -> None:
        """The encoder says that `work` cannot be encoded; a ValueError: by nobody."""

    def lost(self, link: Link, works: Sequence[Work], reason: str) -> None:
        """The encoder is gone, and with it what it had under way. Nothing more will be written of that."""

    def changed(self, link: Link) -> None:
        """The link has been heard of: it is there, or has room again."""


class Link(Protocol):
    """One encoder elsewhere: by gRPC (`grpc_link.py`) or by shared memory (`process_link.py`)."""

    name: str

    @property
    def alive(self) -> bool:
        """Whether it takes work at present."""

    @property
    def reason(self) -> str:
        """Why it does not."""

    @property
    def under_way(self) -> int:
        """Image tokens that have been sent and not come back."""

    @property
    def load(self) -> int:
        """Image tokens in this encoder, those of its other decoders among them as far as that is known."""

    def start(self, owner: LinkOwner) -> None:
        """Connects, now and whenever the connection is lost. Returns once the first attempt has succeeded or failed.
        Raises PartnerRefused for an encoder of another model."""

    def send(self, work: Work, seconds_left: float | None) -> None:
        """Hands `work` over, and does not wait. Ends in exactly one of the owner's methods, or in `revoke`."""

    def revoke(self, work: Work) -> bool:
        """True: nothing will be written or told of `work` from now on. False: it has ended, and the owner is being
        told."""

    def abandon(self) -> None:
        """Gives an encoder up that is late and has not been heard of since: the connection ends, or the process."""

    def stats(self) -> dict[str, float]:
        """Numbers of this encoder; those that end in `_now` are states, the others only grow."""

    def close(self) -> None:
        """Ends the connection. The owner is told of nothing any more. Idempotent."""


class EncoderPool:
    """The encoders of one decoder, behind `service.encoding.encoder.Encoding`. Has a thread of its own."""

    def __init__(self, handoff: Handoff, links: Sequence[Link], *, lease: float, step_tokens: int) -> None:
        """`lease`: seconds that an encoder may take over an image, from being given it. `step_tokens`: image tokens
        of one step of an encoder. Raises PartnerRefused."""
        self.seconds = 0.0
        self.links = list(links)
        self._handoff, self._lease, self._step_tokens = handoff, lease, step_tokens
        self._given: dict[int, tuple[Link, Work]] = {}
        self._late: dict[str, float] = {}
        """Links that are late, and when they are given up."""
        self._lock = threading.Lock()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._nobody_since: float | None = time.monotonic()
        self._sizes: dict[int, int] = {}
        self._counts = dict.fromkeys(("given", "written", "failed", "lost", "late", "cancelled"), 0)
        try:
            for link in self.links:
                link.start(self)
                if not link.alive:
                    log.warning("encoder %s is not there yet: %s", link.name, link.reason)
        except BaseException:
            self.close()
            raise

    def start(self, on_fatal: Callable[[BaseException], None]) -> None:
        self._thread = threading.Thread(target=self._loop, args=(on_fatal,), name="saccade-encoders", daemon=True)
        self._thread.start()

    def turn(self) -> bool:
        return False

    def wake(self) -> None:
        self._wake.set()

    def histogram(self) -> dict[int, int]:
        with self._lock:
            return dict(self._sizes)

    def stats(self) -> dict[str, Any]:
        with self._lock:
            own: dict[str, Any] = dict(self._counts)
            under_way, late = len(self._given), set(self._late)
        own["under_way_now"] = under_way
        own["encoders"] = {
            link.name: {**link.stats(), "up_now": float(link.alive), "late_now": float(link.name in late)}
            for link in self.links
        }
        return own

    def check_integrity(self) -> None:
        with self._lock:
            for ticket, (link, work) in self._given.items():
                assert ticket == work.ticket and link in self.links

    def close(self) -> None:
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        for link in self.links:
            link.close()

    # -- what links tell -----------------------------------------------------------------------------------------------

    def written(self, link: Link, work: Work, counts: tuple[int, ...]) -> None:
        self._end(link, work, "written")
        with self._lock:
            self._sizes[work.image.tokens] = self._sizes.get(work.image.tokens, 0) + 1
        self._handoff.publish([work], [counts])

    def failed(self, link: Link, work: Work, error: Exception) -> None:
        self._end(link, work, "failed")
        self._handoff.fail(work, error)

    def lost(self, link: Link, works: Sequence[Work], reason: str) -> None:
        if works:
            log.warning("encoder %s is gone with %d images under way: %s", link.name, len(works), reason)
        for work in works:
            self._end(link, work, "lost")
            self._handoff.retry(work, EncodingFailed(f"encoder {link.name} is gone: {reason}"))
        self._wake.set()

    def changed(self, link: Link) -> None:
        with self._lock:
            self._late.pop(link.name, None)
        self._wake.set()

    def _end(self, link: Link, work: Work, how: str) -> None:
        with self._lock:
            self._given.pop(work.ticket, None)
            self._counts[how] += 1
            if how != "lost":
                self._late.pop(link.name, None)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _loop(self, on_fatal: Callable[[BaseException], None]) -> None:
        try:
            while True:
                self._wake.clear()
                if self._closing.is_set():
                    return
                self._take_back()
                pause = self._give()
                self._wake.wait(pause)
        except BaseException as error:  # a bug: no image would be given to anybody any more
            on_fatal(error)

    def _take_back(self) -> None:
        """From encoders that are late, and what nobody waits for."""
        for work in self._handoff.expire():
            with self._lock:
                link, _ = self._given.get(work.ticket, (None, None))
                if link is not None:
                    self._late.setdefault(link.name, time.monotonic() + self._lease)
            if link is not None:
                log.warning("encoder %s did not write an image within %g s", link.name, self._lease)
                self._revoke(link, work, "late")
        for work in self._handoff.unwanted():
            with self._lock:
                link, _ = self._given.get(work.ticket, (None, None))
            if link is not None:
                self._revoke(link, work, "cancelled")

    def _revoke(self, link: Link, work: Work, how: str) -> None:
        if link.revoke(work):
            with self._lock:
                self._given.pop(work.ticket, None)
                self._counts[how] += 1
            self._handoff.retry(work, EncodingFailed("the image was taken back from its encoder"))

    def _give(self) -> float | None:
        """Hands out what has space. Returns the seconds until there may be something to do of which nobody tells."""
        while links := self._with_room():
            if not (works := self._handoff.take(self._step_tokens, lease=self._lease)):
                break
            for work in works:
                link = min(links, key=lambda link: link.load)
                with self._lock:
                    self._given[work.ticket] = link, work
                    self._counts["given"] += 1
                link.send(work, self._handoff.seconds_left(work))
        now = time.monotonic()
        moments = self._give_up(now)
        self._nobody_since = None if self._usable() else self._nobody_since or now
        if self._nobody_since is not None:
            if self._nobody_since + self._lease > now:
                moments.append(self._nobody_since + self._lease)
            else:
                reasons = "; ".join(f"{link.name}: {link.reason or 'does not answer'}" for link in self.links)
                self._handoff.fail_reserved(EncoderUnavailable(f"no encoder can be reached ({reasons})"))
        if (expiry := self._handoff.next_expiry()) is not None:
            moments.append(expiry)
        return max(min(moments) - now, 0.0) if moments else None

    def _give_up(self, now: float) -> list[float]:
        """Ends connections to encoders that have been late for a second lease. Returns the moments at which others
        will have been."""
        with self._lock:
            over = [link for link in self.links if self._late.get(link.name, now + 1) <= now]
            for link in over:
                self._late[link.name] = float("inf")  # until it is heard of
            moments = [moment for moment in self._late.values() if moment < float("inf")]
        for link in over:
            link.abandon()
        return moments

    def _usable(self) -> list[Link]:
        with self._lock:
            late = set(self._late)
        return [link for link in self.links if link.alive and link.name not in late]

    def _with_room(self) -> list[Link]:
        return [link for link in self._usable() if link.under_way < DEPTH * self._step_tokens]
