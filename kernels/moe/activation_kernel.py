"""Activations of experts inside the Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(x, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation of that name, in float32."""
    if ACT == "relu2":
        y = tl.maximum(x, 0.0)
        y = y * y
    elif ACT == "relu":
        y = tl.maximum(x, 0.0)
    elif ACT == "silu":
        y = x * tl.sigmoid(x)
    elif ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACT == "gelu_pytorch_tanh")
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(z)) / 2 = sigmoid(2 z)
    return y
