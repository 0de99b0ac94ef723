"""Downloads the packages in benchmarks/peers.txt into .peers, with pip and from PyPI's own list of files.

    python -m benchmarks.fetch_peers [--to .peers] [--python 3.12] [NAME ...]
    python -m benchmarks.fetch_peers --unpack DIR

Wheels stay packed in `.peers/wheels`, so that little has to be copied to a machine without a network; there, `--unpack`
(which needs no network) unpacks them into a folder for PYTHONPATH. Of a source package only the named folder is kept,
under `.peers/src`.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "benchmarks" / "peers.txt"
INDEX = "https://pypi.org/simple"
# pip matches each version of glibc by itself.
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in range(39, 16, -1)] + ["manylinux2014_x86_64"]


@dataclass(frozen=True)
class Peer:
    """One line of the list."""

    kind: str
    name: str
    version: str
    folder: str = ""


def read(text: str) -> list[Peer]:
    """Parses the list. `ValueError` with the line if a line has neither of the two forms."""
    peers = []
    for line in text.splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, _, version = words[1].partition("==") if len(words) > 1 else ("", "", "")
        if (words[0], len(words)) not in {("wheel", 2), ("source", 3)} or not version:
            raise ValueError(f"not `wheel NAME==VERSION` or `source NAME==VERSION FOLDER`: {line!r}")
        peers.append(Peer(words[0], name, version, *words[2:]))
    return peers


def fetch_wheel(peer: Peer, to: Path, python: str) -> None:
    """Downloads one wheel without its dependencies, and deletes other versions of it."""
    wheels = to / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wheels) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", folder]
        command += ["--python-version", python, "--implementation", "cp"]
        command += [word for platform in PLATFORMS for word in ("--platform", platform)]
        subprocess.run([*command, f"{peer.name}=={peer.version}"], check=True)
        for old in wheels.glob(f"{re.sub('[-_.]+', '_', peer.name)}-*.whl"):
            old.unlink()
        for wheel in Path(folder).glob("*.whl"):
            wheel.rename(wheels / wheel.name)


def unpack(peers: Path, to: Path) -> list[str]:
    """Unpacks the fetched wheels into `to` and returns their names. Does nothing if `to` already has these wheels."""
    wheels = sorted((peers / "wheels").glob("*.whl"))
    stamp, names = to / ".unpacked", "\n".join(wheel.name for wheel in wheels)
    if wheels and not (stamp.exists() and stamp.read_text() == names):
        shutil.rmtree(to, ignore_errors=True)
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(to)
        stamp.write_text(names)
    return [wheel.name for wheel in wheels]


def fetch_source(peer: Peer, to: Path) -> None:
    """Downloads one source package and keeps its folder. No code of it is run."""
    page = f"{INDEX}/{peer.name}/"
    with urllib.request.urlopen(page, timeout=60) as answer:
        text = answer.read().decode()
    name = f"{re.sub('[-_.]+', '[-_.]', peer.name)}-{re.escape(peer.version)}"
    found = re.search(rf'href="([^"]+/{name}\.tar\.gz[^"]*)"', text)
    if found is None:
        raise ValueError(f"{page} has no source of {peer.version}")
    with urllib.request.urlopen(urllib.parse.urljoin(page, found[1]), timeout=300) as answer:
        archive = tarfile.open(fileobj=io.BytesIO(answer.read()))
    with archive:
        for member in archive.getmembers():
            inside = member.name.partition("/")[2]
            if member.isfile() and inside.startswith(peer.folder + "/"):
                member.name = inside
                archive.extract(member, to / "src" / peer.name, filter="data")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="packages of the list (default: all)")
    parser.add_argument("--to", type=Path, default=ROOT / ".peers")
    parser.add_argument("--python", default="3.12", help="version of Python that the wheels are for")
    parser.add_argument(
        "--unpack", type=Path, metavar="DIR", help="unpack the downloaded wheels into DIR; download nothing"
    )
    arguments = parser.parse_args(argv)
    if arguments.unpack is not None:
        unpack(arguments.to, arguments.unpack)
        return 0
    peers = read(LIST.read_text())
    if unknown := sorted(set(arguments.names) - {peer.name for peer in peers}):
        parser.error(f"{', '.join(unknown)}: not in {LIST.name}")
    for peer in peers:
        if not arguments.names or peer.name in arguments.names:
            print(f"{peer.kind} {peer.name} {peer.version}", flush=True)
            if peer.kind == "wheel":
                fetch_wheel(peer, arguments.to, arguments.python)
            else:
                fetch_source(peer, arguments.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
