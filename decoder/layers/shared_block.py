"""The branch of a layer: attention and a gated MLP, whose weights several layers may share (`SharedBlock`).

    h = attention(norm([x, e]));  branch = out(mlp(mlp_norm(h)))

The products of the adapters are added to those of the shared weights for each row: merged weights would be a copy of
the block for each layer.

Letters: `T` tokens, `D` width of the residual stream.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from decoder.batch import Batch
from decoder.config import DecoderOptions
from decoder.layers.attention import AttentionMixer
from decoder.layers.descriptions import SharedBlock
from decoder.layers.linear import float_vector, fused_linear, gated_product, named_linear
from decoder.layers.spec import Weights, weights_below
from kernels.rms_norm import rms_norm


class Adapters:
    """`[up(down(x)) for each adapter]` side by side, for adapters of the same rows."""

    def __init__(self, names: Sequence[str], options: DecoderOptions, weights: Weights) -> None:
        self.down = fused_linear([weights[f"{name}.down.weight"] for name in names], None, options)
        self.ups = [named_linear(weights, f"{name}.up", options) for name in names]

    def __call__(self, x: Tensor) -> Tensor:
        inner = self.down(x).chunk(len(self.ups), dim=1)
        return torch.cat([up(part.contiguous()) for up, part in zip(self.ups, inner, strict=True)], dim=1)


class SharedBlockMixer:
    """The branch of one layer. Those of several layers may hold the same weights; each has its own pages."""

    def __init__(
        self, spec: SharedBlock, options: DecoderOptions, weights: Weights, kv_B2SKP: Tensor, eps: float,
        owner: SharedBlockMixer | None,
    ) -> None:  # fmt: skip
        """`owner`: the branch that has the shared weights; None: `weights` have them. `eps`: of both norms."""
        self.eps, self.dtype, self.product = eps, options.dtype, gated_product(spec.mlp.mlp_hidden_act)
        if owner is None:
            self.norm = float_vector(weights, "norm.weight", options)
            self.mlp_norm = float_vector(weights, "mlp_norm.weight", options)
            self.attention = AttentionMixer(spec.attention, options, weights_below(weights, "attention."), kv_B2SKP)
            names, mlp = ("gate_proj", "up_proj"), weights_below(weights, "mlp.")
            bias = torch.cat([mlp[f"{name}.bias"] for name in names]) if spec.mlp.mlp_bias else None
            self.gate_up = fused_linear([mlp[f"{name}.weight"] for name in names], bias, options)
            self.down = named_linear(mlp, "down_proj", options)
        else:
            self.norm, self.mlp_norm = owner.norm, owner.mlp_norm
            self.attention = copy.copy(owner.attention)
            self.attention.kv = kv_B2SKP
            self.gate_up, self.down = owner.gate_up, owner.down
        if spec.attention_adapters:
            self.attention.adapters = Adapters([f"{name}_adapter" for name in "qkv"], options, weights)
        self.adapters = Adapters(["mlp_adapter"], options, weights)
        self.out = named_linear(weights, "out", options)

    def __call__(self, x_TD: Tensor, embedded_TD: Tensor, batch: Batch) -> Tensor:
        """`[T, d]` in the compute dtype, for rows of the residual stream and the embedded tokens that it began with;
        updates the pages in place."""
        return self.output(self.attention(self.rows(x_TD, embedded_TD), batch))

    def rows(self, x_TD: Tensor, embedded_TD: Tensor) -> Tensor:
        """What attention reads, `[T, 2 d]` in the compute dtype."""
        return rms_norm(torch.cat((x_TD, embedded_TD), dim=1), self.norm, self.eps, self.dtype)

    def output(self, attended_TD: Tensor) -> Tensor:
        """The branch for the output of attention, `[T, d]`."""
        rows_TD = rms_norm(attended_TD, self.mlp_norm, self.eps)
        inner = self.gate_up(rows_TD) + self.adapters(rows_TD)
        return self.out(self.down(self.product(inner)))
