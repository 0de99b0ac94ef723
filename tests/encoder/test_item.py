"""An item says how its patches divide into sequences and how many rows come of them."""

from __future__ import annotations

import pytest
import torch

from encoder.item import VIDEO, EncoderItem, num_image_tokens


def test_an_item_divides_into_its_sequences() -> None:
    patches = torch.arange(3 * 8 * 5).view(24, 5)
    item = EncoderItem((2, 4), patches, kind=VIDEO, num_sequences=3, num_frames=5, pruning_rate=0.5)
    assert [part.tokens for part in item.sequences] == [2, 2, 2] and item.sequence_tokens == 2
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
