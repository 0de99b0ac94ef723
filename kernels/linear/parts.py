"""Several products with the same input, for weights that are stored in different ways and cannot be one product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.linear.reference import Linear


class LinearParts:
    """`cat(part(x) for part in parts)`: weights of the same input that are stored in different formats."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` -> `[rows, out]` in x's dtype."""
        return torch.cat([part(x) for part in self.parts], -1)
