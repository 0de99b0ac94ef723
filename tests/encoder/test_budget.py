"""Budget options and their defaults; buffers by ceiling division."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder.budget import EncoderBudgets, graph_shape, resolve_budgets, rows_per_image, token_ladder

STEPS_512 = [*range(512, 4097 + 512, 512), 4864]


@pytest.mark.parametrize(
    ("lo", "hi", "ladder", "images"),
    [
        (64, 64, [64], 1),
        (64, 100, [64, 100], 1),
        (64, 2048, [64, 128, 256, 512, 1024, 2048], 32),
        (64, 4096, [64, 128, 256, 512, 1024, 2048, 4096], 64),
        (64, 5000, [64, 128, 256, 512, 1024, 2048, 4096, 5000], 64),
        (64, 8192, [64, 128, 256, 512, 1024, 2048, 4096, 8192], 64),
        (64, 16384, [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384], 64),
        (256, 3328, [256, 512, 1024, 2048, 3328], 13),
        (4, 64, [4, 8, 16, 32, 64], 4),
        (1, 1, [1], 1),
    ],
)
def test_ladder_and_automatic_images(lo: int, hi: int, ladder: list[int], images: int) -> None:
    assert token_ladder(lo, hi) == ladder
    assert resolve_budgets(lo, hi) == EncoderBudgets(tuple(ladder), images)


def test_given_budgets_and_images() -> None:
    assert resolve_budgets(64, 8192, token_budgets=[1024, 512], max_images=8) == EncoderBudgets((512, 1024), 8)


def test_given_images_raise_the_ladder() -> None:
    got = resolve_budgets(64, 8192, max_images=200)
    assert got == EncoderBudgets((200, 400, 800, 1600, 3200, 6400, 8192), 200)
    assert resolve_budgets(64, 8192, max_images=8) == EncoderBudgets(tuple(token_ladder(64, 8192)), 8)


def test_given_budgets_derive_the_images() -> None:
    assert resolve_budgets(64, 13824, token_budgets=[2048, 4096, 8192, 13824]).max_images == 216
    assert resolve_budgets(64, 8192, token_budgets=[2048, 4096, 8192]).max_images == 128
    assert resolve_budgets(64, 8192, token_budgets=[48, 512]) == EncoderBudgets((48, 512), 48)


def test_duplicates_merge() -> None:
    assert resolve_budgets(64, 8192, token_budgets=[4096, 512, 512]).token_budgets == (512, 4096)


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        pytest.param({"lo": 64, "hi": 2048, "max_images": 4096}, ("4096", "2048"), id="images-above-range"),
        pytest.param(
            {"lo": 64, "hi": 8192, "token_budgets": [4, 1024], "max_images": 8}, ("8", "4"), id="images-over-min"
        ),
        pytest.param(
            {"lo": 64, "hi": 8192, "token_budgets": [512, 13824]},
            ("token_budgets", "13824", "8192"),
            id="budget-above-hi",
        ),
        pytest.param({"lo": 64, "hi": 8192, "token_budgets": [0, 512]}, ("0", "512"), id="zero-budget"),
        pytest.param({"lo": 64, "hi": 8192, "token_budgets": [-5, 512]}, ("-5",), id="negative-budget"),
        pytest.param({"lo": 64, "hi": 8192, "token_budgets": []}, ("none",), id="no-budget"),
        pytest.param({"lo": 64, "hi": 8192, "max_images": 0}, ("0",), id="zero-images"),
        pytest.param({"lo": 64, "hi": 8192, "max_images": -3}, ("-3",), id="negative-images"),
        pytest.param(
            {"lo": 64, "hi": 8192, "token_budgets": [512], "max_images": 0}, ("0",), id="zero-images-with-budgets"
        ),
        pytest.param({"lo": 65, "hi": 64}, ("65", "64"), id="lo-above-hi"),
        pytest.param({"lo": 0, "hi": 64}, ("0", "64"), id="zero-lo"),
        pytest.param({"lo": -1, "hi": 64}, ("-1",), id="negative-lo"),
        pytest.param({"lo": 1, "hi": 0}, ("1", "0"), id="zero-hi"),
        pytest.param({"lo": 65, "hi": 64, "token_budgets": [32]}, ("65", "64"), id="bad-range-with-budgets"),
        pytest.param(
            {"lo": 65, "hi": 64, "token_budgets": [32], "max_images": 2}, ("65", "64"), id="bad-range-with-both"
        ),
    ],
)
def test_holes_are_refused_with_their_numbers(arguments: dict[str, object], numbers: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as refused:
        resolve_budgets(**arguments)  # type: ignore[arg-type]
    for number in numbers:
        assert number in str(refused.value)


def test_the_rules_hold_for_budgets_made_by_hand() -> None:
    for budgets, images in (((512, 64), 1), ((64, 64), 1), ((64,), 65), ((), 1), ((64,), 0)):
        with pytest.raises(ValueError):
            EncoderBudgets(budgets, images)
    with pytest.raises(ValueError, match="3.*4"):
        EncoderBudgets((64,), 4, max_frames=3)


@given(
    lo=st.integers(-2, 300),
    hi=st.integers(-2, 9000),
    budgets=st.none() | st.lists(st.integers(-2, 9000), max_size=6),
    images=st.none() | st.integers(-2, 5000),
)
def test_one_rule_set_for_every_path(lo: int, hi: int, budgets: list[int] | None, images: int | None) -> None:
    try:
        got = resolve_budgets(lo, hi, token_budgets=budgets, max_images=images)
    except ValueError:
        return
    assert 0 < lo <= hi
    assert list(got.token_budgets) == sorted(set(got.token_budgets))
    assert got.token_budgets[0] > 0 and got.largest <= hi
    assert 1 <= got.max_images <= min(got.token_budgets)
    if images is not None:
        assert got.max_images == images
    if budgets is not None:
        assert set(got.token_budgets) == set(budgets)


@given(lo=st.integers(1, 300), hi=st.integers(1, 20000))
def test_automatic_budgets_always_resolve(lo: int, hi: int) -> None:
    lo, hi = min(lo, hi), max(lo, hi)
    got = resolve_budgets(lo, hi)
    assert got.largest == hi and got.token_budgets[0] == lo


@pytest.mark.parametrize(
    ("budget", "images", "per", "capacity"),
    [
        (64, 64, 1, 64),
        (513, 8, 65, 520),
        (324, 8, 41, 328),
        (4864, 8, 608, 4864),
        (8192, 8, 1024, 8192),
        (5000, 64, 79, 5056),
    ],
)
def test_buffers_are_sized_by_the_ceiling(budget: int, images: int, per: int, capacity: int) -> None:
    assert rows_per_image(budget, images) == per
    shape = graph_shape(budget, EncoderBudgets((budget,), images), prefix=10, patches_per_token=4)
    assert (shape.capacity, shape.patches) == (capacity, 4 * capacity)
    assert shape.rows == 4 * capacity + 10 * images + 1
    assert shape.sequences == images + 1


@given(budget=st.integers(1, 20000), images=st.integers(1, 600))
def test_capacity_is_never_short_and_never_a_whole_row_over(budget: int, images: int) -> None:
    images = min(images, budget)
    capacity = rows_per_image(budget, images) * images
    assert budget <= capacity <= budget + images - 1


def test_a_planted_floor_division_would_be_short() -> None:
    """Why the ceiling matters: the floor of 5000 tokens over 64 images holds 4992, and 513 over 8 holds 512."""
    assert 5000 // 64 * 64 < 5000 <= rows_per_image(5000, 64) * 64
    assert 513 // 8 * 8 < 513 <= rows_per_image(513, 8) * 8


def test_fit_is_the_smallest_budget_that_holds() -> None:
    budgets = EncoderBudgets(tuple(STEPS_512), 8)
    assert [budgets.fit(n) for n in (0, 1, 512, 513, 4864, 4865)] == [512, 512, 512, 1024, 4864, None]
    with pytest.raises(ValueError, match="-1"):
        budgets.fit(-1)


@pytest.mark.parametrize("frames", [64, 1024, 49152])
def test_frames_add_sequences_and_never_tokens(frames: int) -> None:
    """If the frame limit sized the buffers, 64 tokens would be replayed as 1,024 or 49,152: it only adds offsets."""
    for budget, images in ((64, 64), (8192, 8)):
        budgets = EncoderBudgets((budget,), images, max_frames=frames)
        shape = graph_shape(budget, budgets, prefix=10, patches_per_token=4)
        assert shape.capacity == budget and shape.patches == 4 * budget
        assert shape.sequences == frames + 1
        assert shape.rows == 4 * budget + 10 * frames + 1


def test_frame_limit_defaults_to_one_sequence_per_image() -> None:
    assert EncoderBudgets((64,), 8).frame_limit == 8
    assert EncoderBudgets((64,), 8, max_frames=64).frame_limit == 64
