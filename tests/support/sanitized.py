"""A plugin of pytest for `make sanitize`: compiled code with the address and undefined behaviour sanitizers, for the
instruction set INSTRUCTION_SET (the best one by default)."""

from __future__ import annotations

import os

import numpy as np
import torch

from kernels import host_memory
from kernels.native import compiler, instruction_sets

OPTIMISED = "-O3"
# -g1: reports need lines only. Following variables through unrolled loops takes GCC more than ten minutes.
SANITIZED = (
    "-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
)  # fmt: skip


def pytest_configure() -> None:
    """Builds with other options have other names in the cache (`compiler.digest`)."""
    os.environ.pop("LD_PRELOAD", None)  # else the compiler also runs with the sanitizer, several times as long
    compiler.FLAGS[:] = [*(flag for flag in compiler.FLAGS if flag != OPTIMISED), *SANITIZED]
    instruction_sets.use(os.environ.get("INSTRUCTION_SET") or instruction_sets.AUTO)
    # Weights share a mapping, and buffers have mappings of whole pages: an access beyond their ends would be valid. The
    # sanitizer's own C allocator puts inaccessible bytes between all pieces of memory.
    host_memory._mappings.take = _zeros
    host_memory.private_mapping = lambda nbytes: _zeros(nbytes).numpy().view(_Bytes)


class _Bytes(np.ndarray):
    """Used in the place of a mapping."""

    def close(self) -> None:
        """Nothing: the memory is freed with the array."""


def _zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)
