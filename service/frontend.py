"""The front's work on a request: text to ids, pictures to patches, ids to text, and a watch over what the engine holds.

    prepare    messages -> prompt ids with one image token per picture; pictures decoded and patched in a pool
    submit     one engine request for each sample; from here on the engine holds resources
    relay      engine events -> deltas: detokenise, match stop strings, count
    finally    whatever is not finished is aborted

Runs on one event loop; everything that takes longer than a millisecond happens in the pool.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from decoder.sampling import SamplingParams
from encoder.config import VisionConfig
from encoder.images import ImageError, ImageLimits, decode_image
from encoder.preprocess import ImagePatches, patchify
from service import errors
from service.chat import ChatTemplate, load_template
from service.engine import EngineEvent, EngineHandle, EngineImage, EngineInfo, EngineRequest
from service.modelconfig import ModelConfig
from service.stops import StopMatcher
from service.tokenizer import Detokenizer, Tokenizer, literal
from service.types import (
    ChatInput,
    Delta,
    Embedded,
    Event,
    Finished,
    GenerateSpec,
    ImageSource,
    Logprob,
    PictureInput,
    RawInput,
    Started,
    Tokenized,
    TokensInput,
    Usage,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_SAMPLES = 64
MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 256
_POOL_TEXT = 2048
"""Characters from which tokenising leaves the event loop."""


@dataclass(frozen=True)
class FrontLimits:
    """What one request may ask for."""

    max_queue: int = 1024
    max_images: int = 16
    image: ImageLimits = field(default_factory=ImageLimits)
    max_answer_bytes: int = 2**31 - 1
    """Of one message."""


class ModelAssets:
    """What the front needs of a model besides the engine: tokenizer, chat template, image rule, sampling defaults."""

    def __init__(self, config: ModelConfig, vision: VisionConfig | None) -> None:
        self.config, self.vision = config, vision
        file = config.path / "tokenizer.json"
        self.tokenizer = Tokenizer(file) if file.exists() else None
        self.image_token_id = config.image_token_id if vision is not None else None
        self.image_token: str | None = None
        if self.tokenizer is not None and self.image_token_id is not None:
            self.image_token = self.tokenizer.token(self.image_token_id)
        self.template: ChatTemplate = load_template(config.path, image_token=self.image_token)
        self.sampling_defaults = sampling_defaults(config)

    def wrap_pictures(self, ids: list[int]) -> list[int]:
        """Puts `<img>` and `</img>` around image tokens that stand bare, where the vocabulary has that pair: the
        released processor adds them after the template."""
        if self.tokenizer is None or self.image_token_id not in ids:
            return ids
        start, end = self.tokenizer.token_id("<img>"), self.tokenizer.token_id("</img>")
        if start is None or end is None or (start in ids and end in ids):
            return ids
        return [x for i in ids for x in ((start, i, end) if i == self.image_token_id else (i,))]


def sampling_defaults(config: ModelConfig) -> dict[str, Any]:
    """Sampling fields that `generation_config.json` sets. `do_sample: false` means greedy."""
    source = config.generation
    defaults: dict[str, Any] = {}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        if source.get(name) is not None:
            defaults[name] = source[name]
    if source.get("max_new_tokens") is not None:
        defaults["max_tokens"] = int(source["max_new_tokens"])
    if source.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


@dataclass(frozen=True)
class _Prompt:
    ids: list[int]
    images: tuple[EngineImage, ...]

    @property
    def image_tokens(self) -> int:
        return sum(image.patches.tokens for image in self.images)


Resolver = Callable[[GenerateSpec, bytes], Awaitable[GenerateSpec]]
"""Fetches the pictures that a request of a tenant only names."""


async def no_references(spec: GenerateSpec, salt: bytes) -> GenerateSpec:
    """The resolver where there is nothing to fetch from. Raises StatusError."""
    for image in spec.images:
        if image.media_id is not None:
            raise errors.NotFound(f"{image.field}: no uploaded media {image.media_id!r}", field=image.field)
        if image.uri is not None:
            raise errors.InvalidArgument(f"{image.field}: URLs are not fetched here; send the bytes", field=image.field)
    return spec


class _Call:
    """One request in the server, as far as others may end it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[EngineEvent] = asyncio.Queue()
        self.names: list[str] = []
        self.cancelled = False

    def begin(self, names: list[str]) -> None:
        self.names = names
        if self.cancelled:
            self.cancel()

    def cancel(self) -> None:
        self.cancelled = True
        for name in self.names:
            self.queue.put_nowait(EngineEvent(name, finish_reason="aborted"))


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

    def __init__(self, engine: EngineHandle, assets: ModelAssets, limits: FrontLimits, *, workers: int = 2) -> None:
        self.engine, self.assets, self.limits = engine, assets, limits
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="saccade-front")
        self._queues: dict[str, asyncio.Queue[EngineEvent]] = {}
        self._calls: dict[tuple[bytes, str], _Call] = {}
        self.resolve: Resolver = no_references
        self.idle = asyncio.Event()
        """Set while no request is in the server."""
        self.idle.set()
        self._numbers = count()
        self._loop: asyncio.AbstractEventLoop | None = None
        fingerprint = f"{engine.info.revision}|{engine.info.dtype}|{assets.vision}"
        self._image_salt = hashlib.sha256(fingerprint.encode()).digest()

    def start(self) -> None:
        """Binds to the running event loop and starts the engine's delivery."""
        self._loop = asyncio.get_running_loop()
        self.engine.start(self._deliver)

    def close(self) -> None:
        """Stops the engine and the pool. Running calls end with ENGINE_DIED."""
        self.engine.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def live(self) -> int:
        """Requests in the server."""
        return len(self._calls)

    def cancel(self, request_id: str, *, salt: bytes = b"") -> bool:
        """Ends a request of this tenant from outside: its samples finish as `aborted`. False: there is none."""
        call = self._calls.get((salt, request_id))
        if call is not None:
            call.cancel()
        return call is not None

    async def tokenize(self, spec: GenerateSpec, *, salt: bytes = b"") -> Tokenized:
        """What `stream` would make of the prompt. Raises StatusError."""
        prompt = await self._prepare(spec, salt)
        ids, previous = [], 0
        for image in prompt.images:
            ids += prompt.ids[previous : image.start + 1]
            previous = image.start + image.patches.tokens
        return Tokenized((*ids, *prompt.ids[previous:]), tuple(image.patches.tokens for image in prompt.images))

    async def stream(self, spec: GenerateSpec, *, salt: bytes = b"") -> AsyncGenerator[Event, None]:
        """Started, Deltas and one Finished per sample. Closing the iterator aborts what is left. Raises StatusError."""
        with self._admitted(spec, salt) as call:
            arrived = time.monotonic()
            seed = spec.sampling.get("seed")
            seed = secrets.randbits(63) if seed is None else int(seed)
            prompt = await self._prepare(spec, salt)
            params = self._sampling(spec, prompt, seed)
            async for event in self._run(spec, prompt, params, salt, arrived, call):
                yield event

    async def embed(self, spec: GenerateSpec, *, salt: bytes = b"") -> Embedded:
        """Hidden states of the prompt, or the tokens of the picture where the input is one. Raises StatusError."""
        with self._admitted(spec, salt) as call:
            prompt = await self._prepare(spec, salt)
            picture = isinstance(spec.input, PictureInput)
            request = EngineRequest(
                f"{next(self._numbers)}:{spec.request_id}", prompt.ids, self._sampling(spec, prompt, 0), prompt.images,
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
        self._queues[name] = call.queue
        finished = False
        try:
            await self._in_pool(self.engine.submit, request)
            call.begin([name])
            event = await call.queue.get()
            if event.finish_reason == "aborted":
                raise errors.Cancelled("the request was cancelled")
            finished = True
            if event.error is not None:
                raise _engine_error(event)
            return event.embedded
        finally:
            self._queues.pop(name, None)
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
        call = self._calls[salt, spec.request_id] = _Call()
        self.idle.clear()
        try:
            yield call
        finally:
            del self._calls[salt, spec.request_id]
            if not self._calls:
                self.idle.set()

    # -- prepare -------------------------------------------------------------------------------------------------------

    async def _in_pool(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(function, *arguments))

    async def _prepare(self, spec: GenerateSpec, salt: bytes) -> _Prompt:
        if spec.model not in ("", self.assets.config.name):
            raise errors.NotFound(
                f"no model {spec.model!r}; this server has {self.assets.config.name!r}", field="model"
            )
        _check_counts(spec, self.limits)
        if any(image.elsewhere for image in spec.images):
            spec = await self.resolve(spec, salt)
        if spec.images and self.assets.vision is None:
            raise errors.FailedPrecondition(f"{self.assets.config.name} takes no images", field=spec.images[0].field)
        images = [self._in_pool(self._decode, image) for image in spec.images]
        patches: list[ImagePatches] = list(await asyncio.gather(*images))
        if isinstance(spec.input, PictureInput):
            return self._picture(spec, patches[0], salt)
        ids = await self._in_pool(self._ids, spec) if _characters(spec) > _POOL_TEXT else self._ids(spec)
        return self._widen(ids, spec, patches, salt)

    def _decode(self, source: ImageSource) -> ImagePatches:
        vision = self.assets.vision
        assert vision is not None
        try:
            return patchify(decode_image(source.data, self.limits.image), vision, self.engine.info.pixel_dtype)
        except ImageError as error:
            raise errors.InvalidArgument(
                f"{source.field}: {error}", reason="IMAGE_DECODE_FAILED", field=source.field
            ) from error
        except ValueError as error:
            raise errors.InvalidArgument(f"{source.field}: {error}", field=source.field) from error

    def _ids(self, spec: GenerateSpec) -> list[int]:
        """Prompt ids with one image token id for each picture."""
        if isinstance(spec.input, TokensInput):
            vocabulary = self.assets.config.decoder.vocab_size
            if bad := [i for i in spec.input.ids if i >= vocabulary]:
                raise errors.InvalidArgument(
                    f"token id {bad[0]} is not below the vocabulary size of {vocabulary}", field="tokens.ids"
                )
            return list(spec.input.ids)
        tokenizer = self.assets.tokenizer
        if tokenizer is None:
            raise errors.FailedPrecondition(
                f"{self.assets.config.name} has no tokenizer: send token ids", field="input"
            )
        if isinstance(spec.input, RawInput):
            return self._raw_ids(spec.input.text, len(spec.images), tokenizer)
        assert isinstance(spec.input, ChatInput)
        try:
            text = self.assets.template.render(spec.input.messages, spec.input.template_arguments)
        except ValueError as error:
            raise errors.InvalidArgument(str(error), field="chat") from None
        return self.assets.wrap_pictures(tokenizer.encode(text))

    def _raw_ids(self, text: str, pictures: int, tokenizer: Tokenizer) -> list[int]:
        """Raw text may hold image tokens of its own; where it holds none, the pictures come first."""
        token, picture = self.assets.image_token, self.assets.image_token_id
        if token is None or picture is None:
            return tokenizer.encode(literal(text))
        if pictures == 0:
            return tokenizer.encode(literal(text, token))
        ids = tokenizer.encode(literal(text))
        return ids if picture in ids else self.assets.wrap_pictures([picture] * pictures) + ids

    def _widen(self, ids: list[int], spec: GenerateSpec, patches: list[ImagePatches], salt: bytes) -> _Prompt:
        """Each image token id becomes as many as its picture has tokens."""
        places = [i for i, token in enumerate(ids) if token == self.assets.image_token_id]
        if len(places) != len(patches):
            raise errors.InvalidArgument(
                f"the prompt holds {len(places)} image tokens (id {self.assets.image_token_id}) for {len(patches)} "
                "images",
                field="input",
            )
        widened: list[int] = []
        images: list[EngineImage] = []
        previous = 0
        for place, image, source in zip(places, patches, spec.images, strict=True):
            self._check_room(source, image)
            widened += ids[previous:place]
            images.append(EngineImage(len(widened), self._image_key(source.data, salt), image))
            widened += [ids[place]] * image.tokens
            previous = place + 1
        widened += ids[previous:]
        if not widened:
            raise errors.InvalidArgument("the prompt is empty", field="input")
        limit = self.engine.info.max_len
        if len(widened) + len(spec.continued) >= limit:
            raise errors.InvalidArgument(
                f"the prompt takes {len(widened)} tokens with its images; the context holds {limit}, answer included",
                reason="CONTEXT_LENGTH_EXCEEDED", field="input",
                metadata={"limit": str(limit), "got": str(len(widened))},
            )  # fmt: skip
        return _Prompt(widened, tuple(images))

    def _picture(self, spec: GenerateSpec, image: ImagePatches, salt: bytes) -> _Prompt:
        """A picture without a prompt, held against what its rows take in the handoff and in a message."""
        (source,) = spec.images
        self._check_room(source, image)
        size = image.tokens * self.assets.config.decoder.hidden_size * 4
        if size > self.limits.max_answer_bytes:
            raise errors.InvalidArgument(
                f"{source.field} has {size} bytes of embeddings, and a message of this server "
                f"{self.limits.max_answer_bytes}", field=source.field, reason="IMAGE_TOO_LARGE",
            )  # fmt: skip
        key = self._image_key(source.data, salt)
        return _Prompt([self.assets.image_token_id or 0] * image.tokens, (EngineImage(0, key, image),))

    def _check_room(self, source: ImageSource, image: ImagePatches) -> None:
        if image.tokens > self.engine.info.max_image_tokens:
            raise errors.InvalidArgument(
                f"{source.field} takes {image.tokens} tokens and the server's handoff holds "
                f"{self.engine.info.max_image_tokens}", field=source.field, reason="IMAGE_TOO_LARGE",
            )  # fmt: skip

    def _image_key(self, data: bytes, salt: bytes) -> bytes:
        """Content key: tenant, model revision and preprocessing, picture."""
        return hashlib.sha256(
            self._image_salt + len(salt).to_bytes(4, "big") + salt + hashlib.sha256(data).digest()
        ).digest()

    def _sampling(self, spec: GenerateSpec, prompt: _Prompt, seed: int) -> SamplingParams:
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
        self, spec: GenerateSpec, prompt: _Prompt, params: SamplingParams, salt: bytes, arrived: float, call: _Call
    ) -> AsyncGenerator[Event, None]:
        info: EngineInfo = self.engine.info
        yield_started = Started(
            spec.request_id, len(prompt.ids), prompt.image_tokens, info.model, info.revision, params.seed
        )
        states = [_SampleState(self.assets.tokenizer, spec.stop, params.min_tokens) for _ in range(spec.n)]
        queue = call.queue
        names = [f"{next(self._numbers)}:{spec.request_id}" for _ in range(spec.n)]
        index_of = {name: i for i, name in enumerate(names)}
        clock = _Clock(arrived)

        def finished(index: int, reason: Any, stop_token: int | None = None) -> Finished:
            state = states[index]
            state.done = True
            usage = Usage(
                len(prompt.ids), prompt.image_tokens, state.cached_tokens, state.tokens, clock.queue, clock.first_token
            )
            return Finished(index, reason, usage, state.stop_string, stop_token)

        for token in spec.continued:  # shown before: only the state that follows from it matters
            states[0].push(token)
        if spec.continued and (ending := self._already_ended(spec, params, states[0])):
            yield yield_started
            yield finished(0, *ending)
            return
        submitted: list[str] = []
        try:
            for index, name in enumerate(names):
                self._queues[name] = queue
                submitted.append(name)
                request = EngineRequest(
                    name,
                    prompt.ids,
                    params,
                    prompt.images,
                    spec.continued,
                    self._eos(params),
                    index,
                    spec.priority,
                    salt,
                )
                if prompt.images:  # copies pixels into shared memory
                    await self._in_pool(self.engine.submit, request)
                else:
                    self.engine.submit(request)
            yield yield_started
            call.begin(names)
            while not all(state.done for state in states):
                batch = [await queue.get()]
                while not queue.empty():
                    batch.append(queue.get_nowait())
                clock.tick(batch)
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
            for name in submitted:
                self._queues.pop(name, None)
                if not states[index_of[name]].done:
                    self.engine.abort(name)

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
            if (queue := self._queues.get(event.request_id)) is not None:
                queue.put_nowait(event)


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
    if event.error == "unavailable":
        return errors.Unavailable(event.message, reason="ENCODER_UNAVAILABLE", retry_after=1.0)
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
        ("images", len(spec.images), 0, limits.max_images),
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
