"""The instruction sets that the compiled code is built for, and which of them this process uses.

The same source is compiled for every set (`vectors.h`). Within one set an answer has the same bits in any batch, with
any chunks and with any number of threads; two sets may round differently.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

AUTO = "auto"
TILE_STATE = 18
"""Number of the XSAVE state component that holds AMX's tiles."""


class NativeUnavailable(RuntimeError):
    """This machine cannot build or run the compiled code; the text gives the reason."""


@dataclass(frozen=True)
class InstructionSet:
    """A set of instructions: what a processor needs for it, and how the source is compiled for it."""

    name: str
    needs: frozenset[str]
    """Flags of /proc/cpuinfo that a processor must have."""
    flags: tuple[str, ...]
    """Options of the compiler, for any processor that has the set: they all use the same library."""
    optional: tuple[tuple[str, str], ...] = ()
    """(flag of /proc/cpuinfo, option of the compiler for processors that have the flag)."""
    only_emulated: bool = False
    """Whether no processor has run it yet, only an emulator. The log and `saccade plan` say so."""
    bf16_pairs: bool = False
    """Whether it multiplies pairs of bfloat16 (`BF16_PAIRS` in the source)."""
    compact_weights: bool = False
    """Whether bfloat16 weights are stored in 12 bits (compact.h), where that is faster than reading 16."""

    def options(self, features: Set[str]) -> list[str]:
        """The compiler's options for every processor that has the set and, of `optional`, these flags."""
        return [*self.flags, *(option for flag, option in self.optional if flag in features)]


_AVX2 = frozenset(("avx2", "fma", "f16c", "bmi1", "bmi2"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2")
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512cd")
_NEON = frozenset(("asimd",))
# Where this pass is on by default, it loads all rows of a tile first, and then not all of its sums stay in registers.
_NEON_FLAGS = ("-fno-schedule-insns",)

_BF16 = InstructionSet(
    "avx512bf16",
    _AVX512 | {"avx512_bf16", "avx512_vnni", "avx512vbmi"},
    (*_AVX512_FLAGS, "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi"),
    bf16_pairs=True,
    compact_weights=True,
)

SETS = (
    InstructionSet(
        "amx",
        _BF16.needs | {"amx_tile", "amx_bf16", "amx_int8"},
        (*_BF16.flags, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        bf16_pairs=True,
        compact_weights=True,
    ),
    _BF16,
    InstructionSet(
        "avx512vnni",
        _AVX512 | {"avx512_vnni"},
        (*_AVX512_FLAGS, "-mavx512vnni"),
        optional=(("avx512vbmi", "-mavx512vbmi"),),
        compact_weights=True,
    ),
    InstructionSet("avx512", _AVX512, _AVX512_FLAGS, compact_weights=True),
    InstructionSet("avx2", _AVX2, _AVX2_FLAGS, optional=(("avx_vnni", "-mavxvnni"),)),
    InstructionSet(
        "neonbf16",
        _NEON | {"asimddp", "bf16", "i8mm"},
        (*_NEON_FLAGS, "-march=armv8.2-a+bf16+dotprod+i8mm"),
        only_emulated=True,
        bf16_pairs=True,
    ),
    InstructionSet(
        "neon",
        _NEON,
        (*_NEON_FLAGS, "-march=armv8-a"),
        optional=(("asimddp", "-march=armv8.2-a+dotprod"),),
        only_emulated=True,
    ),
)
"""Best first: "auto" takes the first that a processor has."""
CHOICES = (AUTO, *(each.name for each in SETS))

_forced = AUTO


def processor_features() -> set[str]:
    """The flags of /proc/cpuinfo (on AArch64 its features), without those of AMX if the kernel does not let this
    process use its tiles; empty if there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    named = (line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features")))
    found = set(next(named, ()))
    if "amx_tile" in found and not _has_tiles():
        found -= {flag for flag in found if flag.startswith("amx_")}
    return found


@functools.cache
def _has_tiles() -> bool:
    """Asks the kernel for AMX's tiles and returns whether this process may use them. If not, the log says why."""
    try:
        request_state(TILE_STATE)
    except NativeUnavailable as reason:
        log.warning("AMX is not used: %s", reason)
        return False
    return True


def request_state(component: int) -> None:
    """Asks Linux on x86-64 for a component of the processor's state, which this process may then use. Raises
    NativeUnavailable if the kernel does not permit it."""
    c_library = ctypes.CDLL(None, use_errno=True)
    arch_prctl, request_permission = 158, 0x1023
    if c_library.syscall(arch_prctl, request_permission, ctypes.c_ulong(component)):
        reason = os.strerror(ctypes.get_errno())
        raise NativeUnavailable(f"the kernel does not permit the processor's state component {component}: {reason}")


def supported(features: Set[str]) -> list[InstructionSet]:
    """The sets that a processor with these flags can run, best first."""
    return [each for each in SETS if each.needs <= features]


def choose(name: str, features: Set[str]) -> InstructionSet:
    """The named set, or with "auto" the best one that a processor with these flags can run. `ValueError` for an unknown
    name or a set that the processor lacks; `NativeUnavailable` for "auto" if it can run none."""
    candidates = supported(features)
    if name == AUTO and not candidates:
        lacking = ", ".join(sorted(_AVX2 - features))
        raise NativeUnavailable(f"this processor lacks {lacking}, and is not an AArch64 processor with asimd")
    if name == AUTO:
        return candidates[0]
    if name not in CHOICES:
        raise ValueError(f"instruction_set: {name} is none of {', '.join(CHOICES)}")
    wanted = next(each for each in SETS if each.name == name)
    if wanted not in candidates:
        lacking = ", ".join(sorted(wanted.needs - features))
        have = ", ".join((AUTO, *(each.name for each in candidates)))
        raise ValueError(f"instruction_set: {name} needs {lacking}, which this processor lacks; {have} would work")
    return wanted


def use(name: str) -> None:
    """Sets the instruction set that this process uses from now on: a name, or "auto". Weights that are packed and
    models that are built already keep theirs. Raises like `choose`, except for "auto", which raises nothing."""
    global _forced  # one processor, one process
    if name != AUTO:
        choose(name, processor_features())
    _forced = name


def in_use() -> str:
    """The name that `use` was last called with; "auto" if it was not."""
    return _forced


def bf16_pairs() -> bool:
    """Whether the set in use multiplies pairs of bfloat16; False if this processor has none."""
    chosen = _chosen()
    return chosen is not None and chosen.bf16_pairs


def compact_weights() -> bool:
    """Whether bfloat16 weights are stored in 12 bits for the set in use; False if this processor has none."""
    chosen = _chosen()
    return chosen is not None and chosen.compact_weights


def _chosen() -> InstructionSet | None:
    try:
        return choose(_forced, processor_features())
    except NativeUnavailable:
        return None
