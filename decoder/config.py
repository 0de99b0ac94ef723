"""What a `nemotron_h` decoder is (`DecoderConfig`) and how it is run (`DecoderOptions`).

Field names of `DecoderConfig` are those of the Hugging Face configuration, so that a reader can hold one beside the
other; the layer types are one string, `pattern`, of `M` (Mamba-2), `*` (attention), `-` (MLP) and `E` (mixture of
experts).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decoder.metadata import STATE_MODES

LAYER_KINDS = "M*-E"
GRAPH_MODES = ("auto", "on", "off")
OVERLAP_MODES = ("auto", "on", "off")
WEIGHT_KINDS = ("int8", "int4")
NATIVE_MODES = ("auto", "on", "off")
SPECULATIVE = ("none", "ngram", "mtp")
SPEC_STATES = ("replay", "slots")
DRAFT_POLICIES = ("adaptive", "fixed")
RING = 16
"""Steps of inputs that `replay` keeps for each sequence: more would cost more to go through than a state to write."""
ACTIVATIONS = ("relu2", "relu", "silu", "gelu", "gelu_pytorch_tanh")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of the model, in elements. `ValueError` names the field, and both numbers where two disagree."""

    pattern: str
    """One letter for each layer, in order."""
    vocab_size: int
    hidden_size: int
    tie_word_embeddings: bool = False
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = False
    """Keeps the residual stream in float32 whatever the compute dtype is."""
    max_position_embeddings: int = 4096
    """Only the length the model was trained for: there are no positions in it."""

    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    """`None` means as many as query heads."""
    head_dim: int = 128
    attention_bias: bool = False
    """Biases of q, k, v and o are used where the checkpoint has them."""

    intermediate_size: int = 21504
    mlp_hidden_act: str = "relu2"
    mlp_bias: bool = False

    ssm_state_size: int = 128
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    mamba_hidden_act: str = "silu"
    n_groups: int = 8
    conv_kernel: int = 4
    chunk_size: int = 128
    """Length of the chunks of the scan; a power of two. It changes rounding, never the result."""
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    """The only clamp put on dt after the softplus."""
    use_conv_bias: bool = True
    use_bias: bool = False
    """Biases of the Mamba input and output projections."""

    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: int | None = None
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    num_nextn_predict_layers: int = 0
    mtp_pattern: str = "*E"

    def __post_init__(self) -> None:
        _require(len(self.pattern) > 0, "pattern is empty: at least one layer is needed")
        unknown = sorted(set(self.pattern + self.mtp_pattern) - set(LAYER_KINDS))
        _require(not unknown, f"pattern {self.pattern!r} has layer kinds {unknown}; known are {list(LAYER_KINDS)}")
        for name in ("vocab_size", "hidden_size"):
            self._positive(name)
        _require(self.layer_norm_epsilon > 0, f"layer_norm_epsilon must be above 0, not {self.layer_norm_epsilon}")
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        object.__setattr__(self, "time_step_limit", (float(self.time_step_limit[0]), float(self.time_step_limit[1])))
        _require(
            self.num_nextn_predict_layers >= 0,
            f"num_nextn_predict_layers must be at least 0, not {self.num_nextn_predict_layers}",
        )
        kinds = set(self.pattern)
        if self.num_nextn_predict_layers:
            _require(len(self.mtp_pattern) > 0, "mtp_pattern is empty: at least one layer is needed")
            kinds |= set(self.mtp_pattern)
        if "M" in kinds:
            self._check_mamba()
        if "*" in kinds:
            self._check_attention()
        if kinds & set("-E"):
            _require(
                self.mlp_hidden_act in ACTIVATIONS,
                f"mlp_hidden_act {self.mlp_hidden_act!r} is not one of {', '.join(ACTIVATIONS)}",
            )
        if "-" in kinds:
            self._positive("intermediate_size")
        if "E" in kinds:
            self._check_experts()

    def _positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            _require(value >= 1, f"{name} must be at least 1, not {value}")

    def _check_mamba(self) -> None:
        self._positive("ssm_state_size", "mamba_num_heads", "mamba_head_dim", "n_groups", "conv_kernel", "chunk_size")
        _require(
            self.mamba_num_heads % self.n_groups == 0,
            f"mamba_num_heads {self.mamba_num_heads} is not a multiple of n_groups {self.n_groups}",
        )
        _require(self.conv_kernel >= 2, f"conv_kernel must be at least 2, not {self.conv_kernel}")
        _require(
            self.chunk_size & (self.chunk_size - 1) == 0, f"chunk_size must be a power of two, not {self.chunk_size}"
        )
        low, high = self.time_step_limit
        _require(0 <= low <= high, f"time_step_limit must rise from 0 or above, not {low} to {high}")
        _require(
            self.mamba_hidden_act in ("silu", "swish"), f"mamba_hidden_act {self.mamba_hidden_act!r} is not 'silu'"
        )

    def _check_attention(self) -> None:
        self._positive("num_attention_heads", "kv_heads", "head_dim")
        _require(
            self.num_attention_heads % self.kv_heads == 0,
            f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads {self.kv_heads}",
        )

    def _check_experts(self) -> None:
        self._positive(
            "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size"
        )
        self._positive("n_group", "topk_group")
        latent = self.moe_latent_size
        _require(latent is None or latent >= 1, f"moe_latent_size must be at least 1, not {latent}")
        experts, groups, kept, chosen = self.n_routed_experts, self.n_group, self.topk_group, self.num_experts_per_tok
        _require(experts % groups == 0, f"n_routed_experts {experts} is not a multiple of n_group {groups}")
        _require(kept <= groups, f"topk_group {kept} is above n_group {groups}")
        available = kept * (experts // groups)
        _require(
            chosen <= available, f"num_experts_per_tok {chosen} is above the {available} experts of the kept groups"
        )

    # -- derived sizes -------------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return len(self.pattern)

    @property
    def kv_heads(self) -> int:
        assert self.num_key_value_heads is not None
        return self.num_key_value_heads

    @property
    def mamba_layers(self) -> int:
        return self.pattern.count("M")

    @property
    def attention_layers(self) -> int:
        return self.pattern.count("*")

    @property
    def mamba_inner(self) -> int:
        """Channels of the Mamba mixer's inner stream."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels that pass through the causal convolution: inner stream, B and C."""
        return self.mamba_inner + 2 * self.n_groups * self.ssm_state_size

    @property
    def ring_width(self) -> int:
        """What the recurrence of a Mamba layer takes in for each token: conv channels and dt."""
        return self.conv_dim + self.mamba_num_heads

    # -- weights -------------------------------------------------------------------------------------------------------

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor a checkpoint may hold for this model, `optional_weights` included."""
        weights: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (self.vocab_size, self.hidden_size)}
        for index, kind in enumerate(self.pattern):
            prefix = f"model.layers.{index}."
            weights[prefix + "norm.weight"] = (self.hidden_size,)
            for name, shape in self._mixer_weights(kind).items():
                weights[f"{prefix}mixer.{name}"] = shape
        weights["model.norm_f.weight"] = (self.hidden_size,)
        weights |= self.mtp_weights()
        if not self.tie_word_embeddings:
            weights["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return weights

    def optional_weights(self) -> frozenset[str]:
        """Names of `expected_weights` that a checkpoint may leave out."""
        return frozenset(
            name
            for name in self.expected_weights()
            if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias")) or name.startswith("mtp.")
        )

    def mtp_weights(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the heads that predict further tokens; empty for a model without them. Released ones have no
        biases.
        """
        if self.num_nextn_predict_layers < 1:
            return {}
        d, last = self.hidden_size, len(self.mtp_pattern) - 1
        weights: dict[str, tuple[int, ...]] = {
            "mtp.layers.0.enorm.weight": (d,),
            "mtp.layers.0.hnorm.weight": (d,),
            "mtp.layers.0.eh_proj.weight": (d, 2 * d),
        }
        for index, kind in enumerate(self.mtp_pattern):
            weights[f"mtp.layers.{index}.norm.weight"] = (d,)
            mixer = {
                name: shape for name, shape in self._mixer_weights(kind).items() if not name.endswith("_proj.bias")
            }
            weights |= {f"mtp.layers.{index}.mixer.{name}": shape for name, shape in mixer.items()}
        weights[f"mtp.layers.{last}.final_layernorm.weight"] = (d,)
        return weights

    def _mixer_weights(self, kind: str) -> dict[str, tuple[int, ...]]:
        if kind == "M":
            return self._mamba_weights()
        if kind == "*":
            return self._attention_weights()
        if kind == "-":
            return self._mlp_weights("", self.intermediate_size)
        return self._expert_weights()

    def _mamba_weights(self) -> dict[str, tuple[int, ...]]:
        d, inner, conv, heads = self.hidden_size, self.mamba_inner, self.conv_dim, self.mamba_num_heads
        weights: dict[str, tuple[int, ...]] = {
            "in_proj.weight": (inner + conv + heads, d),
            "conv1d.weight": (conv, 1, self.conv_kernel),
            "A_log": (heads,),
            "D": (heads,),
            "dt_bias": (heads,),
            "norm.weight": (inner,),
            "out_proj.weight": (d, inner),
        }
        if self.use_conv_bias:
            weights["conv1d.bias"] = (conv,)
        if self.use_bias:
            weights |= {"in_proj.bias": (inner + conv + heads,), "out_proj.bias": (d,)}
        return weights

    def _attention_weights(self) -> dict[str, tuple[int, ...]]:
        d, q, kv = self.hidden_size, self.num_attention_heads * self.head_dim, self.kv_heads * self.head_dim
        weights: dict[str, tuple[int, ...]] = {
            "q_proj.weight": (q, d),
            "k_proj.weight": (kv, d),
            "v_proj.weight": (kv, d),
            "o_proj.weight": (d, q),
        }
        if self.attention_bias:
            weights |= {"q_proj.bias": (q,), "k_proj.bias": (kv,), "v_proj.bias": (kv,), "o_proj.bias": (d,)}
        return weights

    def _mlp_weights(self, prefix: str, width: int) -> dict[str, tuple[int, ...]]:
        weights: dict[str, tuple[int, ...]] = {
            prefix + "up_proj.weight": (width, self.hidden_size),
            prefix + "down_proj.weight": (self.hidden_size, width),
        }
        if self.mlp_bias:
            weights |= {prefix + "up_proj.bias": (width,), prefix + "down_proj.bias": (self.hidden_size,)}
        return weights

    def _expert_weights(self) -> dict[str, tuple[int, ...]]:
        experts, width = self.n_routed_experts, self.moe_intermediate_size
        outer = self.moe_latent_size or self.hidden_size
        weights: dict[str, tuple[int, ...]] = {
            "gate.weight": (experts, self.hidden_size),
            "gate.e_score_correction_bias": (experts,),
            "experts.up_proj": (experts, width, outer),
            "experts.down_proj": (experts, outer, width),
            **self._mlp_weights("shared_experts.", self.moe_shared_expert_intermediate_size),
        }
        if self.moe_latent_size is not None:
            weights["fc1_latent_proj.weight"] = (outer, self.hidden_size)
            weights["fc2_latent_proj.weight"] = (self.hidden_size, outer)
            if self.mlp_bias:
                weights |= {"fc1_latent_proj.bias": (outer,), "fc2_latent_proj.bias": (self.hidden_size,)}
        return weights


@dataclass(frozen=True)
class DecoderOptions:
    """How the decoder runs. What `None` stands for is worked out by the runner, never written back into this."""

    dtype: torch.dtype = torch.float32
    """Dtype of weights, activations, KV pages and conv windows."""
    device: str = "cpu"
    max_seqs: int = 16
    """Requests that may run at the same time."""
    max_len: int = 4096
    """Tokens of prompt and output together that one request may have."""
    max_batched_tokens: int = 2048
    """Tokens of one step, over all requests."""
    max_chunk: int | None = None
    """Prompt tokens that one request may compute in one step; `None`: no limit but `max_batched_tokens`."""
    memory_bytes: int | None = None
    """Size of the state arena; `None`: what `max_seqs` requests of `max_len` need, at most `memory_share` of the
    memory.
    """
    memory_share: float = 0.5
    """Share of the machine's memory that a default arena may take."""
    host_bytes: int | None = None
    """Host memory for the exact state of preempted requests; `None`: a quarter of the arena."""
    state_dtype: torch.dtype = torch.float32
    """Dtype of the SSM states."""
    page_size: int = 16
    """Tokens of one KV page."""
    weights: str | None = None
    """Weights of the linear layers: `None` in `dtype`, `int8` (a scale for each output) or `int4` (one for each 128
    inputs), quantised as they are read where the checkpoint has not done it.
    """
    native: str = "auto"
    """Compiled code for whole decode steps on a CPU: `auto` where it can be built, `on` (a `ValueError` with the reason
    where it cannot), `off`.
    """
    state_cache: str = "auto"
    """Where states are kept for later requests: `none`, `align` (the last boundary of `state_block`), `all` (every
    boundary) or `auto` (ends of images and of the system prompt, junctions, the last chunk, the end of an answer).
    """
    state_block: int | None = None
    """Tokens between boundaries, a multiple of `page_size`; `None`: the least common multiple of page and chunk."""
    ageing: int = 256
    """Steps that one level of priority is worth: a request goes before those a level above it that come so much later.
    """
    graphs: str = "auto"
    """`on`: every step that a captured size holds is a replay; `off`: none is; `auto`: `on` where there is a GPU. On a
    CPU a replay is the same function on padded buffers, which tests want and nobody else.
    """
    overlap: str = "auto"
    """`on`: a step is prepared and launched before the results of the one before it are read, wherever nothing of them
    has to be known on the host; `off`: never; `auto`: `on` where there is a GPU. On a CPU nothing runs meanwhile.
    """
    max_capture: int = 512
    """Largest captured size, in tokens and in requests; `max_batched_tokens` and `max_seqs` bound it too."""
    speculative: str = "none"
    """Who drafts tokens that a step then verifies: `none`, `ngram` (what followed the same tokens before) or `mtp` (the
    checkpoint's own heads).
    """
    draft_tokens: int = 3
    """Drafts of one step and request at most."""
    spec_state: str = "replay"
    """How a state is taken back behind a refused draft: `replay` keeps one slot and the last inputs, `slots` one slot
    for each token of a step.
    """
    draft_policy: str = "adaptive"
    """`adaptive`: as many drafts as have been worth their time, none where drafting loses; `fixed`: always
    `draft_tokens`.
    """

    def __post_init__(self) -> None:
        for name in ("max_seqs", "max_len", "max_batched_tokens", "page_size", "ageing"):
            value = getattr(self, name)
            _require(value >= 1, f"{name} must be at least 1, not {value}")
        _require(self.max_len >= 2, f"max_len must be at least 2 (one prompt and one output token), not {self.max_len}")
        _require(self.max_chunk is None or self.max_chunk >= 1, f"max_chunk must be at least 1, not {self.max_chunk}")
        _require(
            self.memory_bytes is None or self.memory_bytes >= 1,
            f"memory_bytes must be at least 1, not {self.memory_bytes}",
        )
        _require(
            self.host_bytes is None or self.host_bytes >= 0, f"host_bytes must be at least 0, not {self.host_bytes}"
        )
        _require(0 < self.memory_share <= 1, f"memory_share must be above 0 and at most 1, not {self.memory_share}")
        _require(
            self.state_cache in STATE_MODES,
            f"state_cache {self.state_cache!r} is not one of {', '.join(STATE_MODES)}",
        )
        _require(
            self.weights in (None, *WEIGHT_KINDS), f"weights {self.weights!r} is not one of {', '.join(WEIGHT_KINDS)}"
        )
        _require(self.native in NATIVE_MODES, f"native {self.native!r} is not one of {', '.join(NATIVE_MODES)}")
        block = self.state_block
        _require(
            block is None or (block >= 1 and block % self.page_size == 0),
            f"state_block {block} is not a multiple of page_size {self.page_size}",
        )
        _require(self.graphs in GRAPH_MODES, f"graphs {self.graphs!r} is not one of {', '.join(GRAPH_MODES)}")
        _require(self.max_capture >= 1, f"max_capture must be at least 1, not {self.max_capture}")
        for name, known in (
            ("overlap", OVERLAP_MODES),
            ("speculative", SPECULATIVE),
            ("spec_state", SPEC_STATES),
            ("draft_policy", DRAFT_POLICIES),
        ):
            value = getattr(self, name)
            _require(value in known, f"{name} {value!r} is not one of {', '.join(known)}")
        most = RING - 1
        _require(
            1 <= self.draft_tokens <= most,
            f"draft_tokens must be at least 1 and at most {most}, not {self.draft_tokens}",
        )
        _require(self.dtype.is_floating_point, f"dtype must be a floating type, not {self.dtype}")
        _require(self.state_dtype.is_floating_point, f"state_dtype must be a floating type, not {self.state_dtype}")

    @property
    def graphs_on(self) -> bool:
        """What `graphs` comes to on this device."""
        return self.graphs == "on" or (self.graphs == "auto" and torch.device(self.device).type != "cpu")

    @property
    def overlap_on(self) -> bool:
        """What `overlap` comes to on this device."""
        return self.overlap == "on" or (self.overlap == "auto" and torch.device(self.device).type != "cpu")

    @property
    def num_drafts(self) -> int:
        """Drafts of one step and request at most; 0 where nothing drafts."""
        return 0 if self.speculative == "none" else self.draft_tokens

    @property
    def slots_per_seq(self) -> int:
        """State slots that a running request holds: under `slots` one for each token that a step may have."""
        return 1 + self.num_drafts if self.spec_state == "slots" else 1
