"""Prepares a request's prompt: decodes images and clips to patches, and converts messages to ids with positions for
image rows.

Runs on one event loop; work of more than a millisecond runs in threads. An `ImageProcessor` decodes files and cuts them
into patches; in a server it is a pool of processes, so that this process holds no pixels. Bytes of patches are counted
from before decoding until the encoder has read them or the request has ended.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from threading import Lock
from typing import Any, TypeVar

from encoder.media_limits import ImageError
from encoder.stopwatch import Stopwatch
from families import VisionSpec
from service.answers.bounds import FrontendLimits, characters, check_counts, check_size
from service.answers.prompts import Prompt, check_ids, check_room, prompt_ids, system_end, widen
from service.common import errors
from service.common.tenant_turns import TenantSemaphore
from service.common.types import ChatInput, GenerateSpec, Image, ImageInput, MediaSource, TokensInput, Video, files
from service.engine.types import EngineInfo
from service.media.gate import ByteGate, Grant
from service.media.images import ImageProcessor, MediaLimits, most_bytes, video_rule
from service.media.prepared import PreparedItem
from service.media.prepared_cache import PreparedCache
from service.model.assets import ModelAssets

T = TypeVar("T")
Resolver = Callable[[GenerateSpec, bytes], Awaitable[GenerateSpec]]
"""Fetches the images that a tenant's request refers to by URL or media id."""

TEXT_WORKERS = 2
_LIGHT = 2048
"""Up to this many characters are tokenised on the event loop; more take longer than a millisecond."""
_PART, _IDS = 32, 8
"""Cost of a message or a part, in characters, and the number of ids that cost as much as one character."""


async def no_references(spec: GenerateSpec, salt: bytes) -> GenerateSpec:
    """The resolver of a server that fetches nothing. Raises StatusError."""
    for source in files(spec.media):
        if source.media_id is not None:
            raise errors.NotFound(f"{source.field}: no uploaded media {source.media_id!r}", field=source.field)
        if source.uri is not None:
            raise errors.InvalidArgument(
                f"{source.field}: URLs cannot be fetched here; send the bytes", field=source.field
            )
    return spec


def decoder_processes(workers: int) -> int:
    """Image worker processes for `workers` threads: at least two, so that videos always leave one for images."""
    return max(2, workers)


