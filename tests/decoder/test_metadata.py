"""Rules for padded rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.metadata import chunk_end, pad_rows, prefilling_rows, split_rows, state_table_width


def test_stale_rows_are_no_prefills() -> None:
    rows = prefilling_rows([50, 100, 200, 10, 20], [50, 200, 200, 100, 200], 3)
    assert rows == [False, True, False, False, False]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=9), st.data())
def test_prefilling_rows_by_definition(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(rows)))
    found = prefilling_rows([done for done, _ in rows], [total for _, total in rows], count)
    assert found == [done < total for done, total in rows[:count]] + [False] * (len(rows) - count)


def test_prefilling_rows_refuses_rows_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="2 rows, prompt has 1"):
        prefilling_rows([1, 2], [1], 1)
    with pytest.raises(ValueError, match="num_reqs 3"):
        prefilling_rows([1, 2], [1, 2], 3)


@pytest.mark.parametrize(
    ("arguments", "width"),
    [
        pytest.param((256, 16, 2, "all"), 18, id="all-256"),
        pytest.param((250, 16, 2, "all"), 18, id="all-partial-block"),
        pytest.param((8192, 1312, 3, "all"), 10, id="all-large-block"),
        pytest.param((256, 16, 2, "align"), 3, id="align"),
        pytest.param((256, 16, 2, "none"), 3, id="none"),
        pytest.param((256, 16, 0, "auto"), 1, id="auto"),
    ],
)
def test_state_table_width(arguments: tuple[int, int, int, str], width: int) -> None:
    assert state_table_width(*arguments) == width


@given(st.integers(1, 500), st.integers(1, 50), st.integers(0, 5))
def test_every_column_that_is_touched_exists(max_len: int, block: int, drafts: int) -> None:
    touched = {(tokens - 1) // block + draft for tokens in range(1, max_len + 1) for draft in range(drafts + 1)}
    assert state_table_width(max_len, block, drafts, "all") == max(touched) + 1


def test_state_table_width_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="'some'"):
        state_table_width(10, 4, 0, "some")
    with pytest.raises(ValueError, match="state_block 0"):
        state_table_width(10, 0, 0, "all")


def test_padding_counts_requests() -> None:
    assert pad_rows([3, 5], 3, -1) == [3, 5, -1]
    assert pad_rows([], 2, 1) == [1, 1]
    with pytest.raises(ValueError, match="3 requests do not fit 2 rows"):
        pad_rows([1, 2, 3], 2, -1)


def test_padded_rows_are_decodes_and_stale_flags_would_make_them_prefills() -> None:
    computed, lengths = [50, 200, 120, 10, 20], [1, 1, 1, 0, 0]
    assert split_rows(prefilling_rows(computed, [50, 200, 100, 100, 200], 3), computed, lengths) == (5, 0)
    assert split_rows([False, False, False, True, True], computed, lengths) == (3, 2)


def test_a_first_chunk_of_one_token_is_a_prefill_and_a_last_one_is_a_decode() -> None:
    assert split_rows([False, False, True], [7, 8, 0], [1, 1, 1]) == (2, 1)
    assert split_rows([False, False, True], [7, 8, 5], [1, 1, 1]) == (3, 0)
    assert split_rows([False, True], [7, 0], [1, 4]) == (1, 1)


def test_split_rows_refuses_rows_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="2 flags, 1 positions and 2 lengths"):
        split_rows([True, True], [1], [1, 1])


@given(st.integers(0, 40), st.integers(1, 60), st.integers(1, 50), st.integers(0, 70), st.integers(1, 16))
def test_a_chunk_advances_whenever_it_may(start: int, more: int, budget: int, ready: int, align: int) -> None:
    """It never exceeds budget, prompt or readiness; it stops short of them only to end on the grid."""
    total = start + more
    end = chunk_end(start, total, budget, ready, align)
    bound = min(total, start + budget, ready)
    assert start <= end <= max(start, bound)
    assert (end > start) == (bound > start)
    assert end == bound or end == start or end % align == 0 or end == ready
