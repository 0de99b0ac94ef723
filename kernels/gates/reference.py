"""Gated products; the maths is in README.md. `T` tokens, `D` width of a token, `G` gates of a token, `I` width of a
hidden layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def sigmoid_gate(x_TD: Tensor, gate_TG: Tensor) -> Tensor:
    """`x * sigmoid(gate)`: `[T, D]` in x's dtype, a new tensor. Each gate is that of `D / G` neighbouring numbers. Rows
    of both may have any stride."""
    return (x_TD.unflatten(1, (gate_TG.shape[1], -1)) * gate_TG.sigmoid()[:, :, None]).flatten(1)


def swiglu(gate_up_TI: Tensor) -> Tensor:
    """`silu(gate) * up` of rows `[gate, up]`: `[T, 2 I]` -> `[T, I]` in the same dtype."""
    gate, up = gate_up_TI.chunk(2, dim=-1)
    return F.silu(gate) * up


def add_gated(routed_TD: Tensor, shared_TD: Tensor, x_TD: Tensor, weight_1D: Tensor) -> Tensor:
    """`routed + sigmoid(x . weight) * shared`: `[T, D]` in routed's dtype. weight: `[1, D]` float32; the product and
    the sigmoid are computed in float32."""
    return routed_TD + (torch.sigmoid(F.linear(x_TD.float(), weight_1D)) * shared_TD).to(shared_TD.dtype)
