"""Random weights of 8 and 4 bits."""

from __future__ import annotations

import torch

from kernels.linear import Quantised, quantise


def grouped(kind: str, inner: int) -> Quantised:
    """100 outputs of `inner` inputs: "fp8", "nvfp4", "int4", or in groups of 32 inputs "fp8 blocks", "int8 blocks", and
    "int8 zeros" and "int4 zeros" (with zero points)."""
    generator = torch.Generator().manual_seed(inner)
    weight = torch.randn(100, inner, generator=generator)
    if kind in ("fp8", "nvfp4", "int4"):
        return quantise(weight, kind)
    groups = -(-inner // 32)
    scale = torch.rand(100, groups, generator=generator) + 0.5
    if kind == "fp8 blocks":
        return Quantised("fp8", weight.to(torch.float8_e4m3fn), scale, inner, group=32)
    if kind.startswith("int8"):
        octets = torch.randint(-128, 128, (100, inner), dtype=torch.int8, generator=generator)
        points = torch.randint(0, 256, (100, groups), dtype=torch.uint8, generator=generator)
        return Quantised("int8", octets, scale, inner, group=32, zeros=points if kind == "int8 zeros" else None)
    values = torch.randint(0, 256, (100, inner // 2), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 17, (100, groups), dtype=torch.uint8, generator=generator)
    return Quantised("int4", values, scale, inner, group=32, zeros=zeros)
