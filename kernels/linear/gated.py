"""`f(x G^T + b) * (x U^T + c)`: the gate and up projections of a gated MLP as one product."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.linear.int8_rows import takes_int8_rows
from kernels.linear.packed import Packed
from kernels.linear.parts import LinearParts
from kernels.linear.quantised import Quantised
from kernels.linear.reference import Linear
from kernels.native import Activation, NativeUnavailable


class GatedLinear:
    """A weight `[2 * out, in]`, gates first, and an optional bias `[2 * out]`.

    If the compiled product supports the weight (see `Linear`), gate and up outputs are interleaved, and f and the
    multiplication are part of the matrix product. Otherwise the weight becomes a `Linear`, followed by `product`.
    """

    def __init__(
        self,
        weight: Tensor | Quantised | Linear | LinearParts,
        bias: Tensor | None,
        product: Callable[[Tensor], Tensor],
        activation: Activation,
        *,
        dtype: torch.dtype = torch.float32,
        activations: str | None = None,
    ) -> None:
        """`product`: `[rows, 2 * out]`, gate and up halves -> f(gate) * up; `activation`: f in compiled code; `dtype`
        and `activations`: as in `Linear`. The weight may be kept instead of copied. A `Linear` or `LinearParts` is used
        unchanged, and `bias` is ignored."""
        self.product, self.activation = product, activation
        self.packed: Packed | None = None
        self.plain: Linear | LinearParts | None = None
        if isinstance(weight, (Linear, LinearParts)):
            self.plain = weight
            return
        int8_rows = activations == "int8" and takes_int8_rows(weight)
        with contextlib.suppress(NativeUnavailable):
            if isinstance(weight, Quantised) or weight.dtype.itemsize == 2:
                self.packed = Packed(weight, bias, dtype, gated=True, int8_rows=int8_rows)
        if self.packed is None:
            self.plain = Linear(weight, bias, owned=True, compiled=False, dtype=dtype, activations=activations)

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` -> `[rows, out]` in x's dtype, which must be the weight's unless the weight is quantised."""
        if self.packed is not None:
            return self.packed(x, self.activation)
        assert self.plain is not None
        return self.product(self.plain(x))
