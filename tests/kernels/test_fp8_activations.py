"""Products of fp8 rows with fp8 weights: their values, on a CPU, and when they are chosen."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kernels.linear import GatedLinear, Linear, Quantised, check_fp8_products, quantise
from kernels.linear.scaled import has_product, multiplies_fp8, to_fp8, try_product
from kernels.native import Activation

BF16 = torch.bfloat16


def multiplies_here() -> bool:
    """Whether torch multiplies rows that have scales of their own on a CPU: 2.11 does so on GPUs only."""
    values, scale = torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(values, values.t(), scale_a=scale, scale_b=scale.t(), out_dtype=BF16)
    except RuntimeError as error:
        assert "only supports per-tensor scaling for CPU" in str(error)
        return False
    return True


needs_product = pytest.mark.skipif(
    not multiplies_here(), reason=f"torch {torch.__version__} has no such product on a CPU"
)


def fp8(outputs: int, inner: int, group: int) -> Quantised:
    values = torch.randn(outputs, inner).to(torch.float8_e4m3fn)
    return Quantised("fp8", values, torch.rand(outputs, -(-inner // group)) + 0.1, inner, group)


def emulated(x: torch.Tensor, weight: Quantised) -> torch.Tensor:
    """The product of the rounded rows, in float64; e4m3 numbers of a row are those nearest to x / scale."""
    scale = x.double().abs().amax(1, keepdim=True).clamp(min=1e-300) / 448
    rows = (x.double() / scale).float().to(torch.float8_e4m3fn).double() * scale
    return rows @ weight.dequantise().double().T


@needs_product
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("biased", [True, False])
def test_products_are_those_of_rounded_rows(rows: int, biased: bool) -> None:
    weight, x = fp8(48, 64, 64), torch.randn(rows, 64).to(BF16) * torch.logspace(-3, 3, rows)[:, None].to(BF16)
    bias = torch.randn(48).to(BF16) if biased else None
    linear = Linear(weight, bias, dtype=BF16, activations="fp8")
    assert linear.scaled is not None and linear.packed is None
    exact = emulated(x, weight) + (0 if bias is None else bias.double())
    found = linear(x)
    assert found.dtype == BF16
    bound = 2**-7 * (exact.abs().amax(1, keepdim=True) + 1)
    assert bool(((found.double() - exact).abs() <= bound).all())
    # Three bits of mantissa: each input is within a sixteenth, so that sums are off by a few percent.
    plain = x.double() @ weight.dequantise().double().T
    assert 0.001 < float((emulated(x, weight) - plain).norm() / plain.norm()) < 0.06


@needs_product
def test_gates_too() -> None:
    weight, x = fp8(96, 64, 64), torch.randn(3, 64).to(BF16)
    product = torch.nn.SiLU()

    def gated(rows: torch.Tensor) -> torch.Tensor:
        return product(rows[:, :48]) * rows[:, 48:]

    layer = GatedLinear(weight.to("meta"), None, gated, Activation.SILU, dtype=BF16, activations="fp8")
    assert isinstance(layer.plain, Linear) and layer.plain.scaled is not None
    exact = gated(emulated(x, weight))
    on_cpu = gated(Linear(weight, dtype=BF16, activations="fp8")(x))
    assert float((on_cpu.double() - exact).abs().max()) < 2**-6 * float(exact.abs().max())


@needs_product
def test_a_row_is_rounded_by_its_own_largest_number() -> None:
    x = torch.tensor([[448.0, 1.0, 0.0], [-0.896, 0.002, 0.0], [0.0, 0.0, 0.0]])
    values, scale = to_fp8(x)
    assert scale.flatten().tolist() == pytest.approx([1.0, 0.002, 1.0])
    assert values.float()[0].tolist() == [448.0, 1.0, 0.0] and values.float()[1, 0] == -448.0
    assert not bool(
        torch.isfinite(Linear(fp8(16, 16, 16), dtype=BF16, activations="fp8")(torch.full((1, 16), torch.nan))).any()
    )


@pytest.mark.parametrize(
    ("weight", "chosen"),
    [
        (fp8(48, 64, 64), True),
        (fp8(48, 64, 16), False),
        (fp8(40, 64, 64), False),
        (fp8(48, 72, 72), False),
        (quantise(torch.randn(48, 64), "fp8"), True),
        (quantise(torch.randn(48, 64), "int8"), False),
        (quantise(torch.randn(48, 64), "nvfp4"), False),
    ],
)
def test_only_weights_with_a_scale_for_each_output_are_chosen(weight: Quantised, chosen: bool) -> None:
    assert has_product(weight) == chosen
    x, plain = torch.randn(2, weight.shape[1]).to(BF16), Linear(weight, dtype=BF16)
    linear = Linear(weight, dtype=BF16, activations="fp8")
    assert (linear.scaled is not None) == chosen and plain.scaled is None
    if not chosen:
        assert torch.equal(linear(x), plain(x))
    torch.testing.assert_close(plain(x).float(), F.linear(x.float(), weight.dequantise()), rtol=0.02, atol=0.1)


def test_which_gpus_multiply_fp8() -> None:
    names = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950")
    assert [name for name in names if multiplies_fp8(name)] == ["sm_89", "sm_90", "sm_100", "sm_120", "gfx950"]


def test_elsewhere_it_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a GPU, but the device is cpu"):
        check_fp8_products(torch.device("cpu"), BF16)
    with pytest.raises(ValueError, match="needs dtype bfloat16, not torch.float32"):
        check_fp8_products(torch.device("cuda"), torch.float32)


@needs_product
def test_a_product_that_is_wrong_or_missing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial product at start: correct on this CPU; then with a torch that multiplies differently, or not at all. An
    engine process cannot make a generator."""
    cpu, right = torch.device("cpu"), torch._scaled_mm
    monkeypatch.delattr(torch, "Generator")
    try_product(cpu)
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda *given, scale_b, **rest: right(*given, scale_b=scale_b * 1.1, **rest)
    )
    with pytest.raises(ValueError, match="multiplies fp8 values wrongly on cpu"):
        try_product(cpu)

    def none(*_: object, **__: object) -> None:
        raise RuntimeError("no such product")

    monkeypatch.setattr(torch, "_scaled_mm", none)
    with pytest.raises(ValueError, match="is not available on cpu: no such product"):
        try_product(cpu)
