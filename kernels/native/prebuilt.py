"""Libraries of compiled code in a wheel, for machines without a compiler.

`build`, which setup.py and `make libraries` call, builds them for each instruction set of the compiler's architecture.
The name of a library contains a digest of the source and of the compiler's options: a library of another source is
never loaded. The code calls neither Python nor torch, so a library works with every version of both; `layout.py`
compares the structs when it is loaded.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

from kernels.native.compiler import FLAGS, compiled, digest, find_compiler, translate
from kernels.native.instruction_sets import SETS, InstructionSet, processor_features

__all__ = ["FOLDER", "architecture", "build", "check_others", "file_name", "find", "processor_features"]

FOLDER = Path(__file__).with_name("prebuilt")
"""Folder of the libraries in a wheel; a checkout does not have it."""


def file_name(wanted: InstructionSet, features: Set[str]) -> str:
    """The name of a library of the present source for processors with these flags of /proc/cpuinfo."""
    return f"{wanted.name}-{digest([*FLAGS, *wanted.options(features)])}.so"


def find(wanted: InstructionSet, features: Set[str]) -> Path | None:
    """The library that came with the package for processors with these flags, if it is of the present source."""
    path = FOLDER / file_name(wanted, features)
    return path if path.is_file() else None


def architecture() -> str:
    """The architecture that the compiler builds for, such as x86_64. Raises NativeUnavailable if there is none."""
    result = subprocess.run([find_compiler(), "-dumpmachine"], capture_output=True, text=True, check=True)
    return result.stdout.partition("-")[0]


_Variant = tuple[InstructionSet, Set[str]]
"""An instruction set, and the flags of the processors for which this library of it is built."""


def _variants() -> list[_Variant]:
    """The variants of the compiler's architecture. Sets with short registers come first, since they take longest."""
    is_arm = architecture() == "aarch64"
    found: list[_Variant] = [
        (each, each.needs.union(flag for flag, _ in extra))
        for each in SETS
        if ("asimd" in each.needs) == is_arm
        for count in range(len(each.optional) + 1)
        for extra in combinations(each.optional, count)
    ]
    return found[::-1]


def _is_for(variant: _Variant, processor: Set[str]) -> bool:
    """Whether a processor with these flags uses this variant of the set."""
    each, features = variant
    return features == processor & each.needs.union(flag for flag, _ in each.optional)


def build(folder: Path, processor: Set[str] | None = None) -> list[Path]:
    """Puts the libraries of the compiler's architecture into `folder` and returns their paths: of each set, one for
    each combination of its optional flags. Libraries that `compiler.py` has cached are not compiled again. `processor`:
    flags of a processor, to build only the libraries that it uses. Raises NativeUnavailable."""
    folder.mkdir(parents=True, exist_ok=True)

    def one(variant: _Variant) -> Path:
        each, features = variant
        with contextlib.ExitStack() as ends:
            library = compiled(each.name, each.options(features), ends)
            return Path(shutil.copyfile(library, folder / file_name(each, features)))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, (each for each in _variants() if processor is None or _is_for(each, processor))))


def check_others(processor: Set[str]) -> None:
    """Checks that the variants which `build` leaves out for a processor with these flags compile. Raises
    NativeUnavailable."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        others = (variant for variant in _variants() if not _is_for(variant, processor))
        list(pool.map(translate, (each.options(features) for each, features in others)))
