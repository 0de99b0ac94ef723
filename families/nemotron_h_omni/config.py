"""Reads `config.json` and the processors' files of `nemotron_h_omni`.

Two generations of field names are in use: transformers writes `text_config`, `vision_hidden_size` and `image_token_id`;
NVIDIA's released files have `llm_config`, `vit_hidden_size`, `img_context_token_id` and `vision_config.args`. Both are
read; where a file has both, transformers' name wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decoder.config import DecoderConfig
from families.family import FamilyConfig, ModelFiles
from families.fields import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    CONFIG,
    MOST,
    MOST_LAYERS,
    TOWER_NAMES,
    check_processor,
    count,
    flag,
    number,
    per_channel,
    section,
)
from families.files import CheckpointError, checkpoint_errors, first, token_id
from families.nemotron_h.config import decoder_config
from families.nemotron_h_omni.vision import RadioVision

_IMAGE_FILE, _VIDEO_FILE = "preprocessor_config.json", "video_preprocessor_config.json"
# timm names used by `vision_config.args.model` -> (width, layers, heads)
_VIT_SIZES = {
    "vit_tiny": (192, 12, 3),
    "vit_small": (384, 12, 6),
    "vit_base": (768, 12, 12),
    "vit_large": (1024, 24, 16),
    "vit_huge": (1280, 32, 16),
}


def read_config(files: ModelFiles) -> FamilyConfig:
    """Reads the configuration of a model directory. Raises CheckpointError naming the field at fault."""
    text = section(files.config, "text_config", "llm_config")
    decoder = decoder_config(text)
    image_token = first(files.config, "image_token_id", "img_context_token_id")
    return FamilyConfig(
        text=text,
        decoder=decoder,
        vision=vision_config(files, decoder),
        image_token_id=None if image_token is None else token_id("image_token_id", image_token, decoder.vocab_size),
    )


def vision_config(files: ModelFiles, text: DecoderConfig) -> RadioVision:
    """Reads the vision part of `config.json` and the processors' settings. Raises CheckpointError."""
    config, vision = files.config, section(files.config, "vision_config")
    fields = radio_fields(files, text)
    with checkpoint_errors("vision_config", tower_names(vision)):
        found = RadioVision(
            **fields,
            video_temporal_patch_size=count(
                vision, "video_temporal_patch_size", count(config, "video_temporal_patch_size", 2)
            ),
            video_pruning_rate=pruning_rate(config),
            **_sizes(files, vision, section(vision, "args")),
        )
        _check_processors(files, found)
        return found


def radio_fields(files: ModelFiles, text: DecoderConfig) -> dict[str, Any]:
    """Reads the fields of the tower, of the projector and of the normalisation of pixels. Raises CheckpointError."""
    config, images = files.config, files.preprocessor
    vision = section(config, "vision_config")
    args = section(vision, "args")
    width, layers, heads = _VIT_SIZES["vit_huge"]
    if (timm_name := args.get("model")) is not None:
        size = "_".join(str(timm_name).split("_")[:2])
        if size not in _VIT_SIZES:
            raise CheckpointError(f"vision_config.args.model {timm_name!r} is not one of {sorted(_VIT_SIZES)}")
        width, layers, heads = _VIT_SIZES[size]
    hidden = count(vision, "hidden_size", width)
    name = "vit_hidden_size" if config.get("vision_hidden_size") is None else "vision_hidden_size"
    if (claimed := count(config, name, hidden)) != hidden:
        raise CheckpointError(f"{name} ({claimed}) and vision_config.hidden_size ({hidden}) must be equal")
    cls_tokens, registers = _prefix_tokens(vision, args)
    downsample = number(config, "downsample_ratio", 0.5)
    if not 0 < downsample <= 1 or (1 / downsample) % 1:
        raise CheckpointError(f"downsample_ratio {downsample} must be the reciprocal of a whole number, such as 0.5")
    ratio = number(vision, "mlp_ratio", 4.0)
    if not 1 <= hidden * ratio <= MOST:
        raise CheckpointError(f"vision_config.mlp_ratio {ratio:g} times hidden_size {hidden} must be from 1 to {MOST}")
    inner = int(hidden * ratio)
    swiglu = flag(vision, "use_swiglu_ffn")
    mean = first(images, "image_mean", "norm_mean", default=first(config, "norm_mean")) or CLIP_MEAN
    std = first(images, "image_std", "norm_std", default=first(config, "norm_std")) or CLIP_STD
    with checkpoint_errors("vision_config"):
        return {
            "hidden_size": hidden,
            "num_layers": count(vision, "num_hidden_layers", layers, most=MOST_LAYERS),
            "num_heads": count(vision, "num_attention_heads", heads),
            "intermediate_size": RadioVision.swiglu_size(inner) if swiglu else inner,
            "hidden_act": str(first(vision, "hidden_act", default="gelu")),
            "use_swiglu_ffn": swiglu,
            "qkv_bias": flag(vision, "qkv_bias", True),
            "layer_norm_eps": number(vision, "layer_norm_eps", 1e-6),
            "layerscale_value": number(vision, "layerscale_value", 1.0),
            "patch_size": count(vision, "patch_size", count(config, "patch_size", 16)),
            "max_img_size": count(vision, "max_img_size", count(args, "cpe_max_size", 2048)),
            "num_cls_tokens": cls_tokens,
            "num_registers": registers,
            "image_mean": per_channel(mean, "image_mean or norm_mean"),
            "image_std": per_channel(std, "image_std or norm_std"),
            "merge_size": round(1 / downsample),
            "projector_hidden_size": count(config, "projector_hidden_size", 4096),
            "text_hidden_size": text.hidden_size,
            "final_layernorm": bool(text.mtp),
        }


