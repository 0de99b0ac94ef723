"""Packing under limits on images, tokens and frames: never more expensive than greedy packing, optimal for few images,
fast for many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from counting import lines_run
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.budget import EncoderBudgets, resolve_budgets
from encoder.packing import Packed, pack

STEPS_512 = (512, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4608, 4864)


def greedy(counts: Sequence[int], budgets: EncoderBudgets) -> list[Packed]:
    """Fills batches in ascending order up to the largest budget, closing early if one more image would waste a step."""
    batches: list[Packed] = []
    current: list[int] = []
    total = 0

    def fit(tokens: int) -> int:
        return 0 if tokens == 0 else budgets.fit(tokens) or 10**9

    for index in sorted(range(len(counts)), key=lambda i: counts[i]):
        tokens = counts[index]
        fits = len(current) < budgets.max_images and total + tokens <= budgets.largest
        defer = fit(total) + fit(tokens) < fit(total + tokens) and fit(tokens) >= fit(total)
        if current and (not fits or defer):
            batches.append(Packed(tuple(current), budgets.fit(total)))
            current, total = [], 0
        current.append(index)
        total += tokens
    if current:
        batches.append(Packed(tuple(current), budgets.fit(total)))
    return batches


def cost(batches: Sequence[Packed], launch_cost: float = 0) -> float:
    return sum(batch.budget or 0 for batch in batches) + launch_cost * len(batches)


def check(batches: Sequence[Packed], counts: Sequence[int], budgets: EncoderBudgets, frames: Sequence[int]) -> None:
    assert sorted(index for batch in batches for index in batch.indices) == list(range(len(counts)))
    for batch in batches:
        total = sum(counts[index] for index in batch.indices)
        assert list(batch.indices) == sorted(batch.indices)
        if batch.budget is None:
            (index,) = batch.indices
            assert counts[index] > budgets.largest or frames[index] > budgets.frame_limit
        else:
            assert batch.budget == budgets.fit(total)
            assert len(batch.indices) <= budgets.max_images
            assert sum(frames[index] for index in batch.indices) <= budgets.frame_limit


def doublings(hi: int, images: int) -> EncoderBudgets:
    return EncoderBudgets(resolve_budgets(64, hi).token_budgets, images)


WORKED = [
    (doublings(4096, 64), [64, 64, 64], [256], 0),
    (doublings(4096, 64), [256, 256, 256], [1024], 0),
    (doublings(4096, 64), [1000, 100], [128, 1024], 0),
    (doublings(4096, 64), [10, 20, 2040], [64, 2048], 0),
    (doublings(4096, 64), [64, 144, 256, 576, 1296], [512, 2048], 0),
    (doublings(8192, 64), [1296, 64, 576, 144, 256], [512, 2048], 0),
    (doublings(8192, 64), [513, 513], [2048], 0),
    (doublings(8192, 64), [1000, 1100], [1024, 2048], 0),
    (doublings(8192, 64), [65] * 70, [8192, 512], 0),
    (doublings(8192, 64), [9000, 9000], [], 2),
    (EncoderBudgets(STEPS_512, 8), [144] * 20, [1536, 1536, 1024], 0),
    (EncoderBudgets(STEPS_512, 8), [5000, 300, 4864], [512, 4864], 1),
    (EncoderBudgets(STEPS_512, 8), [512], [512], 0),
    (EncoderBudgets(STEPS_512, 8), [513], [1024], 0),
    (EncoderBudgets((2048, 4096), 8), [2000, 2000, 2000], [4096, 2048], 0),
    (EncoderBudgets((64, 128), 1), [64, 64, 64], [64, 64, 64], 0),
]


@pytest.mark.parametrize(("budgets", "counts", "replayed", "eager"), WORKED, ids=[str(row[1][:5]) for row in WORKED])
def test_worked_rows(budgets: EncoderBudgets, counts: list[int], replayed: list[int], eager: int) -> None:
    assert sorted(batch.budget or 0 for batch in greedy(counts, budgets) if batch.budget) == sorted(replayed)
    got = pack(counts, budgets)
    check(got, counts, budgets, [1] * len(counts))
    assert sum(batch.budget is None for batch in got) == eager
    assert cost(got) <= sum(replayed)


def test_seventy_small_images_do_not_overshoot() -> None:
    got = pack([65] * 70, doublings(8192, 64))
    assert sorted(batch.budget or 0 for batch in got) == [512, 4096]


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    head, rest = items[0], items[1:]
    for smaller in partitions(rest):
        yield [[head], *smaller]
        for position in range(len(smaller)):
            yield [*smaller[:position], [head, *smaller[position]], *smaller[position + 1 :]]


def brute_force(counts: Sequence[int], frames: Sequence[int], budgets: EncoderBudgets, launch_cost: float) -> float:
    best = float("inf")
    for groups in partitions(list(range(len(counts)))):
        total = 0.0
        for group in groups:
            budget = budgets.fit(sum(counts[i] for i in group))
            too_many = len(group) > budgets.max_images or sum(frames[i] for i in group) > budgets.frame_limit
            total += float("inf") if budget is None or too_many else budget + launch_cost
        best = min(best, total)
    return best


def ladders() -> st.SearchStrategy[EncoderBudgets]:
    steps = st.lists(st.integers(4, 600), min_size=1, max_size=8, unique=True).map(sorted)
    return steps.flatmap(
        lambda values: st.tuples(st.integers(1, values[0]), st.none() | st.integers(0, 20)).map(
            lambda pair: EncoderBudgets(
                tuple(values), pair[0], max_frames=None if pair[1] is None else pair[0] + pair[1]
            )
        )
    )


@settings(deadline=None, max_examples=80)
@given(data=st.data(), budgets=ladders(), launch_cost=st.sampled_from([0, 0.5, 7, 100]))
def test_optimal_for_small_batches(data: st.DataObject, budgets: EncoderBudgets, launch_cost: float) -> None:
    counts = data.draw(st.lists(st.integers(1, budgets.largest), min_size=1, max_size=7))
    frames = data.draw(st.lists(st.integers(1, budgets.frame_limit), min_size=len(counts), max_size=len(counts)))
    got = pack(counts, budgets, launch_cost=launch_cost, frames=frames)
    check(got, counts, budgets, frames)
    assert cost(got, launch_cost) == pytest.approx(brute_force(counts, frames, budgets, launch_cost))


def test_optimal_for_eight_images() -> None:
    budgets = EncoderBudgets((100, 150, 220, 300), 3)
    counts = [12, 77, 150, 33, 91, 64, 140, 8]
    assert cost(pack(counts, budgets)) == brute_force(counts, [1] * 8, budgets, 0)


@settings(deadline=None, max_examples=300)
@given(
    budgets=ladders(),
    counts=st.lists(st.integers(1, 700), max_size=64),
    launch_cost=st.sampled_from([0, 0.5, 7, 100]),
)
def test_never_dearer_than_the_greedy(budgets: EncoderBudgets, counts: list[int], launch_cost: float) -> None:
    got = pack(counts, budgets, launch_cost=launch_cost)
    check(got, counts, budgets, [1] * len(counts))
    plain = EncoderBudgets(budgets.token_budgets, budgets.max_images)
    assert cost(got, launch_cost) <= cost(greedy(counts, plain), launch_cost) + 1e-9


@settings(deadline=None, max_examples=100)
@given(budgets=ladders(), counts=st.lists(st.integers(1, 600), min_size=9, max_size=64))
def test_large_batches_stay_within_the_stated_bound(budgets: EncoderBudgets, counts: list[int]) -> None:
    """Against lower bounds of the optimum: every real token costs something, and so does each image slot."""
    counts = [min(count, budgets.largest) for count in counts]
    ladder = budgets.token_budgets
    ratio = max([2.0, *(ladder[i + 1] / ladder[i] for i in range(len(ladder) - 1))])
    least = max(sum(counts), -(-len(counts) // budgets.max_images) * ladder[0])
    launch_cost = 3
    batches = max(-(-len(counts) // budgets.max_images), -(-sum(counts) // budgets.largest))
    bound = (ratio + 1) * (least + launch_cost * batches) + budgets.largest + launch_cost
    assert cost(pack(counts, budgets, launch_cost=launch_cost), launch_cost) <= bound


QUALITY = [
    pytest.param((512, 1024, 1536, 2048), 3, 0, [461, 1555, 30, 3, 1091, 1301, 10, 888, 449, 955], 7168, id="best-fit"),
    pytest.param((100, 300, 700), 16, 0, [390, 17, 642, 66, 100, 59, 20, 68, 31], 1400, id="exactly-full"),
    pytest.param((64, 200), 4, 0, [38, 57, 141, 35, 64, 56, 158, 155, 48, 82, 32, 95], 1000, id="full-budget"),
    pytest.param((512, 1024, 1536, 2048), 4, 0, [110, 518, 131, 307, 647, 66, 257, 12, 176], 2560, id="runs"),
    pytest.param(
        (100, 300, 700), 8, 50, [59, 6, 13, 94, 41, 601, 119, 698, 56, 38, 489, 84, 41, 93], 2750, id="launches"
    ),
    pytest.param(
        (512, 1024, 1536, 2048), 8, 50,
        [2006, 265, 304, 308, 1031, 346, 1456, 83, 433, 1367, 152, 865, 657, 302], 10540, id="fewer-launches",
    ),
    pytest.param((64, 200), 16, 0, [19, 38, 67, 37, 37, 36, 86, 63], 400, id="eight-are-exact"),
]  # fmt: skip


@pytest.mark.parametrize(("ladder", "images", "launch_cost", "counts", "least"), QUALITY)
def test_how_good_the_packing_is(
    ladder: tuple[int, ...], images: int, launch_cost: float, counts: list[int], least: int
) -> None:
    """The exact cost of lists that one of the two methods packs better than the other, so that leaving out or weakening
    the best-fit packing, or the runs, is noticed."""
    budgets = EncoderBudgets(ladder, images)
    got = pack(counts, budgets, launch_cost=launch_cost)
    check(got, counts, budgets, [1] * len(counts))
    assert cost(got, launch_cost) == least


def test_a_launch_cost_merges_batches() -> None:
    budgets = doublings(4096, 64)
    assert len(pack([1000, 100], budgets)) == 2
    assert len(pack([1000, 100], budgets, launch_cost=1000)) == 1


def test_frames_are_a_capacity_of_their_own() -> None:
    """Five clips of 16 frames whose tokens fit one batch, but not its 64 frames."""
    budgets = EncoderBudgets((4096,), 8, max_frames=64)
    got = pack([100] * 5, budgets, frames=[16] * 5)
    check(got, [100] * 5, budgets, [16] * 5)
    assert len(got) == 2
    assert pack([100], budgets, frames=[65]) == [Packed((0,), None)]


def test_batches_follow_deadlines_or_arrival() -> None:
    budgets = EncoderBudgets((64, 128), 1)
    assert [batch.indices for batch in pack([128, 64, 64], budgets)] == [(0,), (1,), (2,)]
    urgent = pack([128, 64, 64], budgets, deadlines=[3.0, 2.0, 1.0])
    assert [batch.indices for batch in urgent] == [(2,), (1,), (0,)]


def test_a_batch_is_as_urgent_as_its_most_urgent_image() -> None:
    budgets = EncoderBudgets((128,), 2)
    got = pack([64, 64, 128], budgets, deadlines=[1.0, 9.0, 5.0])
    assert [batch.indices for batch in got] == [(0, 1), (2,)]


def test_misuse_names_the_numbers() -> None:
    budgets = EncoderBudgets((64,), 1)
    for arguments in ({"frames": [1]}, {"deadlines": [1.0]}, {"launch_cost": -1}, {"frames": [1, 0]}):
        with pytest.raises(ValueError):
            pack([3, 4], budgets, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="image 1 .*0"):
        pack([3, 0], budgets)
    assert pack([], budgets) == []


@pytest.mark.parametrize("sizes", ["mixed", "small", "equal"])
def test_packing_stays_cheap(sizes: str) -> None:
    """`benchmarks.encoder --only packing` measures seconds; this counts the steps."""

    def steps(images: int) -> int:
        counts = {
            "mixed": [33 + 37 * i % 2000 for i in range(images)],
            "small": [20 + i % 64 for i in range(images)],
            "equal": [256] * images,
        }[sizes]
        return lines_run(pack, counts, resolve_budgets(64, 8192))

    assert steps(64) < 64 * 400
    assert steps(256) < 8 * steps(64)
