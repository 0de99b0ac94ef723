"""`y = x W^T + b`, with the weight laid out once for this machine."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.dispatch import dispatched
from kernels.linear.int8_rows import int8_linear, takes_int8_rows
from kernels.linear.packed import Packed
from kernels.linear.quantised import Quantised, check_groups
from kernels.linear.scaled import ScaledProduct, has_product
from kernels.native import Activation, NativeUnavailable


def quantised_linear(x: Tensor, weight: Quantised, bias: Tensor | None) -> Tensor:
    """`[rows, in]` -> `[rows, out]` in x's dtype. Expands the weight for each call."""
    return F.linear(x, weight.dequantise(x.dtype), bias)


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[rows, in]` -> `[rows, out]` with a weight of x's dtype."""
    return F.linear(x, weight, bias)


run_quantised = dispatched(quantised_linear)
run_plain = dispatched(plain_linear)


class Linear:
    """A weight `[out, in]` and an optional bias `[out]`, which are copied.

    On a CPU, bfloat16 and quantised weights are kept in the layout of the compiled product if this machine has it;
    otherwise bfloat16 weights are kept in oneDNN's blocked layout, and others unchanged. Quantised weights also stay
    quantised on a GPU; on a CPU without the compiled product they are expanded for each call, which is slow.
    """

    def __init__(
        self, weight: Tensor | Quantised, bias: Tensor | None = None, *, owned: bool = False, compiled: bool = True,
        dtype: torch.dtype = torch.float32, activations: str | None = None, compact: bool | None = None,
    ) -> None:  # fmt: skip
        """`dtype`: of the rows, which a quantised weight does not determine. `activations`: "fp8" rounds rows to fp8
        before products with weights that `kernels.linear.scaled` supports, "int8" rounds them to int8 before products
        with weights that `takes_int8_rows`. `owned`: the weight may be kept instead of copied.
        `compiled`: whether the compiled product may be used; its threads compete for cores with those of torch's
        operations if the two alternate, as in a tower that is not compiled as a whole. `compact`: as in `lay_out`;
        pass False if there are always many rows.

        Raises `ValueError` if the bias does not fit the weight, or for a weight on a GPU with groups that have no
        kernel (`check_groups`).
        """
        self.out_features, self.in_features = weight.shape
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"a bias of shape {tuple(bias.shape)} does not fit {self.out_features} outputs")
        self.bias = None if bias is None else bias.detach().clone()
        self.packed: Packed | None = None
        self.blocked: Tensor | None = None
        self.weight: Tensor | Quantised | None = None
        self.scaled: ScaledProduct | None = None
        self.int8_rows = activations == "int8" and takes_int8_rows(weight)
        """Whether rows are rounded to int8."""
        if activations == "fp8" and isinstance(weight, Quantised) and has_product(weight):
            self.scaled = ScaledProduct(weight)
            return
        if compiled and (isinstance(weight, Quantised) or weight.dtype == torch.bfloat16):
            with contextlib.suppress(NativeUnavailable):
                self.packed = Packed(weight, self.bias, dtype, int8_rows=self.int8_rows, compact=compact)
        if isinstance(weight, Quantised) and weight.values.device.type == "cuda":
            check_groups(weight)
        if self.packed is None and isinstance(weight, Tensor):
            self.blocked = _block(weight.detach())
        if self.packed is None and self.blocked is None:
            self.weight = weight.detach().clone() if isinstance(weight, Tensor) and not owned else weight

    def first(self, outputs: int) -> Linear:
        """The first `outputs` outputs; shares memory. Computes all outputs if the layout cannot be divided."""
        assert 0 < outputs <= self.out_features
        part = copy.copy(self)
        part.out_features = outputs
        part.packed = None if self.packed is None else self.packed.first(outputs)
        if isinstance(self.weight, Quantised):
            part.weight = self.weight.rows(slice(outputs))
        elif self.weight is not None:
            part.weight = self.weight[:outputs]
        if self.bias is not None and self.weight is not None:
            part.bias = self.bias[:outputs]
        return part

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` -> `[rows, out]` in x's dtype, which must be the weight's unless the weight is quantised."""
        if self.packed is not None:
            return self.packed(x)
        if self.scaled is not None:
            product = self.scaled(x)
            return (product if self.bias is None else product + self.bias)[:, : self.out_features]
        if self.blocked is not None:
            product = torch.ops.mkldnn._linear_pointwise(x, self.blocked, self.bias, "none", [], "")
            return product[:, : self.out_features]
        assert self.weight is not None
        if isinstance(self.weight, Quantised):
            if self.int8_rows:
                return int8_linear(x, self.weight, self.bias)
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return run_quantised(x, self.weight, bias)
        return run_plain(x, self.weight, self.bias)

    def relu_squared(self, x: Tensor) -> Tensor:
        """`relu(x W^T + b) ** 2`."""
        if self.packed is not None:
            return self.packed(x, Activation.RELU_SQUARED)
        if self.blocked is not None:
            y = torch.ops.mkldnn._linear_pointwise(x, self.blocked, self.bias, "relu", [], "")[:, : self.out_features]
        else:
            y = self(x).relu_()
        return y.mul_(y)  # type: ignore[no-any-return]


def _block(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's layout, or None if that is not available or not worthwhile."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or min(weight.shape) < 16:
        return None
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        probe = weight.new_ones(1, weight.shape[1])
        torch.ops.mkldnn._linear_pointwise(probe, packed, None, "relu", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return packed
