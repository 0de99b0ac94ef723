"""The weights of a multi-token prediction head, in the layout that all implementations use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from decoder.config import DecoderConfig, DecoderOptions
from decoder.layers.attention import AttentionMixer
from decoder.layers.descriptions import Attention, Experts, Mlp
from decoder.layers.experts import ExpertsMixer
from decoder.layers.linear import float_vector, stored_linear
from decoder.layers.mlp import GatedMlpMixer, MlpMixer, mlp_of
from decoder.layers.spec import weights_below
from kernels.linear import Linear


@dataclass(frozen=True)
class HeadWeights:
    """The head's layers: attention, then MLPs or experts. Norms are `[d]` float32."""

    enorm: Tensor
    hnorm: Tensor
    """Norms of the token's embedding (`enorm`) and of the hidden state of the token before it (`hnorm`)."""
    fuse: Linear
    """`[d, 2 d]`: projects both, concatenated, to one residual row."""
    norms: list[Tensor]
    """The norm before each layer."""
    attention: AttentionMixer
    rest: list[ExpertsMixer | MlpMixer | GatedMlpMixer]
    """Layers after the attention."""
    final: Tensor

    @classmethod
    def of(
        cls, config: DecoderConfig, options: DecoderOptions, weights: Mapping[str, Any], kv_B2SKP: Tensor
    ) -> HeadWeights:
        """`weights` by the names of `DecoderConfig.mtp_weights`, checked by `check_mtp`; `kv`: the head's pages."""

        def norm(name: str) -> Tensor:
            return float_vector(weights, name, options)

        def layer(index: int) -> dict[str, Any]:
            return weights_below(weights, f"mtp.layers.{index}.mixer.")

        last = len(config.mtp) - 1
        attention, *rest = config.mtp
        assert isinstance(attention, Attention)
        return cls(
            enorm=norm("mtp.layers.0.enorm.weight"),
            hnorm=norm("mtp.layers.0.hnorm.weight"),
            fuse=stored_linear(weights["mtp.layers.0.eh_proj.weight"], None, options),
            norms=[norm(f"mtp.layers.{index}.norm.weight") for index in range(last + 1)],
            attention=AttentionMixer(attention, options, layer(0), kv_B2SKP),
            rest=[
                ExpertsMixer(spec, options, layer(index))
                if isinstance(spec, Experts)
                else mlp_of(spec, options, layer(index))
                for index, spec in enumerate(rest, start=1)
                if isinstance(spec, Experts | Mlp)
            ],
            final=norm(f"mtp.layers.{last}.final_layernorm.weight"),
        )
