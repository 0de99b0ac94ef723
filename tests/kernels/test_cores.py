"""The cores that a process may use, read from copies of the system's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cgroup_files import system

from kernels import cores as cores_module
from kernels.cores import Cores, available_cores

V1 = "9:cpu,cpuacct:{path}\n4:memory:/box\n1:name=systemd:/box\n"


def machine(
    monkeypatch: pytest.MonkeyPatch, folder: Path, siblings: list[str], *, nodes: tuple[int, ...] = (),
    allowed: set[int] | None = None,
) -> None:  # fmt: skip
    """CPUs with these siblings (empty: the system does not tell), each on a NUMA node of `nodes`."""
    for cpu, names in enumerate(siblings):
        topology = folder / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        if names:
            (topology / "thread_siblings_list").write_text(f"{names}\n")
        if nodes:
            (folder / f"cpu{cpu}" / f"node{nodes[cpu]}").mkdir()
    monkeypatch.setattr(cores_module, "CPUS", folder)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed or set(range(len(siblings))))


@pytest.mark.parametrize(
    ("siblings", "allowed", "cores"),
    [
        pytest.param(["0", "1", "2", "3"], None, (4, 4), id="one hardware thread for each core"),
        pytest.param(["0-1", "0-1", "2-3", "2-3"], None, (4, 2), id="neighbours are siblings"),
        pytest.param(["0,2", "1,3", "0,2", "1,3"], None, (4, 2), id="siblings are far apart"),
        pytest.param(["0,2", "1,3", "0,2", "1,3"], {0, 1}, (2, 2), id="a cpuset with one of each"),
        pytest.param(["0,2", "1,3", "0,2", "1,3"], {1, 3}, (2, 1), id="a cpuset with both of one"),
        pytest.param(["0", "1", "2-3", "2-3"], None, (4, 3), id="only some cores have two"),
        pytest.param(["", "", ""], None, (3, 3), id="the system does not tell"),
        pytest.param(["0-1", "0-1"], None, (2, 1), id="two of one core"),
    ],
)
def test_each_core_counts_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, siblings: list[str], allowed: set[int] | None,
    cores: tuple[int, int],
) -> None:  # fmt: skip
    machine(monkeypatch, tmp_path / "cpu", siblings, allowed=allowed)
    system(monkeypatch, tmp_path / "cgroup", "0::/\n", {})
    found = available_cores()
    assert (found.cpus, found.physical, found.quota, found.usable) == (*cores, None, cores[1])


def test_the_newer_name_of_siblings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, tmp_path / "cpu", ["", ""])
    for cpu in range(2):
        (tmp_path / "cpu" / f"cpu{cpu}" / "topology" / "core_cpus_list").write_text("0-1\n")
    system(monkeypatch, tmp_path / "cgroup", "0::/\n", {})
    assert available_cores().physical == 1


@pytest.mark.parametrize(
    ("lines", "files", "quota", "usable"),
    [
        pytest.param("0::/\n", {"cpu.max": "400000 100000\n"}, 4.0, 4, id="v2, docker --cpus 4"),
        pytest.param("0::/\n", {"cpu.max": "550000 100000\n"}, 5.5, 6, id="v2, rounded"),
        pytest.param("0::/\n", {"cpu.max": "199000 100000\n"}, 1.99, 2, id="v2, a little less than two"),
        pytest.param("0::/\n", {"cpu.max": "30000 100000\n"}, 0.3, 1, id="v2, at least one"),
        pytest.param("0::/\n", {"cpu.max": "9600000 100000\n"}, 96.0, 8, id="v2, more than there are"),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, None, 8, id="v2, none"),
        pytest.param("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0, 2, id="v2, above"),
        pytest.param(
            "0::/a/b\n", {"a/cpu.max": "600000 100000", "a/b/cpu.max": "30000 10000"}, 3.0, 3, id="v2, the smallest"
        ),
        pytest.param("0::/host/only\n", {"cpu.max": "300000 100000"}, 3.0, 3, id="v2, path of the host"),
        pytest.param("0::/a\n", {"unified/a/cpu.max": "300000 100000"}, 3.0, 3, id="v2 beside v1"),
        pytest.param(
            V1.format(path="/a"), {"cpu/a/cpu.cfs_quota_us": "240000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            2.4, 2, id="v1",
        ),
        pytest.param(
            V1.format(path="/a"),
            {
                "cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n",
                "cpu/cpu.cfs_quota_us": "600000\n", "cpu/cpu.cfs_period_us": "100000\n",
            },
            6.0, 6, id="v1, above",
        ),
        pytest.param(V1.format(path="/a"), {"cpu/a/cpu.cfs_quota_us": "250000\n"}, None, 8, id="v1, no period"),
        pytest.param("3:cpuset:/a\n", {"cpu.max": "100000 100000"}, None, 8, id="another controller"),
        pytest.param("0::/\n", {"cpu.max": "0 100000"}, None, 8, id="zero"),
        pytest.param("0::/\n", {"cpu.max": "100000 0"}, None, 8, id="no time in a period"),
        pytest.param("0::/\n", {"cpu.max": "100000"}, None, 8, id="one number"),
        pytest.param("0::/\n", {"cpu.max": b"\xff\xfe"}, None, 8, id="no text"),
        pytest.param("0::/\n", {}, None, 8, id="no file"),
    ],
)  # fmt: skip
def test_the_smallest_quota_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: str, files: dict[str, str | bytes], quota: float | None,
    usable: int,
) -> None:  # fmt: skip
    machine(monkeypatch, tmp_path / "cpu", [str(cpu) for cpu in range(8)])
    system(monkeypatch, tmp_path / "cgroup", lines, files)
    found = available_cores()
    assert (found.quota, found.usable, found.physical) == (quota, usable, 8)


def test_numa_nodes_are_those_of_the_allowed_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    system(monkeypatch, tmp_path / "cgroup", "0::/\n", {})
    machine(monkeypatch, tmp_path / "cpu", ["0", "1", "2", "3"], nodes=(0, 0, 10, 2))
    assert available_cores().nodes == (0, 2, 10)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert available_cores().nodes == (0,)


def test_what_limits_is_told() -> None:
    assert str(Cores(2, 2, None, (0,))) == "2 cores"
    assert str(Cores(1, 1, None, ())) == "1 core"
    assert str(Cores(64, 32, 4.5, ())) == "32 cores, 64 hardware threads, a CPU quota of 4.5"


def test_this_process() -> None:
    found = available_cores()
    assert 1 <= found.usable <= found.physical <= found.cpus == len(os.sched_getaffinity(0))
