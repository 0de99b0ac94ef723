"""Products with quantised weights in Triton compared with those of the expanded weights in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from triton_kernels import DEVICE, poisoned

from kernels.dispatch import forced
from kernels.launch import recording
from kernels.linear import Linear, Quantised, quantise, rows_kernel
from kernels.linear.kernel import quantised_linear
from kernels.tiles import Tile

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


def weights(outputs: int, inner: int) -> dict[str, Quantised]:
    made = {kind: quantise(torch.randn(outputs, inner) * 0.1, kind) for kind in ("int8", "int8-32", "fp8", "nvfp4")}
    fp8, nvfp4 = made["fp8"], made["nvfp4"]
    assert nvfp4.outer is not None
    octets = torch.randint(0, 256, (outputs, inner // 2), dtype=torch.uint8)
    scale, zeros = torch.randn(outputs, inner // 32) * 0.01, torch.randint(0, 17, (outputs, inner // 32))
    made["fp8 blocks"] = Quantised("fp8", fp8.values, torch.rand(outputs, -(-inner // 128)) + 0.1, inner, 128)
    made["nvfp4 divided"] = Quantised("nvfp4", nvfp4.values, nvfp4.scale, inner, outer=1 / nvfp4.outer, divided=True)
    made["int4"] = Quantised("int4", octets, scale, inner, 32)
    signed, points = made["int8"].values, torch.randint(0, 256, scale.shape, dtype=torch.uint8)
    made["int8 zeros"] = Quantised("int8", signed, scale, inner, 32, zeros=points, order=torch.randperm(inner))
    made["int4 zeros"] = Quantised("int4", octets, scale, inner, 32, zeros=zeros.to(torch.uint8))
    small, few = torch.randn(outputs, inner // 16) * 0.01, torch.randint(0, 17, (outputs, inner // 16))
    made["int4 16"] = Quantised("int4", octets, small, inner, 16, zeros=few.to(torch.uint8))
    made["int4 ordered"] = Quantised("int4", octets, scale, inner, 32, order=torch.randperm(inner))
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 19])
@pytest.mark.parametrize("kind", sorted(weights(2, 32)))
def test_products_of_quantised_weights(kind: str, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    weight = weights(70, 160)[kind]
    x, bias = torch.randn(rows, 160).to(dtype), torch.randn(70).to(dtype)
    exact = F.linear(x.double(), weight.dequantise(torch.float32).double(), bias.double())
    with forced("triton"), poisoned():
        linear = Linear(weight.to(DEVICE), bias.to(DEVICE), compiled=False, dtype=dtype)
        found = linear(x.to(DEVICE)).cpu()
    bound = 1e-6 if dtype == torch.float32 else 2**-8
    assert float((found.double() - exact).abs().max()) <= bound * float(exact.abs().max())


def test_groups_without_a_kernel_are_refused() -> None:
    weight = Quantised("int4", torch.zeros(4, 12, dtype=torch.uint8), torch.ones(4, 3), 24, 8)
    with pytest.raises(ValueError, match="24 inputs in groups of 8 inputs has no kernel on a GPU"):
        quantised_linear(torch.zeros(1, 24), weight, None)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="reads the arguments of Triton's interpreter")
def test_the_number_of_rows_decides_the_tile_alone() -> None:
    """Triton compiles a kernel anew for an integer that is 1 or a multiple of 16, unless told otherwise."""
    weight, numbers = weights(70, 160)["int8"], []
    with recording("sm_90") as launches:
        for rows in (1, 2, 16):
            quantised_linear(torch.zeros(rows, 160), weight, None)
            numbers.append({name: of for name, of in launches[-1].arguments.items() if type(of) is int})
    varying = {name for name in numbers[0] if len({each[name] for each in numbers}) > 1}
    assert varying and varying <= set(launches[0].kernel.kwargs["do_not_specialize"])


@pytest.mark.parametrize("described", [True, False], ids=["described", "pointers"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 70, 160), (70, 40, 136), (19, 33, 100)])
def test_products_of_plain_rows(
    rows: int, outputs: int, inputs: int, described: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a wider tensor; sizes that are not multiples of a block, or of the 16 bytes that a descriptor needs."""
    choices = (rows_kernel.Choice(rows_kernel.ANY, 0, Tile(16, 64, 64, 4, 2), described),)
    monkeypatch.setattr(rows_kernel, "TILES", dict.fromkeys(rows_kernel.TILES, choices))
    x, weight = torch.randn(rows, inputs + 8).bfloat16()[:, :inputs], torch.randn(outputs, inputs).bfloat16()
    bias = torch.randn(outputs).bfloat16()
    exact = F.linear(x.double(), weight.double(), bias.double())
    with forced("triton"), poisoned():
        found = Linear(weight.to(DEVICE), bias.to(DEVICE), compiled=False)(x.to(DEVICE)).cpu()
    assert found.dtype == torch.bfloat16 and float((found.double() - exact).abs().max()) <= 2**-8 * exact.abs().max()


@pytest.mark.skipif(
    DEVICE.type != "cuda", reason="needs a GPU: NumPy's products, which the interpreter uses, depend on the shape"
)
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 160), (1000, 4480), (33, 100)])
def test_the_number_of_rows_changes_no_product(outputs: int, inputs: int) -> None:
    linear = Linear(torch.randn(outputs, inputs, device=DEVICE).bfloat16(), compiled=False)
    x = torch.randn(1500, inputs, device=DEVICE).bfloat16()
    whole = linear(x)
    for rows in (1, 2, 16, 17, 33, 64, 65, 200, 257, 400, 513, 1024):
        assert torch.equal(linear(x[:rows]), whole[:rows]), rows
        assert torch.equal(linear(x[-rows:]), whole[-rows:]), rows
