"""The engine: encoder, handoff and decoder behind one interface (`EngineHandle`).

    commands   from other threads, through one queue
    decode     decoder.step (schedule -> run -> postprocess) -> events
    encode     handoff.take -> encoder.encode -> handoff.publish (service/encoding/encoder.py)

The same object runs in-process (`engine_thread.py`) and behind the process boundary
(`service/servers/engine_process.py`).

Threads. On a CPU one thread does all three in turn, with a few of the tower's layers per decoder step: both runners
want every core, and short time slices bound what an image can add to another request's inter-token latency
(`encoder_time_slice` and a layer). It must also be the thread that built the runners: libgomp keeps a team of threads
for each thread that has computed, and with more such threads than cores they hardly spin between operations, which
halves the speed of a decode step. On a GPU the encoder has a thread and a stream of its own. CUDA events order the
streams: the encoder writes rows after their memory has been reserved, and the decoder reads them after they have been
written (service/encoding/handoff.py).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from decoder.runner import DecoderRunner
from families import VisionSpec
from service.common.errors import EngineDied
from service.encoding.encoder import Encoding
from service.encoding.handoff import Handoff
from service.engine.constraining import Constraining
from service.engine.delivery import Delivery
from service.engine.requests import Requests
from service.engine.types import EngineInfo, EngineRequest, EventSink, Query

log = logging.getLogger(__name__)


class Engine:
    """The parts of one model's engine; text-only models have no `handoff`, `encoding` and `vision`."""

    def __init__(
        self, info: EngineInfo, decoder: DecoderRunner, constraining: Constraining, handoff: Handoff | None = None,
        encoding: Encoding | None = None, vision: VisionSpec | None = None,
    ) -> None:  # fmt: skip
        self.info = info
        self._decoder, self._handoff, self._encoding = decoder, handoff, encoding
        self._constraining = constraining
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._asking = threading.Lock()
        self._asked: set[Future[dict[Any, Any]]] | None = set()
        """Queries that have not been answered; None when the engine is closed."""
        self._delivery = Delivery(lambda events: None)
        emit, wake = self._delivery.put, self._wake.set
        self._requests = Requests(info.model, decoder, handoff, vision, constraining, emit, wake)
        self._delivery.streamed = self._requests.streamed
        self._closing = threading.Event()
        self._fatal: BaseException | None = None
        self._decode_seconds = 0.0
        if handoff is not None:
            handoff.on_change = self._on_handoff_change

    @property
    def alive(self) -> bool:
        return self._fatal is None and not self._closing.is_set()

    def submit(self, request: EngineRequest) -> None:
        """Queues a request; an error in it is delivered as its error event."""
        self._command(lambda: self._add(request))

    def abort(self, request_id: str) -> None:
        """Frees all that the request holds; no further event follows. Unknown ids are ignored."""
        self._command(lambda: self._requests.abort(request_id))

    def query(self, what: Query) -> Future[dict[Any, Any]]:
        """`stats`: counters of all parts. `integrity`: the same after checking every pool; idle pools must be empty.
        `flush`: drops cached states and embeddings that are not in use; `freed_bytes` counts the embeddings.
        `histogram`: number of images encoded, by image tokens. `beat`: an empty answer from the engine's loop, as a
        heartbeat. What is not answered when the engine is closed raises EngineDied."""
        future: Future[dict[Any, Any]] = Future()
        future.set_running_or_notify_cancel()  # cannot be cancelled: answering it would then end the loop
        with self._asking:
            if self._asked is None:
                future.set_exception(EngineDied("the engine is closed"))
                return future
            self._asked.add(future)

        def run() -> None:
            with self._asking:
                if self._asked is not None:
                    self._asked.discard(future)
            try:
                if what == "beat":
                    future.set_result({})
                    return
                if what == "flush":
                    self._decoder.flush_cache()
                    future.set_result({"freed_bytes": self._handoff.flush() if self._handoff else 0})
                    return
                if what == "histogram":
                    future.set_result(self._encoding.histogram() if self._encoding else {})
                    return
                if what == "integrity":
                    self._check_integrity()
                future.set_result(self._stats())
            except BaseException as error:  # the caller of the query gets the error
                future.set_exception(error)

        self._command(run)
        return future

    def stop(self) -> None:
        """Makes `run` return after the current step. May be called from any thread."""
        self._closing.set()
        self._wake.set()

    def run(self, on_events: EventSink, *, linger: bool = True) -> None:
        """Runs the loop until `stop`, then closes both runners. To be called once, from the thread that built the
        runners.

        `on_events` gets the events in order, from this thread: after each step, or after several short ones
        (service/engine/delivery.py). After an error that does not belong to a single request, all requests get an error
        event and `alive` is False; with `linger` the loop goes on and rejects further requests.
        """
        self._delivery.sink = on_events
        if self._encoding is not None:
            self._encoding.start(self._fail_from_outside)
        try:
            while not self._closing.is_set():
                self._iterate()
        except BaseException as error:  # a bug in a step: the state of running requests can no longer be trusted
            self._die(error)
            while linger and not self._closing.is_set():
                self._run_commands()
                self._wake.wait()
                self._wake.clear()
        self.close()

    def close(self) -> None:
        """Closes the runners of an engine that does not run. Idempotent.

        Nothing refers back to the engine afterwards, so that its memory is freed with the last reference to it and not
        by the garbage collector, which does not know how large tensors are.
        """
        self._closing.set()
        with self._asking:
            unanswered, self._asked = self._asked or set(), None
        for future in unanswered:
            future.set_exception(EngineDied("the engine is closed"))
        if self._encoding is not None:
            self._encoding.close()
        self._constraining.close()
        self._decoder.close()
        if self._handoff is not None:
            self._handoff.on_change = lambda: None

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wake.set()

    def _on_handoff_change(self) -> None:
        self._wake.set()
        if self._encoding is not None:
            self._encoding.wake()

    def _fail_from_outside(self, error: BaseException) -> None:
        """Ends the loop because of an error in another thread, unless it has ended on an error already."""

        def stop() -> None:
            if self._fatal is None:
                raise error
            log.critical("a further error after the engine stopped", exc_info=error)

        self._command(stop)

    def _run_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _iterate(self) -> None:
        """Handles commands, then runs a decoder step, then an encoder time slice; sleeps if there is nothing to do.

        The decoder runs first because admission releases images whose rows a cached prefix makes unnecessary.
        """
        if self._wake.is_set():  # new work may make the next step a long one
            self._delivery.flush()
        self._wake.clear()
        if self._closing.is_set():  # checked after `clear`, otherwise a call to `stop` in between would be missed
            return
        self._run_commands()
        self._requests.advance()
        if stepped := self._decoder.has_work and self._decoder.runnable:
            started = time.perf_counter()
            events = self._decoder.step()
            self._decode_seconds += time.perf_counter() - started
            self._requests.publish(events)
        encoded = self._encoding is not None and self._encoding.run_time_slice()
        if not stepped and not encoded:
            self._delivery.flush()
            waiting = self._decoder.has_work or self._requests.waiting
            if not (waiting and self._handoff is not None and self._handoff.unblock()):
                self._wake.wait()

    def _die(self, error: BaseException) -> None:
        log.critical("the engine stopped on an error", exc_info=error)
        self._fatal = error
        self._requests.die()

    def _add(self, request: EngineRequest) -> None:
        if self._fatal is None:
            self._requests.add(request)
        else:
            self._requests.refuse(request.names, "died", "the engine stopped")

    def _check_integrity(self) -> None:
        self._decoder.check_integrity()
        if self._encoding is not None:
            self._encoding.check_integrity()
        if self._handoff is not None:
            # An encoding runs to its end even if its requests have all ended, and its rows are cached.
            self._handoff.check_integrity(idle=not self._requests.live and not self._handoff.stats()["writing"])
        self._requests.check_integrity()

    def _stats(self) -> dict[str, Any]:
        return {
            "live": len(self._requests.live),
            "encode_seconds": self._encoding.seconds if self._encoding else 0.0,
            "decode_seconds": self._decode_seconds,
            "decoder": self._decoder.stats(),
            "encoder": self._encoding.stats() if self._encoding else {},
            "handoff": self._handoff.stats() if self._handoff else {},
        }
