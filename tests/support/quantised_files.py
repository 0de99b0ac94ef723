"""Quantised tensors written in numpy from the formats' specifications, with their values in float32.

Each function takes a module's name and a float32 matrix `[outputs, inputs]`. It returns the tensors that a published
file would contain, and the dequantised matrix, computed here and not by the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

Floats = np.ndarray
Written = tuple[dict[str, Tensor], Floats]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _e4m3_table() -> Floats:
    """Values of all bytes: sign, four bits of exponent with bias 7, three of mantissa; 0x7f and 0xff are NaN."""
    values = np.zeros(256, np.float32)
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values[byte] = -size if byte & 128 else size
    values[[0x7F, 0xFF]] = np.nan
    return values


E4M3 = _e4m3_table()
_FINITE = np.array([b for b in range(256) if not np.isnan(E4M3[b]) and b != 0x80])
_SORTED = _FINITE[np.argsort(E4M3[_FINITE], kind="stable")]


def nearest(values: Floats, grid: Floats) -> Floats:
    """Index of the nearest entry of an ascending grid, the lower one of two."""
    return np.searchsorted((grid[:-1] + grid[1:]) / 2, values)


def to_e4m3(values: Floats) -> Floats:
    return _SORTED[nearest(np.clip(values, -448, 448), E4M3[_SORTED])].astype(np.uint8)


def fp8(octets: Floats) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(octets)).view(torch.float8_e4m3fn)


def bf16(values: Floats) -> tuple[Tensor, Floats]:
    """The tensor, and its values as float32."""
    rounded = torch.from_numpy(np.ascontiguousarray(values, np.float32)).bfloat16()
    return rounded, rounded.float().numpy()


def f32(values: Floats | float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def block_fp8(name: str, w: Floats, block: tuple[int, int] = (128, 128)) -> Written:
    """Qwen's and DeepSeek's format: w * scale_inv, one scale per block; the last blocks may be partial."""
    rows, inner = w.shape
    scale = np.zeros((-(-rows // block[0]), -(-inner // block[1])), np.float32)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = w[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scale[i, j] = np.abs(part).max() / 448
    stored, scale = bf16(scale)
    wide = scale.repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :inner]
    octets = to_e4m3(w / wide)
    return {f"{name}.weight": fp8(octets), f"{name}.weight_scale_inv": stored}, E4M3[octets] * wide


def modelopt_fp8(name: str, w: Floats) -> Written:
    scale = np.float32(np.abs(w).max() / 448)
    octets = to_e4m3(w / scale)
    tensors = {f"{name}.weight": fp8(octets), f"{name}.weight_scale": f32(scale), f"{name}.input_scale": f32(0.02)}
    return tensors, E4M3[octets] * scale


def modelopt_fp8_blocks(name: str, w: Floats) -> Written:
    """FP8_PB_WO: scales `[rows / 128, 1, inputs / 128, 1]`."""
    tensors, meant = block_fp8(name, w)
    scale = tensors.pop(f"{name}.weight_scale_inv").float()
    return tensors | {f"{name}.weight_scale": scale[:, None, :, None].contiguous()}, meant


def channel_fp8(name: str, w: Floats) -> Written:
    """compressed-tensors' float-quantized: one scale per row."""
    stored, scale = bf16(np.abs(w).max(1, keepdims=True) / 448)
    octets = to_e4m3(w / scale)
    return {f"{name}.weight": fp8(octets), f"{name}.weight_scale": stored}, E4M3[octets] * scale


def int8_rows(name: str, w: Floats, group: int | None = None, *, zeros: bool = False) -> Written:
    """compressed-tensors' int-quantized: one scale per row or group; optional signed zero points."""
    numbers, point, stored, meant = integers_in_groups(w, group or w.shape[1], 8, zeros=zeros)
    tensors = {f"{name}.weight": signed(numbers), f"{name}.weight_scale": stored}
    if zeros:
        tensors[f"{name}.weight_zero_point"] = signed(point)
    return tensors, meant


def signed(numbers: Floats) -> Tensor:
    """0 to 255 -> -128 to 127."""
    return torch.from_numpy((numbers - 128).astype(np.int8))


