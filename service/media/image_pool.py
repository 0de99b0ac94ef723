"""Turns images and videos into patches in worker processes (`service.media.image_worker`), which hostile files may
crash.

A worker that dies, takes too long or sends an invalid reply is replaced, and the file is rejected like any other that
cannot be decoded. The worker writes the patches to a sealed memory file. This process checks only the size and seals of
the memory file and passes its descriptor on.
"""

from __future__ import annotations

import base64
import logging
import pickle
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any

from encoder.item import IMAGE, VIDEO, Grid, ItemDescription
from encoder.media_limits import ImageError, ImageHeader, VideoError, known_rate
from encoder.stopwatch import Stopwatch
from encoder.tower import patch_order
from families import CutsSlices, VisionSpec
from service.common import errors
from service.media.images import Frame, MediaLimits, PreparedVideo, most_bytes, video_rule
from service.media.prepared import PreparedItem
from service.media.worker_processes import ForkServer, Lost, NotStarted, Worker

log = logging.getLogger(__name__)

_REASONS = {
    "time": "decoding took longer than the allowed {seconds:g} s",
    "died": "the decoder crashed on this file",
    "nonsense": "the decoder returned an invalid result for this file",
}
"""Why a worker was lost -> the message for the client."""


class ImagePool:
    """An `ImageProcessor` with `workers` processes. Thread-safe; a thread waits while all processes are busy. Requests
    have no more threads than there are processes, so only those that read headers of uploads may wait here for long."""

    def __init__(
        self, limits: MediaLimits, workers: int, *, image_seconds: float, video_seconds: float,
        vision: VisionSpec | None = None, dtype: str = "float32",
    ) -> None:  # fmt: skip
        """`image_seconds`, `video_seconds`: time limits for preparing an image and a whole video. `vision`: the model's
        rules; None if it takes no images. `dtype`: name of the dtype of patches."""
        self._vision, self._dtype = vision, dtype
        self._image_seconds, self._video_seconds = image_seconds, video_seconds
        greeting = {
            "op": "limits",
            "image": asdict(limits.image),
            "video": asdict(limits.video),
            "memory_bytes": limits.worker_bytes + 4 * self._most_patches(limits),
            "vision": None if vision is None else base64.b64encode(pickle.dumps(vision)).decode(),
            "dtype": dtype,
        }
        self._fork_server = ForkServer(greeting)
        self.workers = [Worker(self._fork_server) for _ in range(workers)]
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in reversed(self.workers):
            self._idle.put(worker)
        self._lock = threading.Lock()
        self._closed = False
        self._lost: Counter[str] = Counter(dict.fromkeys(_REASONS, 0))

    def _most_patches(self, limits: MediaLimits) -> int:
        """Bytes of the patches of the largest image or video, in float32."""
        if self._vision is None:
            return 0
        video = 0 if self._vision.video_rule is None else most_bytes(self._vision, "float32", limits.video_frames)
        return max(video, most_bytes(self._vision, "float32", None))

    def start(self) -> None:
        """Starts the processes, without waiting for them. Their imports take over a second, for which no image should
        have to wait. A model that takes no images has none to prepare: its processes start with the first upload.
        Idempotent."""
        if self._vision is not None:
            for worker in self.workers:
                self._restart(worker)

    def stats(self) -> dict[str, float]:
        """Number of workers that have been replaced, by reason."""
        with self._lock:
            return {f"workers_lost_{reason}": float(count) for reason, count in self._lost.items()}

    def image(self, data: bytes, watch: Stopwatch) -> PreparedItem:
        with self._borrowed(self._image_seconds, ImageError) as worker:
            return self._item(worker, worker.ask({"op": "image"}, data, self._image_seconds), IMAGE, watch)

    def video(self, data: bytes, frames: int, watch: Stopwatch) -> PreparedVideo:
        with self._borrowed(self._video_seconds, VideoError) as worker:
            reply = worker.ask({"op": "video", "frames": frames}, data, self._video_seconds)
            item = self._item(worker, reply, VIDEO, watch)
            total, fps = _number(reply, "total"), reply.get("fps")
            fps = known_rate(fps if isinstance(fps, float) else None)
            assert self._vision is not None
            wanted = video_rule(self._vision).sample_file(total, frames, lambda: fps)
            if item.layout.num_frames != len(wanted):
                raise Lost("nonsense")
            watch.frames += len(wanted)
            return PreparedVideo(item, total, fps)

    def frames(self, files: Sequence[Frame], watch: Stopwatch) -> PreparedItem:
        index = 0

        def refused(words: str) -> VideoError:
            return VideoError(f"frame {index}: {words}")

        with self._borrowed(self._image_seconds, refused) as worker:
            for place, (index, data) in enumerate(files):
                command = {"op": "frame", "index": index} if place else {"op": "frames", "index": index}
                reply = worker.ask({**command, "count": len(files)}, data, self._image_seconds)
                if (place + 1 < len(files)) != (reply.get("wanted") is True) and "error" not in reply:
                    raise Lost("nonsense")
                _check(reply)
            item = self._item(worker, reply, VIDEO, watch)
            if item.layout.num_frames != len(files):
                raise Lost("nonsense")
            watch.frames += len(files)
            return item

    def describe(self, data: bytes) -> ImageHeader:
        # Nothing is decoded here, so the time limit is that of images, also for videos.
        with self._borrowed(self._image_seconds, ImageError) as worker:
            reply = worker.ask({"op": "describe"}, data, self._image_seconds)
            _check(reply)
            width, height = _number(reply, "width"), _number(reply, "height")
            return ImageHeader(str(reply.get("format"))[:16], width, height, str(reply.get("mode"))[:16])

    def close(self) -> None:
        """Ends all processes; files that are being decoded are rejected. Idempotent; may be called from any thread."""
        self._closed = True
        for worker in self.workers:
            worker.end()
        self._fork_server.close()

    @contextmanager
    def _borrowed(self, seconds: float, kind: Callable[[str], ImageError]) -> Iterator[Worker]:
        """A worker for one file. If the worker is lost, raises `kind(message)`; if no worker can be started, raises
        Unavailable."""
        worker = self._idle.get()
        try:
            if self._closed:
                raise NotStarted("the server is stopping")
            yield worker
        except NotStarted as error:
            worker.stop()
            log.error("no image worker: %s", error)
            raise errors.Unavailable(
                f"no process to decode images could be started: {error}", reason="NO_IMAGE_WORKER", retry_after=1.0
            ) from error
        except Lost as lost:
            with self._lock:
                self._lost[lost.why] += 1
            log.warning("an image worker was lost (%s) and is replaced", lost.why)
            worker.stop()
            self._restart(worker)
            raise kind(_REASONS[lost.why].format(seconds=seconds)) from lost
        finally:
            self._idle.put(worker)

    def _restart(self, worker: Worker) -> None:
        """Starts the worker before the next file needs it. If that fails, the next file tries again and gets the
        error."""
        if not self._closed:
            try:
                worker.start()
            except NotStarted as error:
                log.error("no image worker: %s", error)

    def _item(self, worker: Worker, reply: dict[str, Any], kind: str, watch: Stopwatch) -> PreparedItem:
        """The item that a worker has made, after checks that its description is possible for the model and that its
        file matches the description. Raises Lost and Unavailable."""
        _check(reply)
        assert self._vision is not None
        try:
            file = worker.take_file()
        except OSError as error:
            raise _no_memory(error.strerror or "no descriptor") from error
        found = _description(reply.get("item"))
        pruning = video_rule(self._vision).pruning_rate if kind == VIDEO else 0.0
        told = (found.kind, found.width, found.merge_size, found.pruning_rate, found.order)
        vision = self._vision
        if told != (kind, vision.patch_widths[kind], vision.merge_size, pruning, patch_order(vision)):
            raise Lost("nonsense")
        # The prompt gets words for each slice, so their number must be one that the model's rule makes.
        rule = video_rule(vision) if kind == VIDEO else vision.image_rule
        most, slices_first = (rule.most_slices, rule.slices_first) if isinstance(rule, CutsSlices) else (0, False)
        if found.num_slices > most or found.slices_first != (slices_first and found.num_slices > 0):
            raise Lost("nonsense")
        one = found.num_frames == 0 and found.num_groups == 1
        several = 1 <= found.num_groups <= found.num_frames
        if not (several if kind == VIDEO else one) or found.dtype not in (self._dtype, "uint8"):
            raise Lost("nonsense")
        if not file.is_sealed(found.nbytes):
            raise Lost("nonsense")
        seconds = reply.get("seconds")
        for stage in ("decode", "resize", "patch"):
            value = seconds.get(stage, 0.0) if isinstance(seconds, dict) else None
            if type(value) is not float or not 0 <= value < 1e6:
                raise Lost("nonsense")
            watch.seconds[stage] += value  # type: ignore[assignment]
        return PreparedItem(found, file)


