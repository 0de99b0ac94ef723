"""Reads the `nemotron_h` part of `config.json`.

Two generations of field names are in use: transformers writes `layers_block_type`, NVIDIA's released files have
`hybrid_override_pattern`. Both are read; where a file has both, transformers' name wins. Where a file has a field and
its alias in transformers, the alias wins, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from decoder.config import DecoderConfig
from decoder.layers.descriptions import Attention, Experts, Mlp
from decoder.layers.recurrent_descriptions import Mamba2
from decoder.layers.spec import Layer, MixerSpec
from families.family import FamilyConfig, ModelFiles
from families.fields import check_types, count, only, required, time_steps
from families.files import CheckpointError, checkpoint_errors, first

LAYER_KINDS = "M*-E"
KV_HEADS = 8
"""Key and value heads of files without the field; null means as many as query heads."""
_LAYER_LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
# transformers' aliases -> the name in NemotronHConfig.
_ALIASES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
    "num_local_experts": "n_routed_experts",
}


@dataclass(frozen=True)
class NemotronHConfig:
    """Sizes of the model, in elements. Fields are named as in `config.json`. Raises `ValueError` naming the field, and
    both values if two disagree."""

    pattern: str
    """One letter for each layer, in order: `M` Mamba-2, `*` attention, `-` MLP, `E` mixture of experts."""
    vocab_size: int
    hidden_size: int
    tie_word_embeddings: bool = False
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = False
    """Whether the residual stream is float32 whatever the compute dtype."""
    max_position_embeddings: int = 4096
    """The context length of training. The model has no positions, so it is not a limit."""

    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    """`None` means as many as query heads."""
    head_dim: int = 128
    attention_bias: bool = False
    """Whether q, k, v and o have biases; they are used if the checkpoint has them."""

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
    """Tokens per chunk of the scan; a power of two. It affects rounding only."""
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    """Bounds that dt is clamped to after the softplus."""
    use_conv_bias: bool = True
    use_bias: bool = False
    """Whether the Mamba input and output projections have biases."""

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

    @cached_property
    def decoder(self) -> DecoderConfig:
        """The decoder's layers."""
        unknown = sorted(set(self.pattern + self.mtp_pattern) - set(LAYER_KINDS))
        if unknown:
            raise ValueError(f"pattern {self.pattern!r} has layer kinds {unknown}; known are {list(LAYER_KINDS)}")
        if self.num_nextn_predict_layers < 0:
            raise ValueError(f"num_nextn_predict_layers must be at least 0, not {self.num_nextn_predict_layers}")
        if self.num_nextn_predict_layers and not self.mtp_pattern:
            raise ValueError("mtp_pattern is empty: at least one layer is needed")
        if not self.pattern:
            raise ValueError("pattern is empty: at least one layer is needed")
        # Layers are checked when they are made, including those of the multi-token prediction heads.
        makers = {"M": self._mamba, "*": self._attention, "-": self._mlp, "E": self._experts}
        heads = self.mtp_pattern if self.num_nextn_predict_layers > 0 else ""
        made = {kind: makers[kind]() for kind in sorted(set(self.pattern + heads))}
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=tuple(Layer((("mixer", made[kind]),)) for kind in self.pattern),
            norm_eps=self.layer_norm_epsilon,
            tie_word_embeddings=self.tie_word_embeddings,
            residual_in_fp32=self.residual_in_fp32,
            max_position_embeddings=self.max_position_embeddings,
            mtp=tuple(made[kind] for kind in heads),
        )

    def _mamba(self) -> MixerSpec:
        if self.mamba_hidden_act not in ("silu", "swish"):
            raise ValueError(f"mamba_hidden_act {self.mamba_hidden_act!r} is not 'silu'")
        return Mamba2(
            hidden_size=self.hidden_size,
            mamba_num_heads=self.mamba_num_heads,
            mamba_head_dim=self.mamba_head_dim,
            n_groups=self.n_groups,
            ssm_state_size=self.ssm_state_size,
            conv_kernel=self.conv_kernel,
            chunk_size=self.chunk_size,
            time_step_limit=self.time_step_limit,
            use_conv_bias=self.use_conv_bias,
            use_bias=self.use_bias,
            norm_eps=self.layer_norm_epsilon,
        )

    def _attention(self) -> MixerSpec:
        return Attention(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            attention_bias=self.attention_bias,
        )

    def _mlp(self) -> MixerSpec:
        return Mlp(self.hidden_size, self.intermediate_size, self.mlp_hidden_act, mlp_bias=self.mlp_bias)

    def _experts(self) -> MixerSpec:
        return Experts(
            hidden_size=self.hidden_size,
            n_routed_experts=self.n_routed_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            moe_intermediate_size=self.moe_intermediate_size,
            moe_shared_expert_intermediate_size=self.moe_shared_expert_intermediate_size,
            moe_latent_size=self.moe_latent_size,
            mlp_hidden_act=self.mlp_hidden_act,
            mlp_bias=self.mlp_bias,
            n_group=self.n_group,
            topk_group=self.topk_group,
            norm_topk_prob=self.norm_topk_prob,
            routed_scaling_factor=self.routed_scaling_factor,
        )


