"""Descriptions of mixers whose requests have slots: recurrences and short convolutions. Like
`decoder.layers.descriptions`, without tensors and without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from decoder.layers.spec import LinearShape, SlotSpec, positive, require
from kernels.native.state_blocks import StateShape


@dataclass(frozen=True)
class Mamba2:
    """Sizes of a Mamba-2 mixer, in elements. Fields are named as in NVIDIA's and transformers' configurations."""

    hidden_size: int
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    n_groups: int = 8
    ssm_state_size: int = 128
    conv_kernel: int = 4
    chunk_size: int = 128
    """Tokens per chunk of the scan; a power of two. It affects rounding only."""
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    """Bounds that dt is clamped to after the softplus."""
    use_conv_bias: bool = True
    use_bias: bool = False
    """Whether the input and output projections have biases."""
    use_out_bias: bool | None = None
    """Whether the output projection has a bias; `None`: as `use_bias`."""
    gated_norm: Literal["gate_first", "norm_first", "gate_only"] = "gate_first"
    """How the output of the recurrence is gated and normalised, in groups; `gate_only`: not normalised."""
    scales: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    """Factors of parts of the input projection, bias included: the gate, x, B and C."""
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        object.__setattr__(self, "time_step_limit", (float(self.time_step_limit[0]), float(self.time_step_limit[1])))
        positive(
            self, "ssm_state_size", "mamba_num_heads", "mamba_head_dim", "n_groups", "conv_kernel", "chunk_size"
        )  # fmt: skip
        require(
            self.mamba_num_heads % self.n_groups == 0,
            f"mamba_num_heads {self.mamba_num_heads} is not a multiple of n_groups {self.n_groups}",
        )
        require(self.conv_kernel >= 2, f"conv_kernel must be at least 2, not {self.conv_kernel}")
        require(
            self.chunk_size & (self.chunk_size - 1) == 0, f"chunk_size must be a power of two, not {self.chunk_size}"
        )
        low, high = self.time_step_limit
        require(0 <= low <= high, f"time_step_limit must be two rising bounds of at least 0, not {low} and {high}")
        require(
            len(self.scales) == 4 and all(0 < scale < float("inf") for scale in self.scales),
            f"scales must be four finite numbers above 0, not {self.scales}",
        )

    @property
    def inner(self) -> int:
        """Channels of the inner stream: heads times head size."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: inner stream, B and C."""
        return self.inner + 2 * self.n_groups * self.ssm_state_size

    @property
    def memory(self) -> SlotSpec:
        state = (self.mamba_num_heads, self.mamba_head_dim, self.ssm_state_size)
        inputs = self.conv_dim + self.mamba_num_heads
        blocks = StateShape(self.n_groups, *state)
        return SlotSpec((self.conv_kernel - 1, self.conv_dim), state, inputs, self.chunk_size, blocks)

    @property
    def activations(self) -> int:
        return 2 * self.inner + 3 * self.conv_dim + self.mamba_num_heads

    def weights(self) -> dict[str, tuple[int, ...]]:
        d, inner, conv, heads = self.hidden_size, self.inner, self.conv_dim, self.mamba_num_heads
        found: dict[str, tuple[int, ...]] = {
            "in_proj.weight": LinearShape((inner + conv + heads, d)),
            "conv1d.weight": (conv, 1, self.conv_kernel),
            "A_log": (heads,),
            "D": (heads,),
            "dt_bias": (heads,),
        }
        if self.gated_norm != "gate_only":
            found["norm.weight"] = (inner,)
        found["out_proj.weight"] = LinearShape((d, inner))
        if self.use_conv_bias:
            found["conv1d.bias"] = (conv,)
        if self.use_bias:
            found["in_proj.bias"] = (inner + conv + heads,)
        if self.use_bias if self.use_out_bias is None else self.use_out_bias:
            found["out_proj.bias"] = (d,)
        return found

    def optional_weights(self) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True)
