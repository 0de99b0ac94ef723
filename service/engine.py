"""The engine: encoder thread, handoff and decoder thread behind five calls.

    encoder thread   handoff.take -> encoder.encode -> handoff.publish
    decoder thread   commands -> decoder.step (schedule -> run -> postprocess) -> events

The same object serves in-process (tests, `saccade.LocalClient`) and behind the process boundary
(`service.engine_process`). Runners are synchronous and each owned by one thread; everything that comes in from
outside passes through one queue."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from decoder.request import DecoderRequest, ImageSpan, TokenEvent
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams
from encoder.preprocess import ImagePatches
from encoder.runner import EncoderRunner
from service.handoff import Handoff, Lease

log = logging.getLogger(__name__)

ErrorKind = Literal["invalid", "internal", "died"]
Query = Literal["stats", "integrity", "flush"]


@dataclass(frozen=True)
class EngineImage:
    """One picture of a request: its rows go to `prompt_ids[start : start + patches.tokens]`."""

    start: int
    key: bytes
    patches: ImagePatches


@dataclass(frozen=True)
class EngineRequest:
    """One sample to draw, as the front hands it over."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    images: tuple[EngineImage, ...] = ()
    output_ids: tuple[int, ...] = ()
    eos_token_ids: frozenset[int] = frozenset()
    sample_index: int = 0
    priority: int = 0
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """What happened to one request: a token, its end, or an error that ended it."""

    request_id: str
    token_id: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    error: ErrorKind | None = None
    message: str = ""


@dataclass(frozen=True)
class EngineInfo:
    """What the front needs to know of a running engine to judge requests before it sends them."""

    model: str
    revision: str
    max_len: int
    max_seqs: int
    max_image_tokens: int
    """Of one picture, by the handoff bound. 0: the model takes no pictures."""
    dtype: str
    pixel_dtype: torch.dtype


EventSink = Callable[[list[EngineEvent]], None]


class EngineHandle(Protocol):
    """What a front talks to: this engine, or the client of one in another process."""

    info: EngineInfo

    @property
    def alive(self) -> bool: ...

    def start(self, on_events: EventSink) -> None: ...

    def submit(self, request: EngineRequest) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def query(self, what: Query) -> Future[dict[str, Any]]: ...

    def close(self) -> None: ...