def tower_names(vision: Mapping[str, Any]) -> dict[str, str]:
    """Fields of `RadioVision` -> what the files call them."""
    names = {**TOWER_NAMES, "image_std": "image_std or norm_std"}
    return names if vision.get("max_img_size") is not None else {**names, "max_img_size": "cpe_max_size"}


def pruning_rate(config: Mapping[str, Any]) -> float:
    """The share of a video's rows that is dropped after the tower. Raises CheckpointError."""
    pruned = first(config, "video_pruning_rate", default=0) != 0
    return number(config, "video_pruning_rate", 1.0) if pruned else 0.0


def _check_processors(files: ModelFiles, config: RadioVision) -> None:
    """Raises CheckpointError if another setting in the processors' files differs from what this code does. ValueError
    if it has a value of a wrong type."""
    both = {"patch_size": config.patch_size, "downsample_ratio": 1 / config.merge_size}
    scaling = {"resample": BICUBIC, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
    check_processor(files.preprocessor, both | scaling, _IMAGE_FILE)
    videos = files.video_preprocessor
    check_processor({name: videos[name] for name in both if name in videos}, both, _VIDEO_FILE)  # it reads no others
    for name, used in (("norm_mean", config.image_mean), ("norm_std", config.image_std)):
        if (given := videos.get(name)) is not None and per_channel(given, name) != used:
            raise CheckpointError(
                f"{_VIDEO_FILE}: {name} is {given}, for images it is {list(used)}; both must be equal"
            )


def _sizes(files: ModelFiles, *sections: Mapping[str, Any]) -> dict[str, Any]:
    """Limits on the patches of an image and of a video's frame, of the processors' own files or else of the first of
    `sections`, which are parts of `config.json` in released files, that has the setting. Raises CheckpointError."""

    def settings(processor: Mapping[str, Any], *names: str) -> dict[str, Any]:
        return {
            name: next((s[name] for s in (processor, *sections) if s.get(name) is not None), None) for name in names
        }

    videos = settings(files.video_preprocessor, "video_target_num_patches", "video_maintain_aspect_ratio")
    if files.video_preprocessor.get("video_maintain_aspect_ratio", True) is None:
        videos["video_maintain_aspect_ratio"] = False  # null in a processor's file is off, as in transformers
    images = settings(files.preprocessor, "min_num_patches", "max_num_patches", "max_model_len")
    where = f"{CONFIG} or {_VIDEO_FILE}", f"{CONFIG} or {_IMAGE_FILE}"
    return {
        "video_target_num_patches": count(videos, "video_target_num_patches", 1024, file=where[0]),
        "video_maintain_aspect_ratio": flag(videos, "video_maintain_aspect_ratio", True, file=where[0]),
        "min_num_patches": count(images, "min_num_patches", 1024, file=where[1]),
        "max_num_patches": _or_zero(images, "max_num_patches", 13312, file=where[1]),
        "max_model_len": count(images, "max_model_len", 16384, file=where[1]),
    }


def _or_zero(text: Mapping[str, Any], name: str, default: int, *, file: str = CONFIG) -> int:
    """Like `count`, but 0 is allowed too."""
    value = text.get(name)
    return 0 if type(value) is int and value == 0 else count(text, name, default, file=file)


def _prefix_tokens(vision: Mapping[str, Any], args: Mapping[str, Any]) -> tuple[int, int]:
    """(class tokens, register tokens) per image: as given, or by RADIO's rule (one class token per distinct teacher,
    and registers that fill up to a multiple)."""
    cls_tokens, registers = 3, 7
    if "teachers" in args:
        teachers = args["teachers"] or []
        if not isinstance(teachers, list) or not all(isinstance(teacher, Mapping) for teacher in teachers):
            raise CheckpointError(f"{CONFIG}: vision_config.args.teachers must be a list of objects, not {teachers!r}")
        per_teacher = flag(args, "cls_token_per_teacher", True, null=False)
        cls_tokens = len({str(t.get("name", i)) for i, t in enumerate(teachers)}) if per_teacher else 1
        cls_tokens = max(cls_tokens, 1)
    if args.get("register_multiple"):
        multiple = count(args, "register_multiple")
        registers = multiple - cls_tokens % multiple
    elif args.get("cpe_num_registers"):
        registers = count(args, "cpe_num_registers")
    return (
        _or_zero(vision, "num_cls_tokens", cls_tokens),
        _or_zero(vision, "num_registers", registers),
    )
