"""Fields of `config.json` that several families share, named as in transformers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from decoder.config import DecoderConfig
from decoder.layers.descriptions import Attention
from decoder.layers.recurrent_descriptions import Mamba2
from families.family import FamilyConfig, ModelFiles
from families.files import CheckpointError, checkpoint_errors, first
from kernels.rope import Rope


def text_only(
    read: Callable[[Mapping[str, Any]], DecoderConfig],
) -> Callable[[ModelFiles], FamilyConfig]:
    """Makes `Family.read_config` of a text-only family from a function that reads its `config.json`. ValueErrors of
    that function and of the layers' descriptions become CheckpointErrors."""

    def read_config(files: ModelFiles) -> FamilyConfig:
        with checkpoint_errors("config.json"):
            return FamilyConfig(files.config, read(files.config))

    return read_config


def required(text: Mapping[str, Any], *names: str) -> list[Any]:
    """Values of fields that have no default. Raises CheckpointError listing those that are missing."""
    if missing := [name for name in names if text.get(name) is None]:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")
    return [text[name] for name in names]


def section(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """The first of the named objects of a file, empty if there is none. Raises CheckpointError naming the field."""
    for name in names:
        if (found := config.get(name)) is not None:
            if not isinstance(found, Mapping):
                raise CheckpointError(f"config.json: {name} must be an object, not {found!r}")
            return found
    return {}


_KINDS: dict[Any, str] = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a string"}


def check_types(config: type, values: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Raises CheckpointError for the first of `values` that the type of its field in the dataclass does not allow.
    `names`: fields -> what the file calls them, where that is something else."""
    for name, hint in get_type_hints(config).items():
        value = values.get(name)
        kind = next((kind for kind in _KINDS if hint in (kind, kind | None)), None)
        if value is None or kind is None:
            continue
        fits = _is_finite(value) if kind is float else isinstance(value, kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{CONFIG}: {names.get(name, name)} must be {_KINDS[kind]}, not {value!r}")
        if kind is int and value > MOST:
            raise CheckpointError(f"{CONFIG}: {names.get(name, name)} is {value}; at most {MOST} is served")


CONFIG = "config.json"
MOST = 2**63 - 1
"""The largest whole number that is read: products and quotients of a few such numbers are numbers of a float."""
LARGEST = 1e38
"""The same for numbers that are not whole: a float32 holds it."""
MOST_LAYERS, WIDEST_HEAD = 2**12, 2**16
"""Above all that is published. Each layer's weights and each number of a head are listed before the files are
compared: with a much larger number that takes minutes and all memory."""


def count(
    text: Mapping[str, Any], name: str, default: int | None = None, *, most: int = MOST, file: str = CONFIG
) -> int:
    """Reads an integer from 1 to `most`. Raises CheckpointError naming the field and the file."""
    [value] = required(text, name) if default is None else [first(text, name, default=default)]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{file}: {name} must be a whole number of at least 1, not {value!r}")
    if value > most:
        raise CheckpointError(f"{file}: {name} is {value}; at most {most} is served")
    return value


def model_sizes(text: Mapping[str, Any], inner: str) -> tuple[int, int, int, int]:
    """Reads `vocab_size`, `hidden_size`, the width of MLPs under its name `inner`, and `num_hidden_layers`. Raises
    CheckpointError listing those that are missing, or naming the one at fault."""
    names = ("vocab_size", "hidden_size", inner)
    required(text, *names, "num_hidden_layers")
    vocab, hidden, width = (count(text, name) for name in names)
    return vocab, hidden, width, count(text, "num_hidden_layers", most=MOST_LAYERS)


def _given(text: Mapping[str, Any], name: str, default: Any, null: Any) -> Any:
    value = text.get(name, default)
    return (default if null is None else null) if value is None else value


def number(
    text: Mapping[str, Any], name: str, default: float, *, null: float | None = None, file: str = CONFIG
) -> float:
    """Reads a number above 0 and at most `LARGEST`. `null`: what null in the file stands for; None: the same as an
    absent field. Raises CheckpointError naming the field and the file."""
    value = _given(text, name, default, null)
    if not _is_finite(value) or value <= 0:
        raise CheckpointError(f"{file}: {name} must be a number above 0, not {value!r}")
    if value > LARGEST:
        raise CheckpointError(f"{file}: {name} is {value}; at most {LARGEST:g} is served")
    return float(value)


CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of each channel, 0..1, by which CLIP's processor normalises."""


def per_channel(values: object, name: str) -> tuple[float, float, float]:
    """Three finite numbers: of red, green and blue. Raises ValueError naming the field."""
    if not isinstance(values, list | tuple) or len(values) != len("rgb") or not all(map(_is_finite, values)):
        raise ValueError(f"{name} must be three finite numbers, not {values!r}")
    red, green, blue = map(float, values)
    return red, green, blue


def _is_finite(value: object) -> bool:
    # A whole number in a JSON file may be too large for a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def flag(
    text: Mapping[str, Any], name: str, default: bool = False, *, null: bool | None = None, file: str = CONFIG
) -> bool:
    """Reads a JSON boolean; 0, 1 and strings are errors. `null`: as for `number`. Raises CheckpointError naming the
    field and the file."""
    value = _given(text, name, default, null)
    if not isinstance(value, bool):
        raise CheckpointError(f"{file}: {name} must be true or false, not {value!r}")
    return value


def head_width(text: Mapping[str, Any], hidden_size: int, heads: int) -> int:
    """Reads `head_dim`, without which heads share the hidden size. Raises CheckpointError naming the fields."""
    if text.get("head_dim") is None and hidden_size < heads:
        raise CheckpointError(f"{CONFIG}: hidden_size {hidden_size} is below num_attention_heads {heads}")
    return count(text, "head_dim", hidden_size // heads, most=WIDEST_HEAD)


def share(text: Mapping[str, Any], name: str, default: float, *, null: float | None = None) -> float:
    """Like `number`, for a number of at most 1."""
    value = number(text, name, default, null=null)
    if value > 1:
        raise CheckpointError(f"{CONFIG}: {name} must be at most 1, not {value:g}")
    return value


def time_steps(text: Mapping[str, Any], name: str = "time_step_limit") -> tuple[float, float]:
    """Both bounds of the time steps; the upper one may be null. Raises CheckpointError naming the field."""
    limit = first(text, name, default=(0.0, math.inf))
    if isinstance(limit, list | tuple) and len(limit) == 2:
        low, high = limit[0], math.inf if limit[1] is None else limit[1]
        if _is_finite(low) and (_is_finite(high) or high == math.inf) and 0 <= low <= high:
            return float(low), float(high)
    raise CheckpointError(f"{CONFIG}: {name} must be two numbers in increasing order, not {limit!r}")


def only(text: Mapping[str, Any], name: str, served: object) -> None:
    """Raises CheckpointError if a field is set to anything but the one value that is served."""
    if first(text, name, default=served) != served:
        raise CheckpointError(f"config.json: {name} is {text[name]!r}; this family is served with {served!r}")


BICUBIC = 3
"""The number of this filter in processors' files."""


def check_processor(settings: Mapping[str, Any], served: Mapping[str, Any], file: str) -> None:
    """Raises CheckpointError if a setting in an image or video processor's file is not the one that is `served`, or if
    the file does not scale bytes to 0..1. A flag that is null is off, as in transformers."""
    for name, value in served.items():
        if (given := settings.get(name, value)) != value:
            raise CheckpointError(f"{file}: {name} is {given!r}; this model is served with {value!r}")
    if abs(number(settings, "rescale_factor", 1 / 255, file=file) - 1 / 255) > 1e-9:
        raise CheckpointError(f"{file}: rescale_factor is {settings['rescale_factor']!r}; 1/255 is served")


TOWER_NAMES = {"num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"}
"""Sizes of towers -> fields of files."""
EXPERT_NAMES = {"n_routed_experts": "num_experts"}
"""Fields of `Experts` -> fields of files."""
MAMBA_NAMES = {
    "mamba_num_heads": "mamba_n_heads", "mamba_head_dim": "mamba_d_head", "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state", "conv_kernel": "mamba_d_conv", "chunk_size": "mamba_chunk_size",
}  # fmt: skip
"""Fields of `Mamba2` -> fields of files that `mamba2` reads."""
DELTA_NAMES = {
    "num_key_heads": "linear_num_key_heads", "num_value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim", "value_head_dim": "linear_value_head_dim",
    "conv_kernel": "linear_conv_kernel_dim",
}  # fmt: skip
"""Fields of `GatedDelta` -> fields of files."""
MAMBA_OR_ATTENTION = {
    "mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"
}  # fmt: skip
"""Kinds of layers by either spelling."""


def layer_kinds(kinds: object, layers: int, field: str, known: Mapping[str, str] = MAMBA_OR_ATTENTION) -> list[str]:
    """What `known` has for the kind of each layer. Raises CheckpointError naming the field for unknown kinds."""
    if not isinstance(kinds, list) or (
        unknown := sorted({str(kind) for kind in kinds if not isinstance(kind, str) or kind not in known})
    ):
        shown = unknown if isinstance(kinds, list) else kinds
        raise CheckpointError(f"config.json: {field} holds {shown}; known kinds are {sorted(known)}")
    if len(kinds) != layers:
        raise CheckpointError(f"config.json: {field} names {len(kinds)} layers and num_hidden_layers is {layers}")
    return [known[kind] for kind in kinds]


def mamba2(
    text: Mapping[str, Any], hidden_size: int, norm_eps: float, *, inner: int | None = None, **others: Any
) -> Mamba2:
    """Reads the fields `mamba_*` and `time_step_limit`. `inner`: channels of all heads, of models with `mamba_d_ssm`;
    None: `mamba_expand` times the hidden size. `others`: further fields of the description. Raises CheckpointError."""
    heads, expand = count(text, "mamba_n_heads", 128), count(text, "mamba_expand", 2)
    width = first(text, "mamba_d_head", default="auto")
    size = f"mamba_expand {expand} x hidden_size {hidden_size}" if inner is None else f"mamba_d_ssm {inner}"
    inner = expand * hidden_size if inner is None else inner
    if inner % heads:
        raise CheckpointError(f"config.json: mamba_n_heads {heads} does not divide {size}")
    each = inner // heads
    if width not in ("auto", each):
        raise CheckpointError(
            f"config.json: mamba_d_head is {width}, and mamba_n_heads {heads} and {size} make it {each}"
        )
    with checkpoint_errors(CONFIG, MAMBA_NAMES):
        return Mamba2(
            hidden_size=hidden_size,
            mamba_num_heads=heads,
            mamba_head_dim=each,
            n_groups=count(text, "mamba_n_groups", 1),
            ssm_state_size=count(text, "mamba_d_state", 256),
            conv_kernel=count(text, "mamba_d_conv", 4),
            chunk_size=count(text, "mamba_chunk_size", 256),
            time_step_limit=time_steps(text),
            use_conv_bias=flag(text, "mamba_conv_bias", True, null=False),  # as in transformers
            use_bias=flag(text, "mamba_proj_bias"),
            norm_eps=norm_eps,
            **others,
        )


def attention(
    text: Mapping[str, Any], hidden_size: int, *, rotated: float = 0.0, scale: float | None = None,
    kv_heads: int | None = None,
) -> Attention:  # fmt: skip
    """Reads the usual attention fields. `rotated`: share of each head that takes rotary positions; `kv_heads`: key and
    value heads of files without the field, where null means as many as query heads; None: as null."""
    heads = count(text, "num_attention_heads", 32)
    absent = heads if kv_heads is None or "num_key_value_heads" in text else kv_heads
    width = head_width(text, hidden_size, heads)
    return Attention(
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=count(text, "num_key_value_heads", absent),
        head_dim=width,
        attention_bias=flag(text, "attention_bias"),
        scale=scale,
        rope=rope(text, int(width * rotated)) if rotated else None,
    )


def rope(text: Mapping[str, Any], dims: int, *, kinds: tuple[str, ...] = ("default",), theta: float = 10000.0) -> Rope:
    """Reads `rope_parameters`, or `rope_theta` and `rope_scaling` of older files. `theta`: the base of files without
    one. Raises CheckpointError for a `rope_type` that is not one of `kinds`.

    With `proportional`, the first frequencies, a share `partial_rotary_factor` of them, are not 0.
    """
    parameters = rope_parameters(text)
    kind = first(parameters, "rope_type", "type", default="default")
    if kind not in kinds:
        raise CheckpointError(f"config.json: rope_type {kind!r} is not served; {kinds[0]!r} is")
    if dims < 2 or dims % 2:
        raise CheckpointError(
            f"{CONFIG}: head_dim (or hidden_size / num_attention_heads) times partial_rotary_factor is {dims}; it must "
            "be even and at least 2"
        )
    rotated = None
    if kind == "proportional":
        only(parameters, "factor", 1.0)
        share = number(parameters, "partial_rotary_factor", 1.0)
        rotated = int(share * dims // 2)
        if not 1 <= rotated <= dims // 2:
            raise CheckpointError(
                f"config.json: partial_rotary_factor {share} makes {rotated} of {dims // 2} frequencies rotate"
            )
    return Rope(dims, number(parameters, "rope_theta", number(text, "rope_theta", theta)), frequencies=rotated)


def rope_parameters(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_parameters`, unless the name of older files, `rope_scaling`, is set, which goes first as in transformers;
    empty where neither is. Raises CheckpointError, also where kinds of layers have parameters of their own."""
    name = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    found = first(text, name, default={})
    if not isinstance(found, Mapping):
        raise CheckpointError(f"config.json: {name} must be an object, not {found!r}")
    if nested := [kind for kind, value in found.items() if isinstance(value, Mapping)]:
        raise CheckpointError(f"config.json: {name}.{nested[0]} is an object; only one for all layers is served")
    return found
