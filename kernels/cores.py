"""How many cores this process may compute on.

Threads of compiled code and of libgomp wait for each other after each operation, so one thread that has no core delays
all. What limits them: the process's affinity (a cpuset, `taskset`), physical cores, since a second hardware thread
shares the units that multiply, and the CPU quota of its cgroups (`docker --cpus`, Kubernetes' `limits.cpu`), which
leaves the process all CPUs but stops it for the rest of a period once it has used its time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernels.cgroups import cgroup_folders, read_text

CPUS = Path("/sys/devices/system/cpu")
"""Has a folder for each CPU."""


@dataclass(frozen=True)
class Cores:
    """What limits a process's computation."""

    cpus: int
    """CPUs (hardware threads) on which the process may run."""
    physical: int
    """Cores to which these CPUs belong."""
    quota: float | None
    """How many CPUs' time the process may use; None: without a limit."""
    nodes: tuple[int, ...]
    """NUMA nodes of these CPUs; empty if the system does not tell."""

    @property
    def usable(self) -> int:
        """The number of threads that can run at the same time, each on a core of its own: at least 1. A quota is
        rounded to the nearest number: threads that together use more than it are stopped in each period, with at
        most half a thread too many for a small part of it, but one thread less than 1.99 would be half of them."""
        return self.physical if self.quota is None else max(1, min(self.physical, int(self.quota + 0.5)))

    def __str__(self) -> str:
        parts = [f"{self.physical} core{'s' if self.physical != 1 else ''}"]
        if self.cpus != self.physical:
            parts.append(f"{self.cpus} hardware threads")
        if self.quota is not None:
            parts.append(f"a CPU quota of {self.quota:g}")
        return ", ".join(parts)


def available_cores() -> Cores:
    """The cores of this process, read from the system."""
    cpus = sorted(os.sched_getaffinity(0))
    nodes = {node.name.removeprefix("node") for cpu in cpus for node in CPUS.glob(f"cpu{cpu}/node*")}
    return Cores(
        len(cpus), len({_core(cpu) for cpu in cpus}), min(_quotas(), default=None),
        tuple(sorted(int(node) for node in nodes if node.isdecimal())),
    )  # fmt: skip


def _core(cpu: int) -> str:
    """What is the same for all CPUs of a core, and for no others."""
    topology = CPUS / f"cpu{cpu}" / "topology"
    # The older name is the second one; without either, each CPU counts as a core.
    return read_text(topology / "core_cpus_list") or read_text(topology / "thread_siblings_list") or str(cpu)


def _quotas() -> Iterator[float]:
    """https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files, `cpu.max`, and
    https://docs.kernel.org/scheduler/sched-bwc.html. In microseconds, or "max" in v2 and -1 in v1."""
    for folder, version in cgroup_folders("cpu"):
        if version == 2:
            quota, _, period = read_text(folder / "cpu.max").partition(" ")
        else:
            quota, period = read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(quota) > 0 and int(period) > 0:
            yield int(quota) / int(period)
