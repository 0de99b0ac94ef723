"""Writes the model directory of a GGUF file: undoes what llama.cpp's converter does to a published checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from families import CheckpointError, Target
from families.gguf_layouts import layout_of
from families.gguf_model import GgufModel, Layout, Made
from families.gguf_weights import Weight
from kernels.linear import Quantised
from kernels.weight_forms import STORED, kind_and_group
from service.model.assets import ModelAssets
from service.model.checkpoint import Checkpoint
from service.model.formats.tensors import Entry, StoredWeight, listed
from service.model.gguf.file import GgufFile, open_gguf
from service.model.gguf.tensors import EXACT, PACKED, Rounding, narrowed, packed, plain, requantised, rounded, undone
from service.model.gguf.vocabulary import tokenizer_files, tokens_of
from service.model.modelconfig import SEVERAL_FORMS, WEIGHTS_KEY, ModelConfig, load_config
from service.model.weight_sources import expected_weights, find_sources, misfits
from service.model.written_folder import Shards, new_folder, own_format

REPORT = "conversion_report.json"
TOWER = "clip"
"""`general.architecture` of a tower's file."""


@dataclass
class Kind:
    """What became of the tensors of one type in one form."""

    tensors: int = 0
    before: int = 0
    after: int = 0
    """Bytes."""
    error: float = 0.0
    """The largest `Rounding.relative` of a weight."""
    rounding: Rounding = Rounding()
    """Of all weights."""


@dataclass
class Converted:
    """Result of a conversion."""

    family: str
    kinds: dict[tuple[str, str], Kind] = field(default_factory=dict)
    """By type in the file and form in the directory."""
    errors: dict[str, float] = field(default_factory=dict)
    """`Rounding.relative` of each weight that was rounded."""
    defaults: list[str] = field(default_factory=list)
    """Settings that the file does not have, for which the family's released values are used."""
    unused: list[str] = field(default_factory=list)
    """Tensors that this server does not use."""
    served: int = 0
    """Bytes of the weights of a server that does not draft."""

    def count(self, stored: str, form: str, before: int, after: int, name: str, rounding: Rounding) -> None:
        kind = self.kinds.setdefault((stored, form), Kind())
        kind.tensors, kind.before, kind.after = kind.tensors + 1, kind.before + before, kind.after + after
        kind.error, kind.rounding = max(kind.error, rounding.relative), kind.rounding.plus(rounding)
        if rounding.error:
            self.errors[name] = rounding.relative


def convert(
    file: Path, tower: Path | None, out: Path, dtype: torch.dtype = torch.bfloat16, weights: str | None = None
) -> Converted:
    """Writes OUT, which must be absent or empty, completely or not at all. `tower`: the file of the vision tower
    (`mmproj`). `dtype`: of weights that are dequantised. `weights`: the form, one of `kernels.weight_forms.FORMS`, in
    which quantised weights of the decoder's linear layers that cannot be kept are quantised again; None: they are
    dequantised. Raises CheckpointError naming the file and the key or tensor at fault, and ConfigError if OUT cannot be
    written."""
    source = open_gguf(file)
    if source.metadata.architecture == TOWER:
        raise CheckpointError(f"{file} is a vision tower (mmproj): name the model's file, and this one with --mmproj")
    images = _open_tower(tower) if tower is not None else None
    model, layout = _described(source, images)
    files = layout.files(model)
    files |= tokenizer_files(source.metadata, model.tokens, model.vocab_size)
    tensors = {**source.tensors, **(images.tensors if images is not None else {})}
    with new_folder(out) as folder, _named(file, folder):
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
        config = load_config(folder)
        ModelAssets(config, config.vision)
        converted = Converted(config.family.name, defaults=model.defaults)
        made, converted.unused = _checked(source, tensors, model, layout, list(layout.weights(model)), config)
        _write(folder, files["config.json"], tensors, made, config, converted, dtype, weights)
        _finish(folder, source, images, converted)
    return converted


@contextmanager
def _named(file: Path, folder: Path) -> Iterator[None]:
    """Errors about what has been written to `folder` name the file that it was made of."""
    try:
        yield
    except CheckpointError as error:
        message = str(error)
        if str(folder) not in message:
            raise
        raise CheckpointError(f"{file}: {message.replace(f'{folder}/', '').removeprefix(f'{folder}: ')}") from None


