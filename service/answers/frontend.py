"""Processes a request in the frontend: text to ids, images to patches, ids to text, and tracking of the engine's
resources.

    prepare    request -> prompt (service/answers/prepare.py)
    submit     one engine request for all samples; from here on the engine holds resources
    relay      engine events -> deltas: detokenise, match stop strings, count
    finally    unfinished samples are aborted

Runs on one event loop; everything that takes longer than a millisecond runs in the pool.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from itertools import count
from typing import Any, TypeVar, cast

from decoder.sampling import SamplingParams
from service.answers.bounds import FrontendLimits
from service.answers.mailbox import Mailbox
from service.answers.prepare import Preparation, Resolver, no_references
from service.answers.prompts import Prompt
from service.answers.reasoning import ReasoningSplit, phase_of, with_reasoning
from service.answers.relay import (
    Clock,
    SampleState,
    Shown,
    engine_error,
    merged,
    read_logprob,
    read_prompt_scores,
)
from service.answers.tool_calls import CallSplit, silent_markers, tool_use, with_tools
from service.common import errors
from service.common.types import (
    Delta,
    Embedded,
    Event,
    Finished,
    FinishReason,
    GenerateSpec,
    ImageInput,
    Logprob,
    PromptLogprob,
    Started,
    Tokenized,
    Usage,
)
from service.engine.types import EngineEvent, EngineHandle, EngineInfo, EngineRequest
from service.media.images import ImageProcessor
from service.model.assets import ModelAssets

log = logging.getLogger(__name__)
T = TypeVar("T")

DELTA_RATE = 400.0
"""Target number of deltas per second over all streams. Tokens that are generated faster share a delta."""
LONGEST_PAUSE = 0.05
"""Seconds that a token may be held back to be sent with others: 20 deltas a second still look continuous."""
_QUICK = 32
"""Up to this many ids, biases or scores are processed on the event loop; more take longer than a millisecond."""


class _Call:
    """One request in the server, with the means to end it from other tasks."""

    def __init__(self, pace: Callable[[], float]) -> None:
        self.mail = Mailbox(pace)
        self.names: list[str] = []
        self.cancelled = False

    def begin(self, names: list[str]) -> None:
        self.names = names
        if self.cancelled:
            self.cancel()

    def cancel(self) -> None:
        self.cancelled = True
        for name in self.names:
            self.mail.put(EngineEvent(name, finish_reason="aborted"))


class Frontend:
    """The frontend of one model over one engine."""

    def __init__(
        self, engine: EngineHandle, assets: ModelAssets, limits: FrontendLimits, *, workers: int = 2,
        processor: ImageProcessor | None,
    ) -> None:  # fmt: skip
        """`workers`: threads that wait for image workers. `processor`: prepares images and videos; closed with the
        frontend."""
        self.engine, self.assets, self.limits = engine, assets, limits
        self._preparation = Preparation(engine.info, assets, limits, processor, workers)
        self._mail: dict[str, Mailbox] = {}
        self._calls: dict[tuple[bytes, str], _Call] = {}
        self.resolve: Resolver = no_references
        self.idle = asyncio.Event()
        """Set while no request is in the server."""
        self.idle.set()
        self._numbers: Iterator[int] = count()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Binds to the running event loop and starts the delivery of the engine's events."""
        self._loop = asyncio.get_running_loop()
        self.engine.start(self._deliver)

    def close(self) -> None:
        """Stops the engine and the pool. Running calls end with ENGINE_DIED."""
        self.engine.close()
        self._preparation.close()

    def stats(self) -> dict[str, float]:
        """Counters and seconds of preparing images and clips, by stage, and the bytes that they hold now."""
        return self._preparation.stats()

    @property
    def live(self) -> int:
        """Requests in the server."""
        return len(self._calls)

    def number(self, numbers: Iterator[int]) -> None:
        """Sets the numbers that prefix request ids in the engine: where several frontends share one, each needs its
        own."""
        self._numbers = numbers

    def cancel(self, request_id: str, *, salt: bytes = b"") -> bool:
        """Cancels a request of this tenant: its samples finish as `aborted`. False: there is no such request."""
        call = self._calls.get((salt, request_id))
        if call is not None:
            call.cancel()
        return call is not None

    async def tokenize(self, spec: GenerateSpec, *, salt: bytes = b"") -> Tokenized:
        """The prompt that `stream` would generate from. Raises StatusError."""
        with self._admitted(spec, salt):
            async with self._preparation.prompt(spec, salt, self.resolve) as (prompt, _):
                return Tokenized(
                    prompt.narrow_ids, len(prompt.ids), prompt.tokens_per_image, prompt.tokens_per_video, prompt.media
                )  # fmt: skip

    async def stream(
        self, spec: GenerateSpec, *, salt: bytes = b"", timeout: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """Started, Deltas and one Finished per sample. Closing the iterator aborts what is left. Raises StatusError.

        `timeout`: seconds until the caller's deadline; the engine refuses what cannot start by then. The caller
        enforces it.
        """
        with self._admitted(spec, salt) as call:
            arrived, spec = time.monotonic(), with_tools(spec, self.assets)
            async with self._preparation.prompt(spec, salt, self.resolve) as (prompt, pixels):
                params = await self._sampling(spec, len(prompt.ids))
                # aclosing: the engine learns of the end before the memory is released.
                async with aclosing(self._run(spec, prompt, params, salt, arrived, call, timeout)) as events:
                    async for event in events:
                        if isinstance(event, Delta):
                            pixels.release()  # the first token means that the encoder has read them
                        yield event

    async def embed(self, spec: GenerateSpec, *, salt: bytes = b"") -> Embedded:
        """Hidden states of the prompt, or the embedding of the image where the input is one. Raises StatusError."""
        with self._admitted(spec, salt) as call:
            async with self._preparation.prompt(spec, salt, self.resolve) as (prompt, _):
                of_image = isinstance(spec.input, ImageInput)
                params = await self._sampling(spec, len(prompt.ids))
                request = EngineRequest(
                    f"{next(self._numbers)}:{spec.request_id}", prompt.ids, params, prompt.take_images(),
                    priority=spec.priority, salt=salt, embed="image" if of_image else "hidden",
                )  # fmt: skip
                embedded = await self._embedded(request, call)
                info, hidden = self.engine.info, self.assets.config.decoder.hidden_size
                values = {"rows": embedded[0]} if of_image else {"last": embedded[0], "mean": embedded[1]}
                return Embedded(
                    spec.request_id, info.model, info.revision, len(prompt.ids), prompt.image_tokens, hidden, **values
                )

    async def _embedded(self, request: EngineRequest, call: _Call) -> tuple[bytes, ...]:
        """The content of the engine's only event for the request. Raises StatusError."""
        name = request.request_id
        self._mail[name] = call.mail
        finished = False
        try:
            self.engine.submit(request)
            call.begin([name])
            event = (await call.mail.take())[0]
            if event.finish_reason == "aborted":
                raise errors.Cancelled("the request was cancelled")
            finished = True
            if event.error is not None:
                raise engine_error(event)
            return event.embedded
        finally:
            self._mail.pop(name, None)
            if not finished:
                self.engine.abort(name)

    @contextmanager
    def _admitted(self, spec: GenerateSpec, salt: bytes) -> Iterator[_Call]:
        """Registers a request for as long as it runs. Raises StatusError."""
        if not self.engine.alive:
            raise errors.Unavailable("the engine is not running", reason="ENGINE_DIED", retry_after=1.0)
        if len(self._calls) >= self.limits.max_queue:
            raise errors.Unavailable(
                f"the server holds {len(self._calls)} requests, the most it takes",
                reason="QUEUE_FULL", metadata={"limit": str(self.limits.max_queue)}, retry_after=1.0,
            )  # fmt: skip
        if (salt, spec.request_id) in self._calls:
            raise errors.AlreadyExists(f"a request {spec.request_id!r} is running", field="request_id")
        call = self._calls[salt, spec.request_id] = _Call(self._pace)
        self.idle.clear()
        try:
            yield call
        finally:
            del self._calls[salt, spec.request_id]
            if not self._calls:
                self.idle.set()

    def _pace(self) -> float:
        """Seconds between two deltas of one answer: the more, the more answers are being written."""
        return min(len(self._calls) / DELTA_RATE, LONGEST_PAUSE)

    async def _quick(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Runs a function: on the event loop where `size` is small, else in a thread."""
        return function(*arguments) if size <= _QUICK else await self._preparation.in_thread(function, *arguments)

    async def _sampling(self, spec: GenerateSpec, prompt_tokens: int) -> SamplingParams:
        size = sum(len(spec.sampling.get(name, ())) for name in ("logit_bias", "stop_token_ids"))
        size += len((spec.constraint and spec.constraint.allowed_token_ids) or ())
        return await self._quick(size, self._make_sampling, spec, prompt_tokens)

    def _make_sampling(self, spec: GenerateSpec, prompt_tokens: int) -> SamplingParams:
        seed = spec.sampling.get("seed")
        seed = secrets.randbits(63) if seed is None else int(seed)
        values = {**self.assets.sampling_defaults, **spec.sampling, "seed": seed}
        vocabulary = self.assets.config.decoder.vocab_size
        allowed = spec.constraint and spec.constraint.allowed_token_ids
        for name, ids in (
            *((name, values.get(name, ())) for name in ("logit_bias", "stop_token_ids")),
            ("allowed_token_ids", allowed or ()),
        ):
            if bad := [i for i in ids if not 0 <= i < vocabulary]:
                raise errors.InvalidArgument(
                    f"{name}: token id {bad[0]} is not below the vocabulary size of {vocabulary}",
                    field=f"sampling.{name}",
                )
        room = self.engine.info.max_len - prompt_tokens
        if (wanted := values.get("max_tokens")) is not None and wanted > room and "max_tokens" in spec.sampling:
            raise errors.InvalidArgument(
                f"max_tokens {wanted} and a prompt of {prompt_tokens} tokens are above the context of "
                f"{self.engine.info.max_len}; at most {room} would fit",
                reason="CONTEXT_LENGTH_EXCEEDED", field="sampling.max_tokens",
                metadata={"limit": str(self.engine.info.max_len), "got": str(wanted + prompt_tokens)},
            )  # fmt: skip
        if wanted is not None:
            values["max_tokens"] = min(wanted, room)
        try:
            return SamplingParams(**values)
        except ValueError as error:
            raise errors.InvalidArgument(f"sampling: {error}", field=f"sampling.{str(error).split(' ')[0]}") from None

    # -- run -----------------------------------------------------------------------------------------------------------

    async def _run(
        self, spec: GenerateSpec, prompt: Prompt, params: SamplingParams, salt: bytes, arrived: float, call: _Call,
        timeout: float | None,
    ) -> AsyncGenerator[Event, None]:  # fmt: skip
        info: EngineInfo = self.engine.info
        yield_started = Started(
            spec.request_id, len(prompt.ids), prompt.image_tokens, info.model, info.revision, params.seed,
            prompt.video_tokens, prompt.media,
        )  # fmt: skip
        phase = phase_of(prompt.ids, self.assets)
        constraint = with_reasoning(spec, phase, self.assets)
        states = [self._state(spec, params, ReasoningSplit(self.assets.reasoning, phase), i) for i in range(spec.n)]
        names = [f"{next(self._numbers)}:{spec.request_id}" for _ in range(spec.n)]
        index_of = {name: i for i, name in enumerate(names)}
        clock = Clock(arrived)
        prompt_scores: list[PromptLogprob] = []

        def finished(index: int, reason: FinishReason, stop_token: int | None = None) -> Finished:
            state = states[index]
            state.done = True
            usage = Usage(
                len(prompt.ids), prompt.image_tokens, state.cached_tokens, state.tokens, clock.queue, clock.first_token,
                prompt.video_tokens, prompt.frames, state.reasoning_tokens, clock.last_token,
            )  # fmt: skip
            scores = tuple(prompt_scores) if index == 0 else ()
            return Finished(index, reason, usage, state.stop_string, stop_token, scores)

        await self._quick(len(spec.continued), states[0].replay, spec.continued)
        if spec.continued and (ending := self._already_ended(spec, params, states[0])):
            yield yield_started
            yield finished(0, *ending)
            return
        request = EngineRequest(
            names[0],
            prompt.ids,
            params,
            prompt.take_images(),
            spec.continued,
            self._eos(params),
            priority=spec.priority,
            salt=salt,
            timeout=None if timeout is None else timeout - (time.monotonic() - arrived),
            checkpoint_at=(prompt.system_end,) if prompt.system_end else (),
            siblings=tuple(names[1:]),
            constraint=constraint,
        )
        self._mail.update(dict.fromkeys(names, call.mail))
        try:
            self.engine.submit(request)
            del request  # the engine owns the patches from here on
            yield yield_started
            call.begin(names)
            while not all(state.done for state in states):
                batch = await call.mail.take()
                clock.tick(batch)
                for event in batch:
                    if event.prompt_scores and not prompt_scores:
                        prompt_scores += await self._quick(
                            len(event.prompt_scores), read_prompt_scores, event, self.assets.tokenizer
                        )
                for name in names:
                    index = index_of[name]
                    events = [event for event in batch if event.request_id == name]
                    if events and not states[index].done:
                        delta, reason, stop_token = self._relay(index, states[index], events)
                        if delta is not None:
                            yield delta
                        if reason is not None:
                            if states[index].over or reason == "aborted":
                                self.engine.abort(name)
                            yield finished(index, reason, stop_token)
        finally:
            for name in names:
                self._mail.pop(name, None)
                if not states[index_of[name]].done:
                    self.engine.abort(name)

    def _state(self, spec: GenerateSpec, params: SamplingParams, split: ReasoningSplit, index: int) -> SampleState:
        use, markup, calls = tool_use(spec), self.assets.tool_markup, None
        if use is not None and use.choice != "none" and markup is not None:
            calls = CallSplit(markup, use, silent_markers(markup, self.assets), f"{spec.request_id}/{index}")
        text_format = None if spec.constraint is None else spec.constraint.format
        exact = text_format is not None and text_format.kind != "tool_calls"
        return SampleState(self.assets.tokenizer, spec.stop, params.min_tokens, split, exact=exact, calls=calls)

    def _eos(self, params: SamplingParams) -> frozenset[int]:
        return frozenset() if params.ignore_eos else self.assets.config.eos_token_ids

    def _already_ended(
        self, spec: GenerateSpec, params: SamplingParams, state: SampleState
    ) -> tuple[FinishReason, int | None] | None:
        """Whether an answer that is to be continued has already ended: (reason, stop token)."""
        last = spec.continued[-1]
        if state.over:
            return state.reason("stop"), None
        if len(spec.continued) > params.min_tokens and last in (self._eos(params) | params.stop_token_ids):
            return state.reason("stop"), last
        if params.max_tokens is not None and len(spec.continued) >= params.max_tokens:
            return "length", None
        return None

    def _relay(
        self, index: int, state: SampleState, events: list[EngineEvent]
    ) -> tuple[Delta | None, FinishReason | None, int | None]:
        """Events of one sample -> (delta, finish reason, stop token). Raises StatusError for an error event."""
        pieces: list[Shown] = []
        ids: list[int] = []
        logprobs: list[Logprob] = []
        reason: FinishReason | None = None
        stop_token: int | None = None
        for event in events:
            if event.error is not None:
                raise engine_error(event)
            state.cached_tokens = max(state.cached_tokens, event.cached_tokens)
            if event.token_id is not None:
                ids.append(event.token_id)
                pieces.append(state.push(event.token_id, shown=event.stop_token is None))
                if event.logprob is not None:
                    logprobs.append(read_logprob(event.token_id, event.logprob, event.top, self.assets.tokenizer))
            if state.over:
                reason = state.reason("stop")
                break
            if event.finish_reason is not None:
                pieces.append(state.flush())
                reason, stop_token = state.reason(cast(FinishReason, event.finish_reason)), event.stop_token
        shown = merged(pieces)
        if not any(shown) and not ids:
            return None, reason, stop_token
        delta = Delta(index, shown.text, tuple(ids), tuple(logprobs), state.sequence, shown.reasoning, shown.calls)
        state.sequence += 1
        return delta, reason, stop_token

    def _deliver(self, events: list[EngineEvent]) -> None:
        """Called on an engine thread: passes the events to the event loop, all at once."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._dispatch, events)
        except RuntimeError:  # the loop is closed, so no call waits any more
            log.debug("%d events after the end of the loop", len(events))

    def _dispatch(self, events: list[EngineEvent]) -> None:
        for event in events:
            if (mail := self._mail.get(event.request_id)) is not None:
                mail.put(event)
