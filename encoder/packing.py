"""Chooses which waiting images share a launch of the tower, and its token budget.

Pure policy. The cost of a packing is the sum of the budgets that it replays plus `launch_cost` per batch. Up to
`EXACT_IMAGES` images the packing is optimal. For more images, it is the cheaper of the best split of the images, sorted
by size, into runs, and a best-fit packing. Its cost is never above that of greedy packing in ascending order, whose
batches are such runs too. It is at most `(max(r, 2) + 1) * optimum + largest budget + launch_cost`, where r is the
largest ratio between neighbouring budgets (the best split is at least as good as next-fit runs, whose cost is within
this bound).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from encoder.budget import EncoderBudgets

EXACT_IMAGES = 8
"""Up to this many images every partition is evaluated (2**8 subsets)."""


@dataclass(frozen=True)
class Packed:
    """One launch: indices into the caller's list, ascending, and the budget to replay; None runs eagerly."""

    indices: tuple[int, ...]
    budget: int | None


@dataclass(frozen=True)
class _Item:
    index: int
    tokens: int
    frames: int


def pack(
    token_counts: Sequence[int],
    budgets: EncoderBudgets,
    *,
    launch_cost: float = 0,
    frames: Sequence[int] | None = None,
    deadlines: Sequence[float] | None = None,
) -> list[Packed]:
    """Splits images into batches within the budgets' limits on images, tokens and frames.

    Image i has `token_counts[i]` image tokens and `frames[i]` attention sequences (default 1); `launch_cost` is in
    tokens. An image larger than every budget is returned alone with budget None. Batches are ordered by their most
    urgent image: by the earliest of `deadlines`, or by the given order without deadlines. Raises `ValueError` for
    counts below 1, a negative cost or lists of unequal length.
    """
    sequences = [1] * len(token_counts) if frames is None else list(frames)
    _check(token_counts, sequences, launch_cost, deadlines)
    items: list[_Item] = []
    batches: list[Packed] = []
    for index, (tokens, count) in enumerate(zip(token_counts, sequences, strict=True)):
        if tokens > budgets.largest or count > budgets.frame_limit:
            batches.append(Packed((index,), None))
        else:
            items.append(_Item(index, tokens, count))
    for group in _partition(items, budgets, launch_cost):
        budget = budgets.fit(sum(item.tokens for item in group))
        assert budget is not None, "a batch was filled beyond the largest budget"
        batches.append(Packed(tuple(sorted(item.index for item in group)), budget))
    urgency = range(len(token_counts)) if deadlines is None else deadlines
    return sorted(batches, key=lambda batch: (min(urgency[index] for index in batch.indices), batch.indices))


def _check(
    token_counts: Sequence[int], frames: Sequence[int], launch_cost: float, deadlines: Sequence[float] | None
) -> None:
    for name, values in (("token count", token_counts), ("frame count", frames)):
        for index, value in enumerate(values):
            if value < 1:
                raise ValueError(f"image {index} has a {name} of {value}, it must be at least 1")
    if launch_cost < 0:
        raise ValueError(f"launch_cost must not be negative, got {launch_cost}")
    for name, length in (("frames", len(frames)), ("deadlines", len(deadlines or token_counts))):
        if length != len(token_counts):
            raise ValueError(f"{length} {name} for {len(token_counts)} images")


def _partition(items: list[_Item], budgets: EncoderBudgets, launch_cost: float) -> list[list[_Item]]:
    if len(items) <= 1:
        return [items] if items else []
    if len(items) <= EXACT_IMAGES:
        return _best_partition(items, budgets, launch_cost)
    ascending = sorted(items, key=lambda item: item.tokens)
    runs_cost, runs = _best_runs(ascending, budgets, launch_cost)
    fill = _best_fit(ascending, budgets, launch_cost)
    return fill if _cost(fill, budgets, launch_cost) < runs_cost else runs


def _cost(groups: list[list[_Item]], budgets: EncoderBudgets, launch_cost: float) -> float:
    chosen = [budgets.fit(sum(item.tokens for item in group)) for group in groups]
    return sum(budget or 0 for budget in chosen) + launch_cost * len(groups)


