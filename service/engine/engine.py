"""The engine: encoder, handoff and decoder behind five calls.

    commands   what came in from outside, through one queue
    decode     decoder.step (schedule -> run -> postprocess) -> events
    encode     handoff.take -> encoder.encode -> handoff.publish (service/encoding/encoder.py)

The same object serves in-process (`engine_thread.py`) and behind the process boundary
(`service/servers/engine_process.py`).

Threads. On a CPU one thread does all three in turn, a few of the tower's layers to a decoder step: both runners want
every core, and short turns bound what an image can add to another request's inter-token latency (`encoder_turn` and a
layer). It must also be the thread that built the runners: libgomp keeps a team of threads for each thread that ever did
maths, and as soon as there are more of them than cores it hardly spins between operations, which costs a decode step
half its speed. On a GPU the encoder has a thread and a stream of its own, and events put the streams in order: it
writes rows behind the reservation of their memory, and the decoder reads them behind that writing
(service/encoding/handoff.py).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import torch

from decoder.pace import DeadlineError
from decoder.request import DecoderRequest, TokenEvent
from decoder.runner import DecoderRunner
from service.encoding.encoder import Encoding
from service.encoding.entries import EncoderUnavailable, Lease
from service.encoding.handoff import Handoff
from service.engine.placing import is_settled, place
from service.engine.types import (
    EngineEvent,
    EngineInfo,
    EngineRequest,
    ErrorKind,
    EventSink,
    Query,
)

log = logging.getLogger(__name__)


class Engine:
    """Decoder, handoff and what encodes, of one model. `handoff` and `encoding` are None for text-only models."""

    def __init__(
        self, info: EngineInfo, decoder: DecoderRunner, handoff: Handoff | None = None, encoding: Encoding | None = None
    ) -> None:
        self.info = info
        self._decoder, self._handoff, self._encoding = decoder, handoff, encoding
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._leases: dict[str, list[Lease]] = {}
        self._pictures: dict[str, Lease] = {}
        self._unsettled: dict[str, EngineRequest] = {}
        self._live: set[str] = set()
        self._emit: EventSink = lambda events: None
        self._closing = threading.Event()
        self._fatal: BaseException | None = None
        self._decode_seconds = 0.0
        if handoff is not None:
            handoff.on_change = self._on_handoff_change

    @property
    def alive(self) -> bool:
        return self._fatal is None and not self._closing.is_set()

    def submit(self, request: EngineRequest) -> None:
        """Queues a request; whatever is wrong with it comes back as its error event."""
        self._command(lambda: self._add(request))

    def abort(self, request_id: str) -> None:
        """Frees all that the request holds. No further event follows. Unknown ids are ignored."""
        self._command(lambda: self._abort(request_id))

    def query(self, what: Query) -> Future[dict[Any, Any]]:
        """`stats`: counters of all parts. `integrity`: the same after checking every pool; idle ones must be empty.
        `flush`: drops what is cached and not in use, states and embeddings; `freed_bytes` counts the embeddings.
        `histogram`: image tokens -> pictures encoded. `beat`: nothing, as soon as the loop comes by."""
        future: Future[dict[Any, Any]] = Future()

        def run() -> None:
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
            except BaseException as error:  # handed to the caller
                future.set_exception(error)

        self._command(run)
        return future

    def stop(self) -> None:
        """Makes `run` return after the current step. May be called from any thread."""
        self._closing.set()
        self._wake.set()

    def run(self, on_events: EventSink, *, linger: bool = True) -> None:
        """The loop: returns after `stop`, with both runners closed. Once, from the thread that built the runners.

        `on_events` gets the events of each step, in order, from this thread. After an error that is not one request's
        own, all requests are told and `alive` is False; with `linger` the loop goes on to refuse what still comes.
        """
        self._emit = on_events
        if self._encoding is not None:
            self._encoding.start(self._fail_from_outside)
        try:
            while not self._closing.is_set():
                self._turn()
        except BaseException as error:  # a bug in a step: nothing that is running can be trusted
            self._die(error)
            while linger and not self._closing.is_set():
                self._wake.wait()
                self._wake.clear()
                self._run_commands()
        self.close()

    def close(self) -> None:
        """Closes the runners of an engine that does not run. Idempotent."""
        self._closing.set()
        if self._encoding is not None:
            self._encoding.close()
        self._decoder.close()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wake.set()

    def _on_handoff_change(self) -> None:
        self._wake.set()
        if self._encoding is not None:
            self._encoding.wake()

    def _fail_from_outside(self, error: BaseException) -> None:
        """Ends the loop by an error of another thread."""

        def stop() -> None:
            raise error

        self._command(stop)

    def _run_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _turn(self) -> None:
        """Commands, then a decoder step, then an encoder launch; sleeps where there is nothing of either.

        The decoder goes first because admission lets go of pictures whose rows a cached prefix makes needless.
        """
        self._wake.clear()
        if self._closing.is_set():  # asked after the clearing, or a call to stop could be missed
            return
        self._run_commands()
        self._give_pictures()
        self._settle()
        if stepped := self._decoder.has_work and self._decoder.runnable:
            started = time.perf_counter()
            events = self._decoder.step()
            self._decode_seconds += time.perf_counter() - started
            self._publish_events(events)
        encoded = self._encoding is not None and self._encoding.turn()
        if not stepped and not encoded:
            waiting = self._decoder.has_work or self._unsettled or self._pictures
            if not (waiting and self._handoff is not None and self._handoff.unblock()):
                self._wake.wait()

    def _die(self, error: BaseException) -> None:
        log.critical("the engine stopped on an error", exc_info=error)
        self._fatal = error
        doomed = sorted(self._live)
        self._live.clear()
        self._emit([EngineEvent(r, finish_reason="error", error="died", message="the engine stopped") for r in doomed])

    def _add(self, request: EngineRequest) -> None:
        if self._fatal is not None:
            self._refuse(request.names, "died", "the engine stopped")
            return
        try:
            if request.embed == "picture":
                self._embed_picture(request)
                return
            for name in request.names:
                self._live.add(name)
                self._lease(request, name)
            if is_settled(request, self._leases[request.request_id]):
                self._admit(request, request.names)
            else:
                self._unsettled[request.request_id] = request
        except (ValueError, DeadlineError) as error:
            self._give_up(request, error)

    def _lease(self, request: EngineRequest, name: str) -> None:
        """Leases on all pictures for one sample: the pixels are there once. Raises ValueError."""
        leases = self._leases[name] = list[Lease]()
        deadline = None if request.timeout is None else time.monotonic() + request.timeout
        for image in request.images:
            if self._handoff is None:
                raise ValueError(f"{self.info.model} takes no images")
            leases.append(self._handoff.lease(image.key, image.patches, name, request.priority, deadline))

    def _give_up(self, request: EngineRequest, error: Exception) -> None:
        """Nothing of the request is left, and each of its samples that is still waited for is told why."""
        names = [name for name in request.names if name in self._live]
        for name in names:
            self._forget(name)
        self._refuse(names, _kind(error), str(error))

    def _embed_picture(self, request: EngineRequest) -> None:
        """Waits for the picture's rows. Raises ValueError."""
        self._live.add(request.request_id)
        self._lease(request, request.request_id)
        (self._pictures[request.request_id],) = self._leases[request.request_id]

    def _give_pictures(self) -> None:
        """Rows that are there leave as events."""
        for request_id, lease in list(self._pictures.items()):
            if lease.error is not None:
                kind = _kind(lease.error)
                event = EngineEvent(request_id, finish_reason="error", error=kind, message=str(lease.error))
            elif lease.ready:
                event = EngineEvent(request_id, finish_reason="length", embedded=(_bytes(lease.rows()),))
            else:
                continue
            self._forget(request_id)
            self._emit([event])

    def _settle(self) -> None:
        """Hands requests on whose pruned clips have been encoded."""
        for request_id, request in list(self._unsettled.items()):
            names = [name for name in request.names if name in self._live]
            if names and not is_settled(request, self._leases[names[0]]):
                continue
            del self._unsettled[request_id]
            try:
                self._admit(request, names)
            except (ValueError, DeadlineError) as error:
                self._give_up(request, error)

    def _admit(self, request: EngineRequest, names: Iterable[str]) -> None:
        """Hands these samples of a request to the decoder. Raises ValueError for what it cannot run, DeadlineError for
        what it cannot run in time.
        """
        made = []
        for name in names:
            prompt_ids, spans = place(request, self._leases[name])
            made.append(
                DecoderRequest(
                    request_id=name,
                    prompt_ids=prompt_ids,
                    sampling=request.sampling,
                    spans=spans,
                    output_ids=request.output_ids,
                    eos_token_ids=request.eos_token_ids,
                    sample_index=request.sample_index + request.names.index(name),
                    priority=request.priority,
                    salt=request.salt,
                    pooled=request.embed == "hidden",
                    timeout=request.timeout,
                    checkpoint_at=request.checkpoint_at,
                )
            )
        if made:
            self._decoder.add(*made)

    def _refuse(self, names: Iterable[str], kind: ErrorKind, message: str) -> None:
        self._emit([EngineEvent(name, finish_reason="error", error=kind, message=message) for name in names])

    def _abort(self, request_id: str) -> None:
        if request_id in self._live:
            self._decoder.abort(request_id)
            self._forget(request_id)
            waiting = self._unsettled.items()
            self._unsettled = {i: r for i, r in waiting if not self._live.isdisjoint(r.names)}

    def _forget(self, request_id: str) -> None:
        self._live.discard(request_id)
        self._pictures.pop(request_id, None)
        for lease in self._leases.pop(request_id, ()):
            lease.release()

    def _publish_events(self, events: list[TokenEvent]) -> None:
        out: list[EngineEvent] = []
        for event in events:
            if event.request_id not in self._live:
                continue
            if event.finish_reason is not None:
                self._forget(event.request_id)
            kind: ErrorKind | None = None
            message = ""
            if event.error is not None:
                kind = _kind(event.error)
                message = str(event.error)
            out.append(
                EngineEvent(
                    event.request_id, event.token_id, event.logprob, event.top, event.finish_reason, event.stop_token,
                    event.cached_tokens, kind, message,
                    () if event.pooled is None else (_bytes(event.pooled.last), _bytes(event.pooled.mean)),
                    event.prompt_scores, event.scheduled,
                )
            )  # fmt: skip
        if out:
            self._emit(out)

    def _check_integrity(self) -> None:
        self._decoder.check_integrity()
        if self._encoding is not None:
            self._encoding.check_integrity()
        if self._handoff is not None:
            # An encoding that nobody waits for any more runs to its end, and the rows are cached.
            self._handoff.check_integrity(idle=not self._live and not self._handoff.stats()["writing"])
        if not self._live:
            assert not self._leases and not self._unsettled, "leases of requests that have ended"
            assert not self._decoder.has_work, "the decoder still has work"

    def _stats(self) -> dict[str, Any]:
        return {
            "live": len(self._live),
            "encode_seconds": self._encoding.seconds if self._encoding else 0.0,
            "decode_seconds": self._decode_seconds,
            "decoder": self._decoder.stats(),
            "encoder": self._encoding.stats() if self._encoding else {},
            "handoff": self._handoff.stats() if self._handoff else {},
        }


def _bytes(values: torch.Tensor) -> bytes:
    """Row by row, little-endian float32. Waits for the device."""
    return values.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False).tobytes()


def _kind(error: Exception) -> ErrorKind:
    if isinstance(error, ValueError):
        return "invalid"
    if isinstance(error, DeadlineError):
        return "deadline"
    return "unavailable" if isinstance(error, EncoderUnavailable) else "internal"
