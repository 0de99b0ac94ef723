"""Turns images and videos into patches in worker processes (`service.media.image_worker`), which hostile files may
crash.

A worker that dies, takes too long or sends an invalid reply is replaced, and its file is rejected like any other that
cannot be decoded. The worker writes the patches to a sealed memory file; only its size and seals are checked here, and
its descriptor is passed on.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from encoder.item import IMAGE, ROW_MAJOR, VIDEO, Grid, ItemDescription
from encoder.media_limits import ImageError, ImageHeader, VideoError
from encoder.stopwatch import Stopwatch
from encoder.tower import patch_order
from families import SlicingRule, VisionSpec
from service.common import errors
from service.media.images import LENGTH, Frame, MediaLimits, PreparedVideo, most_bytes, video_rule
from service.media.prepared import MemoryFile, PreparedItem

log = logging.getLogger(__name__)

START_SECONDS = 60.0
MAX_REPLY = 64 * 1024
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "TMPDIR")
"""Environment variables that a worker gets; others may be secrets."""
_REASONS = {
    "time": "decoding it took longer than the {seconds:g} s that are allowed",
    "died": "its decoder died of it",
    "nonsense": "its decoder broke",
}


class _Lost(Exception):
    """The worker can no longer be used; `why` is one of `_REASONS`."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class _NotStarted(Exception):
    """No worker process could be started, for reasons other than the file; the text gives the reason."""


