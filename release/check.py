"""`make release-check`: builds the wheels, and installs and uses them outside of the checkout, as a user would.

There are two empty environments, with only their own programs on the PATH, and thus without a compiler: one with the
server, in which `saccade demo` has to answer correctly with compiled code, and one with the client alone, which sends
requests to that server. Writes the list of the server's components, in CycloneDX format, beside the wheels.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import HeaderParser
from pathlib import Path

from release import wheels
from release.wheels import CHECKOUT, DIST

CONSTRAINTS = CHECKOUT / "constraints.txt"
TORCH_CPU = "https://download.pytorch.org/whl/cpu"
EXTRAS = "http,urls,video,otlp"

TIMEOUT = 600.0
"""Seconds for one command. Most take less than ten, but CI runs tests at a higher priority meanwhile."""

RESERVED_HOST = re.compile(r"://([\w-]+\.)*example(\.com|\.net|\.org)?(?![\w.-])")
"""A URL whose host nobody can register (RFC 2606)."""

EVERY_SET = """
import logging, sys, torch
from kernels.linear import Packed
from kernels.native import instruction_sets, library
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
generator = torch.Generator().manual_seed(0)
weight, x = torch.randn(130, 256, generator=generator).bfloat16(), torch.randn(7, 256, generator=generator).bfloat16()
for each in instruction_sets.supported(instruction_sets.processor_features()):
    instruction_sets.use(each.name)
    torch.testing.assert_close(Packed(weight, None)(x), x @ weight.T, rtol=0.02, atol=0.1)
    print("checked", each.name)
"""
CLIENT_ALONE = """
import importlib.util, saccade
for name in ("torch", "numpy", "service", "kernels"):
    assert importlib.util.find_spec(name) is None, name
assert saccade.Client and saccade.AsyncClient
"""


class Environment:
    """An empty virtual environment, with a folder of its own as home and working directory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder / "venv", folder / "home"
        self.home.mkdir(parents=True)
        venv.create(self.folder, symlinks=True)
        self.python = self.folder / "bin" / "python"

    def install(self, *arguments: str | Path, may_fail: bool = False) -> bool:
        command = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.python,
            "install",
            "--quiet",
            "--no-compile",
            *arguments,
        ]
        done = subprocess.run(
            [str(part) for part in command], cwd=self.home, capture_output=True, text=True, check=False
        )
        if done.returncode and not may_fail:
            raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
        return done.returncode == 0

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        program = str(self.folder / "bin" / command[0])
        kept = {name: os.environ[name] for name in ("LANG", "OMP_NUM_THREADS", "TMPDIR") if name in os.environ}
        environment = {**kept, "PATH": str(self.folder / "bin"), "HOME": str(self.home), **variables}
        return subprocess.Popen(
            [program, *command[1:]], cwd=self.home, env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *command: str, code: int = 0, says: Sequence[str] = (), **variables: str) -> str:
        """Runs a program of this environment; returns its stdout and stderr. `SystemExit` unless it ends with exit code
        `code` and each pattern of `says` is found in its output."""
        process = self.start(*command, **variables)
        said, _ = process.communicate(timeout=TIMEOUT)
        missing = [words for words in says if not re.search(words, said)]
        if process.returncode != code or missing:
            problem = f"exit code {process.returncode} instead of {code}; not found: {missing}"
            raise SystemExit(f"{' '.join(command)}: {problem}\n{said}")
        return said

    @contextlib.contextmanager
    def serving(self) -> Iterator[tuple[str, str]]:
        """Runs a server of this environment inside the block; yields its gRPC and its HTTP address."""
        process = self.start("saccade", "serve", "demo", "--port", "0", "--http-port", "0", SACCADE_NATIVE="on")
        assert process.stdout is not None
        said, addresses = [], []
        try:
            for line in process.stdout:
                said.append(line)
                if found := re.match(r"saccade (?:http )?ready on (\S+)", line):
                    addresses.append(found[1])
                if len(addresses) == 2:
                    break
            else:
                raise SystemExit(f"the server did not start\n{''.join(said)}")
            yield addresses[0], addresses[1]
        finally:
            process.terminate()
            process.communicate(timeout=TIMEOUT)


def check_metadata(files: Sequence[Path], version: str) -> None:
    """Checks the metadata that a package index shows, in both wheels, and the contents of the server's wheel."""
    for path in (file for file in files if file.suffix == ".whl"):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            said = HeaderParser().parsestr(archive.read(metadata).decode())
        assert said["Version"] == version, f"{path.name}: {said['Version']}"
        assert said["License-Expression"] == "Apache-2.0", path.name
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names), f"{path.name} has no licence file"
        urls = said.get_all("Project-URL", [])
        reserved = [url for url in urls if RESERVED_HOST.search(url)]
        assert not reserved, f"{path.name}: placeholders in [project.urls]: {reserved}"
        if not urls:
            print(f"  {path.name}: no project URLs")
        strange = [name for name in names if name.split("/")[0] in ("tests", "benchmarks", "release", "build")]
        assert not strange, strange
    (server,) = (file for file in files if re.match(r"saccade_server.*\.whl", file.name))
    asked = HeaderParser().parsestr(
        zipfile.ZipFile(server).read(f"saccade_server-{version}.dist-info/METADATA").decode()
    )
    assert f"saccade=={version}" in asked.get_all("Requires-Dist", [])
    shipped = set(zipfile.ZipFile(server).namelist())
    folders = ("service", "families", "encoder", "decoder", "kernels", "demo/model", "demo/pictures")
    wanted = set(wheels.run("git", "ls-files", *folders).split())
    assert wanted <= shipped, f"not in the wheel: {sorted(wanted - shipped)}"