def _letters(kinds: Any, field: str) -> str:
    """A list of layer kinds as letters. Raises CheckpointError."""
    if not isinstance(kinds, list):
        raise CheckpointError(f"config.json: {field} must be a list of the kinds of layers, not {kinds!r}")
    if unknown := sorted({str(kind) for kind in kinds if str(kind) not in _LAYER_LETTERS}):
        raise CheckpointError(f"config.json: {field} holds {unknown}; known kinds are {sorted(_LAYER_LETTERS)}")
    return "".join(_LAYER_LETTERS[kind] for kind in kinds)


def layer_pattern(text: Mapping[str, Any]) -> str:
    """The layer kinds as a string over `LAYER_KINDS`, from either spelling."""
    for name in ("layer_types", "layers_block_type"):
        if text.get(name) is not None:
            return _letters(text[name], name)
    pattern = str(first(text, "hybrid_override_pattern", default=""))
    if not pattern or set(pattern) - set(LAYER_KINDS):
        raise CheckpointError(
            f"config.json must give layers_block_type or a hybrid_override_pattern over {LAYER_KINDS!r}, "
            f"got {pattern!r}"
        )
    return pattern


def mtp_pattern(text: Mapping[str, Any]) -> str | None:
    """The layer kinds of the multi-token prediction heads, from either spelling; None if unset."""
    if (kinds := text.get("mtp_layers_block_type")) is not None:
        return _letters(kinds, "mtp_layers_block_type")
    return None if text.get("mtp_hybrid_override_pattern") is None else str(text["mtp_hybrid_override_pattern"])


def decoder_config(text: Mapping[str, Any]) -> DecoderConfig:
    """Reads the text part of a configuration. Raises CheckpointError naming the field at fault."""
    return published_config(text).decoder


def published_config(text: Mapping[str, Any]) -> NemotronHConfig:
    """The fields of the text part of a configuration; unset ones have the family's defaults. Raises CheckpointError."""
    pattern = layer_pattern(text)
    for name, served in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu"), ("is_causal", True)):
        only(text, name, served)
    if text.get("sliding_window") is not None:
        raise CheckpointError("config.json: sliding_window is set; sliding-window attention is not served")
    required(text, "hidden_size", "vocab_size")
    # Fields of the description -> what the file calls them, where that is something else.
    names = {name: alias for alias, name in _ALIASES.items() if text.get(alias) is not None}
    if text.get("head_dim") is None and text.get("attention_head_dim") is not None:  # in older files
        names["head_dim"] = "attention_head_dim"
    values: dict[str, Any] = {} if "num_key_value_heads" in text else {"num_key_value_heads": KV_HEADS}
    for field in fields(NemotronHConfig):
        if (value := text.get(names.get(field.name, field.name))) is not None:
            values[field.name] = value
    values["pattern"] = pattern
    if (mtp := mtp_pattern(text)) is not None:
        values["mtp_pattern"] = mtp
    values["time_step_limit"] = time_steps(text, names.get("time_step_limit", "time_step_limit"))
    names["norm_eps"] = "layer_norm_epsilon"
    check_types(NemotronHConfig, values, names)
    count(values, "max_position_embeddings", NemotronHConfig.max_position_embeddings)
    with checkpoint_errors("config.json", names):
        config = NemotronHConfig(**values)
        assert config.decoder  # checks the layers
        return config


def read_config(files: ModelFiles) -> FamilyConfig:
    """Reads a text-only model directory. Raises CheckpointError naming the field at fault."""
    return FamilyConfig(files.config, decoder_config(files.config))
