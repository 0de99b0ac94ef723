"""Builds and loads native.cpp.

The library is compiled for one instruction set (`instruction_sets.py`) in about seven seconds, and cached under a name
made of the source, the compiler and the processor's features.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from kernels.native.instruction_sets import (
    InstructionSet,
    NativeUnavailable,
    choose,
    in_use,
    processor_features,
    supported,
)
from kernels.native.layout import check_layout

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-fPIC", "-shared"]


def library() -> ctypes.CDLL:
    """The compiled code for the instruction set in use. Raises NativeUnavailable; a failed attempt is not repeated."""
    found = _library(in_use())
    if isinstance(found, NativeUnavailable):
        raise found
    return found


@functools.cache
def _library(name: str) -> ctypes.CDLL | NativeUnavailable:
    try:
        return _load(choose(name, processor_features()))
    except NativeUnavailable as reason:
        return reason


def _load(wanted: InstructionSet) -> ctypes.CDLL:
    try:
        with contextlib.ExitStack() as ends:
            loaded = ctypes.CDLL(str(_built(wanted, ends)))
    except OSError as error:
        raise NativeUnavailable(str(error)) from None
    there = ", ".join(each.name for each in supported(processor_features()))
    log.info("compiled code uses the instruction set %s (this processor has %s)", wanted.name, there)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    _declare(loaded.saccade_layout, [], ctypes.c_char_p)
    check_layout(loaded.saccade_layout().decode())
    _declare(loaded.saccade_step, [pointer, pointer, number, number], ctypes.c_char_p, _raise)
    _declare(loaded.saccade_draft, [pointer, pointer, pointer], ctypes.c_char_p, _raise)
    _declare(
        loaded.saccade_sample,
        [pointer, number, number, pointer, pointer, pointer, pointer, pointer, number, number],
        ctypes.c_char_p,
        _raise,
    )
    _declare(loaded.saccade_varlen_attention, [pointer, number])
    _declare(loaded.saccade_tower, [pointer, pointer, number, number])
    _declare(loaded.saccade_advance, [pointer, number, pointer])
    _declare(
        loaded.saccade_linear,
        [pointer, pointer, number, number, pointer, number, number, number, number, pointer, number, pointer],
    )
    return loaded


def _declare(function: Any, arguments: list[Any], result: Any = None, check: Any = None) -> None:
    function.argtypes, function.restype = arguments, result
    if check is not None:
        function.errcheck = check


def _raise(reason: bytes | None, *_: object) -> None:
    """Raises `IndexError` if compiled code has rejected a call, which then had no effect."""
    if reason is not None:
        raise IndexError(f"compiled code: {reason.decode()}")


def cache_folder() -> Path:
    """Folder of builds: $XDG_CACHE_HOME/saccade/native, or under ~/.cache. `RuntimeError` without a home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "saccade" / "native"


def _built(wanted: InstructionSet, ends: contextlib.ExitStack) -> Path:
    """The library's file, compiled now if necessary. If it cannot be cached it exists until `ends`; once loaded, the
    code needs no file."""
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        raise NativeUnavailable("there is no C++ compiler (g++, or what CXX names)")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    headers = sorted(SOURCE.parent.glob("*.h"))
    flags = [*FLAGS, *wanted.options(processor_features())]
    parts = [*(file.read_text() for file in (SOURCE, *headers)), version, *flags, *sorted(processor_features())]
    name = f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.so"
    try:
        folder = cache_folder()
        if (folder / name).exists():
            return folder / name
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = _new_file(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="saccade-native-")))
        log.warning("the compiled code cannot be kept, so that it is built again at each start: %s", error)
        unfinished = _new_file(folder)
    started = time.monotonic()
    log.info("compiling the CPU's kernels for %s with %s", wanted.name, compiler)
    result = subprocess.run(
        [compiler, *flags, str(SOURCE), "-o", str(unfinished)], capture_output=True, text=True, check=False
    )
    if result.returncode:
        unfinished.unlink()
        raise NativeUnavailable(f"{compiler} failed: {result.stderr.strip()[:500]}")
    unfinished.rename(folder / name)  # atomically: another process may be doing the same
    log.info("compiled in %.1f s: %s", time.monotonic() - started, folder / name)
    return folder / name


def _new_file(folder: Path) -> Path:
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as file:
        return Path(file.name)
