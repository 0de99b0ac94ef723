"""The weights of a layer's experts, stacked for grouped products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


class Experts(Sequence[Callable[[Tensor], Tensor]]):
    """Ungated experts `down(act(up(x)))` over weights that lie together; each is also a function of rows by itself."""

    def __init__(self, up_EID: Tensor, down_EDI: Tensor, act: Callable[[Tensor], Tensor] | None = None) -> None:
        """`act`: `None` is relu^2, the one that grouped products have. `ValueError` when the shapes do not fit."""
        count, self.inner, width = up_EID.shape
        if down_EDI.shape != (count, width, self.inner):
            raise ValueError(f"experts of {tuple(up_EID.shape)} do not fit {tuple(down_EDI.shape)} behind them")
        self.up_EID, self.down_EDI = up_EID.contiguous(), down_EDI.contiguous()
        self.squared = act is None
        self._act = act or _relu_squared

    def __len__(self) -> int:
        return self.up_EID.shape[0]

    def __getitem__(self, expert: int) -> Callable[[Tensor], Tensor]:  # type: ignore[override]
        up, down, act = self.up_EID[expert], self.down_EDI[expert], self._act
        return lambda x: F.linear(act(F.linear(x, up)), down)


def _relu_squared(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))
