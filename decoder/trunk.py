"""The weights of a model without its MTP head, which all implementations of a step share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from decoder.config import DecoderConfig, DecoderOptions
from decoder.embedding_table import EmbeddingTable
from decoder.layers.build import BuiltLayer
from kernels.linear import Linear


@dataclass(frozen=True)
class Trunk:
    """Embeddings, layers, final norm and vocabulary projection, with the configuration that they were built for."""

    config: DecoderConfig
    options: DecoderOptions
    embeddings: EmbeddingTable
    """`[vocab, d]`, in the dtype of the options."""
    layers: list[BuiltLayer]
    norm_f: Tensor
    """`[d]` float32."""
    head: Linear
