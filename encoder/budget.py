"""Token budgets of the encoder's graphs: their sizes, the images that each holds, and the sizes of their buffers.

Integers only. A budget counts image tokens after the pixel shuffle. The graph of budget T for B images is sized for B
images of `ceil(T / B)` tokens, so its capacity is at least T and exceeds it by less than B.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EncoderBudgets:
    """The resolved budgets: ascending, unique, each at least one token per image.

    `max_frames` limits the attention sequences of one batch where an item may have several (None: `max_images`).
    """

    token_budgets: tuple[int, ...]
    max_images: int
    max_frames: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_budgets", tuple(self.token_budgets))
        _check_budgets(self.token_budgets)
        if list(self.token_budgets) != sorted(set(self.token_budgets)):
            raise ValueError(f"token budgets must ascend without repeats, got {list(self.token_budgets)}")
        if not 1 <= self.max_images <= self.token_budgets[0]:
            raise ValueError(
                f"max_images {self.max_images} must be between 1 and the smallest token budget {self.token_budgets[0]}"
            )
        if self.max_frames is not None and self.max_frames < self.max_images:
            raise ValueError(f"max_frames {self.max_frames} is below max_images {self.max_images}")

    @property
    def largest(self) -> int:
        return self.token_budgets[-1]

    @property
    def frame_limit(self) -> int:
        """Largest number of attention sequences in one batch."""
        return self.max_images if self.max_frames is None else self.max_frames

    def fit(self, tokens: int) -> int | None:
        """The smallest budget that holds `tokens`, or None if every budget is smaller."""
        if tokens < 0:
            raise ValueError(f"a batch cannot hold {tokens} tokens")
        position = bisect_left(self.token_budgets, tokens)
        return self.token_budgets[position] if position < len(self.token_budgets) else None


@dataclass(frozen=True)
class GraphShape:
    """Sizes of the static buffers of one budget's graph."""

    budget: int
    capacity: int
    """Image-token rows of the output; `budget <= capacity <= budget + max_images - 1`."""
    patches: int
    """Patch rows of the input: capacity times the patches of one token."""
    rows: int
    """Tower rows: patches, the prefix of every sequence, and one row for the padding sequence."""
    sequences: int
    """Attention sequences, the padding sequence included."""


def token_ladder(lo: int, hi: int) -> list[int]:
    """`lo` doubled up to `hi`, and `hi` itself. Raises `ValueError` unless `0 < lo <= hi`."""
    _check_range(lo, hi)
    ladder = []
    step = lo
    while step < hi:
        ladder.append(step)
        step *= 2
    return [*ladder, hi]


def resolve_budgets(
    lo: int, hi: int, *, token_budgets: Sequence[int] | None = None, max_images: int | None = None
) -> EncoderBudgets:
    """Resolves budgets and images per batch for images of `lo` to `hi` tokens, from the user's options.

    Given budgets are sorted and merged; a given `max_images` is kept. Otherwise the ladder starts at `max(lo,
    max_images)`, and `max_images` is the number of smallest images that fit the largest step, at most the smallest
    budget. Raises `ValueError` naming both numbers unless `0 < lo <= hi`, every budget is in `1..hi` and `1 <=
    max_images <= min(budgets)`.
    """
    _check_range(lo, hi)
    if max_images is not None and max_images < 1:
        raise ValueError(f"max_images must be at least 1, got {max_images}")
    if token_budgets is not None:
        budgets = sorted(set(token_budgets))
        _check_budgets(budgets)
        if budgets[-1] > hi:
            raise ValueError(f"token_budgets holds {budgets[-1]}, above the {hi} tokens that one step may hold")
    else:
        floor = lo if max_images is None else max(lo, max_images)
        if floor > hi:
            raise ValueError(f"max_images {max_images} is above the {hi} tokens that one step may hold")
        budgets = token_ladder(floor, hi)
    images = min(hi // lo, budgets[0]) if max_images is None else max_images
    return EncoderBudgets(tuple(budgets), images)


def rows_per_image(budget: int, max_images: int) -> int:
    """Token rows reserved for each of `max_images` images: the quotient rounded up, so that no row is lost."""
    if budget < 1 or max_images < 1:
        raise ValueError(f"budget {budget} and max_images {max_images} must both be positive")
    return -(-budget // max_images)


def graph_shape(budget: int, budgets: EncoderBudgets, *, prefix: int, patches_per_token: int) -> GraphShape:
    """Buffer sizes of the graph of `budget`; `prefix`: rows before the patches of each sequence."""
    capacity = rows_per_image(budget, budgets.max_images) * budgets.max_images
    assert budget <= capacity <= budget + budgets.max_images - 1, (budget, capacity, budgets.max_images)
    patches = capacity * patches_per_token
    return GraphShape(
        budget=budget,
        capacity=capacity,
        patches=patches,
        rows=patches + prefix * budgets.frame_limit + 1,
        sequences=budgets.frame_limit + 1,
    )


def _check_range(lo: int, hi: int) -> None:
    if not 0 < lo <= hi:
        raise ValueError(f"tokens per step need 0 < lo <= hi, got lo {lo} and hi {hi}")


def _check_budgets(budgets: Sequence[int]) -> None:
    if not budgets:
        raise ValueError("at least one token budget is needed, got none")
    for budget in budgets:
        if budget < 1:
            raise ValueError(f"token budgets must be positive, got {budget} in {list(budgets)}")
