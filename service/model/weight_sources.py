"""Matches the stored weights of a model directory with those that its configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from families import Target
from service.model.formats.tensors import PLAIN_FLOATS, Entry, StoredWeight
from service.model.modelconfig import ModelConfig

if TYPE_CHECKING:
    import torch

    from kernels.linear import Quantised

EMBEDDINGS, HEAD = "model.embeddings.weight", "lm_head.weight"
"""Native names of the two matrices that a checkpoint may tie."""


@dataclass(frozen=True)
class Source:
    """The source of the tensor of one native name: one stored tensor, or several to stack or join."""

    names: tuple[str, ...]
    target: Target
    """How the stored tensor becomes the native one; if there are several, the target of the first."""


def expected_weights(config: ModelConfig) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """(native name -> shape of the weights that the configuration describes, native names of those that may be
    missing)."""
    decoder, vision = config.decoder, config.vision
    expected, optional = dict(decoder.expected_weights()), set(decoder.optional_weights())
    if vision is not None:
        expected |= vision.expected_weights()
        optional |= vision.optional_weights()
    return expected, optional


def untied(config: ModelConfig) -> ModelConfig:
    """The configuration with a vocabulary projection of its own."""
    decoder = replace(config.decoder, tie_word_embeddings=False)
    return replace(config, model=replace(config.model, decoder=decoder))


def find_sources(
    stored: Mapping[str, StoredWeight], targets: Callable[[str], Sequence[Target]]
) -> tuple[dict[str, Source], list[str], list[str]]:
    """(native name -> source of its tensor, stored names that are not used, problems). `targets`: the native tensors to
    which a stored one contributes."""
    found: dict[str, dict[int, tuple[str, Target]]] = {}
    not_served: list[str] = []
    problems: list[str] = []
    for name in stored:
        used = targets(name)
        if not used:
            not_served.append(name)
        for target in used:
            entries = found.setdefault(target.name, {})
            entry = target.place if target.how in ("stack", "joined") else -1
            if target.shared and entry in entries:
                continue
            if entry in entries or (entries and (entry < 0) != (min(entries) < 0)):
                problems.append(f"{name} and {next(iter(entries.values()))[0]} are both {target.name}")
            entries[entry] = name, target
    sources: dict[str, Source] = {}
    for ours, entries in found.items():
        numbers = sorted(entries)
        if numbers[0] >= 0 and numbers != list(range(len(numbers))):
            problems.append(f"{ours} has entries {numbers}, which do not count up from 0")
        sources[ours] = Source(tuple(entries[i][0] for i in numbers), entries[numbers[0]][1])
    return sources, not_served, problems


def misfits(
    sources: Mapping[str, Source],
    stored: Mapping[str, StoredWeight],
    table: Mapping[str, Entry],
    expected: Mapping[str, tuple[int, ...]],
    optional: Collection[str],
) -> Iterator[str]:
    """A message for each weight that is missing, unexpected, of another shape, not of floating-point numbers, or made
    of weights that are not stored in the same way."""
    for name, shape in expected.items():
        if name not in sources and name not in optional:
            yield f"missing {name} {list(shape)}"
    for name in sources:
        if name not in expected:
            yield f"unexpected {name}"
    for name, shape in expected.items():
        if name not in sources:
            continue
        source = sources[name]
        if (found := shape_of(source, stored)) != shape:
            yield f"{name} has shape {list(found)}, not {list(shape)}"
        elif dtype := _not_numbers(source, stored, table):
            yield f"{name} has dtype {dtype}, not one of {', '.join(PLAIN_FLOATS)}"
        elif len(kinds := _kinds(source, stored, table)) > 1:
            shown = " and ".join(f"{kind} ({each})" for kind, each in kinds.items())
            yield f"{name} is made of {shown}; its weights must be stored in the same way"


def shape_of(source: Source, stored: Mapping[str, StoredWeight]) -> tuple[int, ...]:
    """The shape of the native tensor; `()` if the stored ones do not fit together."""
    first, target = stored[source.names[0]].shape, source.target
    if target.how == "part":
        if not first:
            return ()
        at = max(0, len(first) - 2)
        rows = first[at]
        found = (*first[:at], rows // target.parts * target.num_taken, *first[at + 1 :])
        return found if rows % (target.parts * target.groups) == 0 else ()
    if target.how == "stack":
        same = all(stored[name].shape == first for name in source.names)
        return (len(source.names), *first) if same else ()
    if target.how == "joined":
        shapes = [stored[name].shape for name in source.names]
        fit = all(shape and shape[1:] == first[1:] for shape in shapes)
        return (sum(shape[0] for shape in shapes), *first[1:]) if fit else ()
    return first


def _not_numbers(source: Source, stored: Mapping[str, StoredWeight], table: Mapping[str, Entry]) -> str | None:
    """The dtype of a plain tensor that has no floating-point numbers, such as packed integers without the names of a
    format; None if there is no such tensor."""
    for weight in map(stored.__getitem__, source.names):
        if weight.scheme == "plain" and "values" in weight.parts:
            dtype = table[weight.parts["values"]].dtype
            if dtype not in PLAIN_FLOATS:
                return dtype
    return None


def _kinds(source: Source, stored: Mapping[str, StoredWeight], table: Mapping[str, Entry]) -> dict[str, str]:
    """Dtype of plain weights, or format of quantised ones -> the first stored weight that has it."""
    found: dict[str, str] = {}
    for name in source.names:
        weight = stored[name]
        plain = weight.scheme == "plain" and "values" in weight.parts
        found.setdefault(table[weight.parts["values"]].dtype if plain else weight.format, name)
    return found


def made(tensor: torch.Tensor | Quantised, target: Target) -> torch.Tensor | Quantised:
    """The target tensor made from a stored tensor; aliases it if possible."""
    from kernels.linear import Quantised, concatenate, row_part  # imported here because it needs torch

    if target.how == "part":
        parts: list[torch.Tensor | Quantised] = []
        for first, end in target.taken:
            of = first, target.parts, target.groups, end - first
            if isinstance(tensor, Quantised):
                parts.append(tensor.row_part(*of))
            else:
                parts.append(row_part(tensor, *of, dim=max(-2, -tensor.dim())))
        tensor = parts[0] if len(parts) == 1 else concatenate(parts)
    if target.offset or target.factor != 1.0:
        assert not isinstance(tensor, Quantised), f"{target.name} is quantised, and its numbers are to be changed"
        tensor = tensor.float() * target.factor + target.offset
    return tensor


def joined(parts: Sequence[torch.Tensor | Quantised]) -> torch.Tensor | Quantised:
    """The rows of all parts, one part after another."""
    import torch  # imported here, and above, because frontend processes read tables, not tensors

    from kernels.linear import concatenate

    plain = [part for part in parts if isinstance(part, torch.Tensor)]
    return torch.cat(plain) if len(plain) == len(parts) else concatenate(parts)
