"""Writes quantised weights in the compressed-tensors format: `float-quantized` (fp8), `int-quantized` (int8) and
`pack-quantized` (int4 and int8 in groups)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.linear import Quantised
from kernels.weight_forms import kind_and_group

PUBLISHED = ("fp8", "int8", "int8-32", "int4", "int4-32")
"""Forms that have a published format."""
_EXPERTS = {
    "gate_up_proj": ("", ("gate_proj", "up_proj")),
    "input_linear": (".experts", ("gate_proj", "up_proj")),
    "output_linear": (".experts", ("down_proj",)),
}
"""Last part of the name of stacked experts -> what follows the rest of the name, and the modules of an expert."""


def modules_of(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The matrices of a stored weight by module name. Stacked experts `[experts, n, k]` become one module each, with
    gate and up separate."""
    if tensor.dim() == 2:
        yield name.removesuffix(".weight"), tensor
        return
    stack, _, last = name.removesuffix(".weight").rpartition(".")
    inner, parts = _EXPERTS.get(last, ("", (last,)))
    for expert, matrix in enumerate(tensor):
        for part, share in zip(parts, matrix.chunk(len(parts)), strict=True):
            yield f"{stack}{inner}.{expert}.{part}", share


def writable(matrix: Tensor, form: str) -> bool:
    """Whether the format can store a matrix: groups have to be complete."""
    _, group = kind_and_group(form)
    return group is None or matrix.shape[1] % group == 0


def tensors_of(module: str, weight: Quantised, form: str) -> dict[str, Tensor]:
    """The tensors of a module, for a weight that `quantise` made in one of the forms `PUBLISHED`."""
    values, scale = weight.values.contiguous(), weight.scale
    if form != "int8":
        scale = scale.bfloat16()
        assert torch.equal(scale.float(), weight.scale), "scales are bfloat16 numbers"
    if kind_and_group(form)[1] is None:
        return {f"{module}.weight": values, f"{module}.weight_scale": scale}
    octets = values if weight.kind == "int4" else values.view(torch.uint8) ^ 128  # as unsigned numbers: value + 128
    return {
        f"{module}.weight_packed": octets.view(torch.int32),  # little-endian: the first value in the lowest bits
        f"{module}.weight_scale": scale,
        f"{module}.weight_shape": torch.tensor(weight.shape),
    }


def configuration(form: str, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config`. `ignored`: modules that are not quantised."""
    kind, size = kind_and_group(form)
    common: dict[str, Any] = {"symmetric": True, "actorder": None, "observer": "minmax", "dynamic": False}
    if size is None:  # vLLM reads this layout only if activations are quantised too
        number = "float" if kind == "fp8" else "int"
        weights = {"num_bits": 8, "type": number, "strategy": "channel", "group_size": None, **common}
        inputs = {"num_bits": 8, "type": number, "strategy": "token", "group_size": None, **common, "dynamic": True}
        layout = f"{number}-quantized"
    else:
        bits = 4 if kind == "int4" else 8
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": size, **common}
        inputs, layout = None, "pack-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": list(ignored), "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }  # fmt: skip
