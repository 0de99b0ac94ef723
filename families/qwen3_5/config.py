"""`config.json` -> `DecoderConfig`. Reference: transformers, models/qwen3_5/modeling_qwen3_5.py and qwen3_5_moe.

Vision-language models have the decoder's fields in `text_config`, text-only models at the top level.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from decoder.config import DecoderConfig
from decoder.layers.descriptions import Attention, Experts, Mlp
from decoder.layers.recurrent_descriptions import GatedDelta
from decoder.layers.spec import Layer, MixerSpec
from families import fields
from families.family import FamilyConfig, ModelFiles
from families.files import CheckpointError, checkpoint_errors, first, token_id
from families.qwen3_5.vision import read_vision
from kernels.rope import Rope

SECTIONS = (11, 11, 10)
"""Default number of frequencies of the time, row and column axes."""
IMAGE_TOKEN, VIDEO_TOKEN = 248056, 248057
"""Default placeholders of images and of clips."""
ROTATED = 0.25
"""Default share of each head that is rotated."""


def read_config(files: ModelFiles, *, moe: bool) -> FamilyConfig:
    """Reads the configuration of a model directory. Raises CheckpointError naming the field at fault."""
    config = files.config
    text = fields.section(config, "text_config") or config
    vision = {} if fields.flag(config, "language_model_only") else fields.section(config, "vision_config")
    _check_type(text, "text_config", "text", moe=moe)
    _check_type(vision, "vision_config", "vision", moe=moe)
    tied = fields.flag(config, "tie_word_embeddings", fields.flag(text, "tie_word_embeddings"))
    decoder = decoder_config(text, moe=moe, tied=tied, axes=3 if vision else 1)
    if not vision:
        return FamilyConfig(text, decoder)
    tokens = [
        token_id(name, first(config, name, default=default), decoder.vocab_size)
        for name, default in (("image_token_id", IMAGE_TOKEN), ("video_token_id", VIDEO_TOKEN))
    ]
    if tokens[0] == tokens[1]:
        raise CheckpointError(f"config.json: image_token_id and video_token_id are both {tokens[0]}")
    return FamilyConfig(text, decoder, read_vision(vision, decoder.hidden_size, files), *tokens)


def decoder_config(
    text: Mapping[str, Any],
    *,
    moe: bool = False,
    tied: bool = False,
    axes: int = 1,
    dense: Collection[int] | None = None,
) -> DecoderConfig:
    """Reads the decoder's fields. `moe`: experts instead of MLPs, except in the published layers `dense`; None: files
    may not ask for any. `axes`: number of axes of positions, 3 for models with images, whose tokens have a row and a
    column. Raises CheckpointError."""
    with checkpoint_errors("config.json"):
        if moe and dense is None:
            fields.only(text, "decoder_sparse_step", 1)
            fields.only(text, "mlp_only_layers", [])
        return _decoder_config(text, moe, tied, axes, dense or ())


def _decoder_config(text: Mapping[str, Any], moe: bool, tied: bool, axes: int, dense: Collection[int]) -> DecoderConfig:
    inner = ("intermediate_size",) if dense or not moe else ()
    fields.required(
        text, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", *inner
    )
    vocab, hidden = (fields.count(text, name) for name in ("vocab_size", "hidden_size"))
    layers = fields.count(text, "num_hidden_layers", most=fields.MOST_LAYERS)
    fields.only(text, "hidden_act", "silu")
    fields.only(text, "is_causal", True)
    fields.only(text, "attn_output_gate", True)
    fields.only(text, "use_sliding_window", False)
    if first(text, "output_gate_type", default="swish") not in ("swish", "silu"):
        raise CheckpointError(f"config.json: output_gate_type is {text['output_gate_type']!r}; 'swish' is served")
    eps = fields.number(text, "rms_norm_eps", 1e-6)
    attention = _attention(text, hidden, eps, axes)
    mixers: dict[str, MixerSpec] = {"mamba": _gated_delta(text, hidden, eps), "attention": attention}
    feed_forward = _experts(text, hidden) if moe else _mlp(text, hidden)
    found = []
    for index, kind in enumerate(_layer_kinds(text, layers)):
        follows = _mlp(text, hidden) if index in dense else feed_forward
        found += [Layer((("mixer", mixers[kind]),)), Layer((("mixer", follows),))]
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        layers=tuple(found),
        norm_eps=eps,
        tie_word_embeddings=tied,
        max_position_embeddings=fields.count(text, "max_position_embeddings", 32768),
        position_axes=axes,
        mtp=(attention, feed_forward) if _has_mtp(text) else (),
    )


def _check_type(section: Mapping[str, Any], name: str, part: str, *, moe: bool) -> None:
    """Raises CheckpointError if a section has another `model_type` than its own. The whole model's type is accepted
    too, because older files have it in sections."""
    whole = "qwen3_5_moe" if moe else "qwen3_5"
    found = first(section, "model_type", default=whole)
    if found not in (whole, f"{whole}_{part}"):
        raise CheckpointError(f"config.json: {name}.model_type is {found!r}; {whole}_{part} is served here")


def _layer_kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    if (kinds := text.get("layer_types")) is not None:
        return fields.layer_kinds(kinds, layers, "layer_types")
    interval = fields.count(text, "full_attention_interval", 4)
    return ["mamba" if (index + 1) % interval else "attention" for index in range(layers)]


def _gated_delta(text: Mapping[str, Any], hidden: int, eps: float) -> GatedDelta:
    with checkpoint_errors(fields.CONFIG, fields.DELTA_NAMES):
        return GatedDelta(
            hidden_size=hidden,
            num_key_heads=fields.count(text, "linear_num_key_heads", 16),
            num_value_heads=fields.count(text, "linear_num_value_heads", 32),
            key_head_dim=fields.count(text, "linear_key_head_dim", 128),
            value_head_dim=fields.count(text, "linear_value_head_dim", 128),
            conv_kernel=fields.count(text, "linear_conv_kernel_dim", 4),
            norm_eps=eps,
        )


def _attention(text: Mapping[str, Any], hidden: int, eps: float, axes: int) -> Attention:
    width = fields.count(text, "head_dim", 256, most=fields.WIDEST_HEAD)
    return Attention(
        hidden_size=hidden,
        num_attention_heads=fields.count(text, "num_attention_heads"),
        num_key_value_heads=fields.count(text, "num_key_value_heads"),
        head_dim=width,
        attention_bias=fields.flag(text, "attention_bias"),
        rope=_rope(text, width, axes),
        gate=True,
        qk_norm=eps,
    )


def _rope(text: Mapping[str, Any], width: int, axes: int) -> Rope:
    """Rotary positions of the first part of each head. With several axes, the frequencies' axes alternate, T H W T H W
    and so on; once H or W has used up its section, T takes its place."""
    parameters = fields.rope_parameters(text)
    fields.only(parameters, "mrope_interleaved", True)
    # Null is the whole head, as in transformers.
    outer = fields.share(text, "partial_rotary_factor", ROTATED, null=1.0)
    share = fields.share(parameters, "partial_rotary_factor", outer)
    plain = fields.rope(text, int(width * share), kinds=("default", "mrope"))
    sections = first(parameters, "mrope_section", default=SECTIONS)
    whole = isinstance(sections, list | tuple) and all(isinstance(n, int) and n >= 0 for n in sections)
    if not whole or len(sections) != 3:
        raise CheckpointError(f"config.json: mrope_section must be three counts of frequencies, not {sections!r}")
    if axes == 1:
        return plain
    taken = [0] * (plain.dims // 2)
    for axis in (1, 2):
        for index in range(axis, min(3 * sections[axis], len(taken)), 3):
            taken[index] = axis
    return Rope(plain.dims, plain.theta, tuple(taken))


def _mlp(text: Mapping[str, Any], hidden: int) -> Mlp:
    return Mlp(hidden, fields.count(text, "intermediate_size"), "silu", gated=True)


def _experts(text: Mapping[str, Any], hidden: int) -> Experts:
    fields.only(text, "norm_topk_prob", True)
    with checkpoint_errors(fields.CONFIG, fields.EXPERT_NAMES):
        return Experts(
            hidden_size=hidden,
            n_routed_experts=fields.count(text, "num_experts", 256),
            num_experts_per_tok=fields.count(text, "num_experts_per_tok", 8),
            moe_intermediate_size=fields.count(text, "moe_intermediate_size", 512),
            moe_shared_expert_intermediate_size=fields.count(text, "shared_expert_intermediate_size", 512),
            mlp_hidden_act="silu",
            gated=True,
            routing="softmax",
            shared_gate=True,
        )


def _has_mtp(text: Mapping[str, Any]) -> bool:
    """Whether the model has a multi-token prediction head."""
    layers = first(text, "mtp_num_hidden_layers", default=0)
    if layers not in (0, 1):
        raise CheckpointError(f"config.json: mtp_num_hidden_layers is {layers!r}; 0 and 1 are served")
    fields.only(text, "mtp_use_dedicated_embeddings", False)
    return bool(layers)
