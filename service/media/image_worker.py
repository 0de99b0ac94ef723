"""The processes that turn images and videos into patches. The pool runs `python -m service.media.image_worker FD`, the
fork server, which forks a worker for each socket that it receives.

A hostile file can at most crash or take over a worker. The worker's memory and processor time are limited, it has no
keys and no weights, and its loss costs one request. The fork server itself reads no files of clients.

Commands come one at a time, to the fork server through the socket FD and to each worker through its own socket. A
worker's replies are JSON, which the other end can read without trusting the worker. Patches are written to sealed
memory files, whose descriptors are sent with the reply's length.

    command   4 bytes of length, JSON {"op": ..., "size": n}, n bytes of a file
    reply     4 bytes of length, JSON

    limits    the first command to the fork server: limits on files and on a worker, the model's rules for images
    fork      forks a worker; the command comes with the descriptor of its socket, to which the worker sends {"pid"}
    kill      kills the worker "pid"

    describe  format and size of a file, without decoding it                -> {"format", "width", "height", "mode"}
    image     patches of an image                                           -> {"item", "seconds"}
    video     patches of at most "frames" frames                            -> like image, with "total" and "fps"
    frames    the first of "count" frames, which has the number "index"     -> like image, or {"wanted": true}
    frame     the next frame, after a reply with "wanted"                   -> like frames
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

from PIL import Image

from encoder.frames import describe
from encoder.item import ItemDescription
from encoder.media_limits import FORMATS, ImageError, ImageLimits, VideoError, VideoLimits
from encoder.stopwatch import Stopwatch
from kernels.host_memory import keep_freed_memory
from service.common.helper_process import ignore_stop_signals, torch_imports
from service.common.process_limits import allow_seconds, confine, end_with_parent
from service.media.images import LENGTH, Frame, MediaLimits, framed
from service.media.prepared import PreparedItem

if TYPE_CHECKING:
    from service.media.patches import Patcher

ITEM_FIELDS = tuple(field.name for field in fields(ItemDescription))
KEPT_BYTES = 256 << 20
"""Freed memory that a process keeps for the next image. Getting it from the kernel again took twice as long as decoding
a 1080p image."""


class _Worker:
    """Executes commands in a worker process."""

    def __init__(self, connection: socket.socket, limits: MediaLimits, patcher: Patcher | None) -> None:
        """`patcher`: None for a model that takes no images; then uploads are only described."""
        self._connection, self._limits, self._patcher = connection, limits, patcher

    def answer(self, command: dict[str, Any], data: bytes) -> None:
        file = None
        try:
            reply, item = self._do(command, data)
            if item is not None:
                sealed = item.sealed()
                reply["item"] = {name: getattr(sealed.layout, name) for name in ITEM_FIELDS}
                file = sealed.file
        except ImageError as error:
            kind = "video" if isinstance(error, VideoError) else "image"
            reply = {"error": error.reason, "kind": kind, "too_large": error.too_large}
        except ValueError as error:  # the model's rules do not accept the file
            reply = {"error": str(error), "kind": "value"}
        except OSError as error:  # there is no memory for the file of patches
            reply = {"error": error.strerror or str(error), "kind": "memory"}
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "alloc" not in str(error):  # torch has no exception class for it
                raise
            reply = {"error": "decoding takes more memory than is allowed", "kind": "image"}
        send(self._connection, reply, None if file is None else file.take())

    def _do(self, command: dict[str, Any], data: bytes) -> tuple[dict[str, Any], PreparedItem | None]:
        if command["op"] == "describe":
            header = describe(data, self._limits.file)
            return {
                "format": header.format, "width": header.width, "height": header.height, "mode": header.mode,
            }, None  # fmt: skip
        assert self._patcher is not None, "files of a model that takes none"
        watch = Stopwatch()
        reply: dict[str, Any] = {}
        item: PreparedItem
        match command["op"]:
            case "image":
                item = self._patcher.image(data, watch)
            case "video":
                video = self._patcher.video(data, command["frames"], watch)
                item, reply = video.item, {"total": video.total, "fps": video.fps}
            case "frames":
                count = command["count"]
                item = self._patcher.stream(self._arriving((command["index"], data), count), count, watch)
            case other:
                raise AssertionError(f"no command {other!r}")
        return {**reply, "seconds": dict(watch.seconds)}, item

    def _arriving(self, first: Frame, count: int) -> Iterator[Frame]:
        """Yields the frames of a video, each received after the one before it has been cut into patches."""
        yield first
        for _ in range(count - 1):
            send(self._connection, {"wanted": True})
            command, data = receive(self._connection)
            allow_seconds(command["seconds"])
            yield command["index"], data


def send(connection: socket.socket, reply: dict[str, Any], descriptor: int | None = None) -> None:
    """Sends a reply, with the descriptor attached to its length. Takes ownership of the descriptor."""
    data = framed(reply)
    if descriptor is None:
        connection.sendall(data)
        return
    socket.send_fds(connection, [data[: LENGTH.size]], [descriptor])
    os.close(descriptor)
    connection.sendall(data[LENGTH.size :])


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Receives the next command and its file. Raises EOFError at the end."""
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


