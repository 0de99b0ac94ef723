"""Weights of one shape, such as those of a layer's experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.host_memory import drop_pages
from kernels.linear.quantised import TENSORS, AnyWeight, Quantised


class Stack:
    """A sequence of weights, each of which is read when it is indexed, and not kept."""

    def __init__(self, read: Callable[[int], AnyWeight], shape: Sequence[int]) -> None:
        """`read`: returns the weight at an index; `shape`: of the whole stack, beginning with the number of weights."""
        self._read, self.shape = read, torch.Size(shape)
        self._form: tuple[object, ...] | None = None

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, index: int) -> AnyWeight:
        """Raises `ValueError` for a weight that is not stored in the same way as the first that was read."""
        weight = self._read(index)
        self._form = self._form or _form(weight)
        _check(weight, self._form)
        return weight

    def __iter__(self) -> Iterator[AnyWeight]:
        return (self[index] for index in range(len(self)))


def stack(parts: Sequence[AnyWeight] | Stack) -> AnyWeight:
    """All weights in a new first dimension. `ValueError` unless they are stored in the same way."""
    first, form, found = None, None, []
    for index, part in enumerate(parts):
        tensors = part.tensors if isinstance(part, Quantised) else (part,)
        if form is None:
            first, form = part, _form(part)
            found = [tensor.new_empty(len(parts), *tensor.shape) for tensor in tensors]
        _check(part, form)
        for whole, tensor in zip(found, tensors, strict=True):
            whole[index].copy_(tensor)
        drop_pages(*tensors)
    assert first is not None, "a stack of no weights"
    if isinstance(first, Tensor):
        return found[0]
    names = (name for name in TENSORS if getattr(first, name) is not None)
    changed: dict[str, Any] = dict(zip(names, found, strict=True))
    return replace(first, **changed)


def _form(weight: AnyWeight) -> tuple[object, ...]:
    """How a weight is stored."""
    if isinstance(weight, Tensor):
        return weight.dtype, weight.shape
    there = tuple(name for name in TENSORS if getattr(weight, name) is not None)
    return weight.kind, weight.shape, weight.scale_group, weight.divided, there


def _check(weight: AnyWeight, form: tuple[object, ...]) -> None:
    if _form(weight) != form:
        raise ValueError("weights that belong together are not all stored in the same way")
