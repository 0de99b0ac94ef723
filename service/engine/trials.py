"""Compiles each text format in a separate process before the engine does (`service.engine.trial_process`): the memory
and time that the compiler needs for a hostile format cannot be computed beforehand, and the engine must not spend
them."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import threading
from collections.abc import Collection
from multiprocessing.connection import Connection
from pathlib import Path

from service.common.helper_process import start_helper
from service.common.types import TextFormat
from service.engine.grammar_sources import field_of
from service.engine.grammars import COMPILE_SECONDS
from service.engine.types import ConstraintFailed, UnusableConstraint

log = logging.getLogger(__name__)

MEMORY_BYTES = 512 * 2**20
"""Limit on the memory that compiling a format takes, beyond what the process has when it is ready."""
STACK_BYTES = 512 * 2**20
"""Stack size (of address space, not memory) for the recursion of llguidance's compiler, in each thread that compiles: a
chain of rules of the maximum length would overflow the default stack and end the process."""
WAIT_SECONDS = 120.0
"""Limit on the wait for the process to start, and for a reply; its processor time is limited to much less."""


class Trials:
    """The separate process, which is started again after a format has ended it. `start` and `check` are called by one
    thread, `close` by any."""

    def __init__(self, tokenizer: Path, vocab_size: int, ends: Collection[int]) -> None:
        """`tokenizer`: path of `tokenizer.json`. `ends`: the model's end-of-sequence ids."""
        self._first = {"tokenizer": str(tokenizer), "vocab_size": vocab_size, "ends": sorted(ends)}
        self._lock = threading.Lock()
        """Held while the process is started or stopped."""
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._ready = False

    @property
    def pid(self) -> int | None:
        """The process id; None if there is no process."""
        return self._process.pid if self._process is not None else None

    def check(self, format: TextFormat) -> None:
        """Compiles a format in the process. Raises UnusableConstraint if it cannot be compiled or takes too much
        memory or time, and ConstraintFailed if the process cannot be used."""
        if self._process is not None and self._process.poll() is not None:
            self._end()  # it ended after its last reply, which is not this format's fault
        self.start()
        self._wait_until_ready()
        try:
            self._send({"kind": format.kind, "source": format.source})
            found = self._receive()
        except (EOFError, OSError):
            code = self._end()
            log.warning("the process for formats ended with code %d", code)
            if code == -signal.SIGKILL:
                raise ConstraintFailed("the process for formats was killed") from None
            raise UnusableConstraint(_why(code), field_of(format)) from None
        if "message" in found:
            raise UnusableConstraint(found["message"], found["field"])

    def close(self) -> None:
        """Kills the process and starts no other. Idempotent."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def start(self) -> None:
        """Starts the process, which then reads the vocabulary. Does nothing if there is one. Raises
        ConstraintFailed."""
        if self._process is not None:
            return
        with self._lock:
            self._raise_if_closed()
            try:
                self._process, self._connection = start_helper("service.engine.trial_process")
            except OSError as error:
                raise ConstraintFailed(f"no process for formats could be started: {error}") from error
            self._ready = False
            with contextlib.suppress(OSError):  # a process that has ended already is reported by the first `check`
                self._send(self._first)

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        try:
            self._receive()
        except (EOFError, OSError):
            raise ConstraintFailed(f"the process for formats ended with code {self._end()} while starting") from None
        self._ready = True

    def _send(self, message: dict[str, object]) -> None:
        """Raises OSError if the process has ended."""
        assert self._connection is not None
        self._connection.send_bytes(json.dumps(message).encode())

    def _receive(self) -> dict[str, str]:
        """The next reply. Raises EOFError or OSError if the process has ended or does not reply."""
        assert self._connection is not None
        if not self._connection.poll(WAIT_SECONDS):
            raise TimeoutError
        reply: dict[str, str] = json.loads(self._connection.recv_bytes())
        return reply

    def _end(self) -> int:
        """Kills the process if it has not ended, and returns its code. Raises ConstraintFailed if `close` has ended
        it."""
        assert self._process is not None and self._connection is not None
        with self._lock:
            self._process.kill()
            code = self._process.wait()
            self._connection.close()
            self._process = self._connection = None
            self._raise_if_closed()
        return code

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise ConstraintFailed("the server is stopping")


def _why(code: int) -> str:
    match -code:
        case signal.SIGXCPU:
            return f"compiling it takes more than the {COMPILE_SECONDS:g} s of processor time that are allowed"
        case signal.SIGABRT:
            return f"compiling it takes more than the {MEMORY_BYTES >> 20} MiB of memory that are allowed"
        case signal.SIGSEGV:
            return f"compiling it takes more than the {STACK_BYTES >> 20} MiB of stack that are allowed"
    return f"compiling it ends the compiler's process (code {code})"
