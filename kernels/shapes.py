"""Sizes of the models that the kernels are compiled and measured for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model that kernels depend on, named as in the configurations of `nemotron_h` and RADIO. A count of 0
    means that the model has none: no Mamba-2 heads, no experts, no gated delta heads, no short convolutions, no rotated
    dimensions."""

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
    gated: bool = False
    """Whether experts have a gate beside the up projection (SwiGLU) and are chosen by a softmax."""
    delta_key_heads: int = 0
    delta_value_heads: int = 0
    delta_head_dim: int = 128
    short_conv: int = 0
    """Taps of the convolution of `hidden` channels in layers that are little else (LFM2)."""
    rope_dims: int = 0
    rope_axes: tuple[int, ...] = ()
    radio: bool = True
    """Whether the tower is RADIO: with prefix tokens, and an RMS norm of merged patches. Others have neither."""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    """Compute dtypes that the model is served in on a GPU."""

    @property
    def mamba_inner(self) -> int:
        return self.mamba_heads * self.mamba_head_dim

    @property
    def conv_channels(self) -> int:
        return self.mamba_inner + 2 * self.groups * self.state

    @property
    def delta_channels(self) -> int:
        """Channels of the convolution before a gated delta rule: queries, keys and values."""
        return (2 * self.delta_key_heads + self.delta_value_heads) * self.delta_head_dim


NANO_3_OMNI = ModelShape("nano-3-omni", 2688, 64, 64, 8, 128, 128, 32, 2, 128, 131072, 1856, 128, 6, 1280, 16, patch=16)
NANO_V2_12B_VL = ModelShape(
    "nano-v2-12b-vl", 5120, 128, 80, 8, 128, 128, 40, 8, 128, 131072, 20480, 0, 0, 1280, 16, patch=16
)
DEMO = ModelShape(
    "demo", 192, 6, 64, 2, 32, 64, 4, 2, 64, 1024, 512, 8, 2, 160, 5, patch=8, dtypes=(torch.bfloat16, torch.float32),
    delta_key_heads=2, delta_value_heads=4, delta_head_dim=32, rope_dims=32, short_conv=3,
)  # fmt: skip
"""The embedded model, with small sizes for the layers that it lacks, for the compilations in tests."""
INTERLEAVED = tuple(i % 3 for i in range(32))
"""Axes of 32 frequencies in sections [11, 11, 10]: time, height and width alternate."""
_QWEN: dict[str, Any] = {
    "mamba_heads": 0, "mamba_head_dim": 0, "groups": 0, "state": 0, "chunk": 64, "head_dim": 256, "vocab": 248320,
    "gated": True, "patch": 16, "rope_dims": 64, "rope_axes": INTERLEAVED, "radio": False,
}  # fmt: skip
QWEN_0_8B = ModelShape(
    "qwen3.5-0.8b", 1024, heads=8, kv_heads=2, intermediate=3584, experts=0, experts_per_token=0, delta_key_heads=16,
    delta_value_heads=16, vit_hidden=768, vit_heads=12, **_QWEN,
)  # fmt: skip
QWEN_27B = ModelShape(
    "qwen3.5-27b", 5120, heads=24, kv_heads=4, intermediate=17408, experts=0, experts_per_token=0, delta_key_heads=16,
    delta_value_heads=48, vit_hidden=1152, vit_heads=16, **_QWEN,
)  # fmt: skip
QWEN_35B_A3B = ModelShape(
    "qwen3.5-35b-a3b", 2048, heads=16, kv_heads=2, intermediate=512, experts=256, experts_per_token=8,
    delta_key_heads=16, delta_value_heads=32, vit_hidden=1152, vit_heads=16, **_QWEN,
)  # fmt: skip
MODELS = (NANO_3_OMNI, NANO_V2_12B_VL, DEMO, QWEN_0_8B, QWEN_27B, QWEN_35B_A3B)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of this shape on the "meta" device, which has no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


class Case(NamedTuple):
    """`call()` runs operations on meta tensors; `name` distinguishes it from other cases of the same operation."""

    name: str
    call: Callable[[], object]
