"""Products and attention of the compiled code for another processor, run by an emulator."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernels.linear import Packed
from kernels.native import Activation, Kind
from kernels.native.compiler import FLAGS, SOURCE
from kernels.native.instruction_sets import SETS

COMPILER = shutil.which(os.environ.get("AARCH64_CXX") or "aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


def build(name: str, folder: Path, features: Collection[str] = (), *, attention: bool = True) -> Path:
    """Compiles the program for an instruction set of AArch64 and a processor with these further features. `attention`:
    whether it also computes attention, which takes twice as long to compile."""
    assert COMPILER is not None
    wanted = next(each for each in SETS if each.name == name)
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC", "-O3")]
    source = Path(__file__).with_name("native_runner.cpp")
    command = [
        COMPILER,
        *flags,
        *("-Og", "-fwhole-program"),  # compiles in half the time of -O1, and only what `main` needs
        f"-DWITH_ATTENTION={int(attention)}",
        *wanted.options(set(features)),
        "-static",
        "-pthread",
        f"-I{SOURCE.parent}",
        str(source),
    ]
    subprocess.run([*command, "-o", str(folder / name)], check=True, capture_output=True, text=True)
    return folder / name


def product(program: Path, weight: Packed, x: Tensor, activation: Activation) -> Tensor:
    """`[rows, n]` in x's dtype: what `weight(x, activation)` is there."""
    layout, of = weight._layout, weight.descriptor
    tensors = [b"" if part is None else part.contiguous().view(torch.uint8).numpy().tobytes()
               for part in (layout.data, layout.scale, layout.outer, layout.bf16_scale, layout.compact,
                            layout.exceptions)]  # fmt: skip
    operand_ld = weight.operand_elements if weight.kind is Kind.F32 else weight.operand_elements + 32
    head = struct.pack(
        "17q", of.kind, of.n, of.k, of.kpad, of.gated, of.operand, of.group, x.shape[0], int(x.dtype == torch.bfloat16),
        activation, operand_ld, len(tensors[0]), len(tensors[1]) // 4, len(tensors[2]) // 4, len(tensors[3]) // 2,
        len(tensors[4]) // 8, len(tensors[5]) // 8,
    )  # fmt: skip
    given = head + b"".join(tensors) + x.contiguous().view(torch.uint8).numpy().tobytes()
    return _run(program, "product", given, x.dtype).view(x.shape[0], -1)


def attention(program: Path, qkv: Tensor, lengths: Sequence[int], before: int = 0) -> tuple[Tensor, Tensor]:
    """Attention with products of bfloat16 over float32 `[rows, 3, heads, width]`, sequences of these lengths:
    `[rows, heads, width]`. Of a single sequence also `[rows, width]`: what its last rows (at most 16) get in the first
    head if they are computed as decode rows are, and the first `before` keys and values are in pages.
    """
    rows, _, heads, width = qkv.shape
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    given = struct.pack("4q", heads, width, len(lengths), before) + bounds.numpy().tobytes()
    found = _run(program, "attention", given + qkv.contiguous().numpy().tobytes(), torch.float32)
    together, few = found[: rows * heads * width], found[rows * heads * width :]
    return together.view(rows, heads, width), few.view(-1, width)


def _run(program: Path, what: str, given: bytes, dtype: torch.dtype) -> Tensor:
    done = subprocess.run(
        [str(EMULATOR), str(program), what], input=given, capture_output=True, check=True, timeout=120
    )
    return torch.frombuffer(bytearray(done.stdout), dtype=dtype)
