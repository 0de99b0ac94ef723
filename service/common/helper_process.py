"""Starts helpers: processes of this program that are connected to it by a socket pair. A helper is started by its
module's name, so that the caller's `__main__` is not run again: it may be a notebook or a script without a guard."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)

SPINNING = {"GOMP_SPINCOUNT": "1000"}
"""GOMP_SPINCOUNT: how long a thread of libgomp's team spins before it sleeps, set to about the time that Python takes
between two operations. The default is hundreds of times longer. With the default, an idle machine is 10 to 16 % faster
(141 instead of 122 tokens/s with one request, 455 instead of 415 with eight), but on a busy machine a step waits whole
time slices of the scheduler for a thread that has lost its core, and was measured to be up to fifty times slower."""


POLLS = 10
"""Parts that a timeout is divided into. If both processes are suspended together, as when a container is paused, only
one part has expired when they resume, and the helper has the remaining ones to answer."""

BEAT_SECONDS = 1.0
"""Time between two heartbeats, which show that the loop of a helper still runs."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds before a helper is started again: after the first failure, and at most."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Stop a server."""
STOP_HELPER = signal.SIGUSR1
"""Stops a helper that lets its running calls end."""


ROOT = Path(__file__).resolve().parent.parent.parent
"""The folder of the packages of this program."""


class HelperFailed(RuntimeError):
    """A helper has ended, or was killed, before it was ready."""


def restart_pause(failures: int) -> float:
    """Seconds to wait before a helper is started again that has ended unexpectedly, doubled for each of the earlier
    `failures` in a row."""
    return min(FIRST_PAUSE * 2 ** min(failures, 10), LONGEST_PAUSE)  # 2**1024 is no float


def ignore_stop_signals() -> None:
    """Ignores `STOP_SIGNALS`. In a helper, since they may reach all processes of a server (Ctrl-C in a terminal,
    SIGTERM by systemd or `timeout`), and the process that started the helper decides when it ends. In a server that
    has stopped, since Python removes other handlers before its own end."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def python_path() -> str:
    """PYTHONPATH for another process of this program, which imports the same packages whatever its working folder."""
    return os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH", "")) if path)


def start_helper(module: str, descriptors: Sequence[int] = ()) -> tuple[subprocess.Popen[bytes], Connection]:
    """Starts `python -m module FD`, which also inherits `descriptors`; returns the process and this side of the socket
    pair."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno(), *descriptors],
            stdin=subprocess.DEVNULL,
            env={**SPINNING, **os.environ, "PYTHONPATH": python_path()},
        )
    finally:
        theirs.close()
    return process, Connection(ours.detach())


def log_to_stderr(level: int | str, process: str = "") -> None:
    """Sets up this process's log: lines on stderr from `level` on, which say that they are of `process`, if it has a
    name."""
    who = f"{process} " if process else ""
    logging.basicConfig(
        level=level.upper() if isinstance(level, str) else level, stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s {who}%(name)s: %(message)s",
    )  # fmt: skip


def announce(line: str) -> None:
    """Prints a line to standard output, for the program that has started this one. If it does not read any more, or its
    disk is full, that is only logged."""
    try:
        print(line, flush=True)
    except OSError as error:
        log.warning("standard output: %s: %s", error.strerror, line)
        with open(os.devnull, "wb") as nowhere:  # Python would fail again at its end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def log_level() -> int:
    """The log level of this process; helpers get the same one."""
    return logging.getLogger().getEffectiveLevel()


def until_ready(
    process: subprocess.Popen[bytes], connection: Connection, first: Any, load_timeout: float, name: str
) -> list[Any]:
    """Sends a helper its `first` message and waits for its answer: ("ready", ...), of which the rest is returned, or
    ("failed", message). `name`: of the process, for errors. Raises ConfigError with that message, and HelperFailed if
    the process ends without an answer or is killed after `load_timeout` seconds. An error ends the process."""
    try:
        with contextlib.suppress(ConnectionError):  # a process that has ended already is reported below
            connection.send(first)
        if not any(connection.poll(load_timeout / POLLS) for _ in range(POLLS)):
            raise HelperFailed(
                f"the {name} process was not ready after {load_timeout:g} seconds (load_timeout) and was killed; if "
                "loading takes longer, raise load_timeout"
            )
        verdict, *values = connection.recv()
    except (EOFError, OSError):
        raise HelperFailed(f"the {name} process ended with code {process.wait()} while starting") from None
    except BaseException:
        process.kill()
        process.wait()
        raise
    if verdict == "failed":
        from service.common.option import ConfigError  # imported here: it imports the SDK, which helpers do not need

        process.wait()
        raise ConfigError(values[0])
    return values


META_FUNCTIONS = "torch._meta_registrations"
"""The module in which torch registers, in Python, what operations give for tensors without data. torch.compile and
torch.export need it, operations on data do not."""


@contextlib.contextmanager
def torch_imports() -> Iterator[None]:
    """For the imports of torch and a model's modules in a process of the server's own.

    Objects created inside the context live as long as the process, so the garbage collector is off meanwhile and never
    examines them later. Collections would take a sixth of the time that the imports take. A torch for CPUs does not
    load META_FUNCTIONS, which takes a fifth of it and 18 MiB, unless it is imported after the context; without it
    `torch.Generator` does not work, which torch for GPUs may need."""
    collecting = gc.isenabled()
    gc.disable()
    empty = ModuleType(META_FUNCTIONS)
    sys.modules.setdefault(META_FUNCTIONS, empty)
    try:
        yield
    finally:
        if sys.modules[META_FUNCTIONS] is empty:
            del sys.modules[META_FUNCTIONS]
            torch: Any = sys.modules.get("torch")
            if torch is not None and (torch.version.cuda or torch.version.hip):
                importlib.import_module(META_FUNCTIONS)
        gc.freeze()
        if collecting:
            gc.enable()
