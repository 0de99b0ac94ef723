"""Traces the modules that an image passes through in a server, for the list in docs/architecture.md.

    python -m benchmarks.image_walk [--model demo]

Starts a server without graphs, asks one question about one image, and records in each of its processes
(`sys.setprofile`) which function passes the image to which, as an argument or as a result. A module counts if one of
its functions gets the image from another module and passes it to another. The image is one of its types (`FORMS`), the
file's bytes, a tensor of its pixels, patches or rows, or a request or launch that contains one of these. Not counted:
kernels, which compute on any tensor; modules that define the types (`TYPES`), send any message or run the event loop;
and the decoder's steps after `decoder/batch.py` has read the rows, where they are mixed with other rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, FrameType, GeneratorType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("service", "families", "encoder", "decoder")
FORMS = ("Image", "PreparedItem", "EncoderItem", "Lease")
TYPES = (
    "service/common/types.py", "service/engine/types.py", "service/encoding/entries.py", "encoder/item.py",
    "decoder/request.py",
)  # fmt: skip
MESSAGES = ("service/common/channel.py", "service/rpc/interceptor.py", "service/servers/lifetime.py")
ENDS = ("decoder/queues.py", "decoder/batch.py")
"""The modules where the decoder queues a request for its steps, and where it reads the rows."""
STEPS = ("Sequence", "Row", "Step", "Batch", "Flight")
DEPTH = 5
SIZE = 480, 352
"""Width and height of the image: a shape that no other tensor has."""


class Probe:
    """Records in a file, for this process, which function passes the image to which."""

    def __init__(self, folder: Path, sizes: dict[str, int]) -> None:
        self._file = os.open(folder / f"{os.getpid()}.calls", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._sizes = sizes
        self._modules: dict[CodeType, str] = {}
        self._seen: set[tuple[str, str, str]] = set()
        self._busy = threading.local()

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        module = self._module(frame.f_code)
        if not module or event not in ("call", "return") or getattr(self._busy, "on", False):
            return
        self._busy.on = True
        try:
            caller = self._caller(frame)
            if event == "return":
                self._note(module, caller, frame.f_code, [result])
            else:
                code = frame.f_code
                count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
                values = frame.f_locals
                self._note(caller, module, code, [values[name] for name in code.co_varnames[:count] if name in values])
        finally:
            self._busy.on = False

    def _note(self, giver: str, taker: str, code: CodeType, values: list[Any]) -> None:
        for form in sorted({form for value in values for form in self._forms(value, DEPTH)}):
            if (giver, taker, form) not in self._seen:
                self._seen.add((giver, taker, form))
                os.write(self._file, f"{json.dumps([giver, taker, form, code.co_qualname])}\n".encode())

    def _caller(self, frame: FrameType) -> str:
        back = frame.f_back
        while back is not None:
            if module := self._module(back.f_code):
                return module
            back = back.f_back
        return ""

    def _module(self, code: CodeType) -> str:
        if code not in self._modules:
            name = os.path.relpath(code.co_filename, ROOT) if code.co_filename.startswith("/") else ""
            self._modules[code] = name if name.split("/")[0] in PACKAGES else ""
        return self._modules[code]

    def _forms(self, value: Any, depth: int) -> Iterator[str]:
        """The forms of the image that a value is or contains."""
        kind = type(value)
        if kind is bytes or kind is bytearray:
            if len(value) == self._sizes["file"]:
                yield "file"
        elif kind.__name__ in FORMS and kind.__module__.split(".")[0] in (*PACKAGES, "saccade"):
            yield kind.__name__
        elif kind.__name__ in ("Tensor", "ndarray"):
            yield from self._tensor(tuple(value.shape))
        elif kind is GeneratorType:
            yield from self._forms(list(value.gi_frame.f_locals.values()) if value.gi_frame else [], depth)
        elif kind.__name__ == "GenerateRequest":
            yield from ["Image"] * (value.ByteSize() > self._sizes["file"])
        elif depth and isinstance(value, list | tuple | set | frozenset):
            for part in list(value)[:50]:
                yield from self._forms(part, depth - 1)
        elif depth and isinstance(value, dict):
            yield from self._forms(list(value.values()), depth - 1)
        elif depth and (is_dataclass(kind) or kind.__name__ in ("Prompt", "EncodeJob")) and kind.__name__ not in STEPS:
            names = [field.name for field in fields(kind)] if is_dataclass(kind) else list(vars(value))
            yield from self._forms([getattr(value, name, None) for name in names], depth - 1)

    def _tensor(self, shape: tuple[int, ...]) -> Iterator[str]:
        sizes, size = self._sizes, math.prod(shape)
        if size == sizes["rows"] * sizes["row"]:
            yield "rows"
        elif size in (3 * SIZE[0] * SIZE[1], sizes["patches"] * sizes["patch"]):
            yield "patches" if len(shape) == 2 else "pixels"


def start_probe(config: str) -> None:
    """Called at the start of each process of the server."""
    values = json.loads(Path(config).read_text())
    probe = Probe(Path(config).parent, values)
    sys.setprofile(probe)
    threading.setprofile(probe)


def walk(calls: list[tuple[str, str, str, str]]) -> dict[str, set[str]]:
    """The modules that get the image and pass it on, with its forms there."""
    calls = [call for call in calls if call[0] != call[1]]
    takers = {taker for _, taker, _, _ in calls}
    givers = {giver for giver, taker, _, _ in calls if taker not in TYPES}
    passed = (takers & (givers | {*ENDS})) - {"", *TYPES, *MESSAGES}
    found: dict[str, set[str]] = {}
    for giver, taker, form, _ in calls:
        for module in passed & {giver, taker}:
            found.setdefault(module, set()).add(form)
    return found


def sizes_of(model: str, file: bytes) -> dict[str, int]:
    """The sizes of the image in each form."""
    from encoder.images import decode_image
    from encoder.item import IMAGE
    from service.common.config import ServerOptions
    from service.servers.from_options import load_assets

    vision = load_assets(ServerOptions(model=model)).vision
    if vision is None:
        raise SystemExit(f"{model} takes no images")
    import torch

    item = vision.image_rule.patchify(decode_image(file), torch.float32)
    return {
        "file": len(file), "patches": item.num_patches, "patch": vision.patch_widths[IMAGE], "rows": item.tokens,
        "row": vision.row_width,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calls", action="store_true", help="print every call too")
    arguments = parser.parse_args(argv)
    import saccade
    from benchmarks.noise import noise_png

    file = noise_png(random.Random(0), *SIZE)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "sizes.json"
        config.write_text(json.dumps(sizes_of(arguments.model, file)))
        code = f"from benchmarks.image_walk import start_probe\nstart_probe({str(config)!r})\n"
        (Path(folder) / "sitecustomize.py").write_text(code)
        paths = os.pathsep.join((folder, str(ROOT)))
        options = {"port": "0", "graphs": "off", "log-level": "warning"}
        command = [sys.executable, "-m", "saccade", "serve", arguments.model]
        command += [f"--{name}={value}" for name, value in options.items()]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
        ) as server:
            assert server.stdout is not None
            with saccade.Client(server.stdout.readline().split()[-1]) as client:
                client.generate("What is this?", images=[file], max_tokens=2)
            server.terminate()
        lines = [line for each in sorted(Path(folder).glob("*.calls")) for line in each.read_text().splitlines()]
    calls: list[tuple[str, str, str, str]] = [tuple(json.loads(line)) for line in lines]
    if arguments.calls:
        print(*(f"{giver} -> {taker}: {form} ({name})" for giver, taker, form, name in calls), sep="\n")
    found = walk(calls)
    for module, forms in found.items():
        print(f"{module:40} {', '.join(sorted(forms))}")
    print(json.dumps({"modules": len(found)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