def _best_partition(items: list[_Item], budgets: EncoderBudgets, launch_cost: float) -> list[list[_Item]]:
    """The cheapest partition, by dynamic programming over subsets."""
    size = 1 << len(items)
    infinity = float("inf")
    alone = _subset_costs(items, budgets, launch_cost, infinity)
    best = [0.0] * size
    chosen = [0] * size
    for subset in range(1, size):
        rest = subset & (subset - 1)
        first = subset ^ rest  # the first image is in some batch: try every batch that contains it
        cost, pick = infinity, 0
        others = rest
        while True:
            candidate = alone[first | others] + best[rest ^ others]
            if candidate < cost:
                cost, pick = candidate, first | others
            if not others:
                break
            others = (others - 1) & rest
        best[subset], chosen[subset] = cost, pick
    groups = []
    remaining = size - 1
    while remaining:
        batch = chosen[remaining]
        groups.append([item for position, item in enumerate(items) if batch >> position & 1])
        remaining ^= batch
    return groups


def _subset_costs(items: list[_Item], budgets: EncoderBudgets, launch_cost: float, infinity: float) -> list[float]:
    """Cost of running each subset as one batch; infinite if it does not fit."""
    ladder, images, frame_limit = budgets.token_budgets, budgets.max_images, budgets.frame_limit
    tokens, frames, counts = [0], [0], [0]
    for item in items:
        tokens += [total + item.tokens for total in tokens]
        frames += [total + item.frames for total in frames]
        counts += [total + 1 for total in counts]
    costs = [0.0]
    for subset in range(1, len(tokens)):
        step = bisect_left(ladder, tokens[subset])
        fits = step < len(ladder) and counts[subset] <= images and frames[subset] <= frame_limit
        costs.append(ladder[step] + launch_cost if fits else infinity)
    return costs


def _best_runs(ascending: list[_Item], budgets: EncoderBudgets, launch_cost: float) -> tuple[float, list[list[_Item]]]:
    """The cheapest split of the sorted images into runs of neighbours, with its cost."""
    ladder, largest = budgets.token_budgets, budgets.largest
    images, frame_limit = budgets.max_images, budgets.frame_limit
    best = [0.0]
    start_of = [0]
    for end in range(1, len(ascending) + 1):
        tokens = frames = step = 0
        cost, pick = float("inf"), end - 1
        for start in range(end - 1, max(end - 1 - images, -1), -1):
            tokens += ascending[start].tokens
            frames += ascending[start].frames
            if tokens > largest or frames > frame_limit:
                break
            while ladder[step] < tokens:
                step += 1
            candidate = best[start] + ladder[step] + launch_cost
            if candidate < cost:
                cost, pick = candidate, start
        best.append(cost)
        start_of.append(pick)
    runs = []
    end = len(ascending)
    while end:
        runs.append(ascending[start_of[end] : end])
        end = start_of[end]
    return best[-1], runs


def _best_fit(ascending: list[_Item], budgets: EncoderBudgets, launch_cost: float) -> list[list[_Item]]:
    """Starts each batch with the largest image left, then adds the largest images that still fit its budget."""
    waiting = list(ascending)
    sizes = [item.tokens for item in waiting]
    groups = []
    while waiting:
        group = [waiting.pop()]
        sizes.pop()
        frames = group[0].frames
        # The batch's budget is the largest one that the remaining images can still fill.
        room = _target(group[0].tokens + sum(sizes), group[0].tokens, budgets) - group[0].tokens
        while room > 0 and len(group) < budgets.max_images:
            position = bisect_left(sizes, room + 1) - 1
            if position < 0 or frames + waiting[position].frames > budgets.frame_limit:
                break
            room -= sizes.pop(position)
            frames += waiting[position].frames
            group.append(waiting.pop(position))
        groups.append(group)
    return groups


def _target(total: int, least: int, budgets: EncoderBudgets) -> int:
    """The largest budget that `total` tokens fill, or the smallest that holds `least` if that is larger."""
    filled = [budget for budget in budgets.token_budgets if budget <= total]
    need = budgets.fit(least)
    assert need is not None
    return max(filled[-1] if filled else 0, need)
