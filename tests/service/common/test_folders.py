"""Folders that belong to one process: they are deleted when it ends, at the latest when the next process creates its
own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from service.common.folders import OwnedFolder

PROGRAM = """
import sys
from service.common.folders import OwnedFolder
folder = OwnedFolder("ours-", sys.argv[1])
print(folder.name, flush=True)
sys.stdin.read()
"""


def start(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that makes a folder and lives until its input ends, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_killed_process_is_deleted_and_no_other(tmp_path: Path) -> None:
    killed, abandoned = start(tmp_path)
    alive, used = start(tmp_path)
    (abandoned / "folder").mkdir()
    (abandoned / "folder" / "file").write_text("x")
    for other in ("ours-without-a-lock", "others-"):
        (tmp_path / other).mkdir()
    (tmp_path / "others-" / ".owner").touch()
    (tmp_path / "ours-link").symlink_to(tmp_path / "others-")
    (tmp_path / "ours-file").touch()
    killed.kill()
    killed.communicate()
    assert abandoned.exists()
    with OwnedFolder("ours-", str(tmp_path)) as mine:
        assert not abandoned.exists() and used.exists()
        assert {path.name for path in tmp_path.iterdir()} == {
            used.name, Path(mine).name, "ours-without-a-lock", "others-", "ours-link", "ours-file",
        }  # fmt: skip
    alive.communicate("")
    assert alive.returncode == 0 and not used.exists() and not Path(mine).exists()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        OwnedFolder("ours-", str(tmp_path / "nowhere"))
