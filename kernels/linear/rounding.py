"""Quantises plain weights by rounding to the nearest values; the maths is in README.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.host_memory import drop_pages
from kernels.linear.quantised import E2M1, NVFP4_GROUP, Quantised, pack_nibbles
from kernels.native.structs import GROUP
from kernels.weight_forms import FORMS, kind_and_group

SCALES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Fractions of the largest scale that are tried for int4 and nvfp4."""
PIECE = 1 << 20
"""Elements that are rounded at a time, because the float32 intermediates are many times larger than the result."""
LARGEST_E4M3 = 448.0
LARGEST_E2M1 = E2M1[-1]


def quantise(weight: Tensor, form: str) -> Quantised:
    """Rounds a weight `[..., n, k]` to the grid of each row (int8, fp8) or group (int8-32, int4, nvfp4). `form`: one of
    `FORMS`. Scales of fp8 and of groups are exact in bfloat16, as published formats store them. The result is on the
    weight's device. `ValueError` for another form or for weights that are not finite.
    """
    if form not in FORMS:
        raise ValueError(f"form of weights {form!r} is not one of {', '.join(FORMS)}")
    kind, group = kind_and_group(form)
    rounders: dict[str, Callable[[Tensor], Quantised]] = {
        "int8": partial(_int8, group=group), "int4": partial(_int4, group=group or GROUP), "fp8": _fp8, "nvfp4": _nvfp4,
    }  # fmt: skip
    flat, step = weight.detach().flatten(0, -2), max(1, PIECE // weight.shape[-1])
    whole: Quantised | None = None
    for begin in range(0, len(flat), step):
        rows = flat[begin : begin + step]
        piece = rows.float()
        if not bool(torch.isfinite(piece).all()):
            raise ValueError(f"a weight of shape {tuple(weight.shape)} holds values that are not finite")
        part = rounders[kind](piece)
        whole = whole or part.map(lambda tensor: tensor.new_empty(len(flat), *tensor.shape[1:]))
        for tensor, found in zip(whole.tensors, part.tensors, strict=True):
            tensor[begin : begin + step] = found
        drop_pages(rows)
    assert whole is not None, "a weight without rows"
    return whole.in_shape(weight.shape[:-1])


def _int8(weight: Tensor, group: int | None) -> Quantised:
    """A scale for each row, or for each `group` inputs of it."""
    inner = weight.shape[-1]
    groups = _in_groups(weight, group or inner)
    scale = groups.abs().amax(-1) / 127
    if group is not None:
        scale = scale.bfloat16().float()
    values = (groups / _divisor(scale)[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    return Quantised("int8", values.flatten(-2)[..., :inner].contiguous(), scale, inner, group or inner)


def _in_groups(weight: Tensor, group: int) -> Tensor:
    """`[n, k]` -> `[n, ceil(k / group), group]`, zeros behind the end."""
    return F.pad(weight, (0, -weight.shape[-1] % group)).unflatten(-1, (-1, group))


def _fp8(weight: Tensor) -> Quantised:
    """A scale for each row."""
    inner = weight.shape[-1]
    scale = (weight.abs().amax(-1, keepdim=True) / LARGEST_E4M3).bfloat16().float()
    values = (weight / _divisor(scale)).clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
    return Quantised("fp8", values, scale, inner, group=inner)


def _int4(weight: Tensor, group: int) -> Quantised:
    inner, groups = weight.shape[-1], _in_groups(weight, group)
    # The first scale puts the value of largest magnitude at -8, whatever its sign, so that all 16 steps are in use.
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    steps, scale = _finest(
        groups,
        lambda factor: (largest * (factor / -8)).bfloat16().float(),
        lambda scaled: scaled.round_().clamp_(-8, 7),
    )
    return Quantised("int4", pack_nibbles(steps.flatten(-2)[..., :inner] + 8), scale, inner, group)


def _nvfp4(weight: Tensor) -> Quantised:
    inner = weight.shape[-1]
    groups = _in_groups(weight, NVFP4_GROUP)
    largest = groups.abs().amax(-1)
    # One outer scale per row, chosen so that the row's largest inner scale is at its limit: a row is rounded in the
    # same way alone as within a weight.
    outer = _divisor(largest.amax(-1) / (LARGEST_E2M1 * LARGEST_E4M3))

    def scale_of(factor: float) -> Tensor:
        inner_scale = largest * (factor / LARGEST_E2M1) / outer[..., None]
        return inner_scale.clamp(max=LARGEST_E4M3).to(torch.float8_e4m3fn).float() * outer[..., None]

    magnitudes = torch.tensor(E2M1, device=weight.device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2

    def nearest(scaled: Tensor) -> Tensor:
        return magnitudes[torch.bucketize(scaled.abs(), middles)].copysign(scaled)

    values, scale = _finest(groups, scale_of, nearest)
    codes = torch.bucketize(values.abs(), middles) + 8 * values.signbit()
    stored = (scale / outer[..., None]).to(torch.float8_e4m3fn)
    flat = codes.flatten(-2)[..., :inner]
    return Quantised("nvfp4", pack_nibbles(flat), stored, inner, outer=outer)


def _finest(
    groups: Tensor, scale_of: Callable[[float], Tensor], nearest: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Grid values and scale of each group: of several candidate scales, the one with the least squared error. Scales
    below the first clip the largest values, which reduces the error if few values are large."""
    best_values = torch.zeros_like(groups)
    best_scale = torch.zeros_like(groups[..., 0])
    best_error = torch.full_like(best_scale, float("inf"))
    for factor in SCALES:
        scale = scale_of(factor)
        values = nearest(groups / _divisor(scale)[..., None])
        error = (values * scale[..., None]).sub_(groups).square_().sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_values = torch.where(better[..., None], values, best_values)
    return best_values, best_scale


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)
