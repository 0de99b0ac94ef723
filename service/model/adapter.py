"""Reads LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

A tensor is named after a module of the model's transformers class, as in
`base_model.model.model.layers.0.mlp.up_proj.lora_A.weight`. Together they are a list of changes of parameters, which
`service.model.merging` makes while weights are loaded.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from families import CheckpointError
from families.fields import count, flag, number
from families.files import read_json
from service.model.cache import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from service.model.formats.expressions import check_expressions
from service.model.formats.tensors import PLAIN_FLOATS
from service.model.weight_files import WeightFiles

PREFIX = "base_model.model."
"""What PEFT puts before a module's name."""
MOST_RANK = 2**16
METHODS = ("use_dora", "use_rslora")
"""The settings `use_...` of other methods than plain LoRA that are served."""
OTHER_METHODS = ("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config")
"""Further settings with which an adapter is not just a change of weights."""
STARTS = ("gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights`, besides true and false, that leave the weights of the model as they are."""
_PAIR = re.compile(
    r"(.+?)((?:\.base_layer)*)\.lora_((?:embedding_)?[AB](?:\.weight)?|B\.bias|magnitude_vector(?:\.weight)?)"
)
_TOKENS = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta")
_PLAIN = re.compile(r"[\w.-]+")
_WRAPPER = re.compile(r"\.(?:base_layer|modules_to_save|token_adapter)(?=\.)")
_REPLACED = re.compile(r"\.original_module(?=\.)")


@dataclass(frozen=True)
class AdapterConfig:
    """`adapter_config.json`."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    """Regular expression for names of modules -> rank instead of `rank`."""
    alphas: Mapping[str, float]
    """Likewise, instead of `alpha`."""
    rank_stabilised: bool
    dora: bool
    tied: bool
    """`ensure_weight_tying`: changes of the embeddings are changes of a tied vocabulary projection too."""
    parameters: tuple[str, ...]
    """`target_parameters`: names of parameters that are not the weight of a linear layer, or ends of such names."""
    tokens: Mapping[str, tuple[int, ...]]
    """`trainable_token_indices`: name of a table of embeddings, or the end of it -> ids of its trained rows. An empty
    name stands for any table."""
    base: str
    """Name of the model that the adapter was trained for; empty if the file does not say."""
    version: tuple[int, ...]
    """Of PEFT; empty if the file does not say, as before 0.18."""

    @classmethod
    def read(cls, path: Path) -> AdapterConfig:
        """Reads the file of an adapter's folder. Raises CheckpointError naming the field, also for adapters of other
        methods."""
        if not (path / ADAPTER_CONFIG).exists():
            raise CheckpointError(f"{path} has no {ADAPTER_CONFIG}: it is not an adapter in PEFT's format")
        file = str(path / ADAPTER_CONFIG)
        config = read_json(path / ADAPTER_CONFIG)
        _check_method(config, file)
        return cls(
            rank=count(config, "r", 8, most=MOST_RANK, file=file),
            alpha=number(config, "lora_alpha", 8, file=file),
            ranks={
                key: count(of, key, most=MOST_RANK, file=where) for key, of, where in _entries(config, "rank", file)
            },
            alphas={key: number(of, key, 0, file=where) for key, of, where in _entries(config, "alpha", file)},
            rank_stabilised=flag(config, "use_rslora", file=file),
            dora=flag(config, "use_dora", file=file),
            tied=flag(config, "ensure_weight_tying", file=file),
            parameters=tuple(_texts(config, "target_parameters", file)),
            tokens=_tokens(config.get("trainable_token_indices"), file),
            base=str(config.get("base_model_name_or_path") or ""),
            version=tuple(map(int, re.findall(r"\d{1,9}", str(config.get("peft_version") or ""))[:2])),
        )

    def rank_of(self, key: str) -> int:
        """The rank for a module of this name, or a parameter of `target_parameters`."""
        return _matching(self.ranks, key, self.rank)

    def scale_of(self, key: str) -> float:
        """The factor of the product of the two matrices."""
        rank, alpha = self.rank_of(key), _matching(self.alphas, key, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilised else alpha / rank


def _check_method(config: Mapping[str, Any], file: str) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise CheckpointError(f"{file}: peft_type is {kind!r}; only adapters of the type 'LORA' are served")
    for name, value in config.items():
        other = name in OTHER_METHODS or (name.startswith("use_") and name not in METHODS)
        if other and value:
            raise CheckpointError(f"{file}: {name} is {value!r}, which is not served; an adapter without it would work")
    start = config.get("init_lora_weights", True)
    if not isinstance(start, bool | None) and start not in STARTS:
        raise CheckpointError(
            f"{file}: init_lora_weights is {start!r}, which changes the weights of the model before the adapter is "
            "added; an adapter that PEFT has converted (path_initial_model_for_weight_conversion) would work"
        )


def _entries(config: Mapping[str, Any], kind: str, file: str) -> list[tuple[str, Mapping[str, Any], str]]:
    """(regular expression, the table that it is in, the table's place) of `rank_pattern` or `alpha_pattern`."""
    name = f"{kind}_pattern"
    table = config.get(name) or {}
    if not isinstance(table, dict):
        raise CheckpointError(f"{file}: {name} must be an object, not {table!r}")
    for key in table:
        try:
            _expression(key)
        except (re.error, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{file}: {name}: {key!r} is not a regular expression: {error}") from None
    return [(key, table, f"{file}: {name}") for key in table]


def _texts(config: Mapping[str, Any], name: str, file: str) -> list[str]:
    found = config.get(name) or []
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise CheckpointError(f"{file}: {name} must be a list of names, not {found!r}")
    return found


def _tokens(given: Any, file: str) -> dict[str, tuple[int, ...]]:
    tables = {"": given} if isinstance(given, list) else given or {}
    if not isinstance(tables, dict) or not all(map(_is_ids, tables.values())):
        raise CheckpointError(f"{file}: trainable_token_indices must be lists of different token ids, not {given!r}")
    return {name: tuple(ids) for name, ids in tables.items()}


def _is_ids(value: Any) -> bool:
    numbers = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
    return numbers and len(set(value)) == len(value)


def _expression(pattern: str) -> re.Pattern[str]:
    """A pattern stands for the end of a name, as in PEFT."""
    return re.compile(rf"(?:.*\.)?(?:{pattern})$")


def _matching(patterns: Mapping[str, Any], key: str, default: Any) -> Any:
    return next((value for pattern, value in patterns.items() if _expression(pattern).match(key)), default)


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
        if self.files.files and not self.files.table:
            raise CheckpointError(f"{self.files.files[0]} has no tensors: the adapter would change nothing")
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
        pairs: dict[str, dict[int, dict[str, str]]] = {}
        saved: dict[str, str] = {}
        replaced: dict[str, str] = {}
        rows: list[Change] = []
        for tensor, entry in sorted(self.files.table.items()):
            name = tensor.removeprefix(PREFIX)
            if pair := _PAIR.fullmatch(name):
                module, wrappers, role = pair.groups()
                roles = pairs.setdefault(module, {}).setdefault(wrappers.count("."), {})
                if (first := roles.setdefault(role.removesuffix(".weight"), tensor)) != tensor:
                    raise self._error(f"{first} and {tensor} have the same name")
            elif of := _TOKENS.fullmatch(name):
                rows.append(self._rows(of[1], tensor, entry.shape))
            elif _REPLACED.search(name):
                replaced[_REPLACED.sub("", name)] = tensor
            else:
                first = saved.setdefault(_WRAPPER.sub("", name), tensor)
                if first != tensor and not self.files.same(first, tensor):  # PEFT saves some biases twice
                    raise self._error(f"{first} and {tensor} are the same parameter, and they differ")
        for parameter in replaced.keys() - saved.keys():
            raise self._error(f"{replaced[parameter]} is there without the tensor that replaces it")
        self._check_expressions(sorted(pairs))
        added = [change for module in pairs for change in self._of_module(module, pairs[module], known)]
        whole = [Saved(parameter, self._part(tensor)) for parameter, tensor in saved.items()]
        return [*whole, *rows, *added]

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")

    def _check_expressions(self, modules: list[str]) -> None:
        patterns = {pattern for pattern in (*self.config.ranks, *self.config.alphas) if not _PLAIN.fullmatch(pattern)}
        where = f"{self.path / ADAPTER_CONFIG}: rank_pattern and alpha_pattern"
        check_expressions(sorted(_expression(pattern).pattern for pattern in patterns), modules, where)

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
        named = {f"{module}.{end.rpartition('.')[2]}": end for end in self.config.parameters}
        found = [name for name, end in named.items() if _ends(name, end) and known(name)]
        found = sorted(found, key=lambda name: (name.endswith(".down_proj"), name))  # registered last
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
