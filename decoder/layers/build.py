"""Builds the layers of a model from their descriptions, weights and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor

from decoder.arena import Arena
from decoder.arriving import ArrivingWeights
from decoder.batch import Batch
from decoder.config import DecoderConfig, DecoderOptions
from decoder.layers.attention import AttentionMixer
from decoder.layers.descriptions import Attention, Experts, GatedDelta, Mamba2, Mlp, ShortConv
from decoder.layers.experts import ExpertsMixer
from decoder.layers.gated_delta import GatedDeltaMixer
from decoder.layers.linear import float_vector
from decoder.layers.mamba2 import Mamba2Mixer
from decoder.layers.mlp import mlp_of
from decoder.layers.short_conv import ShortConvMixer
from decoder.layers.spec import MixerSpec, Weights, weights_below

Mixer = Callable[[Tensor, Batch], Tensor]
"""Maps normalised rows `[T, d]` of a batch to what is added to the residual stream; updates its memory in place."""


@runtime_checkable
class Recurrent(Protocol):
    """A mixer whose state is in a slot."""

    def advance(self, batch_slots_R: Tensor, slots_R: Tensor, targets_R: Tensor, counts_R: Tensor, span: int) -> None:
        """Writes the state after the first `counts` inputs of each batch slot's ring to its target slot."""


class BuiltLayer:
    """The norm and mixers of one layer."""

    def __init__(self, norm: Tensor, mixers: list[Mixer], residual_scale: float) -> None:
        self.norm, self.mixers, self.residual_scale = norm, mixers, residual_scale

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """What the layer adds to the residual stream, `[T, d]`, before scaling."""
        delta = self.mixers[0](x_TD, batch)
        for mixer in self.mixers[1:]:
            delta = delta + mixer(x_TD, batch)
        return delta if self.residual_scale == 1.0 else delta * self.residual_scale


def build_layers(
    config: DecoderConfig, options: DecoderOptions, arena: Arena, arriving: ArrivingWeights
) -> list[BuiltLayer]:
    """Builds the layers in order; each takes its weights from `arriving` as they are read."""
    slots = iter(zip(arena.windows, arena.states, arena.rings, strict=True))
    pages = iter(arena.kv)
    layers = []
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}."
        taken = arriving.take([prefix + name for name in layer.weights(config.hidden_size)])
        weights = weights_below(taken, prefix)
        del taken
        mixers = [
            build_mixer(spec, options, weights_below(weights, f"{name}."), slots, pages) for name, spec in layer.mixers
        ]
        layers.append(BuiltLayer(float_vector(weights, "norm.weight", options), mixers, layer.residual_scale))
        del weights  # frees them before the next layer's weights are read
    return layers


def build_mixer(
    spec: MixerSpec,
    options: DecoderOptions,
    weights: Weights,
    slots: Iterator[tuple[Tensor, Tensor, Tensor]],
    pages: Iterator[Tensor],
) -> Mixer:
    """Builds the mixer of a description. `slots` yields windows, states and rings, and `pages` keys and values, of the
    next mixer that needs them."""
    match spec:
        case Mamba2():
            return Mamba2Mixer(spec, options, weights, *next(slots))
        case GatedDelta():
            return GatedDeltaMixer(spec, options, weights, *next(slots))
        case ShortConv():
            return ShortConvMixer(spec, options, weights, *next(slots))
        case Attention():
            return AttentionMixer(spec, options, weights, next(pages))
        case Mlp():
            return mlp_of(spec, options, weights)
        case Experts():
            return ExpertsMixer(spec, options, weights)
        case _:
            raise TypeError(f"{type(spec).__name__} is not the description of a mixer")