def _open_tower(path: Path) -> GgufFile:
    opened = open_gguf(path)
    if opened.metadata.architecture != TOWER or not opened.metadata.flag("has_vision_encoder", False):
        raise CheckpointError(
            f"--mmproj: {path} is no vision tower: its general.architecture is {opened.metadata.architecture!r}"
        )
    return opened


def _described(source: GgufFile, images: GgufFile | None) -> tuple[GgufModel, Layout]:
    projector = ""
    if images is not None:
        key = "projector_type" if "projector_type" in images.metadata else "vision.projector_type"
        projector = images.metadata.text(key)
        if both := sorted(source.tensors.keys() & images.tensors.keys()):
            raise CheckpointError(f"{source.path} and {images.path} both have the tensor {both[0]}")
    try:
        layout = layout_of(source.metadata.architecture, projector)
    except CheckpointError as error:
        raise CheckpointError(f"{(images or source).path}: {error}") from None
    shapes = {
        name: tensor.shape for part in (source, images) if part is not None for name, tensor in part.tensors.items()
    }
    tower = images.metadata if images is not None else None
    return GgufModel(source.metadata, shapes, tokens_of(source.metadata), tower), layout


def _checked(
    source: GgufFile, tensors: Any, model: GgufModel, layout: Layout, made: list[Made], config: ModelConfig
) -> tuple[list[Made], list[str]]:
    """(the weights whose tensors are there, names of tensors that are not used). Raises CheckpointError unless they
    are all that the configuration describes, before any number is read."""
    made = [weight for weight in made if all(name in tensors for name in weight.sources)]
    used = {name for weight in made for name in weight.sources}
    left = sorted(set(tensors) - used)
    unknown = [name for name in left if not layout.unused(model, name)]
    if unknown:
        raise CheckpointError(f"{source.path}: {len(unknown)} tensors are not known:\n  {listed(unknown)}")
    stored, table = {}, {}
    for weight in made:
        try:
            shape = _shape(weight, tensors)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            shapes = ", ".join(f"{name} {list(tensors[name].shape)}" for name in weight.sources)
            raise CheckpointError(f"{source.path}: {weight.name} cannot be made of {shapes}: {error}") from None
        stored[weight.name] = StoredWeight(weight.name, "plain", shape, {"values": weight.name})
        table[weight.name] = Entry("BF16", shape, 0)
    found, _, problems = find_sources(stored, config.weight_targets())
    problems += misfits(found, stored, table, *expected_weights(config))
    if problems:
        raise CheckpointError(
            f"{source.path}: {len(problems)} weights do not fit its metadata:\n  {listed(problems, 40)}"
        )
    return made, left


def _shape(weight: Made, tensors: Any) -> tuple[int, ...]:
    parts = [torch.empty(tensors[name].shape, device="meta") for name in weight.sources]
    return tuple((weight.make(*parts) if weight.make is not None else parts[0]).shape)


def _write(
    folder: Path, content: dict[str, Any], tensors: Any, made: list[Made], config: ModelConfig, converted: Converted,
    dtype: torch.dtype, weights: str | None,
) -> None:  # fmt: skip
    """Writes the weights, and `content`, that of config.json, with the forms that they have."""
    shards, targets, linear = Shards(folder), config.weight_targets(), config.decoder.linear_weights().keys()
    for weight in made:
        parts = [tensors[name] for name in weight.sources]
        packable = _takes_packed(targets(weight.name), linear)
        form, found, rounding = _converted(weight, parts, dtype, weights, packable=packable)
        stored = {weight.name: found} if isinstance(found, Tensor) else _stored(weight.name, found)
        shards.add(stored)
        converted.count(
            "+".join(sorted({part.type.name for part in parts})), form,
            sum(part.nbytes for part in parts), sum(tensor.nbytes for tensor in stored.values()), weight.name, rounding,
        )  # fmt: skip
    shards.close()
    sizes = Counter[str]()
    for (_, form), kind in converted.kinds.items():
        sizes[form] += kind.after
    if forms := [form for form in STORED if sizes.pop(form, None) is not None]:
        content[WEIGHTS_KEY] = {"format": SEVERAL_FORMS, "kinds": forms}
    content["dtype"] = max(sizes, key=sizes.__getitem__, default="bfloat16")
    (folder / "config.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _converted(
    weight: Made, parts: list[Any], dtype: torch.dtype, weights: str | None, *, packable: bool
) -> tuple[str, Weight, Rounding]:
    """A weight made of its tensors: its form or dtype, the weight, and what rounding to `dtype` or the form `weights`
    changes. `packable`: whether it may be quantised. Raises CheckpointError."""
    types = {part.type for part in parts}
    forms = {PACKED[kind][0] if kind in PACKED else "" for kind in types}
    if packable and len(forms) == 1 and _keeps_groups(weight, form := forms.pop()):
        return form, _made(weight, [packed(part) for part in parts]), Rounding()
    if packable and weights is not None and not types & set(EXACT):
        return weights, *_requantised(weight, parts, weights)
    if types <= set(EXACT):
        numbers = [plain(part) for part in parts]
        if weight.inverse is not None:
            numbers = [undone(number, weight.inverse) for number in numbers]
        exact = _made(weight, numbers)
        assert isinstance(exact, Tensor)
        return _with_dtype(narrowed(exact), Rounding())
    if weight.inverse is not None:
        raise CheckpointError(f"{parts[0].name} is quantised ({parts[0].type.name}), which no server computes with")
    pairs = [_numbers(part, dtype) for part in parts]
    made = _made(weight, [numbers for numbers, _ in pairs])
    return _with_dtype(made, reduce(Rounding.plus, (rounding for _, rounding in pairs)))


