"""Pruning keeps what transformers' mask keeps, and the number of rows depends on shapes only."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import compute_retention_mask

from encoder.item import retained_tokens
from encoder.pruning import prune, retained_rows


def video_rows(sequences: int, rows: int, columns: int, seed: int, *, still: float = 0.0) -> torch.Tensor:
    """Float32 `[T, rows * columns, 24]`; a share `still` of the rows repeats the frame before."""
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randn(sequences, rows * columns, 24, generator=generator)
    for index in range(1, sequences):
        repeats = torch.rand(rows * columns, generator=generator) < still
        frames[index][repeats] = frames[index - 1][repeats]
    return frames


def oracle(frames_TND: torch.Tensor, rows: int, columns: int, rate: float) -> torch.Tensor:
    shape = torch.tensor([frames_TND.shape[0], rows, columns])
    flat = frames_TND.flatten(0, 1)
    return compute_retention_mask(video_embeds=flat, thw=shape, spatial_merge_size=1, q=rate)


@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (2, 7), (5, 1), (1, 1)])
@pytest.mark.parametrize("sequences", [1, 2, 5, 8])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.75, 0.95])
@pytest.mark.parametrize("still", [0.0, 0.6, 1.0])
def test_the_mask_is_the_oracle_s(sequences: int, rows: int, columns: int, rate: float, still: float) -> None:
    frames = video_rows(sequences, rows, columns, seed=sequences * 7 + rows, still=still)
    mask = oracle(frames, rows, columns, rate)
    kept = retained_rows(frames, rate)
    assert torch.equal(kept, mask.nonzero().flatten())
    assert len(kept) == retained_tokens(sequences, rows * columns, rate)
    out = torch.full((len(kept), frames.shape[-1]), float("nan"))
    counts = prune(frames, rate, out)
    assert torch.equal(out, frames.flatten(0, 1)[mask])
    assert list(counts) == mask.view(sequences, -1).sum(1).tolist()
    assert counts[0] == rows * columns, "the first temporal patch stays whole"


@settings(deadline=None, max_examples=60)
@example(sequences=15, tokens=1, rate=0.8)
@given(sequences=st.integers(1, 40), tokens=st.integers(1, 40), rate=st.floats(0.001, 0.999))
def test_the_count_is_the_oracle_s(sequences: int, tokens: int, rate: float) -> None:
    mask = oracle(torch.zeros(sequences, tokens, 2), tokens, 1, rate)
    assert int(mask.sum()) == retained_tokens(sequences, tokens, rate)


@pytest.mark.parametrize(
    ("sequences", "tokens", "rate", "kept"),
    [(8, 100, 0.75, 200), (8, 100, 0.95, 100), (100, 8, 0.75, 200), (100, 8, 0.999, 8), (1, 8, 0.9, 8), (3, 5, 0, 15)],
)
def test_worked_counts(sequences: int, tokens: int, rate: float, kept: int) -> None:
    assert retained_tokens(sequences, tokens, rate) == kept


@pytest.mark.parametrize("seed", range(3))
def test_half_precision_rows_are_scored_in_float32(seed: int) -> None:
    """Frames that change little: in bfloat16 cosines near 1 would all be equal, and other rows would be kept."""
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randn(1, 12, 24, generator=generator) + 0.05 * torch.randn(6, 12, 24, generator=generator)
    rounded = frames.bfloat16()
    assert torch.equal(retained_rows(rounded, 0.6), retained_rows(rounded.float(), 0.6))
    coarse = 1 - torch.nn.functional.cosine_similarity(rounded[1:], rounded[:-1], dim=-1)
    fine = 1 - torch.nn.functional.cosine_similarity(rounded[1:].float(), rounded[:-1].float(), dim=-1)
    assert len(coarse.unique()) < len(fine.unique()), "the example can tell"


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_a_rate_out_of_range_is_named(rate: float) -> None:
    with pytest.raises(ValueError, match=str(rate)):
        retained_tokens(2, 2, rate)
    with pytest.raises(ValueError, match="0 temporal"):
        retained_tokens(0, 2, 0.5)