class Turns:
    """A lock that is granted in order of asking, so that encoder and decoder alternate on shared cores."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[threading.Event] = deque()
        self._held = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._held:
                self._held = True
                return
            turn = threading.Event()
            self._queue.append(turn)
        turn.wait()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._queue:
                self._queue.popleft().set()
            else:
                self._held = False


class Engine:
    """Encoder, handoff and decoder of one model. `encoder` and `handoff` are None for text-only models."""

    def __init__(
        self, info: EngineInfo, decoder: DecoderRunner, encoder: EncoderRunner | None, handoff: Handoff | None,
        *, encoder_step_tokens: int | None = None, threads: int | None = None,
    ) -> None:  # fmt: skip
        """`threads`: of the maths on a CPU, for each of the two threads; they take turns."""
        self.info = info
        self._decoder, self._encoder, self._handoff = decoder, encoder, handoff
        self._encoder_step_tokens = encoder_step_tokens
        self._maths_threads = threads
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_decoder, self._wake_encoder = threading.Event(), threading.Event()
        self._leases: dict[str, list[Lease]] = {}
        self._live: set[str] = set()
        self._emit: EventSink = lambda events: None
        self._closing = threading.Event()
        self._fatal: BaseException | None = None
        # On a CPU both runners want all cores: they take turns, one encoder batch to one decoder step, which bounds
        # what a picture can add to another request's inter-token latency. A GPU has a stream for each.
        self._turns = Turns()
        self._threads: list[threading.Thread] = []
        self._seconds = {"encode_seconds": 0.0, "decode_seconds": 0.0}
        if handoff is not None:
            handoff.on_change = self._on_handoff_change

    @property
    def alive(self) -> bool:
        return bool(self._threads) and self._fatal is None and not self._closing.is_set()

    def start(self, on_events: EventSink) -> None:
        """Starts the threads. `on_events` is called from the decoder thread with the events of each step, in order."""
        self._emit = on_events
        targets = [("decoder", self._decode_loop)] + ([("encoder", self._encode_loop)] if self._encoder else [])
        for name, target in targets:
            thread = threading.Thread(target=target, name=f"saccade-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def submit(self, request: EngineRequest) -> None:
        """Queues a request; whatever is wrong with it comes back as its error event."""
        self._command(lambda: self._add(request))

    def abort(self, request_id: str) -> None:
        """Frees all that the request holds. No further event follows. Unknown ids are ignored."""
        self._command(lambda: self._abort(request_id))

    def query(self, what: Query) -> Future[dict[str, Any]]:
        """`stats`: counters of all parts. `integrity`: the same after checking every pool; idle ones must be empty.
        `flush`: drops what is cached and not in use, and says how many bytes that were (`freed_bytes`)."""
        future: Future[dict[str, Any]] = Future()

        def run() -> None:
            try:
                if what == "flush":
                    future.set_result({"freed_bytes": self._handoff.flush() if self._handoff else 0})
                    return
                if what == "integrity":
                    self._check_integrity()
                future.set_result(self._stats())
            except BaseException as error:  # handed to the caller
                future.set_exception(error)

        self._command(run)
        return future

    def close(self) -> None:
        """Stops after the current step. Idempotent."""
        self._closing.set()
        self._wake_decoder.set()
        self._wake_encoder.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        if self._encoder is not None:
            self._encoder.close()
        self._decoder.close()

    # -- decoder thread ------------------------------------------------------------------------------------------------

    def _set_maths_threads(self) -> None:
        if self._maths_threads is not None:
            torch.set_num_threads(self._maths_threads)  # OpenMP keeps this number per thread

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wake_decoder.set()

    def _on_handoff_change(self) -> None:
        self._wake_decoder.set()
        self._wake_encoder.set()

    def _decode_loop(self) -> None:
        self._set_maths_threads()
        try:
            while not self._closing.is_set():
                self._wake_decoder.clear()
                while not self._commands.empty():
                    self._commands.get()()
                if self._decoder.has_work and self._decoder.runnable:
                    with self._turns:
                        started = time.perf_counter()
                        events = self._decoder.step()
                        self._seconds["decode_seconds"] += time.perf_counter() - started
                    self._publish_events(events)
                elif not (self._decoder.has_work and self._handoff is not None and self._handoff.unblock()):
                    self._wake_decoder.wait()
        except BaseException as error:  # a bug in a step: nothing that is running can be trusted
            self._die(error)

    def _die(self, error: BaseException) -> None:
        log.critical("the engine stopped on an error", exc_info=error)
        self._fatal = error
        doomed = sorted(self._live)
        self._live.clear()
        self._emit([EngineEvent(r, finish_reason="error", error="died", message="the engine stopped") for r in doomed])
        while not self._closing.is_set():  # requests that still arrive are told; queries still answer
            self._wake_decoder.wait()
            self._wake_decoder.clear()
            while not self._commands.empty():
                self._commands.get()()

    def _add(self, request: EngineRequest) -> None:
        if self._fatal is not None:
            self._refuse(request, "died", "the engine stopped")
            return
        leases: list[Lease] = []
        try:
            spans = []
            for image in request.images:
                if self._handoff is None:
                    raise ValueError(f"{self.info.model} takes no images")
                lease = self._handoff.lease(image.key, image.patches, request.request_id)
                leases.append(lease)
                spans.append(ImageSpan(image.start, image.patches.tokens, image.key, lease))
            self._decoder.add(
                DecoderRequest(
                    request_id=request.request_id,
                    prompt_ids=request.prompt_ids,
                    sampling=request.sampling,
                    spans=tuple(spans),
                    output_ids=request.output_ids,
                    eos_token_ids=request.eos_token_ids,
                    sample_index=request.sample_index,
                    priority=request.priority,
                    salt=request.salt,
                )
            )
        except ValueError as error:
            for lease in leases:
                lease.release()
            self._refuse(request, "invalid", str(error))
            return
        self._leases[request.request_id] = leases
        self._live.add(request.request_id)

    def _refuse(self, request: EngineRequest, kind: ErrorKind, message: str) -> None:
        self._emit([EngineEvent(request.request_id, finish_reason="error", error=kind, message=message)])

    def _abort(self, request_id: str) -> None:
        if request_id in self._live:
            self._decoder.abort(request_id)
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._live.discard(request_id)
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
                kind = "invalid" if isinstance(event.error, ValueError) else "internal"
                message = str(event.error)
            out.append(
                EngineEvent(
                    event.request_id, event.token_id, event.logprob, event.top, event.finish_reason, event.stop_token,
                    event.cached_tokens, kind, message,
                )
            )  # fmt: skip
        if out:
            self._emit(out)

    def _check_integrity(self) -> None:
        self._decoder.check_integrity()
        if self._handoff is not None:
            self._handoff.check_integrity(idle=not self._live)
        if not self._live:
            assert not self._leases, "leases of requests that have ended"
            assert not self._decoder.has_work, "the decoder still has work"

    def _stats(self) -> dict[str, Any]:
        return {
            "live": len(self._live),
            **self._seconds,
            "decoder": self._decoder.stats(),
            "encoder": self._encoder.stats() if self._encoder else {},
            "handoff": self._handoff.stats() if self._handoff else {},
        }

    # -- encoder thread ------------------------------------------------------------------------------------------------

    def _encode_loop(self) -> None:
        self._set_maths_threads()
        try:
            self._encode_until_closed()
        except BaseException as error:  # without an encoder, requests would wait for ever
            failure = error

            def stop() -> None:
                raise failure

            self._command(stop)

    def _encode_until_closed(self) -> None:
        assert self._handoff is not None
        while not self._closing.is_set():
            self._wake_encoder.clear()
            work = self._handoff.take(self._encoder_step_tokens)
            if not work:
                self._wake_encoder.wait()
                continue
            failures = self._encode([w.image for w in work], [w.rows for w in work])
            for item, failure in zip(work, failures, strict=True):
                if failure is None:
                    self._handoff.publish([item.key])
                else:
                    self._handoff.fail(item.key, failure)

    def _encode(self, images: list[ImagePatches], rows: list[torch.Tensor]) -> list[Exception | None]:
        """Encodes a batch; where it fails, each picture alone, so that one cannot take its neighbours along."""
        assert self._encoder is not None
        try:
            with self._turns:
                started = time.perf_counter()
                self._encoder.encode(images, rows)
                self._seconds["encode_seconds"] += time.perf_counter() - started
            return [None] * len(images)
        except Exception as error:  # reported to each waiter
            if len(images) == 1:
                log.warning("an image could not be encoded", exc_info=error)
                return [error]
        return [self._encode([image], [row])[0] for image, row in zip(images, rows, strict=True)]
