"""Grouped-query attention over paged keys and values, with rotary positions or none. q, k and v are one product.

Letters: `T` tokens, `Q` single queries, `R` scanned rows, `K` key heads, `P` head size, `B` pages, `S` tokens
of a page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoder.batch import Batch
from decoder.config import DecoderOptions
from decoder.layers.descriptions import Attention
from decoder.layers.linear import named_linear, stored_linear
from decoder.layers.spec import Weights
from kernels.linear import concatenate
from kernels.paged_attention import decode_attention, extend_attention, write_kv
from kernels.rotary import rope_table, rotate


class AttentionMixer:
    """The layer: one call maps normalised rows `[T, d]` of a batch to what is added to the residual stream."""

    def __init__(self, spec: Attention, options: DecoderOptions, weights: Weights, kv_B2SKP: Tensor) -> None:
        self.spec = spec
        self.heads, self.kv_heads, self.width = spec.num_attention_heads, spec.kv_heads, spec.head_dim
        self.kv, self.scale = kv_B2SKP, spec.multiplier
        self.table = None if spec.rope is None else rope_table(spec.rope, options.max_len, options.device)
        self.axes = () if spec.rope is None else spec.rope.axes
        names = ("q_proj", "k_proj", "v_proj")
        bias = None
        if any(f"{name}.bias" in weights for name in names):
            zeros = {name: torch.zeros(weights[f"{name}.weight"].shape[0]) for name in names}
            bias = torch.cat([weights.get(f"{name}.bias", zeros[name]) for name in names])
        self.qkv = stored_linear(concatenate([weights[f"{name}.weight"] for name in names]), bias, options)
        self.o_proj = named_linear(weights, "o_proj", options)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        tokens, queries, width = x_TD.shape[0], batch.queries, self.width
        qkv = self.qkv(x_TD).view(tokens, -1, width)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.table is not None:
            assert batch.positions_TA is not None
            q, k = rotate(qkv[:, : self.heads + self.kv_heads], self.table, batch.positions_TA, self.axes).split(
                [self.heads, self.kv_heads], dim=1
            )
        outs, scan, places = [], batch.scan, batch.places_T
        # A verified row's tokens attend one by one, so that each finds the keys of those before it in the pages.
        together = batch.verify is not None
        if together:
            write_kv(self.kv, k, v, places)
        if queries:
            fresh = None if together else (k[:queries], v[:queries], places[:queries])
            rows = (batch.tables_QW, batch.lengths_Q)
            outs.append(decode_attention(q[:queries], self.kv, *rows, self.scale, batch.longest, fresh))
        if scan is not None:
            new = (q[queries:], k[queries:], v[queries:])
            known = (self.kv, scan.tables_RW, scan.computed_R, scan.starts_R)
            outs.append(extend_attention(*new, *known, self.scale, None if together else places[queries:]))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return self.o_proj(out.reshape(tokens, -1))
