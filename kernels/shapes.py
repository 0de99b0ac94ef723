"""Sizes of the models that the kernels are compiled and measured for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class ModelShape:
    """What kernels need to know of a model; names as in the configuration of `nemotron_h` and RADIO."""

    name: str
    hidden: int
    mamba_heads: int
    mamba_head_dim: int
    groups: int
    state: int
    chunk: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    intermediate: int
    experts: int
    experts_per_token: int
    vit_hidden: int
    vit_heads: int
    patch: int
    conv: int = 4
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    """Compute types that the model is served in on a GPU."""

    @property
    def mamba_inner(self) -> int:
        return self.mamba_heads * self.mamba_head_dim

    @property
    def conv_channels(self) -> int:
        return self.mamba_inner + 2 * self.groups * self.state


NANO_3_OMNI = ModelShape("nano-3-omni", 2688, 64, 64, 8, 128, 128, 32, 2, 128, 131072, 1856, 128, 6, 1280, 16, patch=16)
NANO_V2_12B_VL = ModelShape(
    "nano-v2-12b-vl", 5120, 128, 80, 8, 128, 128, 40, 8, 128, 131072, 20480, 0, 0, 1280, 16, patch=16
)
DEMO = ModelShape(
    "demo", 192, 6, 64, 2, 32, 64, 4, 2, 64, 1024, 512, 8, 2, 160, 5, patch=8, dtypes=(torch.bfloat16, torch.float32)
)
MODELS = (NANO_3_OMNI, NANO_V2_12B_VL, DEMO)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of that shape without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


class Case(NamedTuple):
    """`call()` runs operations on meta tensors; `name` tells it from the other cases of the same operation."""

    name: str
    call: Callable[[], object]