def check_server(server: Environment, version: str) -> None:
    said = server.run("python", "-c", EVERY_SET)
    sets = re.findall("checked (.*)", said)
    assert said.count("compiled code came with the package") == len(sets) >= 1, said
    print(f"  compiled code from the wheel, without a compiler: {', '.join(sets)}")
    server.run("saccade", "plan", "demo", says=["compiled for .*, built into the package"])
    server.run("saccade", "--version", says=[f"^saccade {re.escape(version)}\nsaccade-server {re.escape(version)}\n$"])
    said = server.run("saccade", "demo", says=["answers right"], SACCADE_NATIVE="on")
    print(f"  saccade demo: {said.strip().splitlines()[-1]}")


def check_client(client: Environment, grpc: str, http: str, version: str) -> None:
    """`grpc`, `http`: the addresses of a server that runs in the other environment."""
    client.run("python", "-c", CLIENT_ALONE)
    client.run("saccade", "--version", says=[f"^saccade {re.escape(version)}\n$"])
    client.run("saccade", "serve", code=1, says=["pip install saccade-server"])
    image = shutil.copy(CHECKOUT / "demo" / "pictures" / "shapes.png", client.home / "image.png")
    client.run("saccade", "ask", "--server", grpc, str(image), "How many red shapes are there?", says=[r"\w"])
    (example,) = re.findall(r"```python\n(.*?)```", (CHECKOUT / "saccade" / "README.md").read_text(), re.DOTALL)
    client.run("python", "-c", example.replace("127.0.0.1:50051", grpc))
    with urllib.request.urlopen(f"{http}/", timeout=30) as page:
        assert b"<html" in page.read(), "the playground is not in the wheel"
    print("  the client alone, in an environment without torch: ask, and the example of its README")


def check_fallback(server: Environment) -> None:
    """Without prebuilt libraries and without a compiler, SACCADE_NATIVE=on is an error, and `saccade plan` says why."""
    (prebuilt,) = server.folder.glob("lib/python*/site-packages/kernels/native/prebuilt")
    prebuilt.rename(prebuilt.with_name("away"))
    server.run("saccade", "plan", "demo", says=["without compiled code: there is no C\\+\\+ compiler"])
    server.run("saccade", "serve", "demo", "--port", "0", code=2, says=["no C\\+\\+ compiler"], SACCADE_NATIVE="on")
    prebuilt.with_name("away").rename(prebuilt)


def install_torch(server: Environment) -> None:
    """Installs the build for CPUs; the index's default build would add gigabytes of CUDA libraries."""
    (version,) = re.findall(r"^torch==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    if not server.install(f"torch=={version}+cpu", may_fail=True):
        server.install("--index-url", TORCH_CPU, f"torch=={version}")


def list_components(server: Environment, out: Path) -> int:
    """Writes the software bill of materials of an environment; returns the number of its components."""
    for path in server.folder.glob("lib/python*/site-packages/saccade*.dist-info/direct_url.json"):
        path.unlink()  # it would put the wheel's path on this machine into the list
    program = Path(sys.executable).with_name("cyclonedx-py")
    wheels.run(program, "environment", "--output-reproducible", "--output-file", out, server.python)
    components = json.loads(out.read_text())["components"]
    assert {"saccade-server", "torch"} <= {each["name"].replace("_", "-") for each in components}
    return len(components)


def main() -> None:
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)

    files = wheels.build(DIST)
    say(f"built: {', '.join(file.name for file in files)}")
    (sdk,) = (file for file in files if re.match(r"saccade-.*\.whl", file.name))
    (whole,) = (file for file in files if re.match(r"saccade_server-.*\.whl", file.name))
    version = sdk.name.split("-")[1]
    check_metadata(files, version)
    say("metadata, licences and contents are correct")
    with tempfile.TemporaryDirectory(prefix="saccade-release-") as name:
        server, client = Environment(Path(name, "server")), Environment(Path(name, "client"))
        install_torch(server)
        server.install("-c", CONSTRAINTS, sdk, f"{whole}[{EXTRAS}]")
        client.install("-c", CONSTRAINTS, sdk)
        say("installed in empty environments")
        check_server(server, version)
        say("the server is correct")
        with server.serving() as (grpc, http):
            check_client(client, grpc, http, version)
        say("the client is correct")
        check_fallback(server)
        say("without compiled code, the server reports that it is missing")
        components = list_components(server, DIST / f"saccade_server-{version}.cdx.json")
        say(f"{components} components listed in dist/saccade_server-{version}.cdx.json")


if __name__ == "__main__":
    main()
