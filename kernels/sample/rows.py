"""Sampling parameters of rows of logits, as tensors on their device. `R` rows, `V` tokens of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Wishes:
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
    """int64: absolute position to draw."""
