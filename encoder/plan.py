"""Predicts the encoder's buffer sizes and memory before anything runs. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from encoder.budget import EncoderBudgets, GraphShape, graph_shape, rows_per_image
from encoder.item import IMAGE
from encoder.tower import TowerSizes, conv_side, rotation_width


def buffer_sizes(
    shape: GraphShape, sizes: TowerSizes, kinds: Collection[str] = (IMAGE,)
) -> Mapping[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """Shape and dtype (None: the tower's) of each static buffer of one budget, wide enough for patches of all
    `kinds`."""
    width = max(sizes.patch_widths[kind] for kind in kinds)
    rotated, taps = rotation_width(sizes), conv_side(sizes) ** 2
    return {
        "patches": ((shape.patches, width), None),
        "positions": ((shape.patches, sizes.position_width), None),
        **({"rotations": ((shape.patches, rotated), torch.float32)} if rotated else {}),
        "source": ((shape.rows,), torch.int64),
        "cu_seqlens": ((shape.sequences + 1,), torch.int32),
        **({"neighbours": ((shape.rows, taps), torch.int32)} if taps else {}),
        "token_rows": ((shape.capacity, sizes.patches_per_token), torch.int64),
        "rows": ((shape.capacity, sizes.row_width), None),
    }


def buffer_bytes(shape: GraphShape, sizes: TowerSizes, dtype: torch.dtype, kinds: Collection[str] = (IMAGE,)) -> int:
    """Bytes of one budget's static buffers. The largest budget's are the arena; the others are views of it."""
    buffers = buffer_sizes(shape, sizes, kinds).values()
    return sum(math.prod(size) * (kind or dtype).itemsize for size, kind in buffers)


def activation_bytes(shape: GraphShape, sizes: TowerSizes, dtype: torch.dtype) -> int:
    """Estimated bytes of activations of one block, which all graphs of a pool share."""
    return shape.rows * sizes.activation_width * dtype.itemsize


@dataclass(frozen=True)
class PlanRow:
    """The graph of one budget."""

    budget: int
    rows_per_image: int
    """Image-token rows reserved for each image of a batch."""
    capacity: int
    """Image-token rows of the output."""
    tower_rows: int
    """Rows that a replay computes, including prefixes and the padding sequence."""
    sequences: int
    """Attention sequences, the padding sequence included."""
    buffer_bytes: int
    """Bytes of static buffers, which are views of the arena: only the largest row counts towards the total."""
    activation_bytes: int
    """Estimated bytes, shared by all graphs: only the largest row counts towards the total."""


def describe(
    sizes: TowerSizes, budgets: EncoderBudgets, dtype: torch.dtype, kinds: Collection[str] = (IMAGE,)
) -> list[PlanRow]:
    """One row per budget, ascending. `kinds`: of the items that the buffers hold."""
    rows = []
    for budget in budgets.token_budgets:
        shape = graph_shape(budget, budgets, prefix=sizes.num_prefix_tokens, patches_per_token=sizes.patches_per_token)
        rows.append(
            PlanRow(
                budget=budget,
                rows_per_image=rows_per_image(budget, budgets.max_images),
                capacity=shape.capacity,
                tower_rows=shape.rows,
                sequences=shape.sequences,
                buffer_bytes=buffer_bytes(shape, sizes, dtype, kinds),
                activation_bytes=activation_bytes(shape, sizes, dtype),
            )
        )
    return rows
