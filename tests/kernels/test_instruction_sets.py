"""Each instruction set of this processor: the same code, chosen by name, with the same equalities within a set."""

from __future__ import annotations

import logging

import pytest
import torch
from instruction_set import using
from torch import Tensor

from kernels.linear import Packed, quantise
from kernels.native import Activation, NativeUnavailable, instruction_sets, library
from kernels.native.instruction_sets import SETS, choose, processor_features, supported
from kernels.varlen_attention.compiled import varlen_attention

THERE = [each.name for each in supported(processor_features())]
NAMES = [each.name for each in SETS if not each.name.startswith("neon")]


def packed(kind: str, n: int = 130, k: int = 1280) -> tuple[Packed, Tensor, torch.dtype]:
    """A product, the float64 weight it stands for, whose second half is its first, and the dtype of its rows."""
    half = torch.randn(n, k // 2, generator=torch.Generator().manual_seed(n)) * k**-0.5
    weight = torch.cat((half, half), 1)
    form, _, rows = kind.partition("-")
    if form in ("bfloat16", "float32"):
        dtype = getattr(torch, form)
        return Packed(weight.to(dtype), None), weight.to(dtype).double(), dtype
    dtype = torch.bfloat16 if rows else torch.float32
    stored = quantise(weight, form.replace("_", "-"))
    return Packed(stored, None, dtype), stored.dequantise().double(), dtype


KINDS = (
    "bfloat16", "float32", "int8", "int8_32", "int8_32-rows", "int4", "int4-rows", "fp8", "fp8-rows", "nvfp4",
    "nvfp4-rows",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_with_any_number_of_threads(chosen: str, kind: str) -> None:
    product, weight, dtype = packed(kind)
    for rows in (1, 2, 3, 4, 5, 6, 7, 17, 200):
        x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
        x[::2, 640:] = -x[::2, :640]  # sums cancel, so that only the rounding errors are left
        torch.set_num_threads(2)
        together = product(x)
        torch.set_num_threads(1)
        for i in range(0, rows, max(1, rows // 5)):
            assert torch.equal(product(x[i : i + 1])[0], together[i]), f"{rows} rows, row {i}"
        exact = x.double() @ weight.T
        tolerance = 0.01 if dtype == torch.bfloat16 else 2e-4
        torch.testing.assert_close(together.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("k", [2, 14, 510, 514, 1026, 2050], ids=str)
@pytest.mark.parametrize("n", [1, 17, 64, 100], ids=str)
def test_bfloat16_products_of_any_size(chosen: str, n: int, k: int) -> None:
    """Inputs are widened, or processed in slices, some hundred at a time."""
    product, weight, _ = packed("bfloat16", n, k)
    x = torch.randn(9, k).bfloat16()
    for rows in (1, 4, 9):
        found = product(x[:rows], Activation.NONE).double()
        torch.testing.assert_close(found, x[:rows].double() @ weight.T, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("kind", ["float32", "int8", "int8_32", "int4", "fp8", "nvfp4"])
def test_products_in_float32_and_integers_have_the_same_bits_in_every_set(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, found = torch.randn(7, 1280), {}
    for name in sorted(set(THERE) & set(NAMES)):
        with using(name, monkeypatch):
            found[name] = packed(kind)[0](x, Activation.SILU)
    for name, numbers in found.items():
        assert torch.equal(numbers, next(iter(found.values()))), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [40, 64], ids=str)
def test_packed_attention_equals_each_sequence_alone(chosen: str, dtype: torch.dtype, width: int) -> None:
    lengths = (1, 47, 5, 300)
    q, k, v = (torch.randn(sum(lengths), 2, width).to(dtype) for _ in range(3))
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    scale = width**-0.5
    together = varlen_attention(q, k, v, bounds, max(lengths), scale=scale)
    for begin, end in zip(bounds.tolist(), bounds.tolist()[1:]):
        own = [part[begin:end].contiguous() for part in (q, k, v)]
        alone = varlen_attention(*own, torch.tensor([0, end - begin], dtype=torch.int32), end - begin, scale=scale)
        assert torch.equal(alone, together[begin:end])
        scores = torch.einsum("qhd,khd->hqk", own[0].double(), own[1].double()) * scale
        exact = torch.einsum("hqk,khd->qhd", scores.softmax(-1), own[2].double())
        tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(alone.double(), exact, rtol=tolerance, atol=tolerance)


BEST_LAST = {each.name: each.needs for each in reversed(SETS)}


def test_the_best_set_that_the_processor_has_is_chosen() -> None:
    for name, features in BEST_LAST.items():
        assert choose("auto", features).name == name
        assert choose(name, features).name == name
    assert choose("avx2", BEST_LAST["avx512bf16"]).name == "avx2"
    assert "-mavxvnni" in choose("auto", BEST_LAST["avx2"] | {"avx_vnni"}).options({"avx_vnni"})
    assert "-mavxvnni" not in choose("auto", BEST_LAST["avx2"]).options(set())


def test_a_set_that_the_processor_lacks_is_refused_with_what_would_work() -> None:
    with pytest.raises(ValueError, match=r"avx512bf16 needs avx512_bf16.* lacks; auto, avx512vnni, avx512, avx2 would"):
        choose("avx512bf16", BEST_LAST["avx512vnni"])
    with pytest.raises(ValueError, match="neon needs asimd, which this processor lacks; auto, avx2 would work"):
        choose("neon", BEST_LAST["avx2"])
    with pytest.raises(ValueError, match="instruction_set: sse9 is none of auto, amx, avx512bf16"):
        choose("sse9", BEST_LAST["avx2"])
    with pytest.raises(NativeUnavailable, match="this processor lacks avx2, bmi1, bmi2, f16c, fma"):
        choose("auto", frozenset({"sse2"}))
    if "neon" not in THERE:
        with pytest.raises(ValueError, match="neon needs"):
            instruction_sets.use("neon")
        assert instruction_sets.in_use() == "auto"


def test_the_log_names_the_set_in_use(chosen: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        library.__globals__["_library"].cache_clear()
        library()
    there = ", ".join(each.name for each in supported(processor_features()))
    assert f"compiled code uses the instruction set {chosen} (this processor has {there})" in caplog.text
    assert "was only tested under an emulator" not in caplog.text
