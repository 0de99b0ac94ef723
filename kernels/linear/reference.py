"""`y = x W^T + b`, with the weight laid out once for the machine that runs it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class Linear:
    """A weight `[out, in]` and an optional bias `[out]`, copied from what is given.

    On a CPU in bfloat16 the weight is kept in oneDNN's blocked layout: measured on two Zen 5 cores it streams at
    55 to 70 GB/s at 1 to 8 rows, where `F.linear` on the plain layout reaches 28 to 35. The plain layout serves
    everything else, and where this torch has no packing operator.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, owned: bool = False) -> None:
        """`owned`: the weight may be kept instead of copied. `ValueError` when the bias does not fit the weight."""
        self.out_features, self.in_features = weight.shape
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"a bias of shape {tuple(bias.shape)} does not fit {self.out_features} outputs")
        self.bias = None if bias is None else bias.detach().clone()
        packed = _pack(weight.detach())
        self.packed = packed is not None
        if packed is None:
            packed = weight.detach() if owned else weight.detach().clone()
        self.weight = packed

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` -> `[rows, out]` in x's dtype, which must be the weight's."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return F.linear(x, self.weight, self.bias)

    def relu_squared(self, x: Tensor) -> Tensor:
        """`relu(x W^T + b) ** 2`."""
        if self.packed:
            y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "relu", [], "")
        else:
            y = F.linear(x, self.weight, self.bias).relu_()
        return y.mul_(y)  # type: ignore[no-any-return]


def _pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's layout, or `None` where that is not to be had or does not pay."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or min(weight.shape) < 16:
        return None
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        probe = weight.new_ones(1, weight.shape[1])
        torch.ops.mkldnn._linear_pointwise(probe, packed, None, "relu", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return packed
