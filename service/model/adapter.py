"""Reads LoRA adapters in PEFT's format: `adapter_model.safetensors`, by `adapter_config.json`.

A tensor is named after a module of the model's transformers class, as in
`base_model.model.model.layers.0.mlp.up_proj.lora_A.weight`. Together they are a list of changes of parameters, which
`service.model.merging` makes while weights are loaded.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from families import CheckpointError
from service.model.adapter_config import AdapterConfig
from service.model.cache import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from service.model.formats.tensors import PLAIN_FLOATS
from service.model.weight_files import WeightFiles

PREFIX = "base_model.model."
"""What PEFT puts before a module's name."""
_PAIR = re.compile(
    r"(.+?)((?:\.base_layer)*)\.lora_((?:embedding_)?[AB](?:\.weight)?|B\.bias|magnitude_vector(?:\.weight)?)"
)
_TOKENS = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta")
_WRAPPER = re.compile(r"\.(?:base_layer|modules_to_save|token_adapter)(?=\.)")
_REPLACED = re.compile(r"\.original_module(?=\.)")


Shape = tuple[int, ...]


class Part(NamedTuple):
    """A tensor of the adapter."""

    name: str
    shape: Shape

    def misfit(self, shape: Shape) -> str:
        """How the shape differs from this one; empty if it does not."""
        return "" if self.shape == shape else f"has shape {list(self.shape)}, not {list(shape)}"


@dataclass(frozen=True)
class Saved:
    """A parameter that was trained as a whole: the tensor replaces it."""

    parameter: str
    """Its name in the transformers class, with which `tensor` begins; likewise below."""
    tensor: Part

    def misfit(self, shape: Shape) -> str:
        """Why this cannot be a change of a parameter of this shape; empty if it can. Likewise below."""
        return self.tensor.misfit(shape)


@dataclass(frozen=True)
class Added:
    """A bias to which a tensor, multiplied by `scale`, is added."""

    parameter: str
    tensor: Part
    scale: float

    def misfit(self, shape: Shape) -> str:
        return self.tensor.misfit(shape)


@dataclass(frozen=True)
class Rows:
    """Rows of a table of embeddings that are replaced."""

    parameter: str
    tensor: Part
    ids: tuple[int, ...]

    def misfit(self, shape: Shape) -> str:
        if len(shape) != 2 or self.tensor.shape[1] != shape[1]:
            return f"has shape {list(self.tensor.shape)}, which are no rows of {list(shape)}"
        most = max(self.ids, default=0)
        return f"is for token {most}, but there are {shape[0]} tokens" if most >= shape[0] else ""


@dataclass(frozen=True)
class LowRank:
    """`scale * up @ down` is added to a parameter. With a magnitude (DoRA), the rows of the sum then get its numbers as
    their lengths.

    A parameter `[experts, out, in]` has the matrices `down` `[experts * r, in]` and `up` `[out, r * experts]`. Before
    version 0.19, PEFT took the sides of such a parameter for one another: there `down` has `out` and `up` has `in`, and
    the transpose of the product is added.
    """

    parameter: str
    tensor: Part
    """`down`, PEFT's lora_A: `[r, in]`, `[r, in, kernel...]`, or of a table of embeddings `[r, tokens]`."""
    up: Part
    """PEFT's lora_B: `[out, r]`, `[out, r, 1...]`, or `[width, r]`."""
    rank: int
    scale: float
    magnitude: Part | None = None
    """`[out]`, `[1, out, 1...]` or `[width]`."""
    table: bool = False
    """The parameter is a table of embeddings `[tokens, width]`: the transpose of the product is added, and it is the
    columns of the sum that have magnitudes."""
    swapped: bool = False
    """Whether the sides of experts were swapped, as far as their sizes do not tell."""

    def stacked(self, shape: Shape) -> bool:
        """Whether this is a change of all experts, for a parameter of this shape."""
        return len(shape) == 3 and len(self.tensor.shape) == 2 and not self.table

    def transposed(self, shape: Shape) -> bool:
        """Whether the transpose of the product is added to experts of this shape."""
        made = (self.up.shape[0], self.tensor.shape[1])
        return self.swapped if shape[1] == shape[2] else made != shape[1:]

    def misfit(self, shape: Shape) -> str:
        down, up = self.tensor.shape, self.up.shape
        if min(len(down), len(up)) < 2:
            return f"and lora_B have shapes {list(down)} and {list(up)}, which are no matrices"
        stacked = self.stacked(shape)
        rank = self.rank * (shape[0] if stacked else 1)
        if (down[0], up[1]) != (rank, rank):
            of = f" for each of {shape[0]} experts" if stacked else ""
            return f"and lora_B have ranks {down[0]} and {up[1]}; {ADAPTER_CONFIG} says {self.rank}{of}"
        made: Shape = (down[1], up[0]) if self.table else (up[0], *down[1:])
        if stacked:
            made = (shape[0], *(reversed(made) if self.transposed(shape) else made))
        if made != shape or any(side != 1 for side in up[2:]):
            return f"and lora_B have shapes {list(down)} and {list(up)}, which do not fit a parameter {list(shape)}"
        if self.magnitude is not None and (stacked or math.prod(self.magnitude.shape) != up[0]):
            return f"has a lora_magnitude_vector {list(self.magnitude.shape)}, which does not fit {list(shape)}"
        return ""


