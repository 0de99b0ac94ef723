"""Runs the client's tests with the oldest and with the newest versions that saccade/pyproject.toml allows.

Run by `make test-floors`; needs the package index. Uses the oldest allowed Python if it is installed (python3.10, or
one of pyenv's), otherwise the current one, and prints which.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SACCADE = Path(__file__).resolve().parents[1]
CHECKOUT = SACCADE.parent
# Tests that need neither the server nor torch.
TESTS = ("affinity", "aio", "client", "jobs", "journal", "map", "requests", "resume", "retrying", "top", "uploads")
NEEDS = ("pytest", "pytest-timeout", "hypothesis", "pillow")

SAY_VERSIONS = """
import platform, google.protobuf, grpc
print("Python", platform.python_version(), "grpcio", grpc.__version__, "protobuf", google.protobuf.__version__)
"""


def requirements(pyproject: str) -> tuple[str, list[str]]:
    """The oldest Python and the dependencies of a project, as written."""
    python = re.search(r'^requires-python = ">=([\d.]+)"', pyproject, re.MULTILINE)
    listed = re.search(r"^dependencies = \[(.*?)^\]", pyproject, re.MULTILINE | re.DOTALL)
    assert python is not None and listed is not None
    return python[1], re.findall(r'^ *"([^"]+)"', listed[1], re.MULTILINE)


def oldest(requirement: str) -> str:
    """`grpcio>=1.64.3,<2` -> `grpcio==1.64.3`."""
    name, _, rest = requirement.partition(">=")
    return f"{name}=={rest.partition(',')[0]}"


def find_python(version: str) -> str:
    """The executable of a Python version, or the current one."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    # pyenv's versions first: its shims on the PATH may not work.
    return found[-1] if found else shutil.which(f"python{version}") or sys.executable


def run_tests(python: str, dependencies: list[str]) -> int:
    """Runs the tests in a separate environment; returns pytest's exit code."""
    with tempfile.TemporaryDirectory(prefix="saccade-floors-") as name:
        folder = Path(name)
        program = str(folder / "venv" / "bin" / "python")
        subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
        # A copy, since building leaves files behind and tests/conftest.py imports torch.
        shutil.copytree(
            SACCADE, folder / "saccade", ignore=shutil.ignore_patterns("build", "__pycache__", "*.egg-info")
        )
        shutil.copytree(CHECKOUT / "tests" / "saccade", folder / "sdk")
        shutil.copytree(CHECKOUT / "tests" / "support", folder / "support")
        (folder / "pytest.ini").write_text("[pytest]\npythonpath = support\naddopts = --import-mode=importlib\n")
        install = [program, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *dependencies, *NEEDS], check=True)
        subprocess.run([*install, "--no-deps", str(folder / "saccade")], check=True)
        shutil.rmtree(folder / "saccade")
        subprocess.run([program, "-c", SAY_VERSIONS], check=True)
        tests = [f"sdk/test_{test}.py" for test in TESTS]
        command = [program, "-m", "pytest", "-q", "-k", "not numpy and not crash", *tests]
        return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": ""}).returncode


def main() -> int:
    python, dependencies = requirements((SACCADE / "pyproject.toml").read_text("utf-8"))
    codes = [
        run_tests(find_python(python), [oldest(requirement) for requirement in dependencies]),
        run_tests(sys.executable, dependencies),
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
