"""`make lint` checks the sources, and nothing that an installation leaves in the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WRONG = "import os\ndef f( x ):\n  return x + undefined\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with this one's configuration and almost nothing else."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in tomllib.loads((tmp_path / "pyproject.toml").read_text())["tool"]["mypy"]["files"]:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    return tmp_path


COMMANDS = {"check": ["ruff", "check", "."], "format": ["ruff", "format", "--check", "."], "types": ["mypy"]}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_an_installation_leaves_behind_is_not_looked_at(checkout: Path, command: str) -> None:
    for folder in ("saccade/build/lib/saccade", "build/lib/service"):
        (checkout / folder).mkdir(parents=True)
        (checkout / folder / "wrong.py").write_text(WRONG)
    done = lint(checkout, command)
    assert done.returncode == 0, done.stdout + done.stderr
    (checkout / "saccade" / "builder.py").write_text(WRONG)  # a source is checked, whatever its name begins with
    assert lint(checkout, command).returncode == 1


def lint(checkout: Path, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *COMMANDS[command]], cwd=checkout, capture_output=True, text=True, timeout=250
    )
