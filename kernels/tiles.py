"""Configurations of Triton kernels: sizes of blocks, warps, and stages of the load pipeline."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """A product: rows, outputs and inputs of a block."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


class AttentionTile(NamedTuple):
    """Attention: queries and keys of a block."""

    queries: int
    keys: int
    warps: int
    stages: int
