"""Turns reserved images into rows. One interface with two implementations:

    LocalEncoder   the runner in this process: writes straight into the handoff's memory (this module)
    EncoderPool    encoders in other processes, on this host or others (service/encoding/encoder_pool.py)

An engine has one of them. Both take work from the handoff, after its memory has been reserved.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from encoder.item import IMAGE
from encoder.runner import EncodeJob, EncoderRunner
from kernels.streams import on, side_stream
from service.encoding.entries import EncodingFailed, Work

log = logging.getLogger(__name__)

TIME_SLICE_SECONDS = 0.1
"""Time slice of the encoder between two decoder steps, in seconds, if both share the cores of a CPU. A running stream
gets its next token after this time plus a layer and a step at the latest, whatever the sizes and number of images: nine
tokens per second, faster than people read. A decoder step of few rows, which reads all weights for them, then takes a
twentieth of the time that images wait for."""


class Encoding(Protocol):
    """The interface of encoding for the engine. `run_time_slice` and `close` are called from the engine's
    thread, the others from any."""

    seconds: float
    """Seconds that the engine's own process has spent on encoding."""

    def start(self, on_fatal: Callable[[BaseException], None]) -> None:
        """Starts working. `on_fatal` is called with an error after which no more images would be encoded."""

    def run_time_slice(self) -> bool:
        """Encodes for one time slice at most. False if there is nothing to encode, or if another thread or process does
        it."""

    def wake(self) -> None:
        """To be called when the handoff has changed."""

    def stats(self) -> dict[str, Any]: ...

    def histogram(self) -> dict[int, int]:
        """Number of images encoded, by image tokens."""

    def check_integrity(self) -> None: ...

    def close(self) -> None:
        """Stops. Idempotent."""


class WorkSource(Protocol):
    """Where an encoder gets its work and delivers its results: a handoff, or its counterpart in another process."""

    def take(self, max_tokens: int | None = None) -> list[Work]: ...

    def publish(self, works: Sequence[Work], counts: Sequence[tuple[int, ...] | None]) -> None: ...

    def fail(self, work: Work, error: Exception) -> None: ...


class LocalEncoder:
    """The encoder runner in this process. It works in calls of `run_time_slice` or `run`, or with `own_thread` in a
    thread of its own; on a GPU in any case on its own stream, concurrently with the decoder's."""

    def __init__(
        self, runner: EncoderRunner, handoff: WorkSource, *, step_tokens: int | None = None, own_thread: bool = False,
        time_slice: float | None = None,
    ) -> None:  # fmt: skip
        """`step_tokens`: image tokens of one batch. `time_slice`: seconds of one call of `run_time_slice`, exceeded by
        at most one layer of the tower; None: a whole batch."""
        self.runner = runner
        self.seconds = 0.0
        self._handoff = handoff
        self._step_tokens, self._time_slice = step_tokens, time_slice
        self._batch: tuple[list[Work], EncodeJob] | None = None
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._own_thread = own_thread
        self.stream = side_stream(runner.options.device)

    def start(self, on_fatal: Callable[[BaseException], None]) -> None:
        if self._own_thread:
            self._thread = threading.Thread(target=self.run, args=(on_fatal,), name="saccade-encoder", daemon=True)
            self._thread.start()

    def run_time_slice(self) -> bool:
        return self._thread is None and self._launch()

    def wake(self) -> None:
        self._wake.set()

    def stats(self) -> dict[str, Any]:
        budgets, image = self.runner.budgets, self.runner.lanes[IMAGE]
        sizes = {
            "tokens": list(budgets.token_budgets),
            "graphs": image.used_budgets,
            "max_images": budgets.max_images,
        }
        return {**self.runner.stats(), "budgets": sizes}

    def histogram(self) -> dict[int, int]:
        return self.runner.histogram()

    def check_integrity(self) -> None:
        if self._thread is None:  # its counters change while it runs
            self.runner.check_integrity()

    def stop(self) -> None:
        """Makes `run` return after the current time slice. Idempotent; may be called from any thread."""
        self._closing.set()
        self._wake.set()

    def close(self) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()
        self.runner.close()

    def run(self, on_fatal: Callable[[BaseException], None]) -> None:
        """Works until `stop`. `on_fatal`: see `start`."""
        try:
            while True:
                self._wake.clear()
                # Checked after `clear`, otherwise a call to `stop` in between would be missed.
                if self._closing.is_set():
                    return
                if not self._launch():
                    self._wake.wait()
        except BaseException as error:  # without an encoder, requests would wait forever
            on_fatal(error)

    def _launch(self) -> bool:
        """Works for one time slice, on the current batch and on further images. False if there is nothing to encode."""
        with on(self.stream):
            return self._work()

    def _work(self) -> bool:
        started = time.perf_counter()
        left = self._time_slice
        if not self._advance(left):
            return False
        while self._time_slice is not None:
            left = self._time_slice - (time.perf_counter() - started)
            if left <= 0 or not self._advance(left):
                break
        self.seconds += time.perf_counter() - started
        return True

    def _advance(self, seconds: float | None) -> bool:
        """Works on one batch until the time slice or the batch ends. False if there is none."""
        if self._batch is None and not self._begin():
            return False
        if self._batch is not None:
            work, job = self._batch
            try:
                if not job.step(seconds):
                    self._batch = None
                    self._handoff.publish(work, job.rows)
            except Exception as error:
                self._batch = None
                self._encode_alone(work, error)
        return True

    def _begin(self) -> bool:
        """Starts the next batch. False if there is none."""
        if not (work := self._handoff.take(self._step_tokens)):
            return False
        try:
            self._batch = work, self.runner.begin([w.image for w in work], [w.space() for w in work])
        except Exception as error:  # an invalid image, or no memory for the rows of a clip before pruning
            self._encode_alone(work, error)
        return True

    def _encode_alone(self, work: list[Work], error: Exception) -> None:
        """Encodes a failed batch again image by image, so that one bad image does not fail the others; an image that
        fails again fails for good."""
        if len(work) > 1:
            log.warning("a batch of %d images could not be encoded; trying each alone", len(work), exc_info=error)
        for item in work:
            try:
                counts = self.runner.encode([item.image], [item.space()])
            except ValueError as failure:
                self._handoff.fail(item, failure)
            except Exception as failure:  # each waiting request gets the error
                log.error("an image could not be encoded", exc_info=failure)
                self._handoff.fail(item, EncodingFailed(f"the encoder failed on this image: {failure}"))
            else:
                self._handoff.publish([item], counts)