class GatedDelta:
    """Sizes of a gated delta rule mixer, in elements."""

    hidden_size: int
    num_key_heads: int = 16
    num_value_heads: int = 16
    """A multiple of `num_key_heads`: neighbouring value heads share queries and keys."""
    key_head_dim: int = 128
    value_head_dim: int = 128
    conv_kernel: int = 4
    chunk_size: int = 64
    """Tokens per chunk of the scan; a power of two. It affects rounding only."""
    norm_eps: float = 1e-6
    beta_scale: float = 1.0
    """Factor of beta, the weight of a token's change: above 1, the state's transition has negative eigenvalues."""
    separate: bool = False
    """Whether queries, keys and values have their own projections in checkpoints."""

    def __post_init__(self) -> None:
        positive(
            self, "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel", "chunk_size"
        )  # fmt: skip
        require(
            self.num_value_heads % self.num_key_heads == 0,
            f"num_value_heads {self.num_value_heads} is not a multiple of num_key_heads {self.num_key_heads}",
        )
        require(self.conv_kernel >= 2, f"conv_kernel must be at least 2, not {self.conv_kernel}")
        require(
            self.chunk_size & (self.chunk_size - 1) == 0, f"chunk_size must be a power of two, not {self.chunk_size}"
        )
        require(self.norm_eps > 0, f"norm_eps must be above 0, not {self.norm_eps}")
        require(0 < self.beta_scale <= 2, f"beta_scale must be above 0 and at most 2, not {self.beta_scale}")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the input projections of the convolution, in `in_proj_{name}`."""
        return ("q", "k", "v") if self.separate else ("qkv",)

    @property
    def keys(self) -> int:
        """Channels of the keys of all heads; the queries have as many."""
        return self.num_key_heads * self.key_head_dim

    @property
    def values(self) -> int:
        """Channels of the values of all heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def memory(self) -> SlotSpec:
        state = (self.num_value_heads, self.key_head_dim, self.value_head_dim)
        inputs = self.conv_dim + 2 * self.num_value_heads
        blocks = StateShape(self.num_key_heads, self.num_value_heads, self.value_head_dim, self.key_head_dim)
        return SlotSpec((self.conv_kernel - 1, self.conv_dim), state, inputs, self.chunk_size, blocks)

    @property
    def activations(self) -> int:
        return 3 * self.values + 3 * self.conv_dim + 2 * self.num_value_heads

    def weights(self) -> dict[str, tuple[int, ...]]:
        d, heads = self.hidden_size, self.num_value_heads
        channels = (self.keys, self.keys, self.values) if self.separate else (self.conv_dim,)
        projections = {
            f"in_proj_{name}.weight": LinearShape((n, d)) for name, n in zip(self.inputs, channels, strict=True)
        }
        return {
            **projections,
            "in_proj_z.weight": LinearShape((self.values, d)),
            # b and a have one output per head, and the whole state depends on them: published files keep them plain.
            "in_proj_b.weight": (heads, d),
            "in_proj_a.weight": (heads, d),
            "conv1d.weight": (self.conv_dim, 1, self.conv_kernel),
            "A_log": (heads,),
            "dt_bias": (heads,),
            "norm.weight": (self.value_head_dim,),
            "out_proj.weight": LinearShape((d, self.values)),
        }

    def optional_weights(self) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True)
class ShortConv:
    """Sizes of a gated short convolution, in elements: a mixer whose only memory is the convolution's window."""

    hidden_size: int
    conv_kernel: int = 3
    conv_bias: bool = False
    """Whether the convolution and both projections have biases."""

    def __post_init__(self) -> None:
        positive(self, "hidden_size")
        require(self.conv_kernel >= 2, f"conv_kernel must be at least 2, not {self.conv_kernel}")

    @property
    def memory(self) -> SlotSpec:
        return SlotSpec((self.conv_kernel - 1, self.hidden_size), (0,), self.hidden_size, None, None)

    @property
    def activations(self) -> int:
        return 5 * self.hidden_size

    def weights(self) -> dict[str, tuple[int, ...]]:
        d = self.hidden_size
        found: dict[str, tuple[int, ...]] = {
            "in_proj.weight": LinearShape((3 * d, d)),
            "conv1d.weight": (d, 1, self.conv_kernel),
            "out_proj.weight": LinearShape((d, d)),
        }
        if self.conv_bias:
            found |= {"in_proj.bias": (3 * d,), "conv1d.bias": (d,), "out_proj.bias": (d,)}
        return found

    def optional_weights(self) -> frozenset[str]:
        return frozenset()
