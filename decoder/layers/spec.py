"""The interface of layers: their weights, and the memory that they need per sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kernels.native.state_blocks import StateShape

Weights = Mapping[str, Any]
"""Tensors by name, without the layer's prefix; weights of linear layers may be `Quantised`."""


def weights_below(weights: Weights, prefix: str) -> dict[str, Any]:
    """The weights whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


class LinearShape(tuple[int, ...]):
    """The shape of a weight that `DecoderOptions.weights` quantises: `[out, in]` of a linear layer, or of a
    stack of them, `[layers, out, in]`. Weights of other shapes stay plain."""

    __slots__ = ()


@dataclass(frozen=True)
class SlotSpec:
    """Memory of fixed size per sequence: a convolution window and, in most kinds of layers, a recurrent state."""

    window: tuple[int, int]
    """(inputs that the causal convolution looks back at, channels); stored in the compute dtype."""
    state: tuple[int, ...]
    """Shape of the recurrent state, stored in the state dtype; (0,) for a layer that has only a window."""
    inputs: int
    """Values per token that the recurrence takes as input; they are kept to replay tokens that may be rejected."""
    chunk: int | None
    """Tokens per chunk of the scan, a power of two. It affects rounding only. None: the layer does not scan."""
    blocks: StateShape | None
    """The state's sizes for compiled code, which advances it by blocks of tokens and stores it in its own layout; None
    without a state."""

    @property
    def state_size(self) -> int:
        """Values of the recurrent state."""
        return math.prod(self.state)

    def state_bytes(self, element: int, state_element: int, compiled: bool) -> int:
        """Bytes of the state in a slot. `element`, `state_element`: bytes of a value of the compute dtype and of the
        state dtype; `compiled`: whether compiled code may use the state."""
        plain = self.state_size * state_element
        if self.blocks is None or not compiled:
            return plain
        return max(plain, self.blocks.block_bytes(element, state_element))


@dataclass(frozen=True)
class PageSpec:
    """Memory that grows with a sequence: keys and values of each token, stored in the compute dtype."""

    heads: int
    width: int

    def numbers(self, tokens: int) -> int:
        """Number of values in the keys and values of `tokens` tokens."""
        return 2 * tokens * self.heads * self.width


class MixerSpec(Protocol):
    """Description of one mixer: a frozen dataclass with the sizes of its kind."""

    @property
    def memory(self) -> SlotSpec | PageSpec | None: ...

    @property
    def activations(self) -> int:
        """Values per token that are in memory at once, besides the residual stream."""
        ...

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor that a checkpoint may have for this mixer, a `LinearShape` for those that are
        quantised."""
        ...

    def optional_weights(self) -> frozenset[str]:
        """Names of `weights` that a checkpoint may omit."""
        ...


@dataclass(frozen=True)
class Layer:
    """`x += residual_scale * after(sum(scale * mixer(before(x)) for mixer, scale in zip(mixers, scales)))`.

    `before` and `after` are RMS norms, or the identity without `norm_before` or `norm_after`; a layer has at least one
    of them. With a branch, the mixers read `before(x + branch(x, embedded))`. Weights are named `norm.weight`,
    `post_norm.weight` and `{name}.{weight of the mixer}`.
    """

    mixers: tuple[tuple[str, MixerSpec], ...]
    """(name, mixer) pairs."""
    residual_scale: float = 1.0
    scales: tuple[float, ...] = ()
    """A factor for each mixer's output, besides `residual_scale`; empty: 1 for all."""
    norm_before: bool = True
    norm_after: bool = False
    branch: tuple[str, MixerSpec] | None = None
    """(name, mixer) of what is computed from the residual stream beside the embedded tokens; its output is added to
    what the layer reads, and not to the residual stream."""

    def __post_init__(self) -> None:
        count = len(self.mixers)
        require(self.norm_before or self.norm_after, "norm_before and norm_after are both false; a layer needs a norm")
        require(
            len(self.scales) in (0, count), f"scales has {len(self.scales)} numbers and the layer has {count} mixers"
        )

    @property
    def parts(self) -> tuple[tuple[str, MixerSpec], ...]:
        """(name, mixer) pairs, that of the branch first."""
        return self.mixers if self.branch is None else (self.branch, *self.mixers)

    def weights(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        norms = ("norm.weight",) * self.norm_before + ("post_norm.weight",) * self.norm_after
        found: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (hidden_size,))
        for prefix, mixer in self.parts:
            found |= {f"{prefix}.{name}": shape for name, shape in mixer.weights().items()}
        return found

    def optional_weights(self) -> frozenset[str]:
        return frozenset(f"{prefix}.{name}" for prefix, mixer in self.parts for name in mixer.optional_weights())


def positive(owner: object, *names: str) -> None:
    """Raises `ValueError` naming the first of these fields that is below 1."""
    for name in names:
        require(getattr(owner, name) >= 1, f"{name} must be at least 1, not {getattr(owner, name)}")


def require(ok: bool, message: str) -> None:
    """Raises `ValueError` with the message unless `ok`."""
    if not ok:
        raise ValueError(message)
