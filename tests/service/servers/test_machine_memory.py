"""The memory that this machine or container allows, read from copies of the system's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cgroup_files import system

from decoder.arena import device_memory
from kernels import cgroups as cgroups_module
from kernels.machine_memory import machine_memory
from service.common.config import ConfigError, ServerOptions
from service.servers.process_memory import PROCESS_BYTES, check_process_memory

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
LIMIT = 3 << 20
V1 = "9:cpu,cpuacct:/box\n4:memory:{path}\n1:name=systemd:/box\n"
V1_UNLIMITED = "9223372036854771712\n"


@pytest.mark.parametrize(
    ("cgroups", "files"),
    [
        pytest.param("0::/\n", {"memory.max": f"{LIMIT}\n"}, id="v2, a container's own namespace"),
        pytest.param("0::/a/b\n", {"a/b/memory.max": f"{LIMIT}\n", "a/memory.max": "max\n"}, id="v2, own cgroup"),
        pytest.param("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": f"{LIMIT}\n"}, id="v2, cgroup above"),
        pytest.param("0::/a/b\n", {"a/b/memory.max": f"{2 * LIMIT}", "a/memory.max": f"{LIMIT}"}, id="v2, both"),
        pytest.param("0::/a/b\n", {"a/b/memory.max": f"{LIMIT}", "a/memory.max": f"{2 * LIMIT}"}, id="v2, both, own"),
        pytest.param("0::/host/only\n", {"memory.max": f"{LIMIT}\n"}, id="v2, path of the host"),
        pytest.param("0::/../other\n", {"memory.max": f"{LIMIT}\n"}, id="v2, outside of the namespace"),
        pytest.param("0::/a:b\n", {"a:b/memory.max": f"{LIMIT}\n"}, id="v2, colon in the path"),
        pytest.param("0::/a\n", {"unified/a/memory.max": f"{LIMIT}\n"}, id="v2 beside v1"),
        pytest.param(V1.format(path="/a"), {"memory/a/memory.limit_in_bytes": f"{LIMIT}\n"}, id="v1"),
        pytest.param(
            V1.format(path="/docker/1f"), {"memory/memory.limit_in_bytes": f"{LIMIT}\n"}, id="v1, path of the host"
        ),
        pytest.param(
            V1.format(path="/a/b"),
            {"memory/a/b/memory.limit_in_bytes": V1_UNLIMITED, "memory/a/memory.limit_in_bytes": f"{LIMIT}"},
            id="v1, cgroup above",
        ),
    ],
)
def test_the_smallest_limit_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cgroups: str, files: dict[str, str | bytes]
) -> None:
    system(monkeypatch, tmp_path, cgroups, files)
    assert machine_memory() == LIMIT


@pytest.mark.parametrize(
    ("cgroups", "files"),
    [
        pytest.param("0::/a\n", {"a/memory.max": "max\n", "memory.max": "max\n"}, id="v2, max"),
        pytest.param("0::/a\n", {"a/memory.max": f"{PHYSICAL * 4}\n"}, id="v2, more than there is"),
        pytest.param("0::/a\n", {}, id="no files"),
        pytest.param("0::/a\n", {"a/memory.max/x": ""}, id="a folder"),
        pytest.param("0::/a\n", {"a/memory.max": b"\xff\xfe"}, id="no text"),
        pytest.param("0::/a\n", {"a/memory.max": "-1\n"}, id="negative"),
        pytest.param("0::/a\n", {"a/memory.max": "0\n"}, id="zero"),
        pytest.param("0::/a\n", {"a/memory.max": ""}, id="empty"),
        pytest.param("", {"memory.max": f"{LIMIT}\n"}, id="no cgroups"),
        pytest.param("nonsense\n\n:::\n", {"memory.max": f"{LIMIT}\n"}, id="no lines of cgroups"),
        pytest.param(V1.format(path="/a"), {"memory/a/memory.limit_in_bytes": V1_UNLIMITED}, id="v1, unlimited"),
        pytest.param("3:cpu:/a\n", {"memory/a/memory.limit_in_bytes": f"{LIMIT}\n"}, id="another controller"),
    ],
)
def test_no_limit_leaves_the_physical_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cgroups: str, files: dict[str, str | bytes]
) -> None:
    system(monkeypatch, tmp_path, cgroups, files)
    assert machine_memory() == PHYSICAL


def test_a_system_without_cgroups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cgroups_module, "CGROUPS", tmp_path / "none")
    monkeypatch.setattr(cgroups_module, "MOUNTS", tmp_path / "none")
    assert machine_memory() == PHYSICAL


def test_the_limit_decides_the_arena_and_the_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    system(monkeypatch, tmp_path, "0::/\n", {"memory.max": f"{20 * PROCESS_BYTES}\n"})
    assert device_memory("cpu") == 20 * PROCESS_BYTES
    check_process_memory(ServerOptions(image_workers=9))
    with pytest.raises(ConfigError, match="image_workers: 10 .* 2400 MiB of memory .* container; at most 9 fit"):
        check_process_memory(ServerOptions(image_workers=10))