class _ForkServer:
    """Forks workers, and kills them when told to."""

    def __init__(self, connection: socket.socket) -> None:
        """Receives the first command, and imports what decoding and the model's rules need."""
        self._connection = connection
        self._pid = os.getpid()
        self._workers: set[int] = set()
        command, _ = receive(connection)
        files = {"image": ImageLimits, "video": VideoLimits}
        self._limits = MediaLimits(**{name: kind(**command[name]) for name, kind in files.items()})
        self._memory_bytes: int = command["memory_bytes"]
        Image.init()  # loads all readers now, not with the first image of each format
        if "AVIF" in FORMATS:
            from PIL import AvifImagePlugin

            # By default its decoder starts a thread for each core, whose memory counts in a worker's limit.
            AvifImagePlugin.DEFAULT_MAX_THREADS = 1
        self._patcher: Patcher | None = None
        if command["vision"] is not None:
            with torch_imports():  # here, because a model without images needs no torch
                import torch

                from service.media.patches import Patcher

            torch.set_num_threads(1)  # other workers run beside
            # Pickled by the server, which is trusted. These are the rules with which it counts tokens of prompts, even
            # if the checkpoint's files have changed since.
            vision = pickle.loads(base64.b64decode(command["vision"]))
            self._patcher = Patcher(self._limits, vision, command["dtype"])
        keep_freed_memory(KEPT_BYTES)

    def run(self) -> NoReturn:
        """Forks and kills workers. Raises EOFError when the server has ended or, in a worker, when the server has
        closed the worker's socket."""
        while True:
            command, descriptor = _receive_with_descriptor(self._connection)
            self._reap()
            if command["op"] == "kill":
                # Only a child that has not been reaped is certain to have this id.
                if command["pid"] in self._workers:
                    os.kill(command["pid"], signal.SIGKILL)
                continue
            assert command["op"] == "fork" and descriptor is not None
            with socket.socket(fileno=descriptor) as theirs:
                try:
                    pid = os.fork()
                except OSError as error:  # too many processes; the server notices that the socket is closed
                    print(f"no image worker could be forked: {error}", file=sys.stderr, flush=True)
                    continue
                if pid == 0:
                    self._work(theirs)
                self._workers.add(pid)

    def _reap(self) -> None:
        for pid in list(self._workers):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._workers.remove(pid)

    def _work(self, connection: socket.socket) -> NoReturn:
        """Runs in a new worker: gives up what is not needed, and answers commands until the server closes the
        socket."""
        self._connection.close()
        end_with_parent(self._pid)
        confine(self._memory_bytes)
        worker = _Worker(connection, self._limits, self._patcher)
        send(connection, {"pid": os.getpid()})
        while True:
            command, data = receive(connection)
            allow_seconds(command["seconds"])
            worker.answer(command, data)


def _receive_with_descriptor(connection: socket.socket) -> tuple[dict[str, Any], int | None]:
    """Receives the next command and the descriptor that may come with it. Raises EOFError at the end."""
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, 1, socket.MSG_CMSG_CLOEXEC)
    if not head:
        raise EOFError
    (length,) = LENGTH.unpack(head + _exactly(connection, LENGTH.size - len(head)))
    command: dict[str, Any] = json.loads(_exactly(connection, length))
    return command, descriptors[0] if descriptors else None


def main(descriptor: int) -> int:
    ignore_stop_signals()  # the server decides when these processes stop.
    with socket.socket(fileno=descriptor) as connection:
        try:
            _ForkServer(connection).run()
        except (EOFError, ConnectionError):
            pass  # the server has ended, or no longer needs this worker
    return 0


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # threads of libraries may outlive the interpreter and crash it
