"""Parts of lists of operations: products, norms, and the objects that operations point to."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from decoder.layers.descriptions import Experts
from kernels.linear import Linear, LinearParts, Packed
from kernels.native import NativeUnavailable
from kernels.native.structs import Code, Kind, Op, Target

MAX_ROUTED = 512
"""Largest number of tokens whose experts run in compiled code, which needs a row for each token and expert."""

Kept = TypeVar("Kept")


class OperationParts:
    """Makes operations, and keeps the objects that they point to."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: of the model."""
        self._dtype = dtype
        self._picked_by_token = self._most_experts = 0
        self.shared_gates = torch.empty(MAX_ROUTED)
        """Factor of each token's shared expert."""
        self._kept: list[object] = []

    def route(self, spec: Experts, *what: object) -> None:
        """Accounts for the memory that a mixture's picks need, and keeps the objects of its description alive."""
        self._picked_by_token = max(self._picked_by_token, spec.num_experts_per_tok)
        self._most_experts = max(self._most_experts, spec.n_routed_experts)
        self._kept += what

    def packed(self, linear: Linear | LinearParts) -> Packed:
        """The packed weight. Raises NativeUnavailable if there is no compiled product for it."""
        if isinstance(linear, LinearParts):
            raise NativeUnavailable("projections that must be one product are stored in different ways")
        packed = linear.packed
        if packed is None:
            if not isinstance(linear.weight, Tensor):
                raise NativeUnavailable("no compiled product supports this quantised weight")
            packed = Packed(linear.weight, linear.bias)
        return self.keep(packed)

    def projections(self, norm: Tensor | None, *linears: Linear | LinearParts) -> list[Op]:
        """Norms, and the products of the normalised rows with one or several weights, each with its form of rows. The
        outputs of all are side by side. `norm`: None for rows that are not normalised."""
        ops: list[Op] = []
        column, form = 0, None
        for part in (
            part for linear in linears for part in (linear.parts if isinstance(linear, LinearParts) else (linear,))
        ):
            packed = self.packed(part)
            if packed.kind != form:
                ops.append(self.norm(norm, packed))
            ops.append(Op(Code.LINEAR, Kind.F32, 0, packed.descriptor, Target.WIDE, column=column))
            column, form = column + packed.n, packed.kind
        return ops

    def keep(self, what: Kept) -> Kept:
        """Keeps an object alive as long as operations point to it."""
        self._kept.append(what)
        return what

    def has_bf16_rows(self, after: Packed) -> bool:
        """Whether the operation before a conversion of rows to the operand of the product `after` stores these rows in
        bfloat16 instead of float32: in a bfloat16 model, if the operand is signed bytes. This halves the memory that is
        read."""
        return after.kind in (Kind.BYTES, Kind.SUMMED_BYTES) and self._dtype == torch.bfloat16

    def pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def norm(self, weight: Tensor | None, before: Packed) -> Op:
        return Op(Code.NORM, before.kind, before.k, norm=self.pointer(weight))

    def linear(self, packed: Packed, target: Target) -> Op:
        return Op(Code.LINEAR, Kind.F32, 0, weight=packed.descriptor, target=target)

    def residual(self, packed: Packed, scale: float) -> Op:
        """Adds `scale` times the product to the residual stream."""
        return Op(Code.LINEAR, Kind.F32, 0, weight=packed.descriptor, target=Target.RESIDUAL, scale=scale)
