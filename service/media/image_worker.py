"""The process that decodes pictures and clips: `python -m service.media.image_worker FD FD`, run by `picture_pool.py`.

Whatever hostile bytes make of a decoder, it ends here: memory and processor time are limited, the process holds no
key and no model, and its end costs one request. It reads one command at a time from a socket, its first argument.
Its words back are JSON, which the other end need not trust, and pixels lie at the beginning of a memory file, its
second, until the next command.

    command   4 bytes of length, JSON {"op": ..., "size": n}, n bytes of a file
    reply     4 bytes of length, JSON

    limits    the first: what files may be, and what this process may use       -> {}
    describe  format and size of a file, undecoded                              -> {"format", "width", "height", "mode"}
    image     the picture                                                       -> {"height", "width"} of the pixels
    clip      how long the clip is                                              -> {"frames"}
    frames    its frames at "indices": the first of them                        -> as next
    next      the next of them                                                  -> {"height", "width"}, or {"fps"}
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Generator
from typing import Any

import numpy as np
from PIL import Image

from encoder.frames import Clip, VideoError, VideoLimits, describe, open_video
from encoder.images import ImageError, ImageLimits, Pixels, decode_pixels
from kernels.host_memory import keep_freed_memory

LENGTH = struct.Struct("!I")
KEPT_BYTES = 64 << 20
"""Freed memory that stays for the next picture: faulting it in again took twice as long as decoding 1080p."""


class _Worker:
    """What is open at the moment, and the limits."""

    def __init__(self, connection: socket.socket, memory: mmap.mmap, limits: dict[str, Any]) -> None:
        self._connection, self._memory = connection, memory
        self._image, self._video = ImageLimits(**limits["image"]), VideoLimits(**limits["video"])
        self._file = VideoLimits(**limits["file"])
        self._clip: Clip | None = None
        self._frames: Generator[Pixels, None, None] | None = None

    def answer(self, command: dict[str, Any], data: bytes) -> None:
        try:
            reply = self._do(command, data)
        except ImageError as error:
            reply = {"error": error.reason, "video": isinstance(error, VideoError)}
        except MemoryError:
            reply = {"error": "decoding it takes more memory than is allowed"}
        send(self._connection, reply)

    def _do(self, command: dict[str, Any], data: bytes) -> dict[str, Any]:
        match command["op"]:
            case "describe":
                header = describe(data, self._file)
                return {
                    "format": header.format, "width": header.width, "height": header.height, "mode": header.mode,
                }  # fmt: skip
            case "image":
                return self._lay(decode_pixels(data, self._image))
            case "clip":
                return {"frames": open_video(data, self._video).num_frames}
            case "frames":
                self._clip = open_video(data, self._video)
                self._frames = self._clip.arrays(command["indices"])
                return self._next()
            case "next":
                return self._next()
        raise ValueError(f"no command {command['op']!r}")

    def _next(self) -> dict[str, Any]:
        assert self._clip is not None and self._frames is not None
        pixels = next(self._frames, None)
        return self._lay(pixels) if pixels is not None else {"fps": self._clip.fps}

    def _lay(self, pixels: Pixels) -> dict[str, Any]:
        """Puts the pixels where the other end finds them."""
        np.copyto(np.frombuffer(self._memory, np.uint8, pixels.size).reshape(pixels.shape), pixels)
        return {"height": pixels.shape[0], "width": pixels.shape[1]}


def send(connection: socket.socket, reply: dict[str, Any]) -> None:
    words = json.dumps(reply).encode()
    connection.sendall(LENGTH.pack(len(words)) + words)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """The next command and its file. Raises EOFError at the end."""
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    command: dict[str, Any] = json.loads(_exactly(connection, length))
    return command, bytes(_exactly(connection, command.get("size", 0)))


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data


def _confine(memory_bytes: int) -> None:
    """Limits that hold for the rest of this process's life."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # where /proc is not mounted
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where the machine runs out, this goes first


def _allow_seconds(seconds: float) -> None:
    """The kernel ends a command that outlives this, even where nobody is left who waits for it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    end = int(usage.ru_utime + usage.ru_stime + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (end, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main(descriptor: int, memory_descriptor: int) -> int:
    # The server decides when to stop; a Ctrl-C in the terminal reaches the whole group and is not for this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as connection:
        memory = mmap.mmap(memory_descriptor, 0)
        os.close(memory_descriptor)
        try:
            limits, _ = receive(connection)
            Image.init()  # loads all readers now rather than with the first picture of each format
            _confine(limits["memory_bytes"])
            keep_freed_memory(KEPT_BYTES)
            worker = _Worker(connection, memory, limits)
            send(connection, {})
            while True:
                command, data = receive(connection)
                _allow_seconds(command["seconds"])
                worker.answer(command, data)
        except (EOFError, ConnectionError):
            return 0  # the server is gone


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
