"""bfloat16 weights in 12 bits a number (kernels/native/compact.h): lossless, and products have the same bits."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.linear import CompactTable, Packed, layouts
from kernels.linear.layouts import EXCEPTIONS, interleaved_order, lay_out
from kernels.native import Activation, Kind, NativeUnavailable


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    try:
        lay_out(torch.ones(1, 2).bfloat16(), torch.bfloat16)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


def weight_of(n: int, k: int, exponent: int, exceptions: int, seed: int) -> Tensor:
    """`[n, k]` bfloat16 with exponents from `exponent` to `exponent` + 15, and `exceptions` numbers of any bits."""
    generator = torch.Generator().manual_seed(seed)

    def bits(end: int, *shape: int) -> Tensor:
        return torch.randint(0, end, shape, generator=generator)

    words = bits(2, n, k) << 15 | (exponent + bits(16, n, k)) << 7 | bits(128, n, k)
    places = torch.randperm(n * k, generator=generator)[:exceptions]
    words.view(-1)[places] = bits(1 << 16, len(places))
    words.view(-1)[places[:1]] = 0
    return (words - (words >> 15 << 16)).to(torch.int16).view(torch.bfloat16)


def unpacked(layout_data: Tensor, compact: Tensor, exceptions: Tensor) -> Tensor:
    """The plain panels, `[panels, pairs, 128]` int32 of 16 bits, as compact.h describes the layout."""
    words = layout_data.view(torch.int16).int().bitwise_and(0xFFFF).view(*layout_data.shape[:2], 3, 32)
    own, parts = words & 0x87FF, words >> 11 & 15
    last = (parts[:, :, 2] & 8) << 12 | parts[:, :, 0] << 7 | (parts[:, :, 2] & 7) << 4 | parts[:, :, 1]
    found = torch.cat((own, last[:, :, None]), 2) + compact[:-1, 1, None, None, None]
    plain = found.flatten(2).flatten(1)
    for panel, (begin, end) in enumerate(zip(compact[:-1, 0].tolist(), compact[1:, 0].tolist(), strict=True)):
        listed = exceptions[begin:end]
        plain[panel, listed >> 16] = listed & 0xFFFF
    return plain.view(*found.shape[:2], 128).int()


@given(
    n=st.sampled_from([1, 17, 64, 100, 200]),
    pairs=st.integers(1, 70),
    exponent=st.integers(0, 240),
    rare=st.integers(0, 12),
    seed=st.integers(0, 99),
)
@example(n=100, pairs=64, exponent=112, rare=12, seed=0)
@settings(max_examples=60, deadline=None)
def test_every_number_is_there(n: int, pairs: int, exponent: int, rare: int, seed: int) -> None:
    """Zeros, subnormal numbers, infinity and NaN, too."""
    weight = weight_of(n, 2 * pairs, exponent, min(rare, n * pairs * 2 // EXCEPTIONS), seed)
    layout = lay_out(weight, torch.bfloat16, compact=True)
    assert layout.stored is Kind.COMPACT_BF16 and layout.compact is not None and layout.exceptions is not None
    plain = lay_out(weight, torch.bfloat16, compact=False)
    expected = plain.data.view(torch.int16).int().flatten(2) & 0xFFFF
    found = unpacked(layout.data, layout.compact, layout.exceptions)
    real = torch.arange(128)[None] // 2 + 64 * torch.arange(len(found))[:, None] < n  # the others have any content
    assert torch.equal(*(torch.where(real[:, None], each, 0) for each in (found, expected)))
    for compact in (True, False):
        rows = Packed(weight, None, compact=compact).rows(torch.arange(n))
        assert torch.equal(rows.view(torch.int32) >> 16, weight.view(torch.int16).int())  # conversions change NaN


@pytest.mark.parametrize("n", [1, 17, 64, 100, 330])
@pytest.mark.parametrize("k", [2, 14, 514, 1026, 2050, 3000])
def test_products_have_the_bits_of_plain_weights(chosen: str, n: int, k: int) -> None:
    weight = weight_of(n, k, 108, 0, n + k)
    places = torch.randperm(n * k)[: n * k // EXCEPTIONS]
    weight.view(-1)[places] = torch.tensor([0, 3.0e-20, 4.0]).bfloat16().repeat(len(places))[: len(places)]
    if len(places):
        weight.view(-1)[places[0]], weight.view(-1)[-1] = 2**-10, -4.0  # also in the last pair of inputs
    bias = torch.randn(n)
    short, plain = (Packed(weight, bias, compact=compact) for compact in (True, False))
    assert short.stored is Kind.COMPACT_BF16 and plain.stored is Kind.BF16
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 32, 50, 200):
        x = torch.randn(rows, k).bfloat16()
        assert torch.equal(short(x, Activation.SILU), plain(x, Activation.SILU)), rows


def test_a_panel_that_a_thread_has_unpacked_is_for_one_product() -> None:
    """Blocks of rows share an unpacked panel within a product. The next weight may lie at the same address."""
    x = torch.randn(400, 514).bfloat16()
    first, second = (Packed(weight_of(64, 514, 108, 0, seed), None, compact=True) for seed in (1, 2))
    assert first.stored is Kind.COMPACT_BF16 and first(x).isfinite().all()
    expected = second(x)
    first(x)
    # The data is all that differs: both have the same base exponent, and no exceptions.
    ctypes.memmove(first.descriptor.data, second.descriptor.data, 514 * 64 * 3 // 2)
    assert torch.equal(first(x), expected)


@pytest.mark.parametrize("inner", [64, 72, 300])
def test_products_of_gates_have_the_bits_of_plain_weights(inner: int) -> None:
    weight = weight_of(2 * inner, 1030, 108, 20, inner)
    short, plain = (Packed(weight, None, gated=True, compact=compact) for compact in (True, False))
    aligned = len(interleaved_order(inner)) == 2 * inner
    assert short.stored is (Kind.COMPACT_BF16 if aligned else Kind.BF16), "outputs that are padding are zeros"
    for rows in (1, 5, 9, 40):
        x = torch.randn(rows, 1030).bfloat16()
        assert torch.equal(short(x, Activation.SILU).isnan(), plain(x, Activation.SILU).isnan())
        assert torch.equal(short(x, Activation.SILU).nan_to_num(), plain(x, Activation.SILU).nan_to_num()), rows


def test_a_weight_in_several_pieces_is_laid_out_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(500, 130, 108, 60, 3)
    whole = lay_out(weight, torch.bfloat16, compact=True)
    monkeypatch.setattr(layouts, "PIECE", 130 * 64 * 3)
    parts = lay_out(weight, torch.bfloat16, compact=True)
    for name in ("data", "compact", "exceptions"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name
    assert whole.exceptions is not None and len(whole.exceptions) > 30


def test_weights_with_many_other_exponents_stay_plain() -> None:
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    allowed = weight.numel() // EXCEPTIONS
    for count, stored in ((allowed, Kind.COMPACT_BF16), (allowed + 1, Kind.BF16)):
        changed = weight.clone().clamp(min=-4, max=4)
        changed = torch.where(changed.abs() < 2**-10, torch.tensor(1.0).bfloat16(), changed)
        changed.view(-1)[100 : 100 + count] = 0
        layout = lay_out(changed, torch.bfloat16, compact=True)
        assert layout.stored is stored
    assert lay_out(torch.zeros(64, 64).bfloat16(), torch.bfloat16, compact=True).stored is Kind.COMPACT_BF16


@given(
    count=st.sampled_from([1, 2, 17, 40]),
    blocks=st.integers(1, 9),
    exponent=st.integers(0, 240),
    rare=st.integers(0, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_every_number_of_a_table_is_there(count: int, blocks: int, exponent: int, rare: int, seed: int) -> None:
    k = 128 * blocks
    table = weight_of(count, k, exponent, min(rare, count * k // EXCEPTIONS), seed)
    ids = torch.randint(0, count, (7,), generator=torch.Generator().manual_seed(seed))
    compact = CompactTable.of(table)
    assert compact is not None
    rows = compact.rows(ids)
    assert torch.equal(rows.view(torch.int32) >> 16, table[ids].view(torch.int16).int()) and rows.shape == (7, k)
    for wrong in (-1, count):
        with pytest.raises(IndexError, match=f"{wrong} of a weight with {count} rows"):
            compact.rows(torch.tensor([wrong]))


def test_a_table_in_several_pieces_is_the_same(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has exponents of its own, as those of rare tokens are small."""
    table = torch.cat([weight_of(40, 256, exponent, 7, exponent) for exponent in (20, 100, 200)])
    for piece in (1 << 21, 7 * 256, 1):
        monkeypatch.setattr(layouts, "PIECE", piece)
        compact = CompactTable.of(table)
        assert compact is not None and torch.equal(compact.rows(torch.arange(120)), table.float())


def test_tables_that_stay_plain() -> None:
    ones = torch.ones(8, 512, dtype=torch.bfloat16)
    assert CompactTable.of(ones) is not None
    assert CompactTable.of(ones.float()) is None and CompactTable.of(ones[:, :300]) is None
    ones.view(-1)[: 4096 // EXCEPTIONS] = 0
    assert CompactTable.of(ones) is not None
    ones[7, 7] = 0
    assert CompactTable.of(ones) is None


def test_compact_weights_take_three_quarters_of_the_memory() -> None:
    weight = (torch.randn(1024, 2048, generator=torch.Generator().manual_seed(2)) * 0.02).bfloat16()
    short, plain = (Packed(weight, None, compact=compact).nbytes for compact in (True, False))
    assert 0.75 < short / plain < 0.752


def test_each_set_stores_weights_as_it_multiplies_them_fastest(chosen: str) -> None:
    stored = Packed((torch.randn(64, 128) * 0.02).bfloat16(), None).stored
    assert stored is (Kind.COMPACT_BF16 if chosen in ("amx", "avx512bf16", "avx512vnni", "avx512") else Kind.BF16)
