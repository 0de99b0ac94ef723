"""Decoding in processes of its own (`service.media.image_worker`), which hostile files may bring down.

A worker that dies, takes too long or talks nonsense is replaced, and the file that it was decoding is refused like any
other that cannot be decoded. Pixels come back in a memory file that both ends map once and use again and again: fresh
memory for each picture would cost more than decoding a small one.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from encoder.frames import Clip, VideoError
from encoder.images import ImageError, ImageHeader, Pixels
from service.common import errors
from service.media.image_worker import LENGTH
from service.media.images import MediaLimits

log = logging.getLogger(__name__)

START_SECONDS = 60.0
MAX_REPLY = 64 * 1024
KEPT_BYTES = 16 << 20
"""Of pixels: what a worker's memory file holds on to between two pictures."""
_CHANNELS = 3
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "TMPDIR")
"""Variables that a worker may see: others may be secrets."""
_REASONS = {
    "time": "decoding it took longer than the {seconds:g} s that are allowed",
    "died": "its decoder died of it",
    "nonsense": "its decoder broke",
}


class _Lost(Exception):
    """The worker is of no more use; `why` is one of `_REASONS`."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class _NotStarted(Exception):
    """There is no process, for which no file is to blame; the text says what is missing."""


class _Worker:
    """One process, started when it is first needed and again after its end. Used by one thread at a time."""

    def __init__(self, limits: dict[str, Any], most_pixels: int) -> None:
        self._limits, self._size = limits, most_pixels * _CHANNELS
        self._memory: mmap.mmap | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._greeted = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Begins to start the process, unless there is one; does not wait until it is ready. Raises _NotStarted."""
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
        with theirs, open(os.memfd_create("saccade-picture", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "rb") as file:
            descriptor = file.fileno()
            os.ftruncate(descriptor, self._size)
            # Without the seals, the other end could shrink it under this end's mapping, which would be the end of both.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(descriptor, self._size)
            root = str(Path(__file__).resolve().parent.parent.parent)
            path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "service.media.image_worker", str(theirs.fileno()), str(descriptor)],
                pass_fds=[theirs.fileno(), descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**_environment(), "PYTHONPATH": path},
            )

    def stop(self) -> None:
        """Ends the process at once. Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._memory is not None:
            with suppress(BufferError):  # a thread is copying out of it, and is its last holder then
                self._memory.close()
            self._memory = None

    def pixels(self, height: int, width: int) -> Pixels:
        """A copy of what the last reply spoke of. Raises _Lost."""
        size = height * width * _CHANNELS
        if self._memory is None or size > self._size:
            raise _Lost("nonsense")
        found = np.frombuffer(self._memory, np.uint8, size).reshape(height, width, _CHANNELS).copy()
        if size > KEPT_BYTES:
            self._memory.madvise(mmap.MADV_REMOVE)  # what a large picture took is not kept for small ones
        return found

    def ask(self, command: dict[str, Any], data: bytes, seconds: float) -> dict[str, Any]:
        """The reply. Raises _Lost, or _NotStarted before the file was sent."""
        self.start()
        if not self._greeted:
            try:
                self._send({"op": "limits", **self._limits}, b"", START_SECONDS)
                self._receive(START_SECONDS)
            except _Lost as lost:
                raise _NotStarted(f"it was lost while starting ({lost.why})") from lost
            self._greeted = True
        self._send({**command, "seconds": seconds, "size": len(data)}, data, seconds)
        return self._receive(seconds)

    def _send(self, command: dict[str, Any], data: bytes, seconds: float) -> None:
        assert self._connection is not None
        words = json.dumps(command).encode()
        self._connection.settimeout(seconds)
        try:
            self._connection.sendall(LENGTH.pack(len(words)) + words)
            self._connection.sendall(data)
        except TimeoutError:
            raise _Lost("time") from None
        except OSError:
            raise _Lost("died") from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        try:
            (length,) = LENGTH.unpack(self._exactly(LENGTH.size, deadline))
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

    def _exactly(self, size: int, deadline: float) -> bytes:
        assert self._connection is not None
        data = b""
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            part = self._connection.recv(size - len(data))
            if not part:
                raise _Lost("died")
            data += part
        return data


class PicturePool:
    """A `Decoder` over `workers` processes. Thread-safe; a thread waits while all are busy."""

    def __init__(self, limits: MediaLimits, workers: int, *, image_seconds: float, video_seconds: float) -> None:
        """`image_seconds`, `video_seconds`: what decoding one picture, and all of one clip, may take."""
        self._limits = limits
        self._image_seconds, self._video_seconds = image_seconds, video_seconds
        sent = {
            "image": asdict(limits.image),
            "video": asdict(limits.video),
            "file": asdict(limits.file),
            "memory_bytes": limits.worker_bytes,
        }
        self.workers = [_Worker(sent, limits.frame.max_pixels) for _ in range(workers)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in reversed(self.workers):
            self._idle.put(worker)
        self._lock = threading.Lock()
        self._closed = False
        self._lost: Counter[str] = Counter(dict.fromkeys(_REASONS, 0))

    def start(self) -> None:
        """Starts one process, so that the first picture need not wait for it; others when they are needed."""
        self._restart(self.workers[0])

    def stats(self) -> dict[str, float]:
        """Workers that have been replaced, by reason."""
        with self._lock:
            return {f"workers_lost_{reason}": float(count) for reason, count in self._lost.items()}

    def image(self, data: bytes) -> Pixels:
        with self._borrowed(self._image_seconds, ImageError) as worker:
            return self._pixels(worker, worker.ask({"op": "image"}, data, self._image_seconds))

    def clip(self, data: bytes) -> Clip:
        with self._borrowed(self._video_seconds, VideoError) as worker:
            reply = worker.ask({"op": "clip"}, data, self._video_seconds)
            _check(reply)
            return _WorkerClip(self, data, _number(reply, "frames"))

    def describe(self, data: bytes) -> ImageHeader:
        # nothing is decoded for it, so it may not take as long as a video
        with self._borrowed(self._image_seconds, ImageError) as worker:
            reply = worker.ask({"op": "describe"}, data, self._image_seconds)
            _check(reply)
            width, height = _number(reply, "width"), _number(reply, "height")
            return ImageHeader(str(reply.get("format"))[:16], width, height, str(reply.get("mode"))[:16])

    def close(self) -> None:
        """Ends all processes; files that are being decoded are refused. Idempotent."""
        self._closed = True
        for worker in self.workers:
            worker.stop()

    @contextmanager
    def _borrowed(self, seconds: float, kind: type[ImageError]) -> Iterator[_Worker]:
        """A worker for one file. Losing it is the file's fault and raises `kind`; not having one raises Unavailable."""
        worker = self._idle.get()
        try:
            if self._closed:
                raise _NotStarted("the server is stopping")
            yield worker
        except _NotStarted as error:
            worker.stop()
            log.error("no picture worker: %s", error)
            raise errors.Unavailable(
                f"no process to decode pictures could be started: {error}", reason="NO_PICTURE_WORKER", retry_after=1.0
            ) from error
        except _Lost as lost:
            with self._lock:
                self._lost[lost.why] += 1
            log.warning("a picture worker is replaced: %s", lost.why)
            worker.stop()
            self._restart(worker)
            raise kind(_REASONS[lost.why].format(seconds=seconds)) from lost
        finally:
            self._idle.put(worker)

    def _restart(self, worker: _Worker) -> None:
        """Ahead of the next file, which tries again, and is told, where that fails."""
        if not self._closed:
            try:
                worker.start()
            except _NotStarted as error:
                log.error("no picture worker: %s", error)

    def _pixels(self, worker: _Worker, reply: dict[str, Any]) -> Pixels:
        """What a worker has decoded. Its words are believed only as far as they stay within the limits."""
        _check(reply)
        height, width = _number(reply, "height"), _number(reply, "width")
        self._limits.frame.check_size(width, height)
        return worker.pixels(height, width)


