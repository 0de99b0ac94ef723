"""Writes the Python stubs of our protos, and the descriptors of KServe's.

`python protos/generate.py [FOLDER]`; the checkout itself by default.

The generator's version is pinned. What it writes refuses to load on a runtime older than itself, although it uses
nothing that older ones lack: that check is taken out, so that the client can be installed beside other programs'
grpcio and protobuf. What it needs instead is in saccade/pyproject.toml, and `make test-floors` tries it out.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CHECKS = {
    "_pb2.py": (
        r"from google\.protobuf import runtime_version as _runtime_version\n",
        r"_runtime_version\.ValidateProtobufRuntimeVersion\(\n[^)]*\)\n",
    ),
    "_pb2_grpc.py": (r"import warnings\n", r"GRPC_GENERATED_VERSION = .*?\n    raise RuntimeError\(.*?\n    \)\n"),
}
"""How a file's name ends -> what of it compares versions."""

PROTOS = Path(__file__).resolve().parent
CHECKOUT = PROTOS.parent


def generate(folder: Path) -> list[Path]:
    """Writes what is made of the protos under `folder`; returns the files that have been written."""
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "saccade" / "v1").glob("*.proto"))
    services = [source for source in sources if "\nservice " in (PROTOS / source).read_text()]
    well_known = Path(protoc.__file__).parent / "_proto"
    common = ["protoc", f"-I{PROTOS}", f"-I{well_known}"]
    for arguments in (
        [*common, f"--python_out={folder}", f"--pyi_out={folder}", *sources],
        [*common, f"--grpc_python_out={folder}", *services],
    ):
        if protoc.main(arguments) != 0:
            raise SystemExit(f"protoc failed: {' '.join(arguments)}")
    written = sorted((folder / "saccade" / "v1").glob("*_pb2*"))
    for path in written:
        _take_out_checks(path)
    return [*written, generate_kserve(folder, common)]


def _take_out_checks(path: Path) -> None:
    text = path.read_text("utf-8")
    for end, patterns in CHECKS.items():
        for pattern in patterns if path.name.endswith(end) else ():
            text, found = re.subn(pattern, "", text, flags=re.DOTALL)
            if found != 1:
                raise SystemExit(f"{path.name}: {pattern!r} stands there {found} times, expected once")
    path.write_text(text, "utf-8")


def generate_kserve(folder: Path, common: list[str]) -> Path:
    """KServe's contract as a descriptor set: stubs would register its names for the whole process, where only one
    package, usually Triton's client, may have them."""
    from grpc_tools import protoc

    target = folder / "service" / "rpc" / "kserve.binpb"
    target.parent.mkdir(parents=True, exist_ok=True)
    if protoc.main([*common, f"--descriptor_set_out={target}", "inference/grpc_service.proto"]) != 0:
        raise SystemExit("protoc failed: inference/grpc_service.proto")
    return target


if __name__ == "__main__":
    for path in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else CHECKOUT):
        print(path)
    if len(sys.argv) == 1:  # docs/grpc-reference.md is made of the same files
        subprocess.run([sys.executable, str(CHECKOUT / "docs" / "generate.py")], check=True)
