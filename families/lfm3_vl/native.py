"""Runs the tower on a CPU in compiled code (encoder/native.py)."""

from __future__ import annotations

from encoder.native import LayeredTower
from families.lfm3_vl.parts import Attention, Layer, Parts
from kernels.activation_names import COMPILED
from kernels.native.tower import Code, Of, Place


class NativeGridTower(LayeredTower):
    """The compiled operations of `Parts`."""

    def __init__(self, parts: Parts, max_rows: int) -> None:
        """`max_rows`: as for `CompiledTower`."""
        super().__init__(parts.sizes, parts.dtype, max_rows)
        norm = parts.embedding_norm
        self.embedding = {kind: self.embed(projection, norm) for kind, projection in parts.projections.items()}
        self.layers = [self._layer(layer) for layer in parts.layers]
        join = self.norm(parts.final_norm, Code.TOKEN)
        join.of = Of.TOKENS
        between = COMPILED[parts.sizes.projector_act]
        self.projector = self.add(
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
