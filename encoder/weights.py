"""Reads weights of a tower: plain ones in its dtype, quantised ones packed where a product supports them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from encoder.vit import Norm, RmsNorm
from kernels.linear import AnyWeight, Linear, Quantised
from kernels.native import Kind


def plain(weight: AnyWeight) -> Tensor:
    """The tensor, expanded to float32 if it is quantised."""
    return weight.dequantise() if isinstance(weight, Quantised) else weight


class TowerWeights:
    """A tower's stored tensors by name, each taken once as a part of the tower in its dtype on its device.

    Raises `ValueError` if one of the `required` names is missing. `compiled`: the linear layers are for compiled code,
    where fp8, nvfp4 and grouped int4 weights stay packed.
    """

    def __init__(
        self, stored: Iterable[tuple[str, AnyWeight]], required: Collection[str], *, dtype: torch.dtype,
        device: torch.device, compiled: bool = False,
    ) -> None:  # fmt: skip
        # A tensor is dropped once it is taken: a mapped file's pages count as memory as long as a tensor refers to it.
        self._stored = dict(stored)
        if missing := set(required) - self._stored.keys():
            raise ValueError(f"{len(missing)} vision weights are missing, such as {sorted(missing)[:3]}")
        self.dtype, self.device, self.compiled = dtype, device, compiled

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    @property
    def names(self) -> Collection[str]:
        """Names of the tensors that have not been taken yet."""
        return self._stored.keys()

    def stored(self, name: str) -> Tensor:
        """The tensor as it is stored, in float32 if it is quantised."""
        return plain(self._stored.pop(name))

    def take(self, name: str, scale: Tensor | None = None) -> Tensor:
        """The tensor in the tower's dtype; row i multiplied by `scale[i]`, if given, before it is rounded."""
        tensor = self.stored(name)
        if scale is not None:
            tensor = scale.view(-1, *[1] * (tensor.dim() - 1)) * tensor.float()
        return tensor.to(self.device, self.dtype)

    def linear(self, name: str, scale: Tensor | None = None) -> Linear:
        """The linear layer `name`, with a bias if one is stored; `scale` multiplies its outputs."""
        bias = self.take(name + ".bias", scale) if name + ".bias" in self else None
        weight = self._stored.pop(name + ".weight") if scale is None else self.take(name + ".weight", scale)
        if isinstance(weight, Quantised) and self.compiled:
            linear = Linear(weight, bias, dtype=self.dtype)
            packed = linear.packed
            if packed is not None and packed.kind in (Kind.BF16, Kind.F32) and packed.order is None:
                return linear
        return self.layer(plain(weight).to(self.device, self.dtype), bias)

    def joined(self, names: list[str], *, biased: bool = True) -> Linear:
        """One linear layer whose outputs are those of the layers `names`, one after another."""
        weight = torch.cat([self.take(name + ".weight") for name in names])
        bias = torch.cat([self.take(name + ".bias") for name in names]) if biased else None
        return self.layer(weight, bias)

    def layer(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A linear layer of the tower. It always gets many rows, so bfloat16 weights stay in 16 bits."""
        return Linear(weight, bias, compiled=self.compiled, compact=False)

    def norm(self, name: str, eps: float) -> Norm:
        """The layer norm `name`."""
        # clone: otherwise the norm would keep the checkpoint's memory map open
        return Norm(self.take(name + ".weight").clone(), self.take(name + ".bias").clone(), eps)

    def rms_norm(self, name: str, eps: float) -> RmsNorm:
        """The RMS norm `name`, in float32."""
        return RmsNorm(self.take(name + ".weight").to(torch.float32, copy=True), eps)  # a copy, as above
