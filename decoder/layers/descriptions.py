"""Descriptions of MLPs, experts, attention and blocks of them: sizes, weights and memory, without tensors. Mixers whose
requests have slots are in `decoder.layers.recurrent_descriptions`.

Processes that only read a configuration, such as a frontend process, import this module and no torch;
`decoder.layers.build` builds the layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from decoder.layers.spec import LinearShape, PageSpec, positive, require
from kernels.activation_names import GROUPED
from kernels.rope import Rope


def check_activation(name: str) -> None:
    """Raises `ValueError` listing the known activations for any other name."""
    require(name in GROUPED, f"mlp_hidden_act {name!r} is not one of {', '.join(GROUPED)}")


@dataclass(frozen=True)
class Mlp:
    """Sizes of an MLP, in elements."""

    hidden_size: int
    intermediate_size: int = 21504
    mlp_hidden_act: str = "relu2"
    gated: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        check_activation(self.mlp_hidden_act)
        positive(self, "intermediate_size")

    @property
    def memory(self) -> None:
        return None

    @property
    def activations(self) -> int:
        return (3 if self.gated else 2) * self.intermediate_size

    def weights(self) -> dict[str, tuple[int, ...]]:
        inner, names = self.intermediate_size, ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        found: dict[str, tuple[int, ...]] = {f"{name}.weight": LinearShape((inner, self.hidden_size)) for name in names}
        found["down_proj.weight"] = LinearShape((self.hidden_size, inner))
        if self.mlp_bias:
            found |= {f"{name}.bias": (inner,) for name in names} | {"down_proj.bias": (self.hidden_size,)}
        return found

    def optional_weights(self) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True)
class Experts:
    """Sizes of a mixture of experts, in elements."""

    hidden_size: int
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int | None = 7688
    """Inner width of the shared expert, which every token passes; None: no shared expert."""
    moe_latent_size: int | None = None
    mlp_hidden_act: str = "relu2"
    gated: bool = False
    mlp_bias: bool = False
    """Whether the shared expert and the latent projections have biases."""
    routing: Literal["sigmoid", "softmax"] = "sigmoid"
    """`sigmoid`: the sigmoid of each expert's logit, with a correction bias for the choice, and groups; `softmax`: over
    the logits of the chosen experts (equal to softmax over all, divided by the sum of the chosen)."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by the sigmoid of a learned projection."""
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    correction: bool = True
    """Whether sigmoid routing has a correction bias."""
    weight_epsilon: float = 1e-20
    """What is added to the sum of a token's weights before they are divided by it, with sigmoid routing."""

    def __post_init__(self) -> None:
        check_activation(self.mlp_hidden_act)
        positive(self, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group")
        latent = self.moe_latent_size
        require(latent is None or latent >= 1, f"moe_latent_size must be at least 1, not {latent}")
        if self.moe_shared_expert_intermediate_size is not None:
            positive(self, "moe_shared_expert_intermediate_size")
        require(self.weight_epsilon >= 0, f"weight_epsilon must be at least 0, not {self.weight_epsilon}")
        require(self.shared is not None or not self.shared_gate, "shared_gate needs a shared expert, but there is none")
        if self.routing == "softmax":
            sigmoid = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
            sigmoid |= {"correction": True, "weight_epsilon": 1e-20}
            for name, only in sigmoid.items():
                require(getattr(self, name) == only, f"{name} must be {only} with softmax routing")
        experts, groups, kept, chosen = self.n_routed_experts, self.n_group, self.topk_group, self.num_experts_per_tok
        require(experts % groups == 0, f"n_routed_experts {experts} is not a multiple of n_group {groups}")
        require(kept <= groups, f"topk_group {kept} is above n_group {groups}")
        available = kept * (experts // groups)
        require(
            chosen <= available,
            f"num_experts_per_tok {chosen} is above the {available} experts of the kept groups, with n_routed_experts "
            f"{experts}",
        )

    @property
    def expert(self) -> Mlp:
        """Sizes of one routed expert."""
        outer = self.moe_latent_size or self.hidden_size
        return Mlp(outer, self.moe_intermediate_size, self.mlp_hidden_act, self.gated)

    @property
    def shared(self) -> Mlp | None:
        width = self.moe_shared_expert_intermediate_size
        return None if width is None else replace(
            self.expert, hidden_size=self.hidden_size, intermediate_size=width, mlp_bias=self.mlp_bias
        )  # fmt: skip

    @property
    def memory(self) -> None:
        return None

    @property
    def activations(self) -> int:
        routed = self.num_experts_per_tok * (self.moe_intermediate_size + (self.moe_latent_size or 0))
        return (3 if self.gated else 2) * (routed + (self.moe_shared_expert_intermediate_size or 0))

    def weights(self) -> dict[str, tuple[int, ...]]:
        experts = self.n_routed_experts
        found: dict[str, tuple[int, ...]] = {"gate.weight": (experts, self.hidden_size)}
        if self.routing == "sigmoid" and self.correction:
            found["gate.e_score_correction_bias"] = (experts,)
        for name, shape in self.expert.weights().items():
            found[f"experts.{name.removesuffix('.weight')}"] = LinearShape((experts, *shape))
        if self.shared is not None:
            found |= {f"shared_experts.{name}": shape for name, shape in self.shared.weights().items()}
        if self.shared_gate:
            found["shared_expert_gate.weight"] = (1, self.hidden_size)
        if self.moe_latent_size is not None:
            found["fc1_latent_proj.weight"] = LinearShape((self.moe_latent_size, self.hidden_size))
            found["fc2_latent_proj.weight"] = LinearShape((self.hidden_size, self.moe_latent_size))
            if self.mlp_bias:
                found |= {"fc1_latent_proj.bias": (self.moe_latent_size,), "fc2_latent_proj.bias": (self.hidden_size,)}
        return found

    def optional_weights(self) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True)
class Attention:
    """Sizes of an attention mixer, in elements."""

    hidden_size: int
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    """`None`: as many as query heads."""
    head_dim: int = 128
    attention_bias: bool = False
    """Whether q, k, v and o have biases; they are used if the checkpoint has them."""
    scale: float | None = None
    """Factor of the scores, see `multiplier`; `None`: `head_dim ** -0.5`."""
    rope: Rope | None = None
    gate: bool = False
    """Whether each head's output is multiplied by the sigmoid of a further projection of the input."""
    head_gate: bool = False
    """Whether each head's output is multiplied by the sigmoid of one number, a further projection of the input."""
    window: int | None = None
    """Number of latest keys that a token attends to, its own included; `None`: all."""
    qk_norm: float | None = None
    """Epsilon of the RMS norms over each head of queries and keys before rotation; `None`: no norms."""
    qk_norm_whole: bool = False
    """Whether these norms are over all heads of a token together."""
    input_size: int | None = None
    """Width of the rows that are projected; `None`: `hidden_size`, which is that of the output."""

    def __post_init__(self) -> None:
        positive(self, "num_attention_heads", "head_dim")
        require(self.kv_heads >= 1, f"num_key_value_heads must be at least 1, not {self.kv_heads}")
        require(not (self.gate and self.head_gate), "gate and head_gate are both true; at most one of them can be")
        require(self.window is None or self.window >= 1, f"window must be at least 1, not {self.window}")
        require(self.qk_norm is None or self.qk_norm > 0, f"qk_norm must be above 0, not {self.qk_norm}")
        require(
            self.num_attention_heads % self.kv_heads == 0,
            f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads {self.kv_heads}",
        )
        require(
            self.rope is None or self.rope.dims <= self.head_dim,
            f"{self.rope and self.rope.dims} rotated dimensions are above head_dim {self.head_dim}",
        )

    @property
    def kv_heads(self) -> int:
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def multiplier(self) -> float:
        """Factor of the scores of queries and keys."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def memory(self) -> PageSpec:
        return PageSpec(self.kv_heads, self.head_dim)

    @property
    def projected(self) -> int:
        """Outputs of all input projections together."""
        return (self.num_attention_heads + 2 * self.kv_heads) * self.head_dim + self.gates

    @property
    def gates(self) -> int:
        """Gates of a token: one for each number of the queries, or for each head, or none."""
        return self.num_attention_heads * (self.head_dim if self.gate else self.head_gate)

    @property
    def activations(self) -> int:
        return self.projected + 2 * self.num_attention_heads * self.head_dim

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the input projections, in the order in which they are fused."""
        return ("q_proj", "k_proj", "v_proj", *("gate_proj",) * self.gate, *("g_proj",) * self.head_gate)

    def weights(self) -> dict[str, tuple[int, ...]]:
        out, q, kv = self.hidden_size, self.num_attention_heads * self.head_dim, self.kv_heads * self.head_dim
        d = self.input_size or out
        found: dict[str, tuple[int, ...]] = {
            "q_proj.weight": LinearShape((q, d)),
            "k_proj.weight": LinearShape((kv, d)),
            "v_proj.weight": LinearShape((kv, d)),
            "o_proj.weight": LinearShape((out, q)),
        }
        if self.attention_bias:
            found |= {"q_proj.bias": (q,), "k_proj.bias": (kv,), "v_proj.bias": (kv,), "o_proj.bias": (out,)}
        if self.gate:
            found["gate_proj.weight"] = LinearShape((q, d))
            found |= {"gate_proj.bias": (q,)} if self.attention_bias else {}
        if self.head_gate:
            heads = self.num_attention_heads
            found["g_proj.weight"] = LinearShape((heads, d))
            found |= {"g_proj.bias": (heads,)} if self.attention_bias else {}
        if self.qk_norm is not None:
            whole = self.qk_norm_whole
            found |= {"q_norm.weight": (q if whole else self.head_dim,)}
            found |= {"k_norm.weight": (kv if whole else self.head_dim,)}
        return found

    def optional_weights(self) -> frozenset[str]:
        return frozenset(name for name in self.weights() if name.endswith(".bias"))


@dataclass(frozen=True)
class SharedBlock:
    """Sizes of the branch of a layer: attention and a gated MLP, whose weights several layers may share.

        h = attention(norm([x, embedded]));  branch = out(mlp(mlp_norm(h)))

    Without residual connections. Each layer has its own `out`, keys and values, and low-rank adapters, whose products
    are added to those of gate and up, and with `attention_adapters` to queries, keys and values.
    """

    attention: Attention
    mlp: Mlp
    rank: int
    """Inner width of the adapters."""
    attention_adapters: bool = False
    owner: int | None = None
    """Index of the layer that has the shared weights; `None`: this one."""

    def __post_init__(self) -> None:
        positive(self, "rank")
        d = self.attention.hidden_size
        require(
            self.attention.input_size == 2 * d and self.mlp.hidden_size == d and self.mlp.gated,
            f"a block of width {d} needs attention of {2 * d} inputs, not {self.attention.input_size}, and a gated MLP "
            f"of width {d}, not {self.mlp.hidden_size}",
        )

    @property
    def memory(self) -> PageSpec:
        return self.attention.memory

    @property
    def rope(self) -> Rope | None:
        return self.attention.rope

    @property
    def activations(self) -> int:
        d, inner = self.attention.hidden_size, self.mlp.intermediate_size
        return 7 * d + self.attention.activations + self.mlp.activations + 2 * inner

    @property
    def adapters(self) -> dict[str, tuple[int, int]]:
        """Name -> (inputs, outputs) of each adapter."""
        attention = self.attention
        d, heads, kv = attention.hidden_size, attention.num_attention_heads, attention.kv_heads
        outputs = {"q": heads, "k": kv, "v": kv} if self.attention_adapters else {}
        found = {f"{name}_adapter": (2 * d, count * attention.head_dim) for name, count in outputs.items()}
        return {**found, "mlp_adapter": (d, 2 * self.mlp.intermediate_size)}

    def weights(self) -> dict[str, tuple[int, ...]]:
        d = self.attention.hidden_size
        found: dict[str, tuple[int, ...]] = {}
        if self.owner is None:
            found |= {"norm.weight": (2 * d,), "mlp_norm.weight": (d,)}
            found |= {f"attention.{name}": shape for name, shape in self.attention.weights().items()}
            found |= {f"mlp.{name}": shape for name, shape in self.mlp.weights().items()}
        for name, (inputs, outputs) in self.adapters.items():
            found[f"{name}.down.weight"] = LinearShape((self.rank, inputs))
            found[f"{name}.up.weight"] = LinearShape((outputs, self.rank))
        found["out.weight"] = LinearShape((d, d))
        return found

    def optional_weights(self) -> frozenset[str]:
        return frozenset()
