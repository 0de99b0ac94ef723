"""Products with quantised weights in Triton compared with those of the expanded weights in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from triton_kernels import DEVICE, poisoned

from kernels.dispatch import forced
from kernels.linear import Linear, Quantised, quantise
from kernels.linear.kernel import quantised_linear

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


def weights(outputs: int, inner: int) -> dict[str, Quantised]:
    made = {kind: quantise(torch.randn(outputs, inner) * 0.1, kind) for kind in ("int8", "fp8", "nvfp4")}
    fp8, nvfp4 = made["fp8"], made["nvfp4"]
    assert nvfp4.outer is not None
    octets = torch.randint(0, 256, (outputs, inner // 2), dtype=torch.uint8)
    scale, zeros = torch.randn(outputs, inner // 32) * 0.01, torch.randint(0, 17, (outputs, inner // 32))
    made["fp8 blocks"] = Quantised("fp8", fp8.values, torch.rand(outputs, -(-inner // 128)) + 0.1, inner, 128)
    made["nvfp4 divided"] = Quantised("nvfp4", nvfp4.values, nvfp4.scale, inner, outer=1 / nvfp4.outer, divided=True)
    made["int4"] = Quantised("int4", octets, scale, inner, 32)
    made["int4 zeros"] = Quantised("int4", octets, scale, inner, 32, zeros=zeros.to(torch.uint8))
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
    with pytest.raises(ValueError, match="groups of 8 inputs have no kernel"):
        quantised_linear(torch.zeros(1, 24), weight, None)
