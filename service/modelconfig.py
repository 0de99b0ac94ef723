"""`config.json` and its neighbours -> the typed configurations of the two runners.

Two generations of field names are in circulation: the ones that transformers writes (`text_config`,
`vision_hidden_size`, `image_token_id`, `layers_block_type`) and the ones in NVIDIA's released files (`llm_config`,
`vit_hidden_size`, `img_context_token_id`, `hybrid_override_pattern`, `vision_config.args`). Both are read; where a
file carries both, the current name wins."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoder.config import WEIGHT_KINDS, DecoderConfig
from encoder.config import CLIP_MEAN, CLIP_STD, VisionConfig

SERVED_MODEL_TYPES = ("nemotron_h_omni", "nemotron_h")
# What released Omni files, which predate the upstream model type, call themselves.
_MODEL_TYPE_ALIASES = {
    "NemotronH_Nano_Omni_Reasoning_V3": "nemotron_h_omni",
    "NemotronH_Omni_Reasoning_V3": "nemotron_h_omni",
}
_LAYER_LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
# timm names used by `vision_config.args.model` -> (width, layers, heads)
_VIT_SIZES = {
    "vit_tiny": (192, 12, 3),
    "vit_small": (384, 12, 6),
    "vit_base": (768, 12, 12),
    "vit_large": (1024, 24, 16),
    "vit_huge": (1280, 32, 16),
}
# Names that older files and transformers' own keyword aliases use -> the name in DecoderConfig.
_TEXT_ALIASES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
    "attention_head_dim": "head_dim",
    "rms_norm_eps": "layer_norm_epsilon",
    "num_local_experts": "n_routed_experts",
}


WEIGHTS_KEY, WEIGHTS_FORMAT = "saccade_weights", 1
"""Entry of config.json that says how linear layers are stored, and the version of it that is written and read."""


class CheckpointError(ValueError):
    """A model directory that cannot be served; the message names the file or field and what would work."""


@dataclass(frozen=True)
class ModelConfig:
    """All that is read from a model directory but the weights."""

    path: Path
    name: str
    """What clients call the model: the directory's name, `demo`, or the hub id."""
    model_type: str
    dtype: str
    """The dtype the checkpoint declares, `bfloat16` or `float32`."""
    decoder: DecoderConfig
    vision: VisionConfig | None
    """None for text-only models."""
    image_token_id: int | None
    eos_token_ids: frozenset[int]
    generation: Mapping[str, Any] = field(default_factory=dict)
    """`generation_config.json`: sampling defaults for fields that a request leaves unset."""
    weights: str | None = None
    """How the checkpoint stores the decoder's linear layers: `int8`, `int4`, or None for plain tensors."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; `{"__float__": "Infinity"}`, as released configs write infinities, becomes a float."""

    def unwrap(item: dict[str, Any]) -> Any:
        return float(item["__float__"]) if set(item) == {"__float__"} else item

    try:
        value = json.loads(path.read_text("utf-8"), object_hook=unwrap)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} holds no {path.name}: it is not a model directory") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _first(source: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The first of `names` that the file sets to something."""
    for name in names:
        if source.get(name) is not None:
            return source[name]
    return default


def layer_pattern(text: Mapping[str, Any]) -> str:
    """The layer kinds as a string over `M*-E`, from either way of writing them."""
    if (kinds := _first(text, "layers_block_type", "layer_types")) is not None:
        unknown = sorted({kind for kind in kinds if kind not in _LAYER_LETTERS})
        if unknown:
            raise CheckpointError(f"layers_block_type holds {unknown}; known kinds are {sorted(_LAYER_LETTERS)}")
        return "".join(_LAYER_LETTERS[kind] for kind in kinds)
    pattern = str(_first(text, "hybrid_override_pattern", default=""))
    if not pattern or set(pattern) - set("M*-E"):
        raise CheckpointError(
            f"config.json must give layers_block_type or a hybrid_override_pattern over 'M*-E', got {pattern!r}"
        )
    return pattern


def mtp_pattern(text: Mapping[str, Any]) -> str | None:
    """The layer kinds of the heads that predict further tokens, from either way of writing them; None where unset."""
    if (kinds := text.get("mtp_layers_block_type")) is not None:
        unknown = sorted({str(kind) for kind in kinds if kind not in _LAYER_LETTERS})
        if unknown:
            raise CheckpointError(f"mtp_layers_block_type holds {unknown}; known kinds are {sorted(_LAYER_LETTERS)}")
        return "".join(_LAYER_LETTERS[kind] for kind in kinds)
    return None if text.get("mtp_hybrid_override_pattern") is None else str(text["mtp_hybrid_override_pattern"])


