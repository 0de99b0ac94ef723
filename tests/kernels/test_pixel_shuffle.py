"""The gather against the released two-step shuffle."""

from __future__ import annotations

import pytest
import torch

from kernels.pixel_shuffle import pixel_shuffle, shuffle_order


def two_step_shuffle(x_HWD: torch.Tensor, merge: int) -> torch.Tensor:
    """Fold columns into features, swap, fold rows into features, swap back."""
    rows, columns, features = x_HWD.shape
    folded = x_HWD.reshape(rows, columns // merge, features * merge).transpose(0, 1).contiguous()
    folded = folded.view(columns // merge, rows // merge, features * merge * merge)
    return folded.transpose(0, 1).reshape(-1, features * merge * merge)


@pytest.mark.parametrize(("rows", "columns", "merge"), [(2, 2, 2), (4, 10, 2), (6, 2, 2), (9, 6, 3), (5, 7, 1)])
def test_gather_equals_the_two_step_shuffle(rows: int, columns: int, merge: int) -> None:
    x = torch.randn(rows * columns, 3)
    order = shuffle_order(rows, columns, merge)
    assert sorted(order.reshape(-1).tolist()) == list(range(rows * columns))
    assert torch.equal(pixel_shuffle(x, order), two_step_shuffle(x.view(rows, columns, 3), merge))


def test_rows_between_images_are_dropped() -> None:
    x = torch.arange(7.0)[:, None]
    assert pixel_shuffle(x, shuffle_order(2, 2) + 3).tolist() == [[3.0, 4.0, 5.0, 6.0]]


def test_a_ragged_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="3x4"):
        shuffle_order(3, 4)
