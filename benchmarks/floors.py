"""Lower bounds of a workload's time on a machine, computed from the shapes in a checkpoint's configuration.

Matrix products cost 2 FLOPs per weight and token, at the measured rate of large products (`machine.bf16_rate`). A
step reads each weight once, as bfloat16, and each request's recurrent state, at the measured memory bandwidth. States
advance by blocks of tokens (kernels/native): the part in bfloat16 is read, and once per block all of it is read and
written. Attention over pages, recurrences, norms and image pixels are left out, so the bound can only be too low for a
program that reads weights in bfloat16 and computes all layers for all tokens. A program that stores weights in fewer
bits (kernels/native/compact.h: 12), or computes the last layers only for tokens whose rows are read
(decoder/native.py), can be faster than the bound.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decoder.config import DecoderConfig
from decoder.layers.descriptions import Experts
from decoder.layers.spec import MixerSpec
from kernels.native.structs import BLOCK_TOKENS
from service.model.checkpoint import Checkpoint

WEIGHT_BYTES, STATE_BYTES = 2, 4
BLOCK_STATE_BYTES = 2 + 2 * STATE_BYTES / BLOCK_TOKENS
"""Bytes read and written per token and number of a recurrent state."""


@dataclass(frozen=True)
class Machine:
    flops: float
    """FLOP/s of bfloat16 products."""
    bandwidth: float
    """Bytes per second that are read from memory."""

    @classmethod
    def of(cls, ceilings: dict[str, float]) -> Machine:
        return cls(ceilings["bf16_gflop_s"] * 1e9, ceilings["read_gb_s"] * 1e9)


@dataclass(frozen=True)
class Floor:
    """Lower bounds for one checkpoint."""

    decoder: DecoderConfig
    tower: Tower | None

    @classmethod
    def of(cls, path: Path) -> Floor:
        checkpoint = Checkpoint(path)
        return cls(checkpoint.config.decoder, Tower.of(path))

    def prompt(self, machine: Machine, tokens: int, requests: int) -> float:
        """Seconds for these prompts, first tokens included."""
        flops = 2 * (self._body(1) * tokens + self._head * requests)
        return max(flops / machine.flops, self._step_bytes(requests, tokens) / machine.bandwidth)

    def step(self, machine: Machine, requests: int) -> float:
        """Seconds of one step with one token per request."""
        flops = 2 * (self._body(1) + self._head) * requests
        return max(flops / machine.flops, self._step_bytes(requests, requests) / machine.bandwidth)

    @property
    def _head(self) -> int:
        return self.decoder.hidden_size * self.decoder.vocab_size

    def _step_bytes(self, requests: int, tokens: int) -> float:
        weights = self._body(tokens, read=True) + self._head
        states = sum(math.prod(slot.state) for slot in self.decoder.slots)
        return WEIGHT_BYTES * weights + requests * BLOCK_STATE_BYTES * states

    def _body(self, tokens: int, *, read: bool = False) -> float:
        """Number of layer weights that one token is multiplied with, or, with `read`, that this many tokens read."""
        return sum(_weights(mixer, tokens, read) for mixer in self.decoder.mixers)


def _weights(mixer: MixerSpec, tokens: int, read: bool) -> float:
    found = 0.0
    for name, shape in mixer.weights().items():
        if len(shape) < 2 or "conv1d" in name:
            continue
        size = float(math.prod(shape))
        if isinstance(mixer, Experts) and name.startswith("experts."):
            chosen = mixer.num_experts_per_tok / mixer.n_routed_experts
            size *= 1 - (1 - chosen) ** tokens if read else chosen  # assumes equally likely experts
        found += size
    return found


@dataclass(frozen=True)
class Tower:
    """A vision tower of equal blocks over patches, and a merger that combines several patches into one token."""

    of_patch: int
    """Number of weights that a patch is multiplied with."""
    of_token: int
    """Number of weights that an image token is multiplied with."""
    attention: int
    """Number of blocks times width."""
    patch: int
    merged: int
    """Patches per image token."""

    @classmethod
    def of(cls, path: Path) -> Tower | None:
        """None for a model without a tower, or with a tower of another kind."""
        vision = json.loads((path / "config.json").read_text()).get("vision_config", {})
        if "spatial_merge_size" not in vision:
            return None
        width, depth, merged = vision["hidden_size"], vision["depth"], vision["spatial_merge_size"] ** 2
        block = 4 * width**2 + 2 * width * vision["intermediate_size"]
        # Both frames of an image's temporal patch are equal, so a sum of their weights, one frame's size, is enough.
        embedding = 3 * vision["patch_size"] ** 2 * width
        merger = (merged * width) ** 2 + merged * width * vision["out_hidden_size"]
        return cls(depth * block + embedding, merger, depth * width, vision["patch_size"], merged)

    def tokens(self, sizes: Sequence[tuple[int, int]]) -> int:
        """The number of image tokens of images of these sizes, which are multiples of a token's side."""
        return sum(self._patches(size) // self.merged for size in sizes)

    def seconds(self, machine: Machine, sizes: Sequence[tuple[int, int]]) -> float:
        flops = 0.0
        for size in sizes:
            patches = self._patches(size)
            flops += 2 * (self.of_patch * patches + self.of_token * patches / self.merged)
            flops += 4 * self.attention * patches**2
        return flops / machine.flops

    def _patches(self, size: tuple[int, int]) -> int:
        return math.prod(side // self.patch for side in size)