def _with_dtype(weight: Weight, rounding: Rounding) -> tuple[str, Weight, Rounding]:
    assert isinstance(weight, Tensor)
    return str(weight.dtype).removeprefix("torch."), weight, rounding


def _requantised(weight: Made, parts: list[Any], form: str) -> tuple[Weight, Rounding]:
    """The weight in `form`. Inputs are moved before numbers are quantised, since their groups might be divided."""
    change: Any = weight.make if weight.moved else None
    pairs = [requantised(part, form, change) for part in parts]
    rounding = reduce(Rounding.plus, (rounding for _, rounding in pairs))
    found = [numbers for numbers, _ in pairs]
    return found[0] if weight.moved else _made(weight, found), rounding


def _keeps_groups(weight: Made, form: str) -> bool:
    """Whether groups of inputs in this form, if it is one, are still together in the weight that is made."""
    group = kind_and_group(form)[1]
    return group is not None and weight.moved % group == 0


def _stored(name: str, weight: Quantised) -> dict[str, Tensor]:
    """`own_format`, with scales in float16 if that changes none."""
    parts = own_format(name, weight)
    scale = parts[f"{name}.scale"]
    if scale.dtype == torch.float32 and torch.equal(scale.half().float(), scale):
        parts[f"{name}.scale"] = scale.half()
    return parts


def _numbers(part: Any, dtype: torch.dtype) -> tuple[Tensor, Rounding]:
    """The numbers of a tensor in `dtype`, and what rounding changes."""
    if part.type not in EXACT:
        return rounded(part, dtype)
    exact = plain(part)
    return (found := exact.to(dtype)), Rounding.of(exact, found)


def _made(weight: Made, parts: list[Any]) -> Tensor | Quantised:
    return weight.make(*parts) if weight.make is not None else parts[0]


def _takes_packed(targets: list[Target], linear: Collection[str]) -> bool:
    """Whether this server stores a weight in a quantised form, unchanged in its numbers."""
    return bool(targets) and all(
        target.name in linear and not target.offset and target.factor == 1.0 for target in targets
    )


def _finish(folder: Path, source: GgufFile, images: GgufFile | None, converted: Converted) -> None:
    """Opens what was written as a server does, and writes the report."""
    checkpoint = Checkpoint(folder)
    item = getattr(torch, checkpoint.config.compute_dtype(None)).itemsize
    converted.served = sum(checkpoint.weight_bytes(name, item) for name in checkpoint.served(drafts=False))
    report = {
        "files": [part.path.name for part in (source, images) if part is not None],
        "tensors": list(_rows(converted)),
        "relative_error": converted.errors,
        "not_in_the_file": converted.defaults,
        "not_used": converted.unused,
    }
    (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def _rows(converted: Converted) -> Iterator[dict[str, Any]]:
    for (stored, form), kind in converted.kinds.items():
        yield {"type": stored, "as": form, "tensors": kind.tensors, "bytes": kind.before, "bytes_here": kind.after,
               "relative_error": kind.rounding.relative, "largest_error": kind.error}  # fmt: skip
