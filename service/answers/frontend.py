"""Processes a request in the frontend: text to ids, images to patches, ids to text, and tracking of the engine's
resources.

    prepare    request -> prompt (service/answers/prepare.py)
    submit     one engine request for all samples; from here on the engine holds resources
    relay      engine events -> deltas: detokenise, match stop strings, count (service/answers/answer.py)
    finally    unfinished samples are aborted

Runs on one event loop; everything that takes longer than a millisecond runs in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from decoder.sampling import SamplingParams
from service.answers.answer import Answer, needed_at_end, without_prompt
from service.answers.bounds import FrontendLimits
from service.answers.mailbox import Mailbox, Mailboxes
from service.answers.prepare import Preparation, Resolver, no_references
from service.answers.prompts import Prompt
from service.answers.relay import PromptLogprobs, engine_error
from service.answers.sampling import make_sampling, size_of_sampling
from service.answers.tool_calls import with_tools
from service.common import errors
from service.common.types import Delta, Embedded, Event, GenerateSpec, ImageInput, Tokenized
from service.engine.types import EngineEvent, EngineHandle, EngineRequest
from service.media.images import ImageProcessor
from service.model.assets import ModelAssets

T = TypeVar("T")

DELTA_RATE = 400.0
"""Target number of deltas per second over all streams. Tokens that are generated faster share a delta."""
LONGEST_PAUSE = 0.05
"""Seconds that a token may be held back to be sent with others: 20 deltas a second still look continuous."""
WHOLE_PAUSE = 0.5
"""The same for answers that are read only at their end, of which deltas only show the progress."""
_QUICK = 32
"""Up to this many ids, biases or scores are processed on the event loop; more take longer than a millisecond."""


class _Call:
    """One request in the server, which other tasks can cancel."""

    def __init__(self, pace: Callable[[], float]) -> None:
        self.mail = Mailbox(pace)
        self.arrived = time.monotonic()
        self.waits = True
        """Whether there is no token yet."""
        self.names: list[str] = []
        self.cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, names: list[str]) -> None:
        self.names = names
        if self.cancelled.done():
            self.cancel()

    def cancel(self) -> None:
        if not self.cancelled.done():
            self.cancelled.set_result(None)
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
        self._mail = Mailboxes()
        self._calls: dict[tuple[bytes, str], _Call] = {}
        self.resolve: Resolver = no_references
        self.idle = asyncio.Event()
        """Set while no request is in the server."""
        self.idle.set()
        self.numbers: Iterator[int] = count()
        """Numbers that prefix request ids in the engine. Frontends that share an engine need different ones."""

    def start(self) -> None:
        """Binds to the running event loop and starts the delivery of the engine's events."""
        self._mail.bind(asyncio.get_running_loop())
        self.engine.start(self._mail.deliver)

    def close(self) -> None:
        """Stops the engine and the preparation of prompts. Running calls end with ENGINE_DIED."""
        self.engine.close()
        self._preparation.close()

    def stats(self) -> dict[str, float]:
        """Counters of prepared images and clips, seconds by stage, and the bytes that they hold now."""
        return self._preparation.stats()

    @property
    def live(self) -> int:
        """Requests in the server."""
        return len(self._calls)

    def oldest_wait(self) -> float:
        """Seconds since the arrival of the request that has waited longest for its first token; 0 if none waits. May be
        called from any thread."""
        calls, now = list(self._calls.values()), time.monotonic()
        return max((now - call.arrived for call in calls if call.waits), default=0.0)

    def cancel(self, request_id: str, *, salt: bytes = b"") -> bool:
        """Cancels a request of this tenant: its samples finish as `aborted`. False: there is no such request."""
        call = self._calls.get((salt, request_id))
        if call is not None:
            call.cancel()
        return call is not None

    async def tokenize(self, spec: GenerateSpec, *, salt: bytes = b"") -> Tokenized:
        """The prompt that `stream` would generate from. Raises StatusError."""
        with self._admitted(spec, salt) as call:
            async with self._preparation.prompt(spec, salt, self.resolve, call.cancelled) as (prompt, _):
                return Tokenized(
                    prompt.narrow_ids, len(prompt.ids), prompt.tokens_per_image, prompt.tokens_per_video, prompt.media,
                    self.engine.info.max_len,
                )  # fmt: skip

    async def stream(
        self, spec: GenerateSpec, *, salt: bytes = b"", timeout: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yields Started, Deltas and one Finished per sample. Closing the iterator aborts unfinished samples. Raises
        StatusError.

        `timeout`: seconds until the caller's deadline, which the caller enforces; the engine rejects a request that
        cannot meet it.
        """
        with self._admitted(spec, salt) as call:
            arrived, spec = time.monotonic(), with_tools(spec, self.assets)
            async with AsyncExitStack() as ends:
                preparing = self._preparation.prompt(spec, salt, self.resolve, call.cancelled)
                try:
                    prompt, pixels = await ends.enter_async_context(preparing)
                except errors.Cancelled:
                    for event in without_prompt(spec, self.engine.info):
                        yield event
                    return
                params = await self._sampling(spec, len(prompt.ids))
                # aclosing, so that the engine learns of the end before the memory is released.
                async with aclosing(self._run(spec, prompt, params, salt, arrived, call, timeout)) as events:
                    async for event in events:
                        if isinstance(event, Delta):
                            pixels.release()  # the first token means that the encoder has read them
                        yield event

    async def embed(self, spec: GenerateSpec, *, salt: bytes = b"") -> Embedded:
        """Hidden states of the prompt, or the embedding of the image if the input is an image. Raises StatusError."""
        with self._admitted(spec, salt) as call:
            async with self._preparation.prompt(spec, salt, self.resolve, call.cancelled) as (prompt, _):
                of_image = isinstance(spec.input, ImageInput)
                params = await self._sampling(spec, len(prompt.ids))
                request = EngineRequest(
                    self._engine_id(spec), prompt.ids, params, prompt.take_images(),
                    priority=spec.priority, salt=salt, embed="image" if of_image else "hidden",
                )  # fmt: skip
                embedded = (await self._only_event(request, call)).embedded
                info, hidden = self.engine.info, self.assets.config.decoder.hidden_size
                values = {"rows": embedded[0]} if of_image else {"last": embedded[0], "mean": embedded[1]}
                return Embedded(
                    spec.request_id,
                    info.model,
                    info.revision,
                    len(prompt.ids),
                    prompt.image_tokens,
                    prompt.video_tokens,
                    hidden,
                    **values,
                )

    def _engine_id(self, spec: GenerateSpec) -> str:
        """A new request id in the engine, where each sample has one."""
        return f"{next(self.numbers)}:{spec.request_id}"

    async def _only_event(self, request: EngineRequest, call: _Call) -> EngineEvent:
        """Runs a request that has one event, and returns it. Raises StatusError."""
        name = request.request_id
        self._mail.add([name], call.mail)
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
            return event
        finally:
            self._mail.remove(name)
            if not finished:
                self.engine.abort(name)

    @contextmanager
    def _admitted(self, spec: GenerateSpec, salt: bytes) -> Iterator[_Call]:
        """Registers a request for as long as it runs. Raises StatusError."""
        if not self.engine.alive:
            raise errors.Unavailable("the engine is not running", reason="ENGINE_DIED", retry_after=1.0)
        if len(self._calls) >= self.limits.max_queue:
            raise errors.Unavailable(
                f"the server has {len(self._calls)} requests, which is its limit",
                reason="QUEUE_FULL", metadata={"limit": str(self.limits.max_queue)}, retry_after=1.0,
            )  # fmt: skip
        if (salt, spec.request_id) in self._calls:
            raise errors.AlreadyExists(f"request {spec.request_id!r} is running already", field="request_id")
        call = self._calls[salt, spec.request_id] = _Call(self._pace_of(spec))
        self.idle.clear()
        try:
            yield call
        finally:
            del self._calls[salt, spec.request_id]
            if not self._calls:
                self.idle.set()

    def _pace_of(self, spec: GenerateSpec) -> Callable[[], float]:
        """Seconds between two deltas of a request."""
        return (lambda: WHOLE_PAUSE) if needed_at_end(spec) else self._pace

    def _pace(self) -> float:
        """Seconds between two deltas of one answer: the more requests there are, the longer."""
        return min(len(self._calls) / DELTA_RATE, LONGEST_PAUSE)

    async def _quick(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Runs a function on the event loop if `size` is small, else in a thread."""
        return function(*arguments) if size <= _QUICK else await self._preparation.in_thread(function, *arguments)

    async def _sampling(self, spec: GenerateSpec, prompt_tokens: int) -> SamplingParams:
        arguments = spec, prompt_tokens, self.assets, self.engine.info
        return await self._quick(size_of_sampling(spec), make_sampling, *arguments)

    # -- run -----------------------------------------------------------------------------------------------------------

    async def _run(
        self, spec: GenerateSpec, prompt: Prompt, params: SamplingParams, salt: bytes, arrived: float, call: _Call,
        timeout: float | None,
    ) -> AsyncGenerator[Event, None]:  # fmt: skip
        answer = Answer(spec, prompt, params, self.assets, self.engine.info, arrived)
        await self._quick(len(spec.continued), answer.replay)
        if (ended := answer.already_ended()) is not None:
            yield answer.started()
            if params.prompt_logprobs is not None:  # the client has not received them, since they come with the end
                request = answer.prompt_request(self._engine_id(spec), salt, timeout)
                event = await self._only_event(request, call)
                self._read_prompt_scores(answer, [event])
                ended = replace(ended, prompt_logprobs=answer.prompt_scores)
            yield ended
            return
        names = [self._engine_id(spec) for _ in range(spec.n)]
        request = answer.request(names, salt, timeout)
        self._mail.add(names, call.mail)
        try:
            self.engine.submit(request)
            del request  # the engine owns the patches from here on
            yield answer.started()
            call.begin(names)
            while not answer.done:
                batch = await call.mail.take()
                call.waits = False
                answer.tick(batch)
                self._read_prompt_scores(answer, batch)
                for index, name in enumerate(names):
                    events = [event for event in batch if event.request_id == name]
                    if not events or answer.is_done(index):
                        continue
                    deltas, end, runs_on = answer.relay(index, events)
                    for delta in deltas:
                        yield delta
                    if runs_on:
                        self.engine.abort(name)
                    if end is not None:
                        yield end
        finally:
            for index, name in enumerate(names):
                self._mail.remove(name)
                if not answer.is_done(index):
                    self.engine.abort(name)

    def _read_prompt_scores(self, answer: Answer, batch: list[EngineEvent]) -> None:
        """Keeps the log-probabilities of the prompt, which arrive with a first token; all samples have the same."""
        for event in batch:
            if event.prompt_scores and not answer.prompt_scores:
                answer.prompt_scores = PromptLogprobs(event.prompt_scores, self.assets.tokenizer)