def decoder_config(text: Mapping[str, Any]) -> DecoderConfig:
    """The text part of a config -> DecoderConfig. Unset fields take the defaults of the model family."""
    from dataclasses import MISSING, fields

    known = {f.name: f for f in fields(DecoderConfig)}
    values: dict[str, Any] = {"pattern": layer_pattern(text)}
    for source, target in _TEXT_ALIASES.items():
        if text.get(source) is not None:
            values[target] = text[source]
    values |= {name: text[name] for name in known if text.get(name) is not None}
    if (pattern := mtp_pattern(text)) is not None:
        values["mtp_pattern"] = pattern
    if text.get("num_key_value_heads") is None and "num_attention_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if "time_step_limit" in values:
        low, high = values["time_step_limit"]
        values["time_step_limit"] = (float(low), math.inf if high is None else float(high))
    for name in ("mlp_hidden_act", "mamba_hidden_act"):
        expected = "relu2" if name.startswith("mlp") else "silu"
        if text.get(name, expected) != expected:
            raise CheckpointError(f"config.json: {name} is {text[name]!r}; this family is served with {expected!r}")
    if text.get("sliding_window") is not None:
        raise CheckpointError("config.json: sliding_window is set; sliding-window attention is not served")
    missing = sorted(
        f.name for f in known.values() if f.default is MISSING and f.default_factory is MISSING and f.name not in values
    )
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")
    try:
        return DecoderConfig(**values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: {error}") from None


def vision_config(config: Mapping[str, Any], text: DecoderConfig, preprocessor: Mapping[str, Any]) -> VisionConfig:
    """The vision part of a config plus `preprocessor_config.json` -> VisionConfig."""
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    args: Mapping[str, Any] = vision.get("args") or {}
    width, layers, heads = _VIT_SIZES["vit_huge"]
    if (timm_name := args.get("model")) is not None:
        size = "_".join(str(timm_name).split("_")[:2])
        if size not in _VIT_SIZES:
            raise CheckpointError(f"vision_config.args.model {timm_name!r} is not one of {sorted(_VIT_SIZES)}")
        width, layers, heads = _VIT_SIZES[size]
    hidden = int(_first(vision, "hidden_size", default=width))
    claimed = int(_first(config, "vision_hidden_size", "vit_hidden_size", default=hidden))
    if claimed != hidden:
        raise CheckpointError(f"vision_hidden_size ({claimed}) and vision_config.hidden_size ({hidden}) must be equal")
    cls_tokens, registers = _prefix_tokens(vision, args)
    downsample = float(_first(config, "downsample_ratio", default=0.5))
    if not 0 < downsample <= 1 or (1 / downsample) % 1:
        raise CheckpointError(f"downsample_ratio {downsample} must be the reciprocal of a whole number, such as 0.5")
    inner = int(hidden * float(_first(vision, "mlp_ratio", default=4.0)))
    swiglu = bool(_first(vision, "use_swiglu_ffn", default=False))

    def setting(name: str, default: Any) -> Any:
        """Preprocessing settings: the processor's own file first, then the places released configs put them."""
        return _first(preprocessor, name, default=_first(vision, name, default=_first(args, name, default=default)))

    mean = _first(preprocessor, "image_mean", "norm_mean", default=_first(config, "norm_mean")) or CLIP_MEAN
    std = _first(preprocessor, "image_std", "norm_std", default=_first(config, "norm_std")) or CLIP_STD
    try:
        return VisionConfig(
            hidden_size=hidden,
            num_layers=int(_first(vision, "num_hidden_layers", default=layers)),
            num_heads=int(_first(vision, "num_attention_heads", default=heads)),
            intermediate_size=VisionConfig.swiglu_size(inner) if swiglu else inner,
            hidden_act=str(_first(vision, "hidden_act", default="gelu")),
            use_swiglu_ffn=swiglu,
            qkv_bias=bool(_first(vision, "qkv_bias", default=True)),
            layer_norm_eps=float(_first(vision, "layer_norm_eps", default=1e-6)),
            layerscale_value=float(_first(vision, "layerscale_value", default=1.0)),
            patch_size=int(_first(vision, "patch_size", default=_first(config, "patch_size", default=16))),
            max_img_size=int(_first(vision, "max_img_size", default=_first(args, "cpe_max_size", default=2048))),
            num_cls_tokens=cls_tokens,
            num_registers=registers,
            video_temporal_patch_size=_video_patch(config, vision),
            video_target_num_patches=int(setting("video_target_num_patches", 1024)),
            video_maintain_aspect_ratio=bool(setting("video_maintain_aspect_ratio", True)),
            video_pruning_rate=float(_first(config, "video_pruning_rate", default=0.0)),
            min_num_patches=int(setting("min_num_patches", 1024)),
            max_num_patches=int(setting("max_num_patches", 13312)),
            max_model_len=int(setting("max_model_len", 16384)),
            image_mean=_triple(mean),
            image_std=_triple(std),
            merge_size=round(1 / downsample),
            projector_hidden_size=int(_first(config, "projector_hidden_size", default=4096)),
            text_hidden_size=text.hidden_size,
            final_layernorm=text.num_nextn_predict_layers > 0,
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"vision_config: {error}") from None


def _triple(values: Any) -> tuple[float, float, float]:
    red, green, blue = (float(v) for v in values)
    return red, green, blue


def _video_patch(config: Mapping[str, Any], vision: Mapping[str, Any]) -> int | None:
    value = _first(vision, "video_temporal_patch_size", default=_first(config, "video_temporal_patch_size", default=2))
    return None if value is None else int(value)


def _prefix_tokens(vision: Mapping[str, Any], args: Mapping[str, Any]) -> tuple[int, int]:
    """Class and register tokens per image: given outright, or by RADIO's rule of one class token per distinct teacher
    and registers filling up to a multiple."""
    cls_tokens, registers = 3, 7
    if "teachers" in args:
        teachers = args["teachers"] or []
        per_teacher = args.get("cls_token_per_teacher", True)
        cls_tokens = len({str(t.get("name", i)) for i, t in enumerate(teachers)}) if per_teacher else 1
        cls_tokens = max(cls_tokens, 1)
    if args.get("register_multiple"):
        registers = int(args["register_multiple"]) - cls_tokens % int(args["register_multiple"])
    elif args.get("cpe_num_registers"):
        registers = int(args["cpe_num_registers"])
    return (
        int(_first(vision, "num_cls_tokens", default=cls_tokens)),
        int(_first(vision, "num_registers", default=registers)),
    )


def _declared_dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    value = _first(config, "dtype", "torch_dtype", default=_first(text, "dtype", "torch_dtype", default="bfloat16"))
    return "float32" if str(value).endswith("float32") else "bfloat16"


def _eos_ids(*sources: Mapping[str, Any]) -> frozenset[int]:
    for source in sources:
        if (value := source.get("eos_token_id")) is not None:
            return frozenset(int(v) for v in (value if isinstance(value, list) else [value]))
    return frozenset()


def _weights_kind(path: Path, config: Mapping[str, Any]) -> str | None:
    entry = config.get(WEIGHTS_KEY)
    if entry is None:
        return None
    found = entry.get("format") if isinstance(entry, dict) else entry
    if found != WEIGHTS_FORMAT:
        raise CheckpointError(
            f"{path}: {WEIGHTS_KEY} has format {found!r} and this server reads {WEIGHTS_FORMAT}; "
            "quantise the original again"
        )
    if entry.get("kind") not in WEIGHT_KINDS:
        raise CheckpointError(
            f"{path}: {WEIGHTS_KEY} kind {entry.get('kind')!r} is not one of {', '.join(WEIGHT_KINDS)}"
        )
    return str(entry["kind"])


def load_config(path: Path, *, name: str | None = None) -> ModelConfig:
    """Reads a model directory's JSON files. Raises CheckpointError with the field at fault."""
    config = read_json(path / "config.json")
    model_type = str(config.get("model_type") or (config.get("architectures") or [""])[0])
    model_type = _MODEL_TYPE_ALIASES.get(model_type, model_type)
    if model_type not in SERVED_MODEL_TYPES:
        raise CheckpointError(f"model_type {model_type!r} is not served; served are {', '.join(SERVED_MODEL_TYPES)}")
    omni = model_type == "nemotron_h_omni"
    text = _first(config, "text_config", "llm_config", default={}) if omni else config
    decoder = decoder_config(text)
    preprocessor = _optional_json(path / "preprocessor_config.json")
    if "image_processor" in preprocessor:  # processor_config.json style nesting
        preprocessor = preprocessor["image_processor"]
    generation = _optional_json(path / "generation_config.json")
    image_token = _first(config, "image_token_id", "img_context_token_id") if omni else None
    return ModelConfig(
        path=path,
        name=name or path.resolve().name,
        model_type=model_type,
        dtype=_declared_dtype(config, text),
        decoder=decoder,
        vision=vision_config(config, decoder, preprocessor) if omni else None,
        image_token_id=None if image_token is None else int(image_token),
        eos_token_ids=_eos_ids(generation, config, text),
        generation=generation,
        weights=_weights_kind(path, config),
    )
