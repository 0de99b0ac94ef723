"""Packed attention in compiled code compared with float64, one sequence at a time, and with its own results for single
sequences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kernels import varlen_attention as package
from kernels.dispatch import forced
from kernels.varlen_attention import reference
from kernels.varlen_attention.compiled import takes, varlen_attention

DTYPES = [torch.bfloat16, torch.float32]
LENGTHS = [
    pytest.param([1], id="one-row"),
    pytest.param([5, 5, 7, 1, 300], id="mixed"),
    pytest.param([0, 9, 0, 0, 60, 0], id="empty-between"),
    pytest.param([500, 270], id="several-units"),
    pytest.param([1030], id="packed-in-two-parts"),
]


def packed(
    lengths: list[int], dtype: torch.dtype, *, width: int = 16, heads: int = 2, deviation: float = 1.0
) -> Tensor:
    generator = torch.Generator().manual_seed(sum(lengths) + width)
    qkv = torch.randn(sum(lengths), 3, heads, width, generator=generator)
    qkv[:, 0] *= deviation
    return qkv.to(dtype)


def attention(qkv: Tensor, lengths: list[int], scale: float) -> Tensor:
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return varlen_attention(*qkv.unbind(1), bounds, max(lengths), scale=scale)


def exact(qkv: Tensor, lengths: list[int], scale: float) -> Tensor:
    parts = []
    for part in qkv.double().split(lengths):
        q, k, v = part.unbind(1)
        weights = torch.softmax(torch.einsum("rhd,shd->hrs", q, k) * scale, -1)
        parts.append(torch.einsum("hrs,shd->rhd", weights, v))
    return torch.cat(parts)


def fused(qkv: Tensor, lengths: list[int], scale: float) -> Tensor:
    parts = []
    for part in qkv.split(lengths):
        q, k, v = (x.transpose(0, 1)[None] for x in part.unbind(1))
        parts.append(F.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1))
    return torch.cat(parts)


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("width", [1, 3, 64, 72, 80, 96, 131])
@pytest.mark.parametrize("deviation", [1.0, 10.0])
def test_bfloat16_is_about_as_near_to_float64_as_the_fused_kernel(
    lengths: list[int], width: int, deviation: float
) -> None:
    """Rounding probabilities and outputs to bfloat16 is an error of at least 0.2 %, whatever the implementation."""
    qkv, scale = packed(lengths, torch.bfloat16, width=width, deviation=deviation), width**-0.5
    truth = exact(qkv, lengths, scale)
    allowed = max(1.3 * rms(fused(qkv, lengths, scale).double() - truth), 0.0025 * rms(truth))
    assert rms(attention(qkv, lengths, scale).double() - truth) <= allowed


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("width", [5, 64, 80])
@pytest.mark.parametrize("deviation", [1.0, 10.0])
def test_float32_stays_float32(lengths: list[int], width: int, deviation: float) -> None:
    qkv, scale = packed(lengths, torch.float32, width=width, deviation=deviation), width**-0.5
    truth = exact(qkv, lengths, scale)
    allowed = 2 * max(rms(fused(qkv, lengths, scale).double() - truth), 2**-22 * rms(truth))
    assert rms(attention(qkv, lengths, scale).double() - truth) <= allowed


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 120), min_size=1, max_size=5),
    st.integers(1, 40),
    st.sampled_from(DTYPES),
    st.sampled_from([1, 2, 3, 64]),
)
def test_a_sequence_gets_what_it_gets_alone(lengths: list[int], width: int, dtype: torch.dtype, threads: int) -> None:
    """Bit by bit, with any number of threads, and for views as for copies."""
    qkv = packed(lengths, dtype, width=width, deviation=4.0)
    torch.set_num_threads(threads)
    together = attention(qkv, lengths, 0.3)
    torch.set_num_threads(1)
    for part, ours in zip(qkv.split(lengths), together.split(lengths), strict=True):
        assert torch.equal(attention(part.clone(), [len(part)], 0.3), ours)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("large", [71, 199], ids=["first-block", "second-block"])
def test_scores_of_any_size(dtype: torch.dtype, large: int) -> None:
    """Keys with large scores come late, so that each has to become the new reference."""
    length, width = 300, 16
    qkv = torch.zeros(length, 3, 1, width, dtype=dtype)
    qkv[:, 0, 0, 0] = 20.0
    for place, score in ((0, -1e4), (3, 15.0), (70, 40.0), (large, 1e5), (299, 1e5)):
        qkv[place, 1, 0, 0] = score
    qkv[:, 2, 0] = torch.arange(length)[:, None] % 128
    assert (attention(qkv, [length], 1.0) == (large % 128 + 299 % 128) / 2).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_score_minus_infinity_count_nothing(dtype: torch.dtype) -> None:
    qkv = packed([40], dtype)
    qkv[:, 0, :, 0], qkv[:, 1, :, 0] = 1.0, 0.0
    some = torch.tensor([*range(9), 20, 39])
    qkv[some, 1, :, 0] = -torch.inf
    others = torch.tensor([i for i in range(40) if i not in some])
    q, k, v = qkv.double().unbind(1)
    weights = torch.softmax(torch.einsum("rhd,shd->hrs", q, k[others]), -1)
    expected = torch.einsum("hrs,shd->rhd", weights, v[others])
    torch.testing.assert_close(attention(qkv, [40], 1.0).double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_not_a_number_stays_in_its_sequence(dtype: torch.dtype, which: str) -> None:
    lengths = [20, 33, 50]
    qkv = packed(lengths, dtype, width=24)
    clean = attention(qkv, lengths, 0.2)
    qkv[30, "qkv".index(which), 0, 7] = torch.nan
    found = attention(qkv, lengths, 0.2)
    assert found[30, 0].isnan().any()
    found[20:53, 0] = clean[20:53, 0]
    assert torch.equal(found, clean)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_share_keys_and_values_in_order(dtype: torch.dtype) -> None:
    lengths = [70, 3]
    bounds = torch.tensor([0, 70, 73], dtype=torch.int32)
    shared = packed(lengths, dtype, heads=8)[:, 0].split((4, 2, 2), 1)
    assert takes(*shared, 0.25)
    repeated = torch.stack((shared[0], *(x.repeat_interleave(2, 1) for x in shared[1:])), 1)
    assert torch.equal(varlen_attention(*shared, bounds, 70, scale=0.25), attention(repeated, lengths, 0.25))


def test_it_takes_one_layout_and_two_dtypes() -> None:
    q, k, v = packed([7], torch.bfloat16).unbind(1)
    assert takes(q, k, v, 0.5)
    assert not takes(q, k, v.contiguous(), 0.5)
    assert not takes(*(x.transpose(1, 2) for x in (q, k, v)), 0.5)
    assert not takes(q.half(), k.half(), v.half(), 0.5)
    assert not takes(q, k, v, 0.0)


def test_tensors_on_a_cpu_are_worked_on_by_what_takes_them() -> None:
    lengths, bounds = [70, 9], torch.tensor([0, 70, 79], dtype=torch.int32)
    qkv = packed(lengths, torch.bfloat16, width=64)
    assert torch.equal(package.varlen_attention(*qkv.unbind(1), bounds, 70, scale=0.1), attention(qkv, lengths, 0.1))
    plain = reference.varlen_attention(*qkv.unbind(1), bounds, 70, scale=0.1)
    assert not torch.equal(plain, attention(qkv, lengths, 0.1))
    with forced("reference"):
        assert torch.equal(package.varlen_attention(*qkv.unbind(1), bounds, 70, scale=0.1), plain)
    backwards = package.varlen_attention(*qkv.unbind(1), bounds, 70, scale=-0.1)
    assert torch.equal(backwards, reference.varlen_attention(*qkv.unbind(1), bounds, 70, scale=-0.1))
    with pytest.raises(ValueError, match="rows 0 to 70.*0\\.\\.69"):
        package.varlen_attention(*qkv.unbind(1), bounds, 69, scale=0.1)
