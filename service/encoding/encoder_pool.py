"""Encoders in other processes: assigns images to them, and handles encoders that are slow, fail or die.

An image is sent to the encoder with the fewest tokens in progress. The work in progress of each encoder is limited, so
that images wait in the handoff, which orders them by urgency, and not in an encoder's queue. An encoder has a lease on
the memory that it writes to: if the lease runs out, it gets no further images until it answers again, and the image is
sent to another encoder. The images of an encoder that died are sent to others. If there has been no encoder for the
duration of a lease, waiting and new requests get an error until there is one.
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
"""Encoder steps that one encoder may have in progress: one running and one waiting."""


class LinkOwner(Protocol):
    """Callbacks of a link, called from any thread, without holding the link's locks."""

    def written(self, link: Link, work: Work, counts: tuple[int, ...]) -> None:
        """All rows of `work` have been written; `counts`: rows of each of its attention sequences."""

    def failed(self, link: Link, work: Work, error: Exception) -> None:
        """The encoder reports that `work` cannot be encoded; a ValueError means that no encoder can."""

    def lost(self, link: Link, works: Sequence[Work], reason: str) -> None:
        """The encoder or its connection has ended, so `works` will not be written."""

    def changed(self, link: Link) -> None:
        """The encoder has sent something: it is connected, or can take more images."""


class Link(Protocol):
    """The connection to one encoder: by gRPC (`grpc_link.py`) or by shared memory (`process_link.py`)."""

    name: str

    @property
    def alive(self) -> bool:
        """Whether it accepts work at present."""

    @property
    def reason(self) -> str:
        """Why it does not accept work."""

    @property
    def in_progress(self) -> int:
        """Image tokens that have been sent and whose rows have not arrived."""

    @property
    def load(self) -> int:
        """Image tokens in progress in this encoder, including those of other decoders as far as known."""

    def start(self, owner: LinkOwner) -> None:
        """Connects, and reconnects whenever the connection is lost. Returns when the first attempt has succeeded or
        failed. Raises PartnerRefused if the encoder serves another model."""

    def send(self, work: Work, seconds_left: float | None) -> None:
        """Sends `work` without blocking. Ends in exactly one of the owner's methods, or in `revoke`."""

    def revoke(self, work: Work) -> bool:
        """True: nothing more will be written or reported for `work`. False: it has ended, and the owner is being
        notified."""

    def abandon(self) -> None:
        """Ends the connection to an encoder, or its process, that is late and has sent nothing since."""

    def stats(self) -> dict[str, float]:
        """Statistics of this encoder; those that end in `_now` are gauges, the others are counters."""

    def close(self) -> None:
        """Ends the connection. The owner's methods are no longer called. Idempotent."""


class EncoderPool:
    """The encoders of one decoder; implements `service.encoding.encoder.Encoding`. Has a thread of its own."""

    def __init__(self, handoff: Handoff, links: Sequence[Link], *, lease: float, step_tokens: int) -> None:
        """`lease`: seconds from sending an image until its rows must have arrived. `step_tokens`: image tokens of one
        step of an encoder. Raises PartnerRefused."""
        self.seconds = 0.0
        self.links = list(links)
        self._handoff, self._lease, self._step_tokens = handoff, lease, step_tokens
        self._given: dict[int, tuple[Link, Work]] = {}
        self._late: dict[str, float] = {}
        """Links whose encoders are late -> when their connections will be ended."""
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
                    log.warning("encoder %s cannot be reached yet: %s", link.name, link.reason)
        except BaseException:
            self.close()
            raise

    def start(self, on_fatal: Callable[[BaseException], None]) -> None:
        self._thread = threading.Thread(target=self._loop, args=(on_fatal,), name="saccade-encoders", daemon=True)
        self._thread.start()

    def run_time_slice(self) -> bool:
        return False

    def wake(self) -> None:
        self._wake.set()

    def histogram(self) -> dict[int, int]:
        with self._lock:
            return dict(self._sizes)

    def stats(self) -> dict[str, Any]:
        with self._lock:
            own: dict[str, Any] = dict(self._counts)
            in_progress, late = len(self._given), set(self._late)
        own["in_progress_now"] = in_progress
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
        self.links.clear()  # they refer to this object: see Engine.close

    # -- callbacks of links --------------------------------------------------------------------------------------------

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
            log.warning("encoder %s is lost with %d images in progress: %s", link.name, len(works), reason)
        with self._lock:  # what is connected or started in its place is not late
            self._late.pop(link.name, None)
        for work in works:
            self._end(link, work, "lost")
            self._handoff.retry(work, EncodingFailed(f"encoder {link.name} is lost: {reason}"))
        self._wake.set()

    def changed(self, link: Link) -> None:
        with self._lock:
            self._late.pop(link.name, None)
        self._wake.set()

    def _end(self, link: Link, work: Work, how: str) -> None:
        with self._lock:
            self._given.pop(work.ticket, None)
            self._counts[how] += 1
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
        except BaseException as error:  # a bug: no more images would be assigned
            on_fatal(error)

    def _take_back(self) -> None:
        """Revokes images from encoders that are late, and images that no request waits for any more."""
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
        """Assigns the images whose memory is reserved. Returns the seconds until the next action that needs no
        wake-up."""
        while links := [link for link in self._usable() if link.in_progress < DEPTH * self._step_tokens]:
            with self._lock:
                kept = {link.name for link, work in self._given.values() if work.alone}
            links = [link for link in links if link.name not in kept]
            idle = [link for link in links if not link.in_progress]
            if not links or not (works := self._handoff.take(self._step_tokens, lease=self._lease, idle=bool(idle))):
                break
            for work in works:
                link = min(idle if work.alone else links, key=lambda link: link.load)
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
        """Ends the connections to encoders that have been late for a second lease. Returns the times at which the
        others are due."""
        with self._lock:
            over = [link for link in self.links if self._late.get(link.name, now + 1) <= now]
            for link in over:
                self._late[link.name] = float("inf")  # until it sends something
            moments = [moment for moment in self._late.values() if moment < float("inf")]
        for link in over:
            link.abandon()
        return moments

    def _usable(self) -> list[Link]:
        with self._lock:
            late = set(self._late)
        return [link for link in self.links if link.alive and link.name not in late]
