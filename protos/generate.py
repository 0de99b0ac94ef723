"""Writes the Python stubs of the protos of `saccade.v1`, and the descriptors of KServe's protos.

`python protos/generate.py [FOLDER]`; by default into the checkout itself.

The generator's version is pinned. Its stubs refuse to load with older versions of grpcio and protobuf, although they
use nothing that older versions lack. This check is removed, so that the client can be installed beside programs that
need older versions. saccade/pyproject.toml has the versions that are needed, and `make test-floors` tests the oldest.
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
"""End of a file's name -> patterns of the code in it that compares versions."""

PROTOS = Path(__file__).resolve().parent
CHECKOUT = PROTOS.parent


def generate(folder: Path) -> list[Path]:
    """Writes everything that is generated from the protos under `folder`; returns the written files."""
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
                raise SystemExit(f"{path.name}: {pattern!r} was found {found} times, expected once")
    path.write_text(text, "utf-8")


def generate_kserve(folder: Path, common: list[str]) -> Path:
    """Writes KServe's protos as a descriptor set. Stubs would register its names for the whole process, in which only
    one package, such as Triton's client, can register them."""
    from grpc_tools import protoc

    target = folder / "service" / "rpc" / "kserve.binpb"
    target.parent.mkdir(parents=True, exist_ok=True)
    if protoc.main([*common, f"--descriptor_set_out={target}", "inference/grpc_service.proto"]) != 0:
        raise SystemExit("protoc failed: inference/grpc_service.proto")
    return target


if __name__ == "__main__":
    for path in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else CHECKOUT):
        print(path)
    if len(sys.argv) == 1:  # docs/grpc-reference.md is generated from the same files
        subprocess.run([sys.executable, str(CHECKOUT / "docs" / "generate.py")], check=True)
