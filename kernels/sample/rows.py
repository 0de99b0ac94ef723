"""Sampling parameters of rows of logits, as tensors on their device. `R` rows, `V` tokens of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Masks:
    """The tokens that rows may draw: `G` masks of `W` words, and the mask of each row."""

    words_GW: Tensor
    """int32 `[G, ceil(V / 32)]`: bit `t % 32` of word `t // 32` is set if token t may be drawn. Each mask must allow a
    token."""
    index_R: Tensor
    """int64: the index of each row's mask; -1: no mask, any token may be drawn."""


@dataclass(frozen=True)
class RowParams:
    """Parameters of each row's draw, and the counter of its random number."""

    temperature_R: Tensor
    """float32; 0 takes the largest logit."""
    top_k_R: Tensor
    """int64; 0 = off."""
    top_p_R: Tensor
    """float64; 1 = off."""
    min_p_R: Tensor
    """float64; 0 = off."""
    seeds_R: Tensor
    """int64 with the bits of the unsigned 64-bit key."""
    samples_R: Tensor
    """int64: index of the sample within a request."""
    positions_R: Tensor
    """int64: absolute position of the token to draw."""
    masks: Masks | None = None
    """`None`: no row has a mask."""
