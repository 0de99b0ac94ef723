"""`make setup` where only torch's default build is available, with the newest supported Python of this machine.

The index is a folder of wheels with only a name, a version and requirements, and stand-ins for the two projects require
only torch and triton. So nothing is downloaded and little is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pip

CHECKOUT = Path(__file__).resolve().parent.parent
PINNED = dict(re.findall(r"^([\w-]+)==(\S+)$", (CHECKOUT / "constraints.txt").read_text(), re.MULTILINE))
OWN_TRITON = "99.8.0"
"""The version that the stand-in for torch's default build requires; the real one also requires another version than the
pinned one."""

PROJECT = """
[project]
name = "{name}"
version = "0"
dependencies = {dependencies}
[project.optional-dependencies]
dev = ["triton>=3.6"]
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """
import tomllib, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    with open("pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    stem = f"{project['name'].replace('-', '_')}-0"
    asked = [f"Requires-Dist: {name}" for name in project["dependencies"]]
    dev = project["optional-dependencies"]["dev"]
    asked += ["Provides-Extra: dev", *(f'Requires-Dist: {n}; extra == "dev"' for n in dev)]
    head = ["Metadata-Version: 2.1", f"Name: {project['name']}", "Version: 0", *asked]
    with zipfile.ZipFile(f"{folder}/{stem}-py3-none-any.whl", "w") as file:
        file.writestr(f"{stem}.dist-info/METADATA", "\\n".join(head) + "\\n")
        file.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        file.writestr(f"{stem}.dist-info/RECORD", "")
    return f"{stem}-py3-none-any.whl"
"""


def interpreter(version: str) -> str | None:
    """The executable of that version: the current one, one of pyenv's, or one on PATH."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    kept = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    found = shutil.which(f"python{version}")
    for program in [*map(str, kept), *([found] if found else [])]:
        if subprocess.run([program, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return program
    return None


def wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    stem = f"{name}-{version}"
    asked = "".join(f"Requires-Dist: {other}\n" for other in requires)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as file:
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{asked}"
        file.writestr(f"{stem}.dist-info/METADATA", metadata)
        file.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{stem}.dist-info/RECORD", "")


def make_setup(folder: Path, python: str) -> str:
    """The output of `make setup` in a checkout of stand-ins, on a machine without a GPU whose index is `folder /
    "index"`."""
    for name in ("Makefile", "constraints.txt"):
        shutil.copy(CHECKOUT / name, folder / name)
    for path, name, dependencies in ((folder, "saccade-server", ["torch>=2.11"]), (folder / "saccade", "saccade", [])):
        path.mkdir(exist_ok=True)
        (path / "pyproject.toml").write_text(PROJECT.format(name=name, dependencies=dependencies))
        (path / "backend.py").write_text(BACKEND)
    # `make` creates .venv where there is none; with this interpreter's pip in it that takes a tenth of the time.
    subprocess.run([python, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    (site,) = folder.glob(".venv/lib/python*/site-packages")
    (site / "pip").symlink_to(Path(pip.__file__).parent)
    tools = folder / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\nexit 1\n")
    (tools / "nvidia-smi").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "MAKE"))}
    environment = kept | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder / "index"),
    }
    done = subprocess.run(["make", "setup"], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_torch_s_default_build_brings_its_own_triton(tmp_path: Path) -> None:
    """With the newest supported Python; the test of the other build has the one that runs it."""
    version, python = "3.13", interpreter("3.13")
    if python is None:
        version, python = "{}.{}".format(*sys.version_info), sys.executable
    index = tmp_path / "index"
    index.mkdir()
    wheel(index, "torch", PINNED["torch"], f"triton=={OWN_TRITON}")
    wheel(index, "triton", OWN_TRITON)
    wheel(index, "triton", PINNED["triton"])
    said = make_setup(tmp_path, python)
    assert "this build of torch has CUDA and requires its own version of triton" in said
    installed = f"installed: torch {PINNED['torch']} and triton {OWN_TRITON} for Python {version}."
    assert said.splitlines()[-1].startswith(installed)


def test_the_build_for_the_cpu_is_preferred_and_takes_the_pinned_triton(tmp_path: Path) -> None:
    index = tmp_path / "index"
    index.mkdir()
    wheel(index, "torch", PINNED["torch"], f"triton=={OWN_TRITON}")
    wheel(index, "torch", f"{PINNED['torch']}+cpu")
    wheel(index, "triton", OWN_TRITON)
    wheel(index, "triton", PINNED["triton"])
    said = make_setup(tmp_path, sys.executable)
    assert "CUDA" not in said
    assert said.splitlines()[-1].startswith(f"installed: torch {PINNED['torch']}+cpu and triton {PINNED['triton']} for")
