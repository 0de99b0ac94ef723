"""Positions of the rows of a launch, and the cache of position embeddings."""

from __future__ import annotations

import pytest
import torch

from encoder.budget import EncoderBudgets, graph_shape
from encoder.item import BLOCK_MAJOR, ROW_MAJOR
from encoder.layout import layout, neighbours
from encoder.pieces import finish
from encoder.positions import PositionCache

GRIDS = [(2, 4), (4, 2), (2, 2)]
PREFIX = 3


def test_a_launch_of_its_own_size_holds_nothing_else() -> None:
    found = layout(GRIDS, prefix=PREFIX, merge=2)
    assert found.cu_seqlens.tolist() == [0, 11, 22, 29] and found.max_seqlen == 11
    assert (found.patches, found.tokens) == (20, 5)
    assert found.source_R.tolist()[:5] == [0, 1, 2, 4, 5]
    assert found.token_rows_NM.tolist()[0] == [3, 4, 7, 8]


def test_what_is_left_of_a_static_launch_is_one_sequence_of_padding() -> None:
    budgets = EncoderBudgets((8,), 4)
    shape = graph_shape(8, budgets, prefix=PREFIX, patches_per_token=4)
    found = layout(GRIDS, prefix=PREFIX, merge=2, shape=shape)
    used = 20 + 3 * PREFIX
    assert found.cu_seqlens.tolist() == [0, 11, 22, used, used, shape.rows]
    assert found.source_R[used:].tolist() == [PREFIX] * (shape.rows - used)
    assert found.token_rows_NM[5:].unique().tolist() == [shape.rows - 1]
    assert found.max_seqlen == shape.rows  # the padding may be the longest of all
    assert (found.patches, found.tokens) == (20, 5)


def test_the_last_sequence_is_for_padding_alone() -> None:
    budgets = EncoderBudgets((8,), 3)
    shape = graph_shape(8, budgets, prefix=PREFIX, patches_per_token=4)
    layout(GRIDS, prefix=PREFIX, merge=2, shape=shape)
    with pytest.raises(AssertionError, match="4 images"):
        layout([*GRIDS, (2, 2)], prefix=PREFIX, merge=2, shape=shape)


@pytest.mark.parametrize("order", [ROW_MAJOR, BLOCK_MAJOR])
@pytest.mark.parametrize(("grid", "merge", "side"), [((4, 6), 2, 3), ((3, 3), 3, 5), ((2, 5), 1, 3), ((2, 2), 2, 7)])
def test_neighbours_are_those_of_the_grid(order: str, grid: tuple[int, int], merge: int, side: int) -> None:
    """Compared with a loop over rows and columns."""
    rows, columns = grid
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    if order == BLOCK_MAJOR:
        cells.sort(key=lambda cell: (cell[0] // merge, cell[1] // merge, cell))
    reach = range(-(side // 2), side // 2 + 1)
    expected = [
        [cells.index((r + y, c + x)) if (r + y, c + x) in cells else -1 for y in reach for x in reach] for r, c in cells
    ]
    assert neighbours(grid, merge, order, side).tolist() == expected


def test_neighbours_are_tower_rows_of_the_same_sequence() -> None:
    shape = graph_shape(8, EncoderBudgets((8,), 4), prefix=PREFIX, patches_per_token=4)
    placed = layout(GRIDS, prefix=PREFIX, merge=2, shape=shape, order=BLOCK_MAJOR, side=3)
    assert placed.neighbours_RK is not None and placed.neighbours_RK.shape == (shape.rows, 9)
    row = 0
    for grid in GRIDS:
        first, row = row + PREFIX, row + PREFIX + grid[0] * grid[1]
        around = neighbours(grid, 2, BLOCK_MAJOR, 3)
        assert torch.equal(placed.neighbours_RK[first:row], torch.where(around < 0, -1, around + first).int())
        assert (placed.neighbours_RK[first - PREFIX : first] == -1).all()
    assert (placed.neighbours_RK[row:] == -1).all()
    assert layout(GRIDS, prefix=PREFIX, merge=2).neighbours_RK is None


def test_an_exact_layout_has_no_padding() -> None:
    placed = layout([(2, 4), (2, 2)], prefix=3, merge=2)
    assert placed.cu_seqlens.tolist() == [0, 11, 18]
    assert placed.source_R.tolist() == [0, 1, 2, *range(4, 12), 0, 1, 2, *range(12, 16)]
    assert placed.token_rows_NM.tolist() == [[3, 4, 7, 8], [5, 6, 9, 10], [14, 15, 16, 17]]
    assert (placed.patches, placed.tokens, placed.max_seqlen) == (12, 3, 11)


def cache(places: int) -> PositionCache:
    """A cache of float32 rows with 2 numbers, for `places` places."""
    return PositionCache(lambda grid: torch.zeros(grid[0] * grid[1], 2), places * 8)


def test_positions_fill_their_bound_and_not_a_byte_more() -> None:
    positions = cache(8)
    for grid in ((2, 2), (1, 4)):
        positions.get(grid)
    positions.check_integrity()
    assert positions.bytes == 64 and [positions.get(grid) is positions.get(grid) for grid in ((2, 2), (1, 4))]
    whole = positions.get((2, 4))
    assert positions.get((2, 4)) is whole and positions.bytes == 64
    assert positions.get((3, 3)) is not positions.get((3, 3))
    positions.check_integrity()


def test_the_positions_that_were_not_used_for_longest_go_first() -> None:
    positions = cache(8)
    first = positions.get((2, 2))
    positions.get((1, 4))
    assert positions.get((2, 2)) is first
    positions.get((4, 1))
    assert positions.get((2, 2)) is first
    misses = positions.misses
    positions.get((1, 4))
    assert positions.misses == misses + 1


def test_pieces_are_taken_to_the_end() -> None:
    def pieces():  # type: ignore[no-untyped-def]
        for _ in range(3):
            yield
        return "done"

    assert finish(pieces()) == "done"
