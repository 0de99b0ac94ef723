"""The processes of image workers: the fork server from which they are forked, and the connection to each worker.
`service.media.image_worker` is the other end."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from service.common.helper_process import python_path
from service.media.images import LENGTH, framed
from service.media.prepared import MemoryFile

log = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Seconds within which a worker starts, and the process that it is forked from, which imports torch first."""
MAX_REPLY = 64 * 1024
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "TMPDIR")
"""Environment variables that are passed to the processes; others may contain secrets."""


class Lost(Exception):
    """A worker can no longer be used; `why` is "time", "died" or "nonsense" (an invalid reply)."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class NotStarted(Exception):
    """No worker process could be started, for a reason that has nothing to do with the file; the text states it."""


class ForkServer:
    """The process from which workers are forked. If it has ended, it is started again when it is needed. Thread-safe.

    It has already imported the modules for the model's images (1 s, 120 MiB), so a worker starts within milliseconds
    and shares that memory. It reads no files of clients. When it ends, its workers end too.
    """

    def __init__(self, greeting: dict[str, Any]) -> None:
        """`greeting`: the first command that is sent to the process."""
        self._greeting = greeting
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._proven = False
        """Whether a worker of this process has started, so that it imports nothing any more."""
        self._connection: socket.socket | None = None

    def fork(self, theirs: socket.socket) -> None:
        """Forks a worker that uses this socket, without waiting until it is ready. Raises NotStarted."""
        with self._lock:
            if self._closed:
                raise NotStarted("the server is stopping")
            try:
                if self._process is not None and self._process.poll() is None:
                    with suppress(BrokenPipeError, ConnectionResetError):  # the fork server is ending
                        self._send_socket(theirs)
                        return
                self._stop()
                self._launch()
                self._send_socket(theirs)
            except OSError as error:
                self._stop()
                raise NotStarted(error.strerror or str(error)) from error

    def _send_socket(self, theirs: socket.socket) -> None:
        assert self._connection is not None
        socket.send_fds(self._connection, [framed({"op": "fork"})], [theirs.fileno()])

    def started(self, in_time: bool) -> None:
        """Tells whether a worker has started within `START_SECONDS`. If not, and others have, the process hangs, and is
        ended."""
        with self._lock:
            if in_time:
                self._proven = True
            elif self._proven:
                log.critical("the process that image workers are forked from does not answer: it is killed")
                self._stop()

    def kill(self, pid: int) -> None:
        """Kills the worker with this id, if there is one, without waiting for its end."""
        with self._lock, suppress(OSError):  # if the fork server has ended, its workers have ended too
            if self._connection is not None:
                self._connection.sendall(framed({"op": "kill", "pid": pid}))

    def close(self) -> None:
        """Ends the process and all workers. Idempotent."""
        with self._lock:
            self._closed = True
            self._stop()

    def _launch(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(START_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "service.media.image_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**_environment(), "PYTHONPATH": python_path()},
            )
        self._connection.sendall(framed(self._greeting))

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process, self._proven = None, False


class Worker:
    """One worker process. If it has ended, it is forked again when it is needed. Used by one thread at a time, except
    that any thread may end it."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._life = threading.RLock()
        """Held while the process is started or stopped, because a second signal closes the pool from another thread
        while the first one is still closing it."""
        self._ended = False
        self._connection: socket.socket | None = None
        self.pid: int | None = None
        """None until the worker has sent it."""
        self._file: MemoryFile | None = None
        self._dropped = False
        """Whether the last reply came with a file for which this process could have no descriptor."""

    def start(self) -> None:
        """Forks the process, unless there is one, without waiting until it is ready. Raises NotStarted."""
        with self._life:
            if self._ended:
                raise NotStarted("the server is stopping")
            if self._connection is not None and not _closed(self._connection):
                return
            self.stop()
            try:
                self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            except OSError as error:  # too many open files
                raise NotStarted(error.strerror or str(error)) from error
            with theirs:
                try:
                    self._fork_server.fork(theirs)
                except NotStarted:
                    self.stop()
                    raise

    def stop(self) -> None:
        """Kills the process. Idempotent."""
        with self._life:
            self._file = None
            if self._connection is not None:
                self._connection.close()  # this ends a worker that is not ready yet
                self._connection = None
            if self.pid is not None:
                self._fork_server.kill(self.pid)
                self.pid = None

    def end(self) -> None:
        """Kills the process and starts no other. Idempotent; may be called from any thread."""
        with self._life:
            self._ended = True
            self.stop()

    def _open(self) -> socket.socket:
        """The connection. Raises Lost if another thread has ended the process."""
        if (connection := self._connection) is None:
            raise Lost("died")
        return connection

    def take_file(self) -> MemoryFile:
        """The memory file that came with the last reply. Raises Lost, and OSError if this process could have no
        descriptor for it."""
        file, self._file = self._file, None
        if self._dropped:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if file is None:
            raise Lost("nonsense")
        return file

    def ask(self, command: dict[str, Any], data: bytes, seconds: float) -> dict[str, Any]:
        """Sends a command and returns the reply. Raises Lost, or NotStarted if the worker could not be started."""
        self.start()
        if self.pid is None:
            try:
                self.pid = int(self._receive(START_SECONDS)["pid"])
            except Lost as lost:
                if lost.why == "time":
                    self._fork_server.started(False)
                raise NotStarted(f"the process was lost while starting ({lost.why})") from lost
            self._fork_server.started(True)
        self._send({**command, "seconds": seconds, "size": len(data)}, data, seconds)
        return self._receive(seconds)

    def _send(self, command: dict[str, Any], data: bytes, seconds: float) -> None:
        connection = self._open()
        try:
            connection.settimeout(seconds)
            connection.sendall(framed(command))
            connection.sendall(data)
        except TimeoutError:
            raise Lost("time") from None
        except OSError:
            raise Lost("died") from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        try:
            (length,) = LENGTH.unpack(self._length(deadline))
            if length > MAX_REPLY:
                raise Lost("nonsense")
            reply = json.loads(self._exactly(length, deadline))
            if not isinstance(reply, dict):
                raise Lost("nonsense")
            return reply
        except TimeoutError:
            raise Lost("time") from None
        except OSError:
            raise Lost("died") from None
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            raise Lost("nonsense") from None

    def _length(self, deadline: float) -> bytes:
        """Receives the bytes of a length, and the descriptor that may be attached to them."""
        connection = self._open()
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        data, descriptors, flags, _ = socket.recv_fds(connection, LENGTH.size, 1, socket.MSG_CMSG_CLOEXEC)
        self._file = MemoryFile(descriptors[0]) if descriptors else None
        self._dropped = not descriptors and bool(flags & socket.MSG_CTRUNC)
        if not data:
            raise Lost("died")
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
                raise Lost("died")
            data += part
        return data


def _environment() -> dict[str, str]:
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**passed_on, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _closed(connection: socket.socket) -> bool:
    """Whether the process at the other end has ended."""
    connection.settimeout(0)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