class MediaThreads:
    """Threads that prepare images and videos, one for each image worker process: a file waits for a process on the
    event loop, where its request can be cancelled. Videos, which may take minutes, leave one process to images. Tenants
    take turns."""

    def __init__(self, workers: int) -> None:
        processes = decoder_processes(workers)
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="saccade-media")
        self._idle = TenantSemaphore(processes)
        self._images, self._videos = TenantSemaphore(workers), TenantSemaphore(processes - 1)

    async def map(self, function: Callable[[MediaSource], T], sources: Sequence[MediaSource], tenant: bytes) -> list[T]:
        """Applies the function to each source of a tenant's request; results are in order. If a job fails or the caller
        is cancelled, jobs that have not started are dropped, and the error is raised when the others have ended."""
        jobs = [asyncio.create_task(self._run(function, source, tenant)) for source in sources]
        try:
            if jobs:  # not gather, which returns at the first error and leaves the others running
                await asyncio.wait(jobs, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await _end(jobs)
        for done in jobs:
            if not done.cancelled() and (error := done.exception()) is not None:
                raise error
        return [done.result() for done in jobs]

    async def _run(self, function: Callable[[MediaSource], T], source: MediaSource, tenant: bytes) -> T:
        """Runs the function in a thread. A cancellation takes effect before the function has begun or after its end."""
        kind = self._videos if isinstance(source, Video) else self._images
        async with kind.hold(tenant), self._idle.hold(tenant):
            job = asyncio.get_running_loop().run_in_executor(self._threads, function, source)
            try:
                return await asyncio.shield(job)
            except asyncio.CancelledError:
                await asyncio.wait({job})
                job.exception()  # else asyncio would report it as never retrieved
                raise

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


async def _end(jobs: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels the jobs and waits until they have ended, even if the caller is cancelled."""
    cancelled: asyncio.CancelledError | None = None
    for job in jobs:
        job.cancel()
    while pending := [job for job in jobs if not job.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    for job in jobs:  # one error is raised; asyncio would report the others as never retrieved
        if not job.cancelled():
            job.exception()
    if cancelled is not None:
        raise cancelled


def _drop(making: asyncio.Task[tuple[Prompt, Grant]]) -> None:
    """Releases the memory of a prompt for which nobody waits any more."""
    if not making.cancelled() and making.exception() is None:
        making.result()[1].release()


class Preparer:
    """Turns the media of requests into prepared items. Thread-safe."""

    def __init__(
        self, processor: ImageProcessor, vision: VisionSpec, dtype: str, limits: MediaLimits, revision: str,
        cache: PreparedCache,
    ) -> None:  # fmt: skip
        """`dtype`: name of the dtype of patches. `revision`: the model's, which is part of every key."""
        self._processor, self._vision, self._dtype, self._limits = processor, vision, dtype, limits
        self._cache = cache
        self._seed = hashlib.sha256(f"{revision}|{dtype}|{vision}".encode()).digest()
        self._lock = Lock()
        self._counts: dict[str, float] = defaultdict(float)

    def prepare(self, source: MediaSource, salt: bytes) -> PreparedItem:
        """The patches of an image or video, from the cache if they are there. Raises InvalidArgument with the field at
        fault."""
        watch, digests = Stopwatch(), _digests(source)
        file = self._file_key(source, salt, digests)
        item = self._cache.get(file)
        if item is not None:
            return replace(item, field=source.field)
        try:
            if isinstance(source, Video):
                item = self._video(source, salt, digests, watch)
            else:
                item = replace(self._processor.image(source.data, watch), field=source.field, key=file)
            self._cache.put(file, item)
            return item
        except ImageError as error:
            kind = "VIDEO" if isinstance(source, Video) else "IMAGE"
            raise errors.InvalidArgument(
                f"{source.field}: {error}", field=source.field,
                reason=f"{kind}_TOO_LARGE" if error.too_large else f"{kind}_DECODE_FAILED",
            ) from error  # fmt: skip
        except ValueError as error:
            raise errors.InvalidArgument(f"{source.field}: {error}", field=source.field) from error
        finally:
            self._count(source, watch)

    def sampled(self, source: MediaSource) -> MediaSource:
        """Drops, from a video given as frames, those that will not be sampled, so that they are not fetched."""
        if not isinstance(source, Video) or not source.elsewhere or not source.frames:
            return source
        rule = self._vision.video_rule
        if rule is None:  # rejected later, with the field's name
            return source
        wanted = set(rule.sample(len(source.frames), self._most_frames(source)))
        frames = (
            frame if index in wanted or not frame.elsewhere else Image(b"", frame.field)
            for index, frame in enumerate(source.frames)
        )
        return Video(source.data, source.field, frames=tuple(frames), fps=source.fps, max_frames=source.max_frames)

    def most_bytes(self, source: MediaSource) -> int:
        """Upper bound on the bytes of the patches of an image or video, before its file is read."""
        frames = self._most_frames(source) if isinstance(source, Video) else None
        return most_bytes(self._vision, self._dtype, frames)

    def forget(self) -> None:
        """Empties the cache of prepared files."""
        self._cache.clear()

    def stats(self) -> dict[str, float]:
        """Images, videos and frames since the start, and the seconds spent in each stage."""
        names = ("images", "videos", "frames", "decode_seconds", "resize_seconds", "patch_seconds")
        with self._lock:
            return {name: self._counts[name] for name in names} | self._cache.stats()

    def _count(self, source: MediaSource, watch: Stopwatch) -> None:
        with self._lock:
            self._counts["videos" if isinstance(source, Video) else "images"] += 1
            self._counts["frames"] += watch.frames
            for stage, seconds in watch.seconds.items():
                self._counts[f"{stage}_seconds"] += seconds

    def _video(self, source: Video, salt: bytes, digests: Sequence[bytes], watch: Stopwatch) -> PreparedItem:
        most, wanted = self._limits.video_frames, self._most_frames(source)
        if not 1 <= wanted <= most:
            raise ValueError(f"max_frames is {wanted}; it must be from 1 to {most}")
        rule = video_rule(self._vision)
        if source.frames:
            self._check_frames(source)
            indices = rule.sample(len(source.frames), wanted)
            files = [source.frames[index].data for index in indices]
            item = self._processor.frames(list(zip(indices, files, strict=True)), watch)
            dated, fps, digests = len(indices) < len(source.frames), source.fps, [digests[i] for i in indices]
            kind = "frames"
        else:
            video = self._processor.video(source.data, wanted, watch)
            indices = rule.sample_file(video.total, wanted, lambda: video.fps)
            item, dated, fps = video.item, True, video.fps
            kind = "video"  # the first frame of an animation may differ from its file's image
        labels = rule.labels(len(indices), fps=fps, indices=indices if dated else None)
        key = self._key(salt, f"{kind}{len(indices)}".encode(), *digests)
        return replace(item, field=source.field, key=key, labels=tuple(labels), frames=len(indices))

    def _most_frames(self, source: Video) -> int:
        """Largest number of frames that are sampled."""
        return self._limits.video_frames if source.max_frames is None else source.max_frames

    def _check_frames(self, source: Video) -> None:
        limits = self._limits.video
        limits.check_bytes(sum(len(frame.data) for frame in source.frames))
        limits.check(len(source.frames), 1, 1)

    def _file_key(self, source: MediaSource, salt: bytes, digests: Sequence[bytes]) -> bytes:
        """A hash of everything on which the prepared item depends. For an image it is also the key of its rows. A video
        has another key for its rows, which are the same for videos that differ only in frames that are not sampled."""
        if isinstance(source, Video):
            asked = f"video file {source.max_frames} {source.fps} {len(source.frames)}".encode()
            return self._key(salt, asked, *digests)
        return self._key(salt, b"image", *digests)

    def _key(self, salt: bytes, kind: bytes, *digests: bytes) -> bytes:
        """A key, computed here and not by the decoding worker: it must belong to the bytes that this client sent."""
        return hashlib.sha256(self._seed + len(salt).to_bytes(4, "big") + salt + kind + b"".join(digests)).digest()


def _digests(source: MediaSource) -> list[bytes]:
    """Hashes of the file's content, or of each frame of a video that came as images."""
    frames = source.frames if isinstance(source, Video) else ()
    return [hashlib.sha256(part.data).digest() for part in frames or (source,)]


class Preparation:
    """Prepares the prompts of one model. Used on one event loop."""

    def __init__(
        self,
        info: EngineInfo,
        assets: ModelAssets,
        limits: FrontendLimits,
        processor: ImageProcessor | None,
        workers: int,
    ) -> None:
        """`workers`: threads that wait for image workers. `processor` is closed with this object; only a model without
        images needs none."""
        assert processor is not None or assets.vision is None
        self._info, self._assets, self._limits, self._processor = info, assets, limits, processor
        self._text = ThreadPoolExecutor(TEXT_WORKERS, thread_name_prefix="saccade-text")
        # Separate threads, so that slow images do not delay text.
        self._media = MediaThreads(workers)
        self._gate = ByteGate(limits.prepared_bytes)
        self._longest = assets.tokenizer.longest if assets.tokenizer is not None else 1
        self._preparer: Preparer | None = None
        if processor is not None and assets.vision is not None:
            cache = PreparedCache(limits.prepared_cache_bytes)
            self._preparer = Preparer(processor, assets.vision, info.dtype, limits.media, info.revision, cache)

    def close(self) -> None:
        if self._processor is not None:
            self._processor.close()
        self._media.close()
        if self._preparer is not None:
            self._preparer.forget()
        self._text.shutdown(wait=True, cancel_futures=True)

    def stats(self) -> dict[str, float]:
        """Counters of prepared images and clips, seconds by stage, and the bytes that they hold now."""
        counts = self._preparer.stats() if self._preparer is not None else {}
        lost = self._processor.stats() if self._processor is not None else {}
        return {**counts, **lost, "held_bytes": self._gate.used}

    def in_thread(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Runs text work in a thread of its own pool: it may take longer than a millisecond, but not as long as an
        image."""
        return asyncio.get_running_loop().run_in_executor(self._text, functools.partial(function, *arguments))

    @asynccontextmanager
    async def prompt(
        self, spec: GenerateSpec, salt: bytes, resolve: Resolver, cancelled: asyncio.Future[None]
    ) -> AsyncIterator[tuple[Prompt, Grant]]:
        """Yields the request's prompt, and a grant for the memory of its pixels, which is released at the end of the
        context at the latest. Raises StatusError, and Cancelled as soon as `cancelled` is done; files whose decoding
        has begun then keep their memory until its end."""
        self._check(spec)
        if not spec.media and _weight(spec) <= _LIGHT:  # nothing to wait for
            prompt, grant = await self._granted(spec, salt, resolve)
        else:
            prompt, grant = await self._granted_unless(cancelled, spec, salt, resolve)
        try:
            yield prompt, grant
        finally:
            grant.release()

    async def _granted_unless(
        self, cancelled: asyncio.Future[None], spec: GenerateSpec, salt: bytes, resolve: Resolver
    ) -> tuple[Prompt, Grant]:
        """Raises Cancelled as soon as `cancelled` is done."""
        making = asyncio.create_task(self._granted(spec, salt, resolve))
        either: set[asyncio.Future[Any]] = {making, cancelled}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            making.add_done_callback(_drop)
            await _end([making])
            raise
        if not making.done():
            making.add_done_callback(_drop)
            making.cancel()
            raise errors.Cancelled("the request was cancelled")
        return making.result()

    async def _granted(self, spec: GenerateSpec, salt: bytes, resolve: Resolver) -> tuple[Prompt, Grant]:
        expected = 0 if self._preparer is None else sum(map(self._preparer.most_bytes, spec.media))
        grant = await self._gate.acquire(expected)
        try:
            prompt = await self._make(spec, salt, resolve)
        except BaseException:
            grant.release()
            raise
        grant.shrink(prompt.pixel_bytes)
        return prompt, grant

    def _check(self, spec: GenerateSpec) -> None:
        """Checks that need no decoding. Raises StatusError."""
        name = self._assets.config.name
        if spec.model not in ("", name):
            raise errors.NotFound(f"no model {spec.model!r}; this server has {name!r}", field="model")
        check_counts(spec, self._limits)
        check_size(spec, self._limits, self._info.max_len, self._longest)
        if spec.media and self._preparer is None:
            raise errors.FailedPrecondition(f"{name} takes no images", field=spec.media[0].field)
        clips = [source.field for source in spec.media if isinstance(source, Video)]
        if clips and not self._info.takes_video:
            raise errors.FailedPrecondition(f"{name} takes no videos", field=clips[0])

    async def _make(self, spec: GenerateSpec, salt: bytes, resolve: Resolver) -> Prompt:
        if any(source.elsewhere for source in spec.media):
            if self._preparer is not None:
                spec = replace(spec, media=tuple(map(self._preparer.sampled, spec.media)))
            spec = await resolve(spec, salt)
        media: list[PreparedItem] = []
        if self._preparer is not None:
            media = await self._media.map(functools.partial(self._preparer.prepare, salt=salt), spec.media, salt)
        if isinstance(spec.input, ImageInput):
            return self._image_alone(media[0])
        if _weight(spec) > _LIGHT:
            return await self.in_thread(self._prompt_of, spec, media)
        return self._prompt_of(spec, media)

    def _prompt_of(self, spec: GenerateSpec, media: Sequence[PreparedItem]) -> Prompt:
        check_ids("continued_token_ids", spec.continued, self._assets)
        ids = prompt_ids(spec, media, self._assets)
        shared = system_end(spec, ids, self._assets)
        prompt = widen(ids, media, len(spec.continued), self._assets, self._info)
        prompt.system_end = shared
        return prompt

    def _image_alone(self, item: PreparedItem) -> Prompt:
        """An image without a prompt, checked against the handoff and the message size."""
        check_room(item, self._info)
        tokens = item.layout.tokens
        size = tokens * self._assets.config.decoder.hidden_size * 4
        if size > self._limits.max_answer_bytes:
            raise errors.InvalidArgument(
                f"{item.field} has {size} bytes of embeddings; a message of this server holds at most "
                f"{self._limits.max_answer_bytes}", field=item.field, reason="IMAGE_TOO_LARGE",
            )  # fmt: skip
        ids = [self._assets.image_token_id or 0] * tokens
        return Prompt(ids, (item,), tuple(ids[:1]))


def _weight(spec: GenerateSpec) -> int:
    """Cost of processing the request's text, in characters."""
    parts, ids, in_arguments = 0, len(spec.continued), 0
    match spec.input:
        case ChatInput(messages, arguments):
            parts = sum(1 + len(message.parts) for message in messages)
            in_arguments = _argument_characters(arguments)
        case TokensInput(given):
            ids += len(given)
    return characters(spec) + in_arguments + _PART * parts + ids // _IDS


def _argument_characters(arguments: Mapping[str, Any]) -> int:
    """Characters of a template's arguments; names and other values count as a few."""
    count, rest = 0, [*arguments.values()]
    while rest:
        value = rest.pop()
        count += len(value) if isinstance(value, str) else _IDS
        if isinstance(value, Mapping):
            rest += value.values()
        elif isinstance(value, list):
            rest += value
    return count
