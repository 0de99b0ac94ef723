"""Runs the tower on a CPU in compiled code (encoder/native.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from encoder.native import CompiledTower, contiguous
from encoder.pieces import Pieces
from encoder.tower import PackedBatch
from families.lfm3_vl.parts import Attention, Layer, Parts
from kernels.activation_names import COMPILED
from kernels.native.tower import Code, Of, Place


class NativeGridTower(CompiledTower):
    """The compiled operations of `Parts`."""

    def __init__(self, parts: Parts, max_rows: int) -> None:
        """`max_rows`: as for `CompiledTower`."""
        super().__init__(parts.sizes, parts.dtype, max_rows)
        norm = parts.embedding_norm
        self._embed = {kind: self.embed(projection, norm) for kind, projection in parts.projections.items()}
        self._layers = [self._layer(layer) for layer in parts.layers]
        join = self.norm(parts.final_norm, Code.TOKEN)
        join.of = Of.TOKENS
        between = COMPILED[parts.sizes.projector_act]
        self._project = self.add(
            join,
            self.linear(parts.linear_1, Place.NORMED, Place.WIDE, of=Of.TOKENS, activation=between),
            self.linear(parts.linear_2, Place.WIDE, Place.OUT, of=Of.TOKENS),
        )
        self.build(parts.table_KD)

    def _layer(self, layer: Layer) -> range:
        mixer = layer.mixer
        if isinstance(mixer, Attention):
            mixed = self.attention(layer.norm, mixer.qkv, mixer.out, (mixer.q_norm, mixer.k_norm))
        else:
            mixed = self.convolution(layer.norm, mixer.gates, mixer.weight_KD, mixer.out)
        return self.add(*mixed, self.norm(layer.mlp_norm), *self.mlp(layer.up, layer.down))

    def pieces(self, batch: PackedBatch, *, kind: str) -> Pieces[Tensor]:
        """Like `Parts.pieces`. Raises `ValueError` with the offsets if `cu_seqlens` does not cover all rows."""
        batch = contiguous(batch)
        x_RD = torch.empty(batch.source_R.shape[0], self.sizes.hidden_size)
        out = torch.empty(batch.token_rows_NM.shape[0], self.sizes.row_width, dtype=self.dtype)
        step = self.begin(batch, x_RD, batch.cu_seqlens, out)
        self.run(self._embed[kind], step)
        for layer in self._layers:
            self.run(layer, step)
            yield
        self.run(self._project, step)
        return out
