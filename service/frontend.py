"""The front's work on a request: text to ids, pictures to patches, ids to text, and a watch over what the engine holds.

    prepare    pictures and clips decoded and patched in a pool; messages -> prompt ids with room for their rows
    submit     one engine request for all samples; from here on the engine holds resources
    relay      engine events -> deltas: detokenise, match stop strings, count
    finally    whatever is not finished is aborted

Runs on one event loop; everything that takes longer than a millisecond happens in the pool.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar

from decoder.sampling import SamplingParams
from service import errors
from service.assets import ModelAssets
from service.engine import EngineEvent, EngineHandle, EngineImage, EngineInfo, EngineRequest
from service.gate import ByteGate, Grant
from service.mailbox import Mailbox
from service.pictures import Decoder, LocalDecoder, MediaLimits, Prepared, Preparer
from service.prompts import Prompt, check_room, read, system_end, widen
from service.stops import StopMatcher
from service.tokenizer import Detokenizer, Tokenizer
from service.types import (
    ChatInput,
    Delta,
    Embedded,
    Event,
    Finished,
    GenerateSpec,
    ImageSource,
    Logprob,
    MediaSource,
    PictureInput,
    PromptLogprob,
    RawInput,
    Started,
    Tokenized,
    Usage,
    VideoSource,
    files,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

TEXT_WORKERS = 2
MAX_SAMPLES = 64
MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 256
DELTA_RATE = 400.0
"""Deltas a second over all streams that the front aims at. Tokens that come faster share one."""
LONGEST_PAUSE = 0.05
"""Seconds that a token may wait for company: 20 deltas a second read as a steady flow."""
_POOL_TEXT = 2048
"""Characters from which tokenising leaves the event loop."""


@dataclass(frozen=True)
class FrontLimits:
    """What one request may ask for."""

    max_queue: int = 1024
    max_images: int = 16
    max_videos: int = 4
    media: MediaLimits = field(default_factory=MediaLimits)
    prepared_bytes: int = 2**31
    """Of decoded and cut pictures and clips that the encoder has not seen yet."""
    max_answer_bytes: int = 2**31 - 1
    """Of one message."""


Resolver = Callable[[GenerateSpec, bytes], Awaitable[GenerateSpec]]
"""Fetches the pictures that a request of a tenant only names."""


async def no_references(spec: GenerateSpec, salt: bytes) -> GenerateSpec:
    """The resolver where there is nothing to fetch from. Raises StatusError."""
    for source in files(spec.media):
        if source.media_id is not None:
            raise errors.NotFound(f"{source.field}: no uploaded media {source.media_id!r}", field=source.field)
        if source.uri is not None:
            raise errors.InvalidArgument(
                f"{source.field}: URLs are not fetched here; send the bytes", field=source.field
            )
    return spec


class _Call:
    """One request in the server, as far as others may end it."""

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


class _SampleState:
    """One sample while it streams."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str], min_tokens: int) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(stops)
        self._min_tokens = min_tokens
        self.tokens = 0
        self.sequence = 0
        self.cached_tokens = 0
        self.done = False

    @property
    def stop_string(self) -> str | None:
        return self._stops.matched

    def push(self, token: int, *, shown: bool = True) -> str:
        """Counts a token and returns the text that became certain. `shown` is False for an end token."""
        self.tokens += 1
        text = self._detokenizer.push([token]) if shown else ""
        # until min_tokens are there, stop strings pass like any other text
        return self._stops.push(text) if self.tokens >= self._min_tokens else text

    def flush(self) -> str:
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()


