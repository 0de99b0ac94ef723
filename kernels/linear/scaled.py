"""Products of fp8 rows with fp8 weights, on GPUs with such products: `--activations fp8`.

Each row of activations is rounded to e4m3 with its own scale, its largest magnitude / 448, like compressed-tensors'
dynamic "per token" activations. Results therefore differ from those with 16-bit activations, so this must be requested.
Weights without such a product (other kinds, one scale per block, sizes that are not multiples of 16, experts) are
multiplied with 16-bit rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import architecture
from kernels.linear.quantised import Quantised
from kernels.linear.rounding import LARGEST_E4M3

STEP = 16
"""Inputs and outputs must be multiples of this for the hardware's product."""


def has_product(weight: Quantised) -> bool:
    """Whether fp8 rows can be multiplied with a weight: fp8 with one scale per output, and suitable sizes."""
    outputs, inner = weight.shape[-2:]
    whole = weight.kind == "fp8" and weight.scale_group >= inner
    return whole and weight.values.dim() == 2 and outputs % STEP == 0 and inner % STEP == 0


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """`[rows, in]` -> e4m3 `[rows, in]` and float32 scales `[rows, 1]`; x is approximately their product."""
    wide = x.float()
    scale = wide.abs().amax(1, keepdim=True) / LARGEST_E4M3
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (wide / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn), scale


class ScaledProduct:
    """`x W^T` for bfloat16 rows, by torch's product of fp8 tensors."""

    def __init__(self, weight: Quantised) -> None:
        assert has_product(weight)
        self._values = weight.values.contiguous()
        self._scale_1N = weight.scale.reshape(1, -1).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` -> `[rows, out]` bfloat16."""
        values, scale = to_fp8(x)
        product: Tensor = torch._scaled_mm(
            values, self._values.t(), scale_a=scale, scale_b=self._scale_1N, out_dtype=torch.bfloat16
        )
        return product


def multiplies_fp8(name: str) -> bool:
    """Whether GPUs of this architecture (`sm_90`, `gfx950`) multiply e4m3 values. gfx94x have another fp8 type."""
    if name.startswith("gfx"):
        return name[3:].isdigit() and int(name[3:]) >= 950
    return name.startswith("sm_") and int(name[3:]) >= 89


def check_fp8_products(device: torch.device, dtype: torch.dtype) -> None:
    """Raises `ValueError` if fp8 rows cannot be multiplied: no GPU, a GPU without such products, rows of another dtype
    than bfloat16, or a test product with a wrong result."""
    if device.type != "cuda":
        raise ValueError(f"activations fp8 needs a GPU, but the device is {device}; leave it unset for 16 bits")
    if dtype != torch.bfloat16:
        raise ValueError(f"activations fp8 needs dtype bfloat16, not {dtype}")
    if not multiplies_fp8(name := architecture(device)):
        raise ValueError(f"activations fp8 needs a GPU that multiplies fp8 (sm_89 or gfx950, or later), not {name}")
    try_product(device)


def try_product(device: torch.device) -> None:
    """Raises `ValueError` unless a small product has the right result."""
    # No random numbers: torch can make a generator only where it has imported `torch._prims`, as no engine process has.
    values = torch.arange(48 * 64.0).sin().view(48, 64).to(torch.float8_e4m3fn)
    weight = Quantised("fp8", values, torch.linspace(0.1, 1.1, 48)[:, None], 64, 64)
    x = torch.arange(5 * 64.0).cos().view(5, 64).bfloat16()
    rows, scale = to_fp8(x)
    exact = (rows.double() * scale) @ weight.dequantise().double().t()
    try:
        found = ScaledProduct(weight.to(device))(x.to(device)).cpu().double()
    except RuntimeError as error:
        raise ValueError(f"activations fp8 is not available on {device}: {error}") from error
    if not float((found - exact).abs().max()) <= 2**-7 * float(exact.abs().max()):
        raise ValueError(f"activations fp8: torch {torch.__version__} multiplies fp8 values wrongly on {device}")
