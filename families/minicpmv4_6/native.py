"""Runs the tower on a CPU in compiled code (encoder/native.py). Norms of joined rows, which are few, are computed by
torch operations, whose results for a row do not depend on others.

R tower rows, D features, N image tokens, W windows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from encoder.native import CompiledTower, contiguous
from encoder.pieces import Pieces
from encoder.tower import PackedBatch
from families.minicpmv4_6.parts import Parts, joined_rows, merged_sequences, window_bounds, window_order
from kernels.activation_names import COMPILED
from kernels.native.tower import Of, Place, Store


class NativeMergingTower(CompiledTower):
    """The compiled operations of `Parts`."""

    def __init__(self, parts: Parts, max_rows: int) -> None:
        """`max_rows`: as for `CompiledTower`."""
        super().__init__(parts.sizes, parts.dtype, max_rows)
        self._parts = parts
        self._embedding = self.embed(parts.projection)
        self._layers = [self.block(block) for block in parts.blocks]
        if (window := parts.window) is not None:
            self._attention = self.add(*self.attention(window.norm, window.qkv, window.out))
            first, second = window.merger.linear_1, window.merger.linear_2
            self._joined = self.add(
                self.linear(first, Place.NORMED, Place.WIDE, activation=COMPILED[window.merger.act]),
                self.linear(second, Place.WIDE, Place.STREAM, store=Store.ADD),
            )
        merger = parts.merger
        self._project = self.add(
            self.linear(merger.linear_1, Place.NORMED, Place.WIDE, of=Of.TOKENS, activation=COMPILED[merger.act]),
            self.linear(merger.linear_2, Place.WIDE, Place.OUT, of=Of.TOKENS),
        )
        self.build(parts.table_KD)

    def pieces(self, batch: PackedBatch, *, kind: str) -> Pieces[Tensor]:
        """Like `Parts.pieces`. Raises `ValueError` with the offsets if `cu_seqlens` does not cover all rows."""
        batch = contiguous(batch)
        out = torch.empty(batch.token_rows_NM.shape[0], self.sizes.row_width, dtype=self.dtype)
        bounds, token_rows_NM = batch.cu_seqlens, batch.token_rows_NM
        x_RD = torch.empty(batch.source_R.shape[0], self.sizes.hidden_size)
        step = self.begin(batch, x_RD, bounds, out)
        self.run(self._embedding, step)
        for index, layer in enumerate(self._layers):
            self.run(layer, step)
            if index == self._parts.sizes.insert_layer:
                x_RD = self._merge_windows(x_RD, batch, out)
                bounds = merged_sequences(bounds, len(x_RD))
                token_rows_NM = joined_rows(x_RD)
                step = self.begin(batch, x_RD, bounds, out)
            yield
        joined_NE = self._parts.final_norm.in_float32(x_RD)[token_rows_NM.flatten()].view(len(out), -1)
        self.set_operands(self._parts.merger.norm.in_float32(joined_NE))
        self.run(self._project, step)
        return out

    def _merge_windows(self, x_RD: Tensor, batch: PackedBatch, out: Tensor) -> Tensor:
        """`[W, D]` float32, like `Parts._merge_windows`."""
        window = self._parts.window
        assert window is not None
        x_RD = x_RD[window_order(batch.token_rows_NM)]
        bounds = window_bounds(x_RD)
        self.run(self._attention, self.begin(batch, x_RD, bounds, out))
        first_WD, second_WD, third_WD, fourth_WD = x_RD.view(-1, 4, x_RD.shape[1]).unbind(1)
        # Added in a fixed order: the order of torch's mean may depend on the number of rows.
        merged_WD = (first_WD + second_WD).add_(third_WD + fourth_WD).mul_(0.25)
        alone = torch.tensor([0, len(merged_WD)], dtype=torch.int32)
        step = self.begin(batch, merged_WD, alone, out)
        self.set_operands(window.merger.norm.in_float32(x_RD.view(len(merged_WD), -1)))
        self.run(self._joined, step)
        return merged_WD
