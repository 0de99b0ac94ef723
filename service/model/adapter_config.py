"""The settings of LoRA adapters in PEFT's format: `adapter_config.json`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from families import CheckpointError
from families.fields import count, flag, number
from families.files import read_json
from service.model.cache import ADAPTER_CONFIG
from service.model.formats.expressions import check_expressions

MOST_RANK = 2**16
METHODS = ("use_dora", "use_rslora")
"""The settings `use_...` of other methods than plain LoRA that are served."""
OTHER_METHODS = ("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config")
"""Further settings with which an adapter is not just a change of weights."""
ALL_LINEAR = "all-linear"
"""Value of `target_modules` for all linear layers but the vocabulary projection."""
STARTS = ("gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights`, besides true and false, that leave the weights of the model as they are."""
_PLAIN = re.compile(r"[\w.-]+")


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
    biases: bool
    """`lora_bias`: whether each pair of matrices has a bias."""
    tied: bool
    """`ensure_weight_tying`: changes of the embeddings are changes of a tied vocabulary projection too."""
    parameters: tuple[str, ...]
    """`target_parameters`: names of parameters that are not the weight of a linear layer, or ends of such names."""
    tokens: Mapping[str, tuple[int, ...]]
    """`trainable_token_indices`: name of a table of embeddings, or the end of it -> ids of its trained rows. An empty
    name stands for any table."""
    modules: tuple[str, ...]
    """`target_modules` if it is a list: names of modules that have pairs of matrices, or ends of such names."""
    pattern: str | None
    """`target_modules` if it is a regular expression for whole names of modules; `.*` for `all-linear`."""
    narrowed: bool
    """Whether further settings choose among the modules that `target_modules` names."""
    saved: tuple[str, ...]
    """`modules_to_save`: ends of names of modules that were trained as a whole."""
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
        modules = config.get("target_modules")
        return cls(
            rank=count(config, "r", 8, most=MOST_RANK, file=file),
            alpha=number(config, "lora_alpha", 8, file=file),
            ranks={
                key: count(of, key, most=MOST_RANK, file=where) for key, of, where in _entries(config, "rank", file)
            },
            alphas={key: number(of, key, 0, file=where) for key, of, where in _entries(config, "alpha", file)},
            rank_stabilised=flag(config, "use_rslora", file=file),
            dora=flag(config, "use_dora", file=file),
            biases=flag(config, "lora_bias", file=file),
            tied=flag(config, "ensure_weight_tying", file=file),
            parameters=tuple(_texts(config, "target_parameters", file)),
            tokens=_tokens(config.get("trainable_token_indices"), file),
            modules=() if isinstance(modules, str) else tuple(_texts(config, "target_modules", file)),
            pattern=_module_pattern(modules, file) if isinstance(modules, str) else None,
            narrowed=any(config.get(name) is not None for name in ("exclude_modules", "layers_to_transform")),
            saved=tuple(_texts(config, "modules_to_save", file)),
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

    def check_expressions(self, modules: list[str], file: str) -> None:
        """Raises CheckpointError naming `file` if a regular expression takes too long for the names of modules."""
        patterns = {pattern for pattern in (*self.ranks, *self.alphas) if not _PLAIN.fullmatch(pattern)}
        expressions = [_ending(pattern).pattern for pattern in sorted(patterns)]
        expressions += [] if self.pattern is None else [self.pattern]
        check_expressions(expressions, modules, f"{file}: rank_pattern, alpha_pattern and target_modules")


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
        _check_expression(_ending, key, f"{file}: {name}")
    return [(key, table, f"{file}: {name}") for key in table]


def _module_pattern(given: str, file: str) -> str:
    """`target_modules` as a regular expression. Raises CheckpointError."""
    pattern = ".*" if given.lower() == ALL_LINEAR else given
    _check_expression(re.compile, pattern, f"{file}: target_modules")
    return pattern


def _check_expression(made: Callable[[str], re.Pattern[str]], pattern: str, where: str) -> None:
    try:
        made(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{where}: {pattern!r} is not a regular expression: {error}") from None


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


def _ending(pattern: str) -> re.Pattern[str]:
    """Of `rank_pattern` and `alpha_pattern`, which stand for ends of names, as in PEFT."""
    return re.compile(rf"(?:.*\.)?(?:{pattern})$")


def _matching(patterns: Mapping[str, Any], key: str, default: Any) -> Any:
    return next((value for pattern, value in patterns.items() if _ending(pattern).match(key)), default)