def _nvfp4(w: Floats, outer: np.float32) -> tuple[Floats, Floats, Floats]:
    """Packed nibbles, e4m3 bytes of scales, and e2m1 * scale without the outer scale."""
    rows, inner = w.shape
    groups = (w / outer).reshape(rows, inner // 16, 16)
    scale = to_e4m3(np.abs(groups).max(-1) / 6)
    wide = E4M3[scale]
    grid, code_of = np.unique(E2M1, return_index=True)  # of both zeros the positive one
    codes = code_of[nearest(groups / np.where(wide == 0, 1, wide)[..., None], grid)]
    codes = codes.astype(np.uint8).reshape(rows, inner)
    return (
        codes[:, 0::2] | codes[:, 1::2] << 4,
        scale,
        (E2M1[codes].reshape(groups.shape) * wide[..., None]).reshape(w.shape),
    )


def modelopt_nvfp4(name: str, w: Floats, *, input_scale: bool = True) -> Written:
    """e2m1 * weight_scale * weight_scale_2; W4A16_NVFP4 has no input_scale."""
    outer = np.float32(np.abs(w).max() / (6 * 448))
    packed, scale, inner = _nvfp4(w, outer)
    tensors = {
        f"{name}.weight": torch.from_numpy(packed),
        f"{name}.weight_scale": fp8(scale),
        f"{name}.weight_scale_2": f32(outer),
    }
    if input_scale:
        tensors[f"{name}.input_scale"] = f32(0.01)
    return tensors, inner * outer


def packed_nvfp4(name: str, w: Floats) -> Written:
    """compressed-tensors' nvfp4: divided by its global scale."""
    divisor = np.float32(6 * 448 / np.abs(w).max())
    packed, scale, inner = _nvfp4(w, np.float32(1) / divisor)
    tensors = {
        f"{name}.weight_packed": torch.from_numpy(packed), f"{name}.weight_scale": fp8(scale),
        f"{name}.weight_global_scale": f32([divisor]), f"{name}.input_global_scale": f32([100.0]),
    }  # fmt: skip
    return tensors, inner / divisor


def words(numbers: Floats, axis: int, order: tuple[int, ...] | None = None, *, bits: int = 4) -> Tensor:
    """Eight numbers below 16, or four below 256, in an int32, the first of `order` in the lowest bits."""
    per_word = 32 // bits
    moved = np.moveaxis(numbers.astype(np.uint32), axis, -1)
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % per_word)])
    split = moved.reshape(*moved.shape[:-1], -1, per_word)[..., list(order or range(per_word))]
    packed = np.bitwise_or.reduce(split << (bits * np.arange(per_word, dtype=np.uint32)), -1).astype(np.uint32)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32))


def in_groups(w: Floats, group: int) -> Floats:
    """`[rows, inputs]` -> `[rows, groups, group]`; a short last group is filled with its last input."""
    return np.pad(w, [(0, 0), (0, -w.shape[1] % group)], "edge").reshape(w.shape[0], -1, group)


