"""Packed attention in torch compared with float64, one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kernels.varlen_attention import reads_host, reference
from kernels.varlen_attention.reference import varlen_attention

LENGTHS = [
    pytest.param([1], id="one-row"),
    pytest.param([63], id="63"),
    pytest.param([5, 5, 5, 7, 1, 300], id="mixed"),
    pytest.param([64, 64, 64], id="equal"),
    pytest.param([0, 9, 0, 0, 60, 0], id="empty-between"),
    pytest.param([500, 270], id="several-blocks"),
]


def packed(lengths: list[int], dtype: torch.dtype, scale: float = 1.0, heads: int = 3, width: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(lengths))
    qkv = torch.randn(sum(lengths), 3, heads, width, generator=generator)
    qkv[:, 0] *= scale
    return qkv.to(dtype)


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def exact(qkv: torch.Tensor, lengths: list[int], scale: float) -> torch.Tensor:
    parts = []
    for part in qkv.double().split(lengths):
        if len(part):
            q, k, v = part.unbind(1)
            weights = torch.softmax(torch.einsum("rhd,shd->hrs", q, k) * scale, -1)
            parts.append(torch.einsum("hrs,shd->rhd", weights, v))
    return torch.cat(parts)


def rms(x: torch.Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())


@pytest.mark.parametrize("lengths", LENGTHS)
def test_each_sequence_gets_what_it_gets_alone(lengths: list[int]) -> None:
    qkv = packed(lengths, torch.float32)
    got = varlen_attention(*qkv.unbind(1), offsets(lengths), max(lengths), scale=0.25)
    assert got.is_contiguous() and got.shape == (sum(lengths), 3, 16)
    torch.testing.assert_close(got.double(), exact(qkv, lengths, 0.25), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("deviation", [1.0, 4.0, 30.0])
def test_bfloat16_error_is_near_that_of_the_fused_kernel(lengths: list[int], deviation: float) -> None:
    """Taking the shift from a sample of keys costs accuracy: the error is at most three times that of the fused kernel
    and, for large deviations, far below that of rounding the scores themselves."""
    qkv = packed(lengths, torch.bfloat16, deviation, width=64)
    truth = exact(qkv, lengths, 0.125)
    got = varlen_attention(*qkv.unbind(1), offsets(lengths), max(lengths), scale=0.125)
    fused = torch.cat(
        [
            F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in part.unbind(1)))[0].transpose(0, 1)
            for part in qkv.split(lengths)
            if len(part)
        ]
    )
    assert rms(got.double() - truth) <= 3 * max(rms(fused.double() - truth), 0.0016 * rms(truth))


def test_a_key_that_the_sample_missed_does_not_overflow() -> None:
    """One key scores 300 above every other, at a position that is not sampled: exp would overflow."""
    length, width = 128, 16
    qkv = torch.zeros(length, 3, 1, width, dtype=torch.bfloat16)
    qkv[:, 0, 0, 0] = 20.0
    qkv[3, 1, 0, 0] = 15.0
    qkv[:, 2, 0] = torch.arange(length)[:, None]
    got = varlen_attention(*qkv.unbind(1), offsets([length]), length, scale=1.0)
    assert (got == 3).all()


def test_heads_and_strides_do_not_mix() -> None:
    lengths = [70, 3]
    qkv = packed(lengths, torch.bfloat16, heads=5)
    views = varlen_attention(*qkv.unbind(1), offsets(lengths), 70, scale=0.25)
    copies = varlen_attention(*(x.contiguous() for x in qkv.unbind(1)), offsets(lengths), 70, scale=0.25)
    assert torch.equal(views, copies)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_share_keys_and_values_in_order(dtype: torch.dtype) -> None:
    lengths = [70, 3]
    heads = packed(lengths, dtype, heads=6)[:, 0]
    q, k, v = heads.split((4, 1, 1), 1)
    shared = varlen_attention(q, *(x.expand(-1, 2, -1) for x in (k, v)), offsets(lengths), 70, scale=0.25)
    assert torch.equal(shared, varlen_attention(q, k, v, offsets(lengths), 70, scale=0.25))
    two = torch.cat((k, k.flip(0)), 1), torch.cat((v, v.flip(0)), 1)
    found = varlen_attention(q, *two, offsets(lengths), 70, scale=0.25)
    apart = [
        varlen_attention(q[:, [head]], *(x[:, [head // 2]] for x in two), offsets(lengths), 70, scale=0.25)
        for head in range(4)
    ]
    torch.testing.assert_close(found, torch.cat(apart, 1))


def test_working_in_portions_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [60] * 7
    qkv = packed(lengths, torch.bfloat16)
    whole = varlen_attention(*qkv.unbind(1), offsets(lengths), 60, scale=0.25)
    monkeypatch.setattr(reference, "SCORE_BYTES", 60 * 60 * 3 * 2 * 2)
    assert torch.equal(whole, varlen_attention(*qkv.unbind(1), offsets(lengths), 60, scale=0.25))


@pytest.mark.parametrize(
    ("bounds", "max_seqlen", "message"),
    [
        ([0, 4, 8], 8, "0 to 9"),
        ([1, 4, 9], 9, "0 to 9"),
        ([0, 6, 4, 9], 9, "rows 6 to 4"),
        ([0, 2, 9], 6, r"rows 2 to 9.*0\.\.6"),
        ([9], 9, "0 to 9"),
    ],
    ids=["tail-short", "head-late", "falling", "over-bound", "no-sequence"],
)
def test_offsets_that_leave_rows_out_are_refused(bounds: list[int], max_seqlen: int, message: str) -> None:
    qkv = packed([9], torch.float32)
    with pytest.raises(ValueError, match=message):
        varlen_attention(*qkv.unbind(1), torch.tensor(bounds, dtype=torch.int32), max_seqlen, scale=1.0)


def test_only_a_cpu_may_look_at_lengths_inside_a_graph() -> None:
    assert not reads_host("cpu") and not reads_host("cuda")
