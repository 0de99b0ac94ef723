"""Grouped-query attention over paged keys and values, optionally with rotary positions, norms of queries and keys, a
sliding window, and an output gate.

    q, k, v, g = projections of x (one product);  q, k = rope(norm(q)), rope(norm(k)) per head
    y = o_proj(attention(q, k, v) * sigmoid(g))

Keys are stored normalised and rotated. A head of the output has a gate for each of its numbers, or one gate. With a
window, a token attends to its latest keys only; the pages hold all keys.

Letters: `T` tokens, `Q` single queries, `R` scanned rows, `H` query heads, `K` key heads, `P` head size, `G` gates of a
token, `A` axes of positions, `B` pages, `S` tokens of a page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from decoder.batch import Batch
from decoder.config import DecoderOptions
from decoder.layers.descriptions import Attention
from decoder.layers.linear import float_vector, fused_linear, named_linear
from decoder.layers.spec import Weights
from kernels.gates import sigmoid_gate
from kernels.paged_attention import decode_attention, extend_attention, write_kv
from kernels.rms_norm import rms_norm
from kernels.rotary import norm_rotate, rope_table


class Projected(NamedTuple):
    """Output of attention's input projections."""

    q_THP: Tensor
    k_TKP: Tensor
    v_TKP: Tensor
    gate_TG: Tensor | None
    """Gates before the sigmoid; `None` for a layer without gates."""


class AttentionMixer:
    """The layer: maps normalised rows `[T, d]` of a batch to what is added to the residual stream."""

    def __init__(self, spec: Attention, options: DecoderOptions, weights: Weights, kv_B2SKP: Tensor) -> None:
        self.spec = spec
        self.heads, self.kv_heads, self.width = spec.num_attention_heads, spec.kv_heads, spec.head_dim
        self.kv, self.scale = kv_B2SKP, spec.multiplier
        self.table = None if spec.rope is None else rope_table(spec.rope, options.max_len, options.device)
        self.axes = () if spec.rope is None else spec.rope.axes
        names, bias = spec.projections, None
        if any(f"{name}.bias" in weights for name in names):
            zeros = {name: torch.zeros(weights[f"{name}.weight"].shape[0]) for name in names}
            bias = torch.cat([weights.get(f"{name}.bias", zeros[name]) for name in names])
        self.qkv = fused_linear([weights[f"{name}.weight"] for name in names], bias, options)
        """Includes the gate if the layer has one."""
        self.norms: tuple[Tensor, Tensor] | None = None
        """Norm weights of queries and keys, `[P]` float32 each, or `[H * P]` and `[K * P]`."""
        if spec.qk_norm is not None:
            q_norm, k_norm = (float_vector(weights, f"{name}_norm.weight", options) for name in "qk")
            self.norms = q_norm, k_norm
        self.o_proj = named_linear(weights, "o_proj", options)
        self.adapters: Callable[[Tensor], Tensor] | None = None
        """What is added to the outputs of `qkv`, as a function of the same rows."""

    def inputs(self, x_TD: Tensor) -> Tensor:
        """The outputs of all input projections of normalised rows, `[T, projected]`."""
        return self.qkv(x_TD) if self.adapters is None else self.qkv(x_TD) + self.adapters(x_TD)

    def project(self, x_TD: Tensor, positions_TA: Tensor | None) -> Projected:
        """Projects normalised rows; queries and keys are normalised and rotated."""
        heads, kv_heads = self.heads, self.kv_heads
        together = self.inputs(x_TD)
        gates = self.spec.gates
        projected_TN, gate = together.split([together.shape[1] - gates, gates], dim=1)
        projected = projected_TN.unflatten(1, (-1, self.width))
        q, k, v = projected.split([heads, kv_heads, kv_heads], dim=1)
        norms, eps = self.norms, self.spec.qk_norm or 0.0
        both = projected[:, : heads + kv_heads]
        if norms is not None and self.spec.qk_norm_whole:
            parts = zip((q, k), norms, strict=True)
            q, k = (rms_norm(part.flatten(1), weight, eps).view(part.shape) for part, weight in parts)
            norms, both = None, torch.cat((q, k), dim=1)
        if norms is not None or self.table is not None:
            turned = norm_rotate(both, heads, norms, eps, self.table, positions_TA, self.axes)
            q, k = turned.split([heads, kv_heads], dim=1)
        return Projected(q, k, v, gate if gates else None)

    def output(self, attended_THP: Tensor, gate_TG: Tensor | None) -> Tensor:
        """Applies the gates and the output projection; `[T, d]`."""
        out_TD = attended_THP.reshape(attended_THP.shape[0], -1)
        return self.o_proj(out_TD if gate_TG is None else sigmoid_gate(out_TD, gate_TG))

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        queries, window = batch.queries, self.spec.window
        q, k, v, gate = self.project(x_TD, batch.positions_TA)
        outs, scan, places = [], batch.scan, batch.places_T
        # Tokens of a verified row attend one by one, each to the keys of those before it, which are already in the
        # pages.
        together = batch.verify is not None
        if together:
            write_kv(self.kv, k, v, places)
        if queries:
            fresh = None if together else (k[:queries], v[:queries], places[:queries])
            rows = (batch.tables_QW, batch.lengths_Q)
            outs.append(decode_attention(q[:queries], self.kv, *rows, self.scale, batch.longest, fresh, window))
        if scan is not None:
            new = (q[queries:], k[queries:], v[queries:])
            known = (self.kv, scan.tables_RW, scan.computed_R, scan.starts_R)
            outs.append(extend_attention(*new, *known, self.scale, None if together else places[queries:], window))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return self.output(out, gate)
