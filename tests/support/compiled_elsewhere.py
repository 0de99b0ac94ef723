"""Products of the compiled code for another processor, run by an emulator."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from kernels.linear import Packed
from kernels.native import Activation, Kind
from kernels.native.compiler import FLAGS, SOURCE
from kernels.native.instruction_sets import SETS

COMPILER = shutil.which(os.environ.get("AARCH64_CXX") or "aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


def build(name: str, folder: Path, features: Collection[str] = ()) -> Path:
    """The program for an instruction set of AArch64, on a processor with these further features."""
    assert COMPILER is not None
    wanted = next(each for each in SETS if each.name == name)
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC", "-O3")]
    source = Path(__file__).with_name("product_runner.cpp")
    command = [
        COMPILER,
        *flags,
        "-O2",
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
               for part in (layout.data, layout.scale, layout.outer)]  # fmt: skip
    operand_ld = weight.operand_elements if weight.kind is Kind.F32 else weight.operand_elements + 32
    head = struct.pack(
        "14q", of.kind, of.n, of.k, of.kpad, of.gated, of.operand, of.group, x.shape[0], int(x.dtype == torch.bfloat16),
        activation, operand_ld, len(tensors[0]), len(tensors[1]) // 4, len(tensors[2]) // 4,
    )  # fmt: skip
    given = head + b"".join(tensors) + x.contiguous().view(torch.uint8).numpy().tobytes()
    done = subprocess.run([str(EMULATOR), str(program)], input=given, capture_output=True, check=True, timeout=120)
    return torch.frombuffer(bytearray(done.stdout), dtype=x.dtype).view(x.shape[0], -1)
