"""Reads a model directory's JSON files into a `ModelConfig`; the model's family interprets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoder.config import DecoderConfig
from families import CheckpointError, Family, FamilyConfig, ModelFiles, Target, VisionSpec, family_of
from families.files import first, optional_json, read_json, token_id
from kernels.weight_forms import STORED
from service.model.cache import ADAPTER_CONFIG, GGUF, how_to_convert

WEIGHTS_KEY = "saccade_weights"
"""Entry of config.json that says how linear layers are stored."""
ONE_FORM, SEVERAL_FORMS = 1, 2
"""Versions of the entry: one form, `kind`, with scales in float32; or a list of forms, `kinds`, with scales in float16
or float32. The shapes of a weight's tensors show which of them it has."""
COMPUTE_DTYPES = ("float32", "bfloat16")
"""Names of the dtypes that models are computed in."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything that is read from a model directory except the weights."""

    path: Path
    name: str
    """The name for clients: the directory's name, `demo`, or the hub id."""
    family: Family
    dtype: str
    """The dtype that the checkpoint declares, such as `bfloat16`; empty if it declares none."""
    model: FamilyConfig
    published: Mapping[str, Any] = field(compare=False, repr=False)
    """`config.json` as published: equal configurations may be spelled differently."""
    eos_token_ids: frozenset[int]
    generation: Mapping[str, Any] = field(default_factory=dict)
    """`generation_config.json`: sampling defaults for fields that a request leaves unset."""
    stored_forms: tuple[str, ...] = ()
    """The forms of the linear layers of a checkpoint in this server's own quantised format, each one of
    `kernels.weight_forms.STORED`; empty for a checkpoint in another format."""

    @property
    def decoder(self) -> DecoderConfig:
        return self.model.decoder

    @property
    def vision(self) -> VisionSpec | None:
        """None for text-only models."""
        return self.model.vision

    @property
    def image_token_id(self) -> int | None:
        return self.model.image_token_id

    def compute_dtype(self, wanted: str | None) -> str:
        """Name of the dtype of computation: `wanted`, the server's option, or else the checkpoint's dtype; `bfloat16`
        if that is none of `COMPUTE_DTYPES`."""
        dtype = wanted or self.dtype
        return dtype if dtype in COMPUTE_DTYPES else "bfloat16"

    def weight_targets(self) -> Callable[[str], list[Target]]:
        """Maps a stored name to the native tensors to which it contributes."""
        return self.family.weights(self.model)


def _declared_dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    value = first(config, "dtype", "torch_dtype", default=first(text, "dtype", "torch_dtype", default=""))
    return str(value).removeprefix("torch.")


def _eos_ids(vocab_size: int, *sources: tuple[str, Mapping[str, Any]]) -> frozenset[int]:
    """The ids of the first source, (file, its content), that has any."""
    for file, source in sources:
        if (value := source.get("eos_token_id")) is not None:
            ids = value if isinstance(value, list) else [value]
            return frozenset(token_id("eos_token_id", each, vocab_size, file=file) for each in ids)
    return frozenset()


def _stored_forms(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    entry = config.get(WEIGHTS_KEY)
    if entry is None:
        return ()
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: {WEIGHTS_KEY} must be an object, not {entry!r}")
    if (found := entry.get("format")) not in (ONE_FORM, SEVERAL_FORMS):
        raise CheckpointError(
            f"{path}: {WEIGHTS_KEY} has format {found!r}, but this server reads {ONE_FORM} and {SEVERAL_FORMS}; "
            "quantise or convert the original again"
        )
    forms = [entry.get("kind")] if found == ONE_FORM else entry.get("kinds")
    if not isinstance(forms, list):
        raise CheckpointError(f"{path}: {WEIGHTS_KEY} kinds must be a list, not {forms!r}")
    for form in forms:
        if form not in STORED:
            raise CheckpointError(f"{path}: {WEIGHTS_KEY} kind {form!r} is not one of {', '.join(STORED)}")
    return tuple(forms)


def _processor(path: Path, nested: Mapping[str, Any], part: str, *files: str) -> Mapping[str, Any]:
    """The settings of a processor: its section of `nested`, `processor_config.json`, else the first of `files` that
    exists, as in transformers. Raises CheckpointError."""
    if part in nested:
        if not isinstance(nested[part], dict):
            raise CheckpointError(f"{path / 'processor_config.json'}: {part} must be an object, not {nested[part]!r}")
        return dict(nested[part])
    return next((read_json(path / name) for name in files if (path / name).exists()), {})


def load_config(path: Path, *, name: str | None = None) -> ModelConfig:
    """Reads a model directory's JSON files. Raises CheckpointError with the field at fault."""
    if (path / ADAPTER_CONFIG).exists() and not (path / "config.json").exists():
        raise CheckpointError(f"{path} is an adapter and not a model: name the model, and the adapter with --adapter")
    if not (path / "config.json").exists() and (found := sorted(path.glob(f"*{GGUF}"))):
        raise CheckpointError(f"{path} has no config.json, but {found[0].name}: {how_to_convert(str(found[0]))}")
    config = read_json(path / "config.json")
    architectures = config.get("architectures") or [""]
    if not isinstance(architectures, list):
        raise CheckpointError(f"{path / 'config.json'}: architectures must be a list, not {architectures!r}")
    family = family_of(str(config.get("model_type") or architectures[0]))
    generation = optional_json(path / "generation_config.json")
    processor = optional_json(path / "processor_config.json")
    image = _processor(path, processor, "image_processor", "preprocessor_config.json")
    video = _processor(path, processor, "video_processor", "video_preprocessor_config.json", "preprocessor_config.json")
    try:
        model = family.read_config(ModelFiles(path, config, image, video, processor))
    except OverflowError as error:  # a JSON file may have 1e400 or Infinity where an integer is expected
        raise CheckpointError(f"{path}: its configuration has a number that is too large: {error}") from None
    return ModelConfig(
        path=path,
        name=name or path.resolve().name,
        family=family,
        dtype=_declared_dtype(config, model.text),
        model=model,
        published=config,
        eos_token_ids=_eos_ids(
            model.decoder.vocab_size,
            ("generation_config.json", generation),
            ("config.json", config),
            ("config.json", model.text),
        ),  # fmt: skip
        generation=generation,
        stored_forms=_stored_forms(path, config),
    )