def _check(reply: dict[str, Any]) -> None:
    """Raises the error that a reply describes, if it describes one."""
    if "error" not in reply:
        return
    # Halves of surrogate pairs, which JSON may contain, could not be sent to the client.
    words = str(reply["error"])[:400].encode(errors="replace").decode()
    too_large = reply.get("too_large") is True
    match reply.get("kind"):
        case "video":
            raise VideoError(words, too_large=too_large)
        case "value":
            raise ValueError(words)
        case "memory":
            raise _no_memory(words)
    raise ImageError(words, too_large=too_large)


def _no_memory(words: str) -> errors.Unavailable:
    return errors.Unavailable(
        f"no shared memory for the request's images: {words}", reason="SHARED_MEMORY_FULL", retry_after=1.0
    )


def _description(value: Any) -> ItemDescription:
    """Parses an item's description. Raises Lost if it is invalid."""
    names = {field.name: field.type for field in fields(ItemDescription)}
    if not isinstance(value, dict) or value.keys() != names.keys():
        raise Lost("nonsense")
    grids = {name: _grid(value[name]) for name, kind in names.items() if kind == "Grid"}
    kinds = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
    if any(type(value[name]) not in kinds[str(kind)] for name, kind in names.items() if name not in grids):
        raise Lost("nonsense")
    try:
        found = ItemDescription(**{**value, **grids})
        found.tokens  # noqa: B018  raises for a ragged grid
        return found
    except (ValueError, OverflowError):
        raise Lost("nonsense") from None


def _grid(value: Any) -> Grid:
    if not isinstance(value, list) or len(value) != 2 or any(type(side) is not int or side < 0 for side in value):
        raise Lost("nonsense")
    return value[0], value[1]


def _number(reply: dict[str, Any], name: str) -> int:
    value = reply.get(name)
    if type(value) is not int or not 1 <= value < 2**63:  # families convert it to float
        raise Lost("nonsense")
    return value
