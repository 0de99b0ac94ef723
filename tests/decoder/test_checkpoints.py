"""At which positions states are kept, and how many states one request can hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.checkpoints import NEVER, Placement, resolve_state_block, state_bytes, state_slots
from decoder.config import DecoderOptions
from decoder.metadata import state_table_width


def place(mode: str, block: int = 4, chunk: int = 8, page: int = 4, has_states: bool = True) -> Placement:
    return Placement(mode, block, chunk, page, has_states)


@pytest.mark.parametrize(
    ("mode", "prompt", "expected"),
    [
        ("none", 40, ()),
        ("align", 10, (8,)),
        ("align", 8, (4,)),
        ("align", 4, ()),
        ("all", 10, (4, 8)),
        ("all", 8, (4,)),
        ("auto", 10, (8,)),
        ("auto", 75, (64, 72)),
        ("auto", 33, (32,)),
        ("auto", 1, ()),
    ],
)
def test_marks_of_a_plain_prompt(mode: str, prompt: int, expected: tuple[int, ...]) -> None:
    assert place(mode).prompt_marks(prompt) == expected


def test_marks_of_images_hints_and_junctions() -> None:
    auto = place("auto")
    assert auto.prompt_marks(30, images=[7, 21, 30], wanted=[0, 3, 99], junction=16) == (3, 7, 16, 21, 24)
    assert place("align").prompt_marks(30, images=[7], wanted=[3], junction=18) == (16, 28)
    assert place("all", block=8).prompt_marks(30, junction=4) == (8, 16, 24)
    assert place("auto", has_states=False).prompt_marks(30, images=[7]) == (28,)


def test_marks_of_output() -> None:
    """Prompt of 10: `all` keeps every boundary that a row passes, `align` the last one, `auto` none inside a row."""
    assert place("all").marks_between((4, 8), 10, 0, 10) == [4, 8]
    assert place("all").marks_between((4, 8), 10, 8, 17) == [12, 16]
    assert place("align").marks_between((8,), 10, 8, 17) == [16]
    assert place("auto").marks_between((8,), 10, 8, 17) == []
    assert place("align").next_mark((8,), 10, 8) == 12
    assert place("auto").next_mark((8,), 10, 8) == NEVER


@given(
    st.sampled_from(["align", "all", "auto", "none"]),
    st.integers(1, 80),
    st.lists(st.integers(1, 9), min_size=1, max_size=30),
    st.integers(0, 40),
)
def test_next_mark_is_what_the_next_rows_pass(mode: str, prompt: int, counts: list[int], junction: int) -> None:
    """A row passes a mark exactly when it reaches the position announced before it."""
    placement = place(mode)
    marks = placement.prompt_marks(prompt, junction=junction)
    position = 0
    for count in counts:
        announced = placement.next_mark(marks, prompt, position)
        found = placement.marks_between(marks, prompt, position, position + count)
        assert bool(found) == (announced <= position + count)
        assert all(position < mark <= position + count for mark in found)
        assert mode == "align" or not found or min(found) == announced
        position += count


@pytest.mark.parametrize(
    ("mode", "drafts", "expected"), [("none", 0, 1), ("none", 3, 4), ("align", 3, 5), ("all", 3, 10), ("auto", 3, 8)]
)
def test_slots_of_a_request(mode: str, drafts: int, expected: int) -> None:
    assert state_slots(mode, 8192, 1312, drafts, checkpoints=4) == expected
    assert state_bytes(100, 8192, 1312, drafts, checkpoints=4)[mode] == 100 * expected
    if mode in ("none", "all"):
        assert expected == state_table_width(8192, 1312, drafts, mode)


def test_wrong_options_name_their_numbers() -> None:
    with pytest.raises(ValueError, match="'some' is not one of none, align, all, auto"):
        DecoderOptions(state_cache="some")
    with pytest.raises(ValueError, match="state_block 24 .* page_size 16; 32 would work"):
        DecoderOptions(state_block=24)
    with pytest.raises(ValueError, match="state_block 0"):
        state_slots("all", 10, 0)
    with pytest.raises(ValueError, match="'some'"):
        state_slots("some", 10, 4)
    assert resolve_state_block(None, 16, 128) == 128 and resolve_state_block(None, 48, 128) == 384
    assert resolve_state_block(64, 16, 128) == 64