@dataclass
class _Tensors:
    """The tensors of an adapter by kind, without PEFT's prefix and the names of its wrappers."""

    pairs: dict[str, dict[int, dict[str, str]]] = field(default_factory=dict)
    """Module -> number of wrappers around it -> role in a pair, such as `A` or `B.bias` -> tensor."""
    saved: dict[str, str] = field(default_factory=dict)
    """Parameter -> the tensor that takes its place."""
    replaced: dict[str, str] = field(default_factory=dict)
    """Parameter -> a copy of what it was before."""
    rows: dict[str, str] = field(default_factory=dict)
    """Table of embeddings -> trained rows of it."""


Change = Saved | Added | Rows | LowRank
Known = Callable[[str], bool]
"""Whether the model has a parameter of this name."""


class Adapter:
    """The folder of an adapter: its configuration, and the changes of the model's parameters."""

    def __init__(self, path: Path, *, name: str | None = None, outline: bool = False) -> None:
        """`name`: for clients; None: the folder's. `outline`: there may be no tensors, and then there are no changes.
        Raises CheckpointError."""
        self.path, self.name = path, name or path.resolve().name
        self.config = AdapterConfig.read(path)
        self.files = WeightFiles(path, optional=outline, only=ADAPTER_WEIGHTS)
        if self.files.paths and not self.files.table:
            raise CheckpointError(f"{self.files.paths[0]} has no tensors: the adapter would change nothing")
        for tensor, entry in self.files.table.items():
            if entry.dtype not in PLAIN_FLOATS:
                known = ", ".join(PLAIN_FLOATS)
                raise CheckpointError(f"{path}: {tensor} has dtype {entry.dtype}, not one of {known}")
        self.digest = hashlib.sha256((path / ADAPTER_CONFIG).read_bytes() + self.files.digest.encode()).hexdigest()
        """Digest over the configuration, the tensor table and samples of the tensors."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.files.table.values())

    def changes(self, known: Known) -> list[Change]:
        """All changes, in the order in which they are to be made. Raises CheckpointError listing the tensors that do
        not belong together or contradict the configuration."""
        found = self._sorted()
        for parameter in found.replaced.keys() - found.saved.keys():
            raise self._error(f"{found.replaced[parameter]} is there without the tensor that replaces it")
        self.config.check_expressions(sorted(found.pairs), str(self.path / ADAPTER_CONFIG))
        added = [change for module, pairs in found.pairs.items() for change in self._of_module(module, pairs, known)]
        rows = [self._rows(module, tensor, self.files.table[tensor].shape) for module, tensor in found.rows.items()]
        whole = [Saved(parameter, self._part(tensor)) for parameter, tensor in found.saved.items()]
        return [*whole, *rows, *added]

    def check_named(
        self, layers: Collection[str], tied: Collection[str], holders: Collection[str], known: Known
    ) -> None:
        """Raises CheckpointError for a module that the configuration names and of which the file has nothing: a part of
        what was trained would be missing. PEFT warns of that.

        `layers`: the model's modules that may have pairs of matrices. A name in `target_modules` that none of them has
        is ignored, as in PEFT: training tools write the usual names whatever the model. Likewise an
        end of names in `target_parameters` that no parameter of `holders` has. `tied`: last parts of the names of
        modules that share a weight, of which the file may have one.
        """
        found, config = self._sorted(), self.config
        pairs, rows = list(found.pairs), list(found.rows)
        saved = [parameter.rpartition(".")[0] for parameter in found.saved]
        targets = () if config.narrowed else [name for name in config.modules if _named(name, layers)]
        parameters = [end for end in config.parameters if known(end) or _parameters([end], holders, known)]
        for setting, names, there in (
            ("target_modules", targets, [*pairs, *saved]),
            ("target_parameters", parameters, [*_parameters(parameters, pairs, known), *pairs]),
            ("modules_to_save", config.saved, saved),
            ("trainable_token_indices", config.tokens, rows),
        ):
            shared = any(_last(module) in tied for module in there)
            for name in names:
                if not _named(name, there) and not (shared and _last(name) in tied):
                    raise self._lacks(f"{setting} names {name!r}" if name else f"{setting} is set", there)
        pattern = config.pattern
        if pattern and not config.parameters and not any(re.fullmatch(pattern, module) for module in pairs):
            raise self._lacks(f"target_modules is {pattern!r}", pairs)

    def _lacks(self, what: str, there: Collection[str]) -> CheckpointError:
        has = ", ".join(sorted(set(map(_last, there)))) or "none"
        return CheckpointError(
            f"{self.path / ADAPTER_CONFIG}: {what}, and {ADAPTER_WEIGHTS} has no tensors of such modules; those that "
            f"it has are of {has}"
        )

    def _sorted(self) -> _Tensors:
        """The tensors by kind. Raises CheckpointError for two that are the same."""
        found = _Tensors()
        for tensor in sorted(self.files.table):
            name = tensor.removeprefix(PREFIX)
            if pair := _PAIR.fullmatch(name):
                module, wrappers, role = pair.groups()
                roles = found.pairs.setdefault(module, {}).setdefault(wrappers.count("."), {})
                self._put(roles, role.removesuffix(".weight"), tensor)
            elif of := _TOKENS.fullmatch(name):
                self._put(found.rows, of[1], tensor)
            elif _REPLACED.search(name):
                self._put(found.replaced, _REPLACED.sub("", name), tensor)
            else:
                first = found.saved.setdefault(_WRAPPER.sub("", name), tensor)
                if first != tensor and not self.files.same(first, tensor):  # PEFT saves some biases twice
                    raise self._error(f"{first} and {tensor} are the same parameter, and they differ")
        return found

    def _put(self, into: dict[str, str], key: str, tensor: str) -> None:
        if (first := into.setdefault(key, tensor)) != tensor:
            raise self._error(f"{first} and {tensor} have the same name")

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")

    def _rows(self, module: str, tensor: str, shape: Shape) -> Rows:
        ids = next((ids for end, ids in self.config.tokens.items() if not end or _ends(module, end)), ())
        if len(shape) != 2 or shape[0] != len(ids):
            raise self._error(
                f"{tensor} has shape {list(shape)}, and trainable_token_indices has {len(ids)} ids for its rows"
            )
        return Rows(f"{module}.weight", Part(tensor, shape), ids)

    def _of_module(self, module: str, wrappers: dict[int, dict[str, str]], known: Known) -> Iterator[Change]:
        """The changes by pairs of matrices. `wrappers`: depth -> the tensors' names by role. If several parameters of a
        module have pairs, PEFT wraps the module several times, the last one that it registers outermost."""
        found = sorted(
            _parameters(self.config.parameters, [module], known),
            key=lambda name: (name.endswith(".down_proj"), name),  # registered last
        )
        if len(wrappers) != max(1, len(found)):
            raise self._error(
                f"{module} has {len(wrappers)} pairs of lora_A and lora_B, and target_parameters names {len(found)} of "
                "its parameters"
            )
        for depth, parameter in enumerate(reversed(found or [f"{module}.weight"])):
            yield from self._pair(module, parameter, parameter if found else module, wrappers.get(depth, {}))

    def _pair(self, module: str, parameter: str, key: str, roles: dict[str, str]) -> Iterator[Change]:
        """`key`: the name by which the configuration's patterns know the parameter."""
        table = "embedding_A" in roles or "embedding_B" in roles
        down, up = (roles.get(f"embedding_{part}" if table else part) for part in "AB")
        magnitude, bias = roles.get("magnitude_vector"), roles.get("B.bias")
        if down is None or up is None:
            raise self._error(f"{module}: of lora_A and lora_B there is only {', '.join(roles.values()) or 'neither'}")
        if (magnitude is not None) != self.config.dora:
            there = "has one" if magnitude else "has none"
            raise self._error(
                f"use_dora is {str(self.config.dora).lower()}, but {module} {there}: lora_magnitude_vector"
            )
        if (bias is not None) != self.config.biases:
            there = f"has one: {bias}" if bias else "has none: lora_B.bias"
            raise self._error(f"lora_bias is {str(self.config.biases).lower()}, but {module} {there}")
        if unused := set(roles.values()) - {down, up, magnitude, bias}:
            raise self._error(f"{unused.pop()} is beside {down}, so that it would not be used")
        rank, scale = self.config.rank_of(key), self.config.scale_of(key)
        lengths = None if magnitude is None else self._part(magnitude)
        swapped = self.config.version < (0, 19)
        yield LowRank(parameter, self._part(down), self._part(up), rank, scale, lengths, table, swapped)
        if bias is not None:
            yield Added(f"{module}.bias", self._part(bias), scale)

    def _part(self, tensor: str) -> Part:
        return Part(tensor, self.files.table[tensor].shape)


def _ends(name: str, end: str) -> bool:
    """Whether `end` is the last parts of a name with dots, or all of them."""
    return name == end or name.endswith(f".{end}")


def _named(end: str, modules: Collection[str]) -> bool:
    """Whether one of the modules, or a module that contains one, has a name with this end. PEFT does not ask for whole
    parts of names either."""
    return any(re.search(rf"{re.escape(end)}(\.|$)", module) for module in modules)


def _parameters(ends: Collection[str], modules: Collection[str], known: Known) -> set[str]:
    """The model's parameters that have one of these ends of names and belong to one of these modules."""
    names = ((f"{module}.{_last(end)}", end) for end in ends for module in modules)
    return {name for name, end in names if _ends(name, end) and known(name)}


def _last(name: str) -> str:
    """The last part of a name with dots."""
    return name.rpartition(".")[2]
