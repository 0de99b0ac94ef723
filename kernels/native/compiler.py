"""Compiles native.cpp with the machine's C++ compiler, and caches the library."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from kernels.native.instruction_sets import NativeUnavailable

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("native.cpp")
# -ffp-contract=off: only `fmadd` is fused. Otherwise each compiler would choose what to fuse, and results would differ.
FLAGS = [
    "-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fopenmp-simd", "-fPIC",
    "-shared",
]  # fmt: skip


def cache_folder() -> Path:
    """Folder of builds: $XDG_CACHE_HOME/saccade/native, or under ~/.cache. `RuntimeError` without a home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "saccade" / "native"


def find_compiler() -> str:
    """Path of the compiler: $CXX, or g++. Raises NativeUnavailable if there is none."""
    found = shutil.which(os.environ.get("CXX") or "g++")
    if found is None:
        raise NativeUnavailable("there is no C++ compiler (g++, or the one in CXX)")
    return found


def digest(parts: Iterable[str]) -> str:
    """24 hexadecimal digits of a hash of the present source and `parts`."""
    texts = [file.read_text() for file in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    return hashlib.sha256(chr(0).join([*texts, *parts]).encode()).hexdigest()[:24]


def compiled(name: str, options: Sequence[str], ends: contextlib.ExitStack) -> Path:
    """Path of the library for the instruction set `name`, compiled with `options` now if the cache does not have it. A
    library that cannot be cached is deleted when `ends` closes; once loaded, it needs no file. Raises NativeUnavailable
    if there is no compiler or it fails.
    """
    compiler = find_compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    flags = [*FLAGS, *options]
    file = f"{digest([version, *flags])}.so"
    try:
        folder = cache_folder()
        if (folder / file).exists():
            return folder / file
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = _new_file(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="saccade-native-")))
        log.warning("the compiled code cannot be cached, so it is built again at each start: %s", error)
        unfinished = _new_file(folder)
    started = time.monotonic()
    log.info("compiling the CPU's kernels for %s with %s", name, compiler)
    result = subprocess.run(
        [compiler, *flags, str(SOURCE), "-o", str(unfinished)], capture_output=True, text=True, check=False
    )
    if result.returncode:
        unfinished.unlink()
        raise NativeUnavailable(f"{compiler} failed: {result.stderr.strip()[:500]}")
    unfinished.rename(folder / file)  # atomically: another process may be doing the same
    log.info("compiled in %.1f s: %s", time.monotonic() - started, folder / file)
    return folder / file


def translate(options: Sequence[str]) -> None:
    """Checks that the code compiles with these options. Without optimisation and without a library it takes a third of
    the time, and the compiler reports the same errors. Raises NativeUnavailable."""
    compiler = find_compiler()
    command = [compiler, *FLAGS, *options, "-O0", "-S", str(SOURCE), "-o", os.devnull]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise NativeUnavailable(f"{compiler} {' '.join(options)} failed: {result.stderr.strip()[:500]}")


def _new_file(folder: Path) -> Path:
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as file:
        return Path(file.name)