class _Worker:
    """One worker process, started again when needed after it has ended. Used by one thread at a time, except that any
    may end it."""

    def __init__(self, greeting: dict[str, Any]) -> None:
        self._greeting = greeting
        self._life = threading.RLock()
        """Held while the process is started or stopped: a second signal closes the pool from another thread, while the
        first one does."""
        self._ended = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._greeted = False
        self._file: MemoryFile | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the process, unless there is one, without waiting until it is ready. Raises _NotStarted."""
        with self._life:
            if self._ended:
                raise _NotStarted("the server is stopping")
            if self._process is not None and self._process.poll() is None:
                return
            self.stop()
            try:
                self._launch()
            except OSError as error:
                self.stop()
                raise _NotStarted(error.strerror or str(error)) from error

    def _launch(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._greeted = False
        with theirs:
            root = str(Path(__file__).resolve().parent.parent.parent)
            path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "service.media.image_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**_environment(), "PYTHONPATH": path},
            )
            with suppress(_Lost):  # the thread that waits for its answer notices
                self._send(self._greeting, b"", START_SECONDS)

    def stop(self) -> None:
        """Kills the process. Idempotent."""
        with self._life:
            self._file = None
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None

    def end(self) -> None:
        """Kills the process and starts no other. Idempotent; may be called from any thread."""
        with self._life:
            self._ended = True
            self.stop()

    def _open(self) -> socket.socket:
        """The connection. Raises _Lost if another thread has ended the process."""
        if (connection := self._connection) is None:
            raise _Lost("died")
        return connection

    def take_file(self) -> MemoryFile:
        """The memory file that came with the last reply. Raises _Lost."""
        file, self._file = self._file, None
        if file is None:
            raise _Lost("nonsense")
        return file

    def ask(self, command: dict[str, Any], data: bytes, seconds: float) -> dict[str, Any]:
        """Sends a command and returns the reply. Raises _Lost, or _NotStarted if the worker could not be started."""
        self.start()
        if not self._greeted:
            try:
                self._receive(START_SECONDS)
            except _Lost as lost:
                raise _NotStarted(f"it was lost while starting ({lost.why})") from lost
            self._greeted = True
        self._send({**command, "seconds": seconds, "size": len(data)}, data, seconds)
        return self._receive(seconds)

    def _send(self, command: dict[str, Any], data: bytes, seconds: float) -> None:
        connection, words = self._open(), json.dumps(command).encode()
        try:
            connection.settimeout(seconds)
            connection.sendall(LENGTH.pack(len(words)) + words)
            connection.sendall(data)
        except TimeoutError:
            raise _Lost("time") from None
        except OSError:
            raise _Lost("died") from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        try:
            (length,) = LENGTH.unpack(self._length(deadline))
            if length > MAX_REPLY:
                raise _Lost("nonsense")
            reply = json.loads(self._exactly(length, deadline))
            if not isinstance(reply, dict):
                raise _Lost("nonsense")
            return reply
        except TimeoutError:
            raise _Lost("time") from None
        except OSError:
            raise _Lost("died") from None
        except ValueError:
            raise _Lost("nonsense") from None

    def _length(self, deadline: float) -> bytes:
        """Receives the bytes of a length, and the descriptor that may come with them."""
        connection = self._open()
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        data, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, 1, socket.MSG_CMSG_CLOEXEC)
        self._file = MemoryFile(descriptors[0]) if descriptors else None
        if not data:
            raise _Lost("died")
        return data + self._exactly(LENGTH.size - len(data), deadline)

    def _exactly(self, size: int, deadline: float) -> bytes:
        connection, data = self._open(), b""
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
            part = connection.recv(size - len(data))
            if not part:
                raise _Lost("died")
            data += part
        return data


class ImagePool:
    """An `ImageProcessor` over `workers` processes. Thread-safe; a thread waits while all are busy."""

    def __init__(
        self, limits: MediaLimits, workers: int, *, image_seconds: float, video_seconds: float,
        vision: VisionSpec | None = None, dtype: str = "float32",
    ) -> None:  # fmt: skip
        """`image_seconds`, `video_seconds`: time limits for preparing an image, and a whole video. `vision`, `dtype`:
        the model's rules (None if it takes no images) and the dtype of patches by name."""
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
        self.workers = [_Worker(greeting) for _ in range(workers)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in reversed(self.workers):
            self._idle.put(worker)
        self._lock = threading.Lock()
        self._closed = False
        self._lost: Counter[str] = Counter(dict.fromkeys(_REASONS, 0))

    def _most_patches(self, limits: MediaLimits) -> int:
        """Bytes of the largest item."""
        if self._vision is None:
            return 0
        video = 0 if self._vision.video_rule is None else most_bytes(self._vision, "float32", limits.video_frames)
        return max(video, most_bytes(self._vision, "float32", None))

    def start(self) -> None:
        """Starts the processes without waiting for them: each needs over a second, which no image should wait for."""
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
            fps = fps if isinstance(fps, float) and 1e-9 < fps < math.inf else None
            assert self._vision is not None
            wanted = video_rule(self._vision).sample_file(total, frames, lambda: fps)
            if item.layout.num_frames != len(wanted):
                raise _Lost("nonsense")
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
                    raise _Lost("nonsense")
                _check(reply)
            item = self._item(worker, reply, VIDEO, watch)
            if item.layout.num_frames != len(files):
                raise _Lost("nonsense")
            watch.frames += len(files)
            return item

    def describe(self, data: bytes) -> ImageHeader:
        # Nothing is decoded for it, so it gets less time than a video.
        with self._borrowed(self._image_seconds, ImageError) as worker:
            reply = worker.ask({"op": "describe"}, data, self._image_seconds)
            _check(reply)
            width, height = _number(reply, "width"), _number(reply, "height")
            return ImageHeader(str(reply.get("format"))[:16], width, height, str(reply.get("mode"))[:16])

    def close(self) -> None:
        """Ends all processes; files that are being decoded are refused. Idempotent; may be called from any thread."""
        self._closed = True
        for worker in self.workers:
            worker.end()

    @contextmanager
    def _borrowed(self, seconds: float, kind: Callable[[str], ImageError]) -> Iterator[_Worker]:
        """A worker for one file. If the worker is lost, the file is rejected with `kind`; if none can be started,
        raises Unavailable."""
        worker = self._idle.get()
        try:
            if self._closed:
                raise _NotStarted("the server is stopping")
            yield worker
        except _NotStarted as error:
            worker.stop()
            log.error("no image worker: %s", error)
            raise errors.Unavailable(
                f"no process to decode images could be started: {error}", reason="NO_IMAGE_WORKER", retry_after=1.0
            ) from error
        except _Lost as lost:
            with self._lock:
                self._lost[lost.why] += 1
            log.warning("an image worker is replaced: %s", lost.why)
            worker.stop()
            self._restart(worker)
            raise kind(_REASONS[lost.why].format(seconds=seconds)) from lost
        finally:
            self._idle.put(worker)

    def _restart(self, worker: _Worker) -> None:
        """Starts the worker before the next file needs it; if that fails, the next file tries again and gets the
        error."""
        if not self._closed:
            try:
                worker.start()
            except _NotStarted as error:
                log.error("no image worker: %s", error)

    def _item(self, worker: _Worker, reply: dict[str, Any], kind: str, watch: Stopwatch) -> PreparedItem:
        """The item that a worker has made, after checking that its description fits the model and its file the
        description."""
        _check(reply)
        assert self._vision is not None
        file, found = worker.take_file(), _description(reply.get("item"))
        pruning = video_rule(self._vision).pruning_rate if kind == VIDEO else 0.0
        told = (found.kind, found.width, found.merge_size, found.pruning_rate, found.order)
        vision = self._vision
        if told != (kind, vision.patch_widths[kind], vision.merge_size, pruning, patch_order(vision)):
            raise _Lost("nonsense")
        sliced = found.num_slices > 0 and isinstance(vision.image_rule, SlicingRule)
        whole = found.num_frames == 0 and (found.num_sequences == 1 or sliced)
        several = 1 <= found.num_sequences <= found.num_frames
        if not (several if kind == VIDEO else whole) or found.dtype not in (self._dtype, "uint8"):
            raise _Lost("nonsense")
        if not file.is_sealed(found.nbytes):
            raise _Lost("nonsense")
        seconds = reply.get("seconds")
        for stage in ("decode", "resize", "patch"):
            value = seconds.get(stage, 0.0) if isinstance(seconds, dict) else None
            if type(value) is not float or not 0 <= value < 1e6:
                raise _Lost("nonsense")
            watch.seconds[stage] += value  # type: ignore[assignment]
        return PreparedItem(found, file)


def _environment() -> dict[str, str]:
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**passed_on, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _check(reply: dict[str, Any]) -> None:
    """Raises the error that a reply describes."""
    if "error" not in reply:
        return
    words, too_large = str(reply["error"])[:400], reply.get("too_large") is True
    match reply.get("kind"):
        case "video":
            raise VideoError(words, too_large=too_large)
        case "value":
            raise ValueError(words)
        case "memory":
            raise errors.Unavailable(
                f"no shared memory for the request's images: {words}", reason="SHARED_MEMORY_FULL", retry_after=1.0
            )
    raise ImageError(words, too_large=too_large)


def _description(value: Any) -> ItemDescription:
    """Parses an item's description. Raises _Lost where it is invalid."""
    names = {field.name: field.type for field in fields(ItemDescription)}
    if not isinstance(value, dict):
        raise _Lost("nonsense")
    value = {"order": ROW_MAJOR, "slices": [0, 0], "slice_grid": [0, 0], **value}
    if value.keys() != names.keys():
        raise _Lost("nonsense")
    grids = {name: _grid(value[name]) for name, kind in names.items() if kind == "Grid"}
    kinds = {"int": (int,), "float": (int, float), "str": (str,)}
    if any(type(value[name]) not in kinds[str(kind)] for name, kind in names.items() if name not in grids):
        raise _Lost("nonsense")
    if min(grids["grid"]) < 1:
        raise _Lost("nonsense")
    try:
        found = ItemDescription(**{**value, **grids})
        found.tokens  # noqa: B018  raises for a ragged grid
        return found
    except (ValueError, OverflowError):
        raise _Lost("nonsense") from None


def _grid(value: Any) -> Grid:
    if not isinstance(value, list) or len(value) != 2 or any(type(side) is not int or side < 0 for side in value):
        raise _Lost("nonsense")
    return value[0], value[1]


def _number(reply: dict[str, Any], name: str) -> int:
    value = reply.get(name)
    if type(value) is not int or not 1 <= value < 2**63:  # families compute with it in floats
        raise _Lost("nonsense")
    return value