class Frontend:
    """One model's front over one engine."""

    def __init__(
        self, engine: EngineHandle, assets: ModelAssets, limits: FrontLimits, *, workers: int = 2,
        decoder: Decoder | None = None,
    ) -> None:  # fmt: skip
        """`workers`: threads that prepare pictures and clips. `decoder`: what decodes them; None: this process. It is
        closed with the front."""
        self.engine, self.assets, self.limits = engine, assets, limits
        self._pool = ThreadPoolExecutor(TEXT_WORKERS, thread_name_prefix="saccade-front")
        # Apart, so that slow pictures keep nobody's words waiting.
        self._picture_pool = ThreadPoolExecutor(workers, thread_name_prefix="saccade-pictures")
        self._gate = ByteGate(limits.prepared_bytes)
        self._decoder = decoder or LocalDecoder(limits.media)
        self._mail: dict[str, Mailbox] = {}
        self._calls: dict[tuple[bytes, str], _Call] = {}
        self.resolve: Resolver = no_references
        self.idle = asyncio.Event()
        """Set while no request is in the server."""
        self.idle.set()
        self._numbers: Iterator[int] = count()
        self._loop: asyncio.AbstractEventLoop | None = None
        info = engine.info
        self._preparer = None if assets.vision is None else Preparer(
            self._decoder, assets.vision, info.pixel_dtype, limits.media, info.revision
        )  # fmt: skip

    def start(self) -> None:
        """Binds to the running event loop and starts the engine's delivery."""
        self._loop = asyncio.get_running_loop()
        self.engine.start(self._deliver)

    def close(self) -> None:
        """Stops the engine and the pool. Running calls end with ENGINE_DIED."""
        self.engine.close()
        self._decoder.close()
        self._picture_pool.shutdown(wait=True, cancel_futures=True)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def stats(self) -> dict[str, float]:
        """What preparing pictures and clips has taken so far, by stage, and the room that it takes now."""
        counts = self._preparer.stats() if self._preparer is not None else {}
        return {**counts, **self._decoder.stats(), "held_bytes": self._gate.used}

    @property
    def live(self) -> int:
        """Requests in the server."""
        return len(self._calls)

    def number(self, numbers: Iterator[int]) -> None:
        """Where several fronts share an engine: numbers that none of the others uses."""
        self._numbers = numbers

    def cancel(self, request_id: str, *, salt: bytes = b"") -> bool:
        """Ends a request of this tenant from outside: its samples finish as `aborted`. False: there is none."""
        call = self._calls.get((salt, request_id))
        if call is not None:
            call.cancel()
        return call is not None

    async def tokenize(self, spec: GenerateSpec, *, salt: bytes = b"") -> Tokenized:
        """What `stream` would make of the prompt. Raises StatusError."""
        async with self._prepared(spec, salt) as (prompt, _):
            return Tokenized(
                prompt.narrow_ids, len(prompt.ids), prompt.tokens_per_image, prompt.tokens_per_video
            )  # fmt: skip

    async def stream(
        self, spec: GenerateSpec, *, salt: bytes = b"", timeout: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """Started, Deltas and one Finished per sample. Closing the iterator aborts what is left. Raises StatusError.

        `timeout`: seconds that the caller has left; the engine refuses what cannot begin by then. It is not kept here.
        """
        with self._admitted(spec, salt) as call:
            arrived = time.monotonic()
            seed = spec.sampling.get("seed")
            seed = secrets.randbits(63) if seed is None else int(seed)
            async with self._prepared(spec, salt) as (prompt, pixels):
                params = self._sampling(spec, prompt, seed)
                async for event in self._run(spec, prompt, params, salt, arrived, call, timeout):
                    if isinstance(event, Delta):
                        pixels.release()  # an answer begins when the encoder is done with them
                    yield event

    async def embed(self, spec: GenerateSpec, *, salt: bytes = b"") -> Embedded:
        """Hidden states of the prompt, or the tokens of the picture where the input is one. Raises StatusError."""
        with self._admitted(spec, salt) as call:
            async with self._prepared(spec, salt) as (prompt, _):
                picture = isinstance(spec.input, PictureInput)
                params = self._sampling(spec, prompt, 0)
                request = EngineRequest(
                    f"{next(self._numbers)}:{spec.request_id}", prompt.ids, params, prompt.images,
                    priority=spec.priority, salt=salt, embed="picture" if picture else "hidden",
                )  # fmt: skip
                embedded = await self._embedded(request, call)
                info, hidden = self.engine.info, self.assets.config.decoder.hidden_size
                values = {"rows": embedded[0]} if picture else {"last": embedded[0], "mean": embedded[1]}
                return Embedded(
                    spec.request_id, info.model, info.revision, len(prompt.ids), prompt.image_tokens, hidden, **values
                )

    async def _embedded(self, request: EngineRequest, call: _Call) -> tuple[bytes, ...]:
        """What the engine's only event for the request holds. Raises StatusError."""
        name = request.request_id
        self._mail[name] = call.mail
        finished = False
        try:
            await self._submit(request)
            call.begin([name])
            event = (await call.mail.take())[0]
            if event.finish_reason == "aborted":
                raise errors.Cancelled("the request was cancelled")
            finished = True
            if event.error is not None:
                raise _engine_error(event)
            return event.embedded
        finally:
            self._mail.pop(name, None)
            if not finished:
                self.engine.abort(name)

    @contextmanager
    def _admitted(self, spec: GenerateSpec, salt: bytes) -> Iterator[_Call]:
        """A place in the server for the time of one request. Raises StatusError."""
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
        """Seconds between two deltas of one answer: none to speak of while few are running."""
        return min(len(self._calls) / DELTA_RATE, LONGEST_PAUSE)

    # -- prepare -------------------------------------------------------------------------------------------------------

    async def _in_pool(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(function, *arguments))

    @asynccontextmanager
    async def _prepared(self, spec: GenerateSpec, salt: bytes) -> AsyncIterator[tuple[Prompt, Grant]]:
        """The request's prompt, and a hold on the room for its pixels, given back at the end at the latest. Raises
        StatusError."""
        self._check(spec)
        expected = 0 if self._preparer is None else sum(map(self._preparer.most_bytes, spec.media))
        grant = await self._gate.acquire(expected)
        try:
            prompt = await self._prepare(spec, salt)
            grant.shrink(sum(image.patches.patches.nbytes for image in prompt.images))
            yield prompt, grant
        finally:
            grant.release()

    def _check(self, spec: GenerateSpec) -> None:
        """What can be said of a request before anything of it is decoded. Raises StatusError."""
        if spec.model not in ("", self.assets.config.name):
            raise errors.NotFound(
                f"no model {spec.model!r}; this server has {self.assets.config.name!r}", field="model"
            )
        _check_counts(spec, self.limits)
        self._check_media(spec)

    async def _prepare(self, spec: GenerateSpec, salt: bytes) -> Prompt:
        if any(source.elsewhere for source in spec.media):
            spec = await self.resolve(spec, salt)
        loop = asyncio.get_running_loop()
        media = await asyncio.gather(
            *[loop.run_in_executor(self._picture_pool, self._prepare_one, source, salt) for source in spec.media]
        )
        if isinstance(spec.input, PictureInput):
            return self._picture(spec, media[0])
        reading = functools.partial(self._read, spec, media)
        ids, shared = await self._in_pool(reading) if _characters(spec) > _POOL_TEXT else reading()
        prompt = widen(ids, media, len(spec.continued), self.assets, self.engine.info)
        return replace(prompt, system_end=shared)

    def _read(self, spec: GenerateSpec, media: Sequence[Prepared]) -> tuple[list[int], int]:
        ids = read(spec, media, self.assets)
        return ids, system_end(spec, ids, self.assets)

    def _check_media(self, spec: GenerateSpec) -> None:
        """Whether the model takes what the request holds. Raises FailedPrecondition."""
        if spec.media and self._preparer is None:
            raise errors.FailedPrecondition(f"{self.assets.config.name} takes no images", field=spec.media[0].field)
        clips = [source.field for source in spec.media if isinstance(source, VideoSource)]
        if clips and not self.engine.info.takes_video:
            raise errors.FailedPrecondition(f"{self.assets.config.name} takes no videos", field=clips[0])

    def _prepare_one(self, source: MediaSource, salt: bytes) -> Prepared:
        assert self._preparer is not None
        return self._preparer.prepare(source, salt)

    def _picture(self, spec: GenerateSpec, item: Prepared) -> Prompt:
        """A picture without a prompt, held against what its rows take in the handoff and in a message."""
        check_room(item, self.engine.info)
        tokens = item.item.tokens
        size = tokens * self.assets.config.decoder.hidden_size * 4
        if size > self.limits.max_answer_bytes:
            raise errors.InvalidArgument(
                f"{item.field} has {size} bytes of embeddings, and a message of this server "
                f"{self.limits.max_answer_bytes}", field=item.field, reason="IMAGE_TOO_LARGE",
            )  # fmt: skip
        ids = [self.assets.image_token_id or 0] * tokens
        return Prompt(ids, (EngineImage(0, item.key, item.item),), tuple(ids[:1]))

    def _sampling(self, spec: GenerateSpec, prompt: Prompt, seed: int) -> SamplingParams:
        values = {**self.assets.sampling_defaults, **spec.sampling, "seed": seed}
        vocabulary = self.assets.config.decoder.vocab_size
        for name in ("logit_bias", "stop_token_ids"):
            if bad := [i for i in values.get(name, ()) if i >= vocabulary]:
                raise errors.InvalidArgument(
                    f"{name}: token id {bad[0]} is not below the vocabulary size of {vocabulary}",
                    field=f"sampling.{name}",
                )
        room = self.engine.info.max_len - len(prompt.ids)
        if (wanted := values.get("max_tokens")) is not None and wanted > room and "max_tokens" in spec.sampling:
            raise errors.InvalidArgument(
                f"max_tokens {wanted} and a prompt of {len(prompt.ids)} tokens are above the context of "
                f"{self.engine.info.max_len}; at most {room} would fit",
                reason="CONTEXT_LENGTH_EXCEEDED", field="sampling.max_tokens",
                metadata={"limit": str(self.engine.info.max_len), "got": str(wanted + len(prompt.ids))},
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
            prompt.video_tokens,
        )  # fmt: skip
        states = [_SampleState(self.assets.tokenizer, spec.stop, params.min_tokens) for _ in range(spec.n)]
        names = [f"{next(self._numbers)}:{spec.request_id}" for _ in range(spec.n)]
        index_of = {name: i for i, name in enumerate(names)}
        clock = _Clock(arrived)
        prompt_scores: list[PromptLogprob] = []

        def finished(index: int, reason: Any, stop_token: int | None = None) -> Finished:
            state = states[index]
            state.done = True
            usage = Usage(
                len(prompt.ids), prompt.image_tokens, state.cached_tokens, state.tokens, clock.queue, clock.first_token,
                prompt.video_tokens, prompt.frames,
            )  # fmt: skip
            scores = tuple(prompt_scores) if index == 0 else ()
            return Finished(index, reason, usage, state.stop_string, stop_token, scores)

        for token in spec.continued:  # shown before: only the state that follows from it matters
            states[0].push(token)
        if spec.continued and (ending := self._already_ended(spec, params, states[0])):
            yield yield_started
            yield finished(0, *ending)
            return
        request = EngineRequest(
            names[0],
            prompt.ids,
            params,
            prompt.images,
            spec.continued,
            self._eos(params),
            priority=spec.priority,
            salt=salt,
            timeout=None if timeout is None else timeout - (time.monotonic() - arrived),
            checkpoint_at=(prompt.system_end,) if prompt.system_end else (),
            siblings=tuple(names[1:]),
        )
        self._mail.update(dict.fromkeys(names, call.mail))
        try:
            if prompt.images:  # copies pixels into shared memory
                await self._submit(request)
            else:
                self.engine.submit(request)
            yield yield_started
            call.begin(names)
            while not all(state.done for state in states):
                batch = await call.mail.take()
                clock.tick(batch)
                for event in batch:
                    if event.prompt_scores and not prompt_scores:
                        prompt_scores += [
                            PromptLogprob(score.position, Logprob(score.token, score.logprob, score.top))
                            for score in event.prompt_scores
                        ]
                for name in names:
                    index = index_of[name]
                    events = [event for event in batch if event.request_id == name]
                    if events and not states[index].done:
                        delta, reason, stop_token = self._relay(index, states[index], events)
                        if delta is not None:
                            yield delta
                        if reason is not None:
                            if states[index].stop_string is not None or reason == "aborted":
                                self.engine.abort(name)
                            yield finished(index, reason, stop_token)
        finally:
            for name in names:
                self._mail.pop(name, None)
                if not states[index_of[name]].done:
                    self.engine.abort(name)

    async def _submit(self, request: EngineRequest) -> None:
        """In a thread. Where the call ends meanwhile an abort follows: one that went ahead of it would end nothing."""
        submitting = asyncio.get_running_loop().run_in_executor(self._pool, self.engine.submit, request)

        def abort(_: object) -> None:
            for name in request.names:
                self.engine.abort(name)

        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(abort)
            raise

    def _eos(self, params: SamplingParams) -> frozenset[int]:
        return frozenset() if params.ignore_eos else self.assets.config.eos_token_ids

    def _already_ended(
        self, spec: GenerateSpec, params: SamplingParams, state: _SampleState
    ) -> tuple[str, int | None] | None:
        """Whether an answer that is to be continued has in fact ended: (reason, stop token)."""
        last = spec.continued[-1]
        if state.stop_string is not None:
            return "stop", None
        if len(spec.continued) > params.min_tokens and last in (self._eos(params) | params.stop_token_ids):
            return "stop", last
        if params.max_tokens is not None and len(spec.continued) >= params.max_tokens:
            return "length", None
        return None

    def _relay(
        self, index: int, state: _SampleState, events: list[EngineEvent]
    ) -> tuple[Delta | None, str | None, int | None]:
        """Events of one sample -> (delta, finish reason, stop token). Raises StatusError for an error event."""
        text: list[str] = []
        ids: list[int] = []
        logprobs: list[Logprob] = []
        reason: str | None = None
        stop_token: int | None = None
        for event in events:
            if event.error is not None:
                raise _engine_error(event)
            state.cached_tokens = max(state.cached_tokens, event.cached_tokens)
            if event.token_id is not None:
                ids.append(event.token_id)
                text.append(state.push(event.token_id, shown=event.stop_token is None))
                if event.logprob is not None:
                    logprobs.append(Logprob(event.token_id, event.logprob, event.top))
            if state.stop_string is not None:
                reason = "stop"
                break
            if event.finish_reason is not None:
                reason, stop_token = event.finish_reason, event.stop_token
                text.append(state.flush())
        joined = "".join(text)
        if not joined and not ids:
            return None, reason, stop_token
        delta = Delta(index, joined, tuple(ids), tuple(logprobs), state.sequence)
        state.sequence += 1
        return delta, reason, stop_token

    def _deliver(self, events: list[EngineEvent]) -> None:
        """Called on an engine thread: hands the events to the loop, all at once."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._dispatch, events)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            log.debug("%d events after the end of the loop", len(events))

    def _dispatch(self, events: list[EngineEvent]) -> None:
        for event in events:
            if (mail := self._mail.get(event.request_id)) is not None:
                mail.put(event)


class _Clock:
    """Times of one request, in seconds since its arrival."""

    def __init__(self, arrived: float) -> None:
        self._arrived = arrived
        self.queue = time.monotonic() - arrived
        self.first_token = 0.0

    def tick(self, events: list[EngineEvent]) -> None:
        if not self.first_token and any(e.token_id is not None for e in events):
            self.first_token = time.monotonic() - self._arrived


def _engine_error(event: EngineEvent) -> errors.StatusError:
    if event.error == "invalid":
        return errors.InvalidArgument(event.message)
    if event.error == "deadline":
        return errors.DeadlineExceeded(event.message, reason="DEADLINE_UNREACHABLE", metadata={"phase": "admission"})
    if event.error == "unavailable":
        return errors.Unavailable(event.message, reason="ENCODER_UNAVAILABLE", retry_after=1.0)
    if event.error == "full":
        return errors.Unavailable(event.message, reason="SHARED_MEMORY_FULL", retry_after=1.0)
    if event.error == "died":
        return errors.Unavailable(
            "the engine stopped while it worked on this request", reason="ENGINE_DIED", retry_after=1.0
        )
    log.error("request %s failed in the engine: %s", event.request_id, event.message)
    return errors.Internal("the engine failed on this request; the server's log has the details")


def _characters(spec: GenerateSpec) -> int:
    match spec.input:
        case ChatInput(messages):
            return sum(len(part or "") for message in messages for part in message.parts)
        case RawInput(text):
            return len(text)
    return 0


def _check_counts(spec: GenerateSpec, limits: FrontLimits) -> None:
    """Bounds on how much one request may ask for."""
    bounds = (
        ("sampling.n", spec.n, 1, MAX_SAMPLES),
        ("sampling.logprobs", spec.sampling.get("logprobs"), 0, MAX_LOGPROBS),
        ("sampling.prompt_logprobs", spec.sampling.get("prompt_logprobs"), 0, MAX_LOGPROBS),
        ("images", sum(isinstance(source, ImageSource) for source in spec.media), 0, limits.max_images),
        ("videos", sum(isinstance(source, VideoSource) for source in spec.media), 0, limits.max_videos),
        ("sampling.stop", len(spec.stop), 0, MAX_STOP_STRINGS),
    )
    for name, value, low, high in bounds:
        if value is not None and not low <= value <= high:
            raise errors.InvalidArgument(f"{name} is {value}; it must be from {low} to {high}", field=name)
    for i, stop in enumerate(spec.stop):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise errors.InvalidArgument(
                f"sampling.stop[{i}] has {len(stop)} characters; it must have from 1 to {MAX_STOP_LENGTH}",
                field=f"sampling.stop[{i}]",
            )
    if spec.continued and spec.n != 1:
        raise errors.InvalidArgument(
            f"continued_token_ids continue one sample, not n = {spec.n}", field="continued_token_ids"
        )
