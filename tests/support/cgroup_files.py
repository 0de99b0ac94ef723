"""Copies of the system's files about cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels import cgroups


def system(monkeypatch: pytest.MonkeyPatch, folder: Path, lines: str, files: dict[str, str | bytes]) -> None:
    """A folder with what a system says of this process' cgroups: `lines` of /proc/self/cgroup, and `files`, paths in
    the folder -> their content."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (folder / "self").write_text(lines)
    monkeypatch.setattr(cgroups, "CGROUPS", folder / "self")
    monkeypatch.setattr(cgroups, "MOUNTS", folder)
