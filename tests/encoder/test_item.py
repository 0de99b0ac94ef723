"""How an item's patches divide into sequences, and how many rows it gives."""

from __future__ import annotations

import pytest
import torch

from encoder.item import VIDEO, EncoderItem, Grid, num_image_tokens


def test_an_item_divides_into_its_sequences() -> None:
    patches = torch.arange(3 * 8 * 5).view(24, 5)
    item = EncoderItem((2, 4), patches, kind=VIDEO, num_sequences=3, num_frames=5, pruning_rate=0.5)
    assert [part.tokens for part in item.sequences] == [2, 2, 2] and item.sequence_tokens == (2, 2, 2)
    assert item.tokens == 3
    assert torch.equal(torch.cat([part.patches for part in item.sequences]), patches)
    assert all(part.patches.untyped_storage().data_ptr() == patches.data_ptr() for part in item.sequences)
    assert EncoderItem((4, 6), torch.zeros(24, 5)).tokens == 6
    assert EncoderItem((4, 6), torch.zeros(24, 5), merge_size=1).tokens == 24


@pytest.mark.parametrize(
    ("rows", "changes", "numbers"),
    [
        (23, {}, "2x4 needs 8 rows of patches for each of 3 sequences, got shape .23, 5."),
        (24, {"num_sequences": 2}, "2x4 needs 8 .* 2 sequences"),
        (24, {"num_sequences": 0}, "0 sequences"),
        (24, {"merge_size": 0}, "merge_size 0"),
        (24, {"pruning_rate": 1.0}, "below 1, got 1.0"),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(rows: int, changes: dict[str, float], numbers: str) -> None:
    given: dict[str, float] = {"num_sequences": 3, **changes}
    with pytest.raises(ValueError, match=numbers):
        EncoderItem((2, 4), torch.zeros(rows, 5), kind=VIDEO, **given)  # type: ignore[arg-type]


def test_a_ragged_grid_has_no_tokens() -> None:
    with pytest.raises(ValueError, match="3x4"):
        num_image_tokens((3, 4))
    with pytest.raises(ValueError, match="2x3"):
        _ = EncoderItem((2, 3), torch.zeros(6, 5)).tokens


def test_an_image_with_slices_has_sequences_of_two_grids() -> None:
    patches = torch.arange(5.0 * (2 * 4 + 6 * 4 * 2)).view(-1, 5)
    item = EncoderItem((2, 4), patches, num_sequences=7, slices=(2, 3), slice_grid=(4, 2))
    assert item.grids == ((2, 4), *[(4, 2)] * 6) and item.sequence_tokens == (2,) * 7 and item.tokens == 14
    assert [part.grid for part in item.sequences] == list(item.grids)
    assert torch.equal(torch.cat([part.patches for part in item.sequences]), patches)
    assert item.description.with_patches(patches) == item and item.description.nbytes == patches.nbytes


def test_each_frame_of_a_clip_may_have_slices() -> None:
    patches = torch.arange(5.0 * 2 * (2 * 4 + 2 * 4 * 2)).view(-1, 5)
    item = EncoderItem((2, 4), patches, kind=VIDEO, num_frames=2, num_sequences=6, slices=(1, 2), slice_grid=(4, 2))
    assert item.grids == ((2, 4), (4, 2), (4, 2)) * 2 and item.sequence_tokens == (2,) * 6 and item.tokens == 12
    assert [part.grid for part in item.sequences] == list(item.grids) and item.num_groups == 2
    assert torch.equal(torch.cat([part.patches for part in item.sequences]), patches)
    assert item.description.with_patches(patches) == item and item.description.nbytes == patches.nbytes


@pytest.mark.parametrize("whole", [(2, 4), (0, 0)], ids=["whole", "slices-alone"])
def test_slices_may_come_first_or_alone(whole: Grid) -> None:
    sequences, patches = 7 if any(whole) else 6, torch.arange(5.0 * (whole[0] * whole[1] + 6 * 16)).view(-1, 5)
    item = EncoderItem(
        whole, patches, num_sequences=sequences, slices=(2, 3), slice_grid=(4, 4), slices_first=True
    )  # fmt: skip
    last = [whole] if any(whole) else []
    assert item.grids == (*[(4, 4)] * 6, *last) and item.num_groups == 1
    assert item.sequence_tokens == (*[4] * 6, *[2] * len(last)) and item.tokens == sum(item.sequence_tokens)
    assert [part.grid for part in item.sequences] == list(item.grids)
    assert torch.equal(torch.cat([part.patches for part in item.sequences]), patches)
    assert item.description.with_patches(patches) == item


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"slices_first": True, "slices": (0, 0), "slice_grid": (0, 0), "num_sequences": 1}, r"\(0, 0\) slices"),
        ({"grid": (0, 4)}, r"a grid of \(0, 4\) patches"),
        ({"grid": (0, 0)}, "7 sequences.* 6 slices there are 6"),
        ({"num_sequences": 6}, "6 sequences.* 6 slices there are 7"),
        ({"slice_grid": (0, 0)}, r"slices of \(0, 0\) patches"),
        ({"slices": (0, 3), "num_sequences": 1}, r"\(0, 3\) slices"),
        ({"pruning_rate": 0.5}, "pruning rate 0.5"),
        ({"num_frames": 7}, "7 frames"),
        ({"num_frames": -1}, "-1 frames"),
        ({"num_frames": 2, "num_sequences": 8}, "8 sequences, 2 frames"),
        ({"slice_grid": (4, 4)}, "2x4 needs 8 .* 1 sequences, and 16 for each of 6 slices of 4x4"),
    ],
)
def test_slices_that_cannot_be_are_refused(changes: dict[str, object], numbers: str) -> None:
    given: dict[str, object] = {
        "grid": (2, 4), "num_sequences": 7, "slices": (2, 3), "slice_grid": (4, 2), **changes
    }  # fmt: skip
    with pytest.raises(ValueError, match=numbers):
        EncoderItem(patches=torch.zeros(56, 5), **given)  # type: ignore[arg-type]