class _WorkerClip(Clip):
    """A clip that a worker opens again whenever its frames are wanted."""

    def __init__(self, pool: PicturePool, data: bytes, frames: int) -> None:
        self._pool, self._data, self._frames = pool, data, frames
        self._fps: float | None = None
        self._timed = False

    @property
    def num_frames(self) -> int:
        return self._frames

    @property
    def fps(self) -> float | None:
        if not self._timed:
            for _ in self.arrays([]):
                pass
        return self._fps

    def arrays(self, indices: Sequence[int]) -> Generator[Pixels, None, None]:
        left = seconds = self._pool._video_seconds
        command, data = {"op": "frames", "indices": list(indices)}, self._data
        with self._pool._borrowed(seconds, VideoError) as worker:
            while True:
                asked = time.monotonic()
                reply = worker.ask(command, data, max(left, 0.001))
                left -= time.monotonic() - asked
                if "fps" in reply:
                    break
                yield self._pool._pixels(worker, reply)
                command, data = {"op": "next"}, b""
        fps = reply["fps"]
        self._fps = float(fps) if isinstance(fps, float) and 1e-9 < fps < math.inf else None
        self._timed = True


def _environment() -> dict[str, str]:
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**passed_on, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _check(reply: dict[str, Any]) -> None:
    """Raises the error that a reply tells of."""
    if "error" in reply:
        kind = VideoError if reply.get("video") else ImageError
        raise kind(str(reply["error"])[:400])


def _number(reply: dict[str, Any], name: str) -> int:
    value = reply.get(name)
    if not isinstance(value, int) or value < 1:
        raise _Lost("nonsense")
    return value
