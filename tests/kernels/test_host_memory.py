"""Freed activations stay with the process once it says so."""

from __future__ import annotations

import platform
import subprocess
import sys

from kernels.host_memory import keep_freed_memory

PROGRAM = """
import resource, torch
from kernels.host_memory import keep_freed_memory
if {keep}:
    assert keep_freed_memory()
def layer():
    first = torch.ones(12 << 18)
    second = torch.ones(20 << 18)
layer()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    layer()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(keep=keep)], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout)


def test_later_steps_fault_nothing_in() -> None:
    if platform.libc_ver()[0] == "glibc":
        assert faults(keep=True) < 100
    else:
        assert keep_freed_memory() is False
