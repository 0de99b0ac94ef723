"""Builds the layers of a model from their descriptions, weights and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from decoder.arena import Arena
from decoder.arriving_weights import ArrivingWeights
from decoder.batch import Batch
from decoder.config import DecoderConfig, DecoderOptions
from decoder.layers.attention import AttentionMixer
from decoder.layers.descriptions import Attention, Experts, Mlp, SharedBlock
from decoder.layers.experts import ExpertsMixer
from decoder.layers.gated_delta import GatedDeltaMixer
from decoder.layers.linear import float_vector
from decoder.layers.mamba2 import Mamba2Mixer
from decoder.layers.mlp import mlp_of
from decoder.layers.recurrent_descriptions import GatedDelta, Mamba2, ShortConv
from decoder.layers.shared_block import SharedBlockMixer
from decoder.layers.short_conv import ShortConvMixer
from decoder.layers.spec import MixerSpec, Weights, weights_below
from kernels.rms_norm import add_rms_norm, rms_norm

Mixer = Callable[[Tensor, Batch], Tensor]
"""Maps normalised rows `[T, d]` of a batch to what is added to the residual stream; updates its memory in place."""


@runtime_checkable
class Recurrent(Protocol):
    """A mixer whose state is in a slot."""

    def advance(self, batch_slots_R: Tensor, slots_R: Tensor, targets_R: Tensor, counts_R: Tensor, span: int) -> None:
        """Writes the state after the first `counts` inputs of each batch slot's ring to its target slot."""


class BuiltLayer:
    """The norms and mixers of one layer."""

    def __init__(
        self, norm: Tensor | None, mixers: list[Mixer], eps: float, residual_scale: float = 1.0,
        scales: tuple[float, ...] = (), post_norm: Tensor | None = None, branch: SharedBlockMixer | None = None,
    ) -> None:  # fmt: skip
        """`norm`, `post_norm`: weights `[d]` of the norms before and after the mixers, None for no norm."""
        self.norm, self.mixers, self.eps, self.residual_scale = norm, mixers, eps, residual_scale
        self.scales, self.post_norm = scales or (1.0,) * len(mixers), post_norm
        self.branch = branch

    def rows(
        self, x_TD: Tensor, delta_TD: Tensor | None, dtype: torch.dtype, batch: Batch, embedded_TD: Tensor | None
    ) -> Tensor:
        """Adds `delta` to the residual stream x in place. Returns what the mixers read, `[T, d]` in `dtype`.
        `embedded`: the rows that x began with, if a layer has a branch."""
        if self.branch is not None:
            if delta_TD is not None:
                x_TD += delta_TD
            assert embedded_TD is not None
            x_TD, delta_TD = x_TD + self.branch(x_TD, embedded_TD, batch), None
        if self.norm is not None:
            given = (self.norm, self.eps, dtype)
            return rms_norm(x_TD, *given) if delta_TD is None else add_rms_norm(x_TD, delta_TD, *given)
        if delta_TD is not None:
            x_TD += delta_TD
        return x_TD.to(dtype)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """What the layer adds to the residual stream, `[T, d]`, for the result of `rows`."""
        parts = zip(self.mixers, self.scales, strict=True)
        delta, *rest = (_scaled(mixer(x_TD, batch), scale) for mixer, scale in parts)
        for other in rest:
            delta = delta + other
        if self.post_norm is not None:
            delta = rms_norm(delta, self.post_norm, self.eps)
        return _scaled(delta, self.residual_scale)


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


def build_layers(
    config: DecoderConfig, options: DecoderOptions, arena: Arena, arriving: ArrivingWeights
) -> list[BuiltLayer]:
    """Builds the layers in order; each takes its weights from `arriving` as they are read."""
    slots = iter(zip(arena.windows, arena.states, arena.rings, strict=True))
    pages = iter(arena.kv)
    layers: list[BuiltLayer] = []
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}."
        taken = arriving.take([prefix + name for name in layer.weights(config.hidden_size)])
        weights = weights_below(taken, prefix)
        del taken
        branch = None
        if layer.branch is not None:
            name, block = layer.branch
            assert isinstance(block, SharedBlock)
            owner = None if block.owner is None else layers[block.owner].branch
            own = weights_below(weights, f"{name}.")
            branch = SharedBlockMixer(block, options, own, next(pages), config.norm_eps, owner)
            del own
        mixers = [
            build_mixer(spec, options, weights_below(weights, f"{name}."), slots, pages) for name, spec in layer.mixers
        ]
        norm = float_vector(weights, "norm.weight", options) if layer.norm_before else None
        post_norm = float_vector(weights, "post_norm.weight", options) if layer.norm_after else None
        how = (config.norm_eps, layer.residual_scale, layer.scales, post_norm, branch)
        layers.append(BuiltLayer(norm, mixers, *how))
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