def integers_in_groups(w: Floats, group: int, bits: int, *, zeros: bool) -> tuple[Floats, Floats, Tensor, Floats]:
    """Unsigned numbers `[rows, inputs]`, zero points (the middle without `zeros`) and scales `[rows, groups]`, and the
    dequantised matrix."""
    rows, inner = w.shape
    groups, most = in_groups(w, group), 2**bits - 1
    low, high = groups.min(-1), groups.max(-1)
    step = (high - low) / most if zeros else np.abs(groups).max(-1) / (most // 2)
    stored, scale = bf16(step)
    point = np.clip(np.round(-low / scale), 0, most) if zeros else np.full_like(scale, 2 ** (bits - 1))
    numbers = np.clip(np.round(groups / scale[..., None] + point[..., None]), 0, most)
    meant = (numbers - point[..., None]).astype(np.float32) * scale[..., None]
    flat = [found.reshape(rows, -1)[:, :inner].copy() for found in (numbers, meant)]
    return flat[0], point, stored, flat[1]


def packed(name: str, w: Floats, group: int | None = 32, *, bits: int = 4, zeros: bool = False) -> Written:
    """compressed-tensors' pack-quantized: value + 8 or + 128 along the inputs; optional zero points along the rows."""
    numbers, point, stored, meant = integers_in_groups(w, group or w.shape[1], bits, zeros=zeros)
    tensors = {
        f"{name}.weight_packed": words(numbers, 1, bits=bits), f"{name}.weight_scale": stored,
        f"{name}.weight_shape": torch.tensor(w.shape),
    }  # fmt: skip
    if zeros:
        tensors[f"{name}.weight_zero_point"] = words(point, 0, bits=bits)
    return tensors, meant


def gptq(name: str, w: Floats, group: int = 32, *, bits: int = 4, act_order: bool = False, version: int = 1) -> Written:
    """(q - zero) * scale of the input's group. Shape: inputs x outputs. Version 1 stores zero - 1, subtracted from
    whole words, so that a zero point of 0 takes one from the next number."""
    rows, inner = w.shape
    most = 2**bits - 1
    group_of = np.arange(inner) // group
    if act_order:
        group_of = np.random.default_rng(inner).permutation(group_of)
    groups = -(-inner // group)
    scales, points = np.zeros((groups, rows), np.float16), np.zeros((groups, rows), np.uint8)
    numbers, meant = np.zeros((inner, rows), np.uint8), np.zeros((inner, rows), np.float32)
    for g in range(groups):
        part = w[:, group_of == g].T
        low, high = part.min(0), part.max(0)
        scale = ((high - low) / most).astype(np.float16)
        point = np.clip(np.round(-low / scale.astype(np.float32)), 0, most)
        q = np.clip(np.round(part / scale.astype(np.float32) + point), 0, most)
        scales[g], points[g], numbers[group_of == g] = scale, point, q
        meant[group_of == g] = (q - point).astype(np.float32) * scale.astype(np.float32)
    ones = {4: 0x11111111, 8: 0x01010101}[bits] if version == 1 else 0
    tensors = {
        f"{name}.qweight": words(numbers, 0, bits=bits), f"{name}.qzeros": words(points, 1, bits=bits) - ones,
        f"{name}.scales": torch.from_numpy(scales), f"{name}.g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }  # fmt: skip
    return tensors, meant.T.copy()


def awq(name: str, w: Floats, group: int = 32) -> Written:
    """(q - zero) * scale; eight neighbouring outputs per word in the order 0 2 4 6 1 3 5 7."""
    rows, inner = w.shape
    groups = w.T.reshape(inner // group, group, rows)
    low, high = groups.min(1), groups.max(1)
    scale = ((high - low) / 15).astype(np.float16)
    point = np.clip(np.round(-low / scale.astype(np.float32)), 0, 15)
    q = np.clip(np.round(groups / scale.astype(np.float32)[:, None] + point[:, None]), 0, 15)
    meant = ((q - point[:, None]).astype(np.float32) * scale.astype(np.float32)[:, None]).reshape(inner, rows).T
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        f"{name}.qweight": words(q.reshape(inner, rows), 1, order), f"{name}.qzeros": words(point, 1, order),
        f"{name}.scales": torch.from_numpy(scale),
    }  # fmt: skip
    return tensors, meant.copy()


def in_32(layout: str, bits: int, *, symmetric: bool = True) -> dict[str, object]:
    """The configuration of compressed-tensors for integers in groups of 32 inputs."""
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32, "symmetric": symmetric}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


FORMATS: Mapping[str, tuple[Callable[[str, Floats], Written], dict[str, object]]] = {
    "block-fp8": (block_fp8, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
    "modelopt-fp8": (modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt-fp8-blocks": (modelopt_fp8_blocks, {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}),
    "modelopt-nvfp4": (modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}),
    "modelopt-w4a16": (
        lambda name, w: modelopt_nvfp4(name, w, input_scale=False),
        {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16},
    ),
    "channel-fp8": (
        channel_fp8,
        {
            "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
        },
    ),
    "channel-int8": (
        int8_rows,
        {
            "quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}}},
        },
    ),
    "packed-nvfp4": (
        packed_nvfp4,
        {
            "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}},
        },
    ),
    "grouped-int8": (lambda name, w: int8_rows(name, w, 32), in_32("int-quantized", 8)),
    "grouped-int8-zeros": (
        lambda name, w: int8_rows(name, w, 32, zeros=True), in_32("int-quantized", 8, symmetric=False),
    ),
    "packed-int4": (packed, in_32("pack-quantized", 4)),
    "packed-int4-zeros": (
        lambda name, w: packed(name, w, zeros=True), in_32("pack-quantized", 4, symmetric=False),
    ),
    "packed-int8": (lambda name, w: packed(name, w, bits=8), in_32("pack-quantized", 8)),
    "packed-int8-zeros": (
        lambda name, w: packed(name, w, bits=8, zeros=True), in_32("pack-quantized", 8, symmetric=False),
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}),
    "gptq-act-order": (
        lambda name, w: gptq(name, w, act_order=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    ),
    "gptq-v2": (
        lambda name, w: gptq(name, w, version=2),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-int8": (
        lambda name, w: gptq(name, w, bits=8),
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False, "sym": False},
    ),
    "gptq-int8-act-order": (
        lambda name, w: gptq(name, w, bits=8, act_order=True, version=2),
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
}  # fmt: skip
"""Name -> the function that writes a module, and the `quantization_config` of a model in which every listed module is
quantised."""
