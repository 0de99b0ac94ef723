"""Reads what a model directory says about its quantisation: `quantization_config` in config.json, or one of the files
`BESIDE` it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from families import CheckpointError
from service.model.formats.expressions import check_expressions
from service.model.formats.tensors import GPTQ, Scheme, StoredWeight

BESIDE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq"}
"""Files that describe a checkpoint's quantisation if config.json does not -> the method of those that name none."""
METHODS = ("fp8", "modelopt", "compressed-tensors", "gptq", "awq")
MODELOPT = {
    "FP8": ("fp8-tensor",), "FP8_PER_CHANNEL_PER_TOKEN": ("fp8-channel",), "FP8_PB_WO": ("fp8-block",),
    "NVFP4": ("nvfp4",), "W4A16_NVFP4": ("nvfp4",), "NVFP4_AWQ": (),
}  # fmt: skip
"""Schemes of the tensors that each of modelopt's algorithms writes; empty for those that are not supported."""
NAMES = {"groups": "g_idx, the groups of its inputs", "zeros": "zero points"}
"""Role of a tensor that a configuration may require -> its name in messages."""
IN_WEIGHTS = ("weight_input", "weight_output")
"""Places of compressed-tensors' transforms, such as rotations, that are part of the stored weights. At other places the
runtime would have to transform activations; without that, answers would be meaningless.
"""
Listed = Literal["table", "default", "excluded"]


class Said(NamedTuple):
    """What a configuration says about one module."""

    schemes: tuple[str, ...]
    """One of these schemes; empty: not quantised."""
    how: Listed
    """By the module's own entry, by a rule for all modules, or as an exception."""
    group: int | None = None
    """Inputs that share a scale; None if it says nothing about them."""
    needed: tuple[str, ...] = ()
    """Roles (keys of `StoredWeight.parts`) of further tensors that the module must have. Without them the weights would
    have other values, and the tensors alone would not show that.
    """
    inputs: str = ""
    """For int8 and int4: how the declared quantisation of inputs differs from int8 rows with a scale for each token;
    empty if it does not, or if none is declared.
    """


@dataclass(frozen=True)
class Declared:
    """A quantisation configuration, read and checked without the tensors."""

    method: str
    where: str
    """The file and key, for errors."""
    say: Callable[[str], Said]
    """What the configuration says about the module of a name."""
    block: tuple[int, int] = (128, 128)
    gptq_offset: int = 1
    """Offset that stored zero points lack."""
    listed: frozenset[str] = field(default_factory=frozenset)
    """Modules that have their own entry, without globs."""

    def group_of(self, module: str) -> int | None:
        """Inputs of a module that share a scale, if the configuration says so."""
        return self.say(module).group

    def packed_of(self, module: str) -> Scheme:
        """Which of the schemes `PACKED` a module has if it is packed in words."""
        return "int8-packed" if "int8-packed" in self.say(module).schemes else "int4"


def read_declared(
    config: Mapping[str, Any], beside: Mapping[str, Mapping[str, Any]], modules: Collection[str] = ()
) -> Declared | None:
    """The quantisation configuration; None if no file has one. `beside`: name of a file in `BESIDE` -> its content.
    `modules`: the names that it will be asked about. Raises CheckpointError naming what is not supported."""
    entry = config.get("quantization_config") or config.get("compression_config")
    for text in map(config.get, ("text_config", "llm_config")):
        if entry is None and isinstance(text, Mapping):
            entry = text.get("quantization_config")
    where = "config.json: quantization_config"
    for file, method in BESIDE.items():
        if entry is None and (content := beside.get(file)):
            entry, where = content.get("quantization", content), file
            entry = {"quant_method": method, **entry} if isinstance(entry, Mapping) else entry
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"{where} is {entry!r}, not an object")
    check_expressions(_expressions(entry), modules, where)
    method = str(entry.get("quant_method") or ("modelopt" if "quant_algo" in entry else ""))
    readers = {
        "fp8": _block_fp8, "modelopt": _modelopt, "compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq,
    }  # fmt: skip
    if method.startswith("modelopt"):
        method = "modelopt"
    if method not in readers:
        raise CheckpointError(
            f"{where}: quant_method {method!r} is not supported; expected one of {', '.join(METHODS)}"
        )
    try:
        return readers[method](entry, where)
    except (TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{where} cannot be read: {error!r}") from error


def _expressions(entry: Mapping[str, Any]) -> list[str]:
    """All regular expressions of a configuration, whichever method it is of."""
    groups, dynamic, table = (entry.get(key) for key in ("config_groups", "dynamic", "quantized_layers"))
    within = groups.values() if isinstance(groups, Mapping) else ()
    holders = [*entry.values(), *(group.get("targets") for group in within if isinstance(group, Mapping)), table]
    names = [name for of in holders if isinstance(of, list | Mapping) for name in of if isinstance(name, str)]
    rules = [_rule_expression(rule) for rule in dynamic] if isinstance(dynamic, Mapping) else []
    return sorted({*rules, *(name.removeprefix("re:") for name in names if name.startswith("re:"))})


def _rule_expression(rule: str) -> str:
    """The regular expression of one of GPTQ's dynamic rules."""
    return rule.removeprefix("-:").removeprefix("+:")


def _number(entry: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = entry.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"{where}: {key} is {value!r}, not a whole number")
    return value


def _object(entry: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """The object of a key; empty if it is null, absent or another empty value."""
    value = entry.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: {key} is {value!r}, not an object")
    return value


def _named(entry: Mapping[str, Any], key: str, default: str) -> str:
    """The layout of GPTQ or AWQ: `key`, or `format`, which replaces it in newer files, as in transformers."""
    return str(entry.get(key) or entry.get("format") or default).lower()


def _names(entry: Mapping[str, Any], where: str, *keys: str) -> list[str]:
    """The names of modules, globs and regular expressions in these lists."""
    found: list[str] = []
    for key in keys:
        listed = entry.get(key) or []
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise CheckpointError(f"{where}: {key} is {listed!r}, not a list of names")
        found += listed
    for name in found:
        if name.startswith("re:"):
            _expression(name[3:], f"{where}: {name!r}")
    return found


def _expression(pattern: str, what: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:  # too large a count, too deep
        raise CheckpointError(f"{what} is not a regular expression: {error}") from error


def _below(module: str, name: str) -> bool:
    """Whether a name in a list refers to this module: it is the module's name, that of a parent, or the end of the
    module's name. Files of the same model name modules with and without prefixes."""
    return module == name or module.startswith(f"{name}.") or module.endswith(f".{name}") or f".{name}." in module


def _matches(module: str, pattern: str) -> bool:
    """Whether a module matches a name, a glob, or `re:` with a regular expression."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if any(letter in pattern for letter in "*?["):
        return fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"*.{pattern}")
    return _below(module, pattern)


def _rule(schemes: tuple[str, ...], excluded: list[str], group: int | None = None) -> Callable[[str], Said]:
    def say(module: str) -> Said:
        if any(_matches(module, name) for name in excluded):
            return Said((), "excluded")
        return Said(schemes, "default", group)

    return say


def _block_fp8(entry: Mapping[str, Any], where: str) -> Declared:
    if entry.get("fmt", "e4m3") != "e4m3":
        raise CheckpointError(f"{where}: fmt {entry['fmt']!r} is not e4m3")
    size = entry.get("weight_block_size")
    excluded = _names(entry, where, "modules_to_not_convert", "ignored_layers")
    if size is None:
        blocks = () if "weight_block_size" in entry else ("fp8-block",)  # transformers' default is 128x128
        return Declared("fp8", where, _rule(("fp8-tensor", "fp8-channel", *blocks), excluded))
    block = _block(size, f"{where}: weight_block_size")
    return Declared("fp8", where, _rule(("fp8-block",), excluded), block=block)


def _block(size: Any, what: str) -> tuple[int, int]:
    """Outputs and inputs of a block."""
    if not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n >= 1 for n in size)):
        raise CheckpointError(f"{what} {size!r} is not two positive whole numbers")
    return size[0], size[1]


def _modelopt(entry: Mapping[str, Any], where: str) -> Declared:
    algorithm = str(entry.get("quant_algo") or "")
    excluded = _names(entry, where, "exclude_modules", "ignore")
    if not algorithm:  # caches alone
        return Declared("modelopt", where, _rule((), []))

    def schemes(name: str, of: str, group: Any) -> Said:
        found = MODELOPT.get(name, ())
        if not found:
            known = ", ".join([*(key for key, value in MODELOPT.items() if value), "MIXED_PRECISION"])
            raise CheckpointError(f"{where}: quant_algo {name!r} of {of} is not supported; expected one of {known}")
        if found == ("nvfp4",) and group not in (None, 16):
            raise CheckpointError(f"{where}: group_size {group} of {of}; NVFP4 has 16")
        return Said(found, "table")

    if algorithm != "MIXED_PRECISION":
        said = schemes(algorithm, "all modules", entry.get("group_size"))
        return Declared("modelopt", where, _rule(said.schemes, excluded))
    layers = _object(entry, "quantized_layers", where)
    each = {name: _object(layers, name, f"{where}: quantized_layers") for name in layers}
    table = {name: schemes(str(of.get("quant_algo")), name, of.get("group_size")) for name, of in each.items()}
    _names({"quantized_layers": [*table]}, where, "quantized_layers")

    def say(module: str) -> Said:
        """Uses the longest entry that is the module or a parent of it; globs after names."""
        above = [name for name in table if module == name or module.startswith(f"{name}.")]
        above = above or [name for name in table if _below(module, name)]
        above = above or [name for name in table if "*" in name and _matches(module, name)]
        if above:
            return table[max(above, key=len)]
        return Said((), "excluded")

    plain = frozenset(name for name in table if "*" not in name)
    return Declared("modelopt", where, say, listed=plain)


def _check_transforms(entry: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError for a transform that the stored weights do not contain."""
    transforms = _object(_object(entry, "transform_config", where), "config_groups", f"{where}: transform_config")
    for name, scheme in transforms.items():
        for applied in scheme["apply"]:
            if applied["location"] not in IN_WEIGHTS:
                raise CheckpointError(
                    f"{where}: transform_config {name} is applied at {applied['location']!r}, while the model runs; "
                    f"only transforms that the weights contain are supported: {', '.join(IN_WEIGHTS)}"
                )


def _compressed(entry: Mapping[str, Any], where: str) -> Declared:
    overall, ignored = str(entry.get("format") or ""), _names(entry, where, "ignore")
    _check_transforms(entry, where)
    groups: list[tuple[list[str], Said]] = []
    blocks: set[tuple[int, int]] = set()
    given = _object(entry, "config_groups", where)
    for name in given:
        group = _object(given, name, f"{where}: config_groups")
        at = f"{where}: config group {name}"
        weights, inputs = _object(group, "weights", at), _object(group, "input_activations", at)
        if weights.get("strategy") == "block":
            blocks.add(_block(weights.get("block_structure", [128, 128]), f"{where}: block_structure of {name}"))
        form = str(group.get("format") or overall)
        groups.append((_names(group, at, "targets"), _compressed_group(name, form, weights, inputs, where)))
    if len(blocks) > 1:
        sizes = " and ".join(f"{rows}x{inner}" for rows, inner in sorted(blocks))
        raise CheckpointError(f"{where}: blocks of {sizes} in one model are not supported, only of one size")

    def say(module: str) -> Said:
        if any(_matches(module, name) for name in ignored):
            return Said((), "excluded")
        for wanted in (False, True):  # the module's own entry takes precedence over one for its class
            for targets, said in groups:
                for target in targets:
                    if (target == "Linear") == wanted and (wanted or _matches(module, target)):
                        return said._replace(how="default" if wanted else "table")
        return Said((), "excluded")

    return Declared("compressed-tensors", where, say, block=blocks.pop() if blocks else (128, 128))


INT8_ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
"""compressed-tensors' `input_activations` for rows in int8, each with its own scale."""
UNSAID = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True, "dynamic": False}
"""compressed-tensors' defaults for keys that are absent."""


def _other_inputs(name: str, inputs: Mapping[str, Any]) -> str:
    """`Said.inputs` of a config group."""
    if not inputs:
        return ""
    said = {key: inputs[key] if inputs.get(key) is not None else default for key, default in UNSAID.items()}
    other = [key for key, wanted in INT8_ROWS.items() if said[key] != wanted]
    if not other:
        return ""
    found, wanted = (", ".join(f"{key} {of[key]!r}" for key in other) for of in (said, INT8_ROWS))
    return f"input_activations of config group {name} have {found}, not {wanted}"


def _compressed_group(name: str, form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any], where: str) -> Said:
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    group, mixed = weights.get("group_size"), form == "mixed-precision"
    if group is not None and (type(group) is not int or group < -1):
        raise CheckpointError(f"{where}: group_size {group!r} of config group {name} is not a whole number of inputs")
    if (mixed or form in ("float-quantized", "naive-quantized")) and (bits, kind) == (8, "float"):
        schemes = {"channel": "fp8-channel", "tensor": "fp8-tensor", "block": "fp8-block"}
        if strategy in schemes:
            return Said((schemes[str(strategy)],), "default")
    if (mixed or form == "nvfp4-pack-quantized") and (bits, kind, group) == (4, "float", 16):
        return Said(("nvfp4",), "default")
    integers: tuple[str, ...] = ()
    if (mixed or form == "pack-quantized") and (bits, kind) in ((4, "int"), (8, "int")):
        integers = ("int4",) if bits == 4 else ("int8-packed",)
    if (mixed or form in ("int-quantized", "naive-quantized")) and (bits, kind) == (8, "int"):
        integers += ("int8",) * (strategy in ("channel", "group"))
    if integers:
        ordered = weights.get("actorder") in (True, "group", "dynamic")
        needed = ("groups",) * ordered + ("zeros",) * (weights.get("symmetric") is False)
        if strategy == "group" and not (group and group > 0):
            raise CheckpointError(f"{where}: config group {name} of strategy 'group' has group_size {group!r}")
        return Said(integers, "default", -1 if group is None else group, needed, _other_inputs(name, inputs))
    known = "; pack-quantized may have 4 or 8 bits, int-quantized 8 by channel or group" if kind == "int" else ""
    raise CheckpointError(
        f"{where}: config group {name} of format {form!r}, {bits} bits, type {kind!r}, strategy {strategy!r} is not "
        f"supported{known}"
    )


def _gptq(entry: Mapping[str, Any], where: str) -> Declared:
    bits = _gptq_bits(entry, where)
    group, excluded = _number(entry, "group_size", where), _names(entry, where, "modules_to_not_convert")
    form = _named(entry, "checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise CheckpointError(f"{where}: checkpoint_format {form!r} is not gptq or gptq_v2")
    rules: list[tuple[bool, re.Pattern[str], Mapping[str, Any]]] = []
    dynamic = _object(entry, "dynamic", where)
    for pattern in dynamic:
        changes = _object(dynamic, pattern, f"{where}: dynamic")
        expression = _expression(_rule_expression(pattern), f"{where}: dynamic rule {pattern!r}")
        rules.append((pattern.startswith("-:"), expression, changes))
        _number(changes, "group_size", f"{where}: dynamic rule {pattern!r}", group)
        if not pattern.startswith("-:"):
            _gptq_bits(changes, f"{where}: dynamic rule {pattern!r}", bits)

    def say(module: str) -> Said:
        if any(_matches(module, name) for name in excluded):
            return Said((), "excluded")
        for negative, pattern, changes in rules:
            if pattern.match(module):
                if negative:
                    return Said((), "excluded")
                ordered = changes.get("desc_act", entry.get("desc_act"))
                needed = ("groups",) if ordered else ()
                return Said((GPTQ[changes.get("bits", bits)],), "table", changes.get("group_size", group), needed)
        return Said((GPTQ[bits],), "default", group, ("groups",) if entry.get("desc_act") else ())

    return Declared("gptq", where, say, gptq_offset=1 if form == "gptq" else 0)


def _gptq_bits(entry: Mapping[str, Any], where: str, default: int | None = None) -> int:
    if (bits := _number(entry, "bits", where, default)) not in GPTQ:
        raise CheckpointError(
            f"{where}: GPTQ with {bits} bits is not supported, only with {' or '.join(map(str, GPTQ))}"
        )
    return bits


def _awq(entry: Mapping[str, Any], where: str) -> Declared:
    bits = _number(entry, "bits" if "bits" in entry else "w_bit", where)
    if bits != 4:
        raise CheckpointError(f"{where}: AWQ with {bits} bits is not supported, only with 4")
    if (version := _named(entry, "version", "gemm")) != "gemm":
        raise CheckpointError(f"{where}: AWQ version {version!r} is not supported, only gemm")
    group = _number(entry, "group_size" if "group_size" in entry else "q_group_size", where)
    return Declared("awq", where, _rule(("awq",), _names(entry, where, "modules_to_not_convert"), group))


def disagreements(declared: Declared | None, found: Mapping[str, StoredWeight]) -> list[str]:
    """Modules for which files and configuration disagree, one sentence each.

    An unquantised weight under a rule for all modules is no disagreement: lists of exceptions are rarely complete, and
    no precision is lost.
    """
    problems = []
    quantised = {weight.module: weight for weight in found.values() if weight.scheme not in ("plain", "own")}
    if declared is None:
        if quantised:
            first = next(iter(quantised.values()))
            problems.append(
                f"{first.module} is stored as {first.scheme}, but none of config.json, {', '.join(BESIDE)} says "
                f"how the {len(quantised)} quantised weights are to be read"
            )
        return problems
    for module, weight in quantised.items():
        said = declared.say(module)
        if weight.scheme not in said.schemes and not _degenerate(weight, said, declared.block):
            meant = " or ".join(said.schemes) or "not quantised"
            problems.append(f"{module} is stored as {weight.scheme}, but {declared.where} says {meant}")
        elif said.group is not None and weight.group and not _group_fits(said.group, weight):
            problems.append(f"{module} has groups of {weight.group}, but {declared.where} says {said.group}")
        problems += [
            f"{module} has no {NAMES[role]}, but {declared.where} requires them"
            for role in said.needed
            if role not in weight.parts
        ]
    modules = {weight.module for weight in found.values()}
    for name in sorted(declared.listed):
        below = [module for module in modules if _below(module, name)]
        if not below:
            problems.append(f"{declared.where} names {name}, which has no tensors")
        elif not any(module in quantised for module in below):
            problems.append(
                f"{below[0]} is stored unquantised, but {declared.where} says {declared.say(below[0]).schemes[0]}"
            )
    return problems


def _degenerate(weight: StoredWeight, said: Said, block: tuple[int, int]) -> bool:
    """Whether the weight has a single block or row, so that one scale fits either scheme."""
    if weight.scheme != "fp8-tensor":
        return False
    rows, inner = weight.shape[-2:]
    return ("fp8-block" in said.schemes and rows <= block[0] and inner <= block[1]) or (
        "fp8-channel" in said.schemes and rows == 1
    )


def _group_fits(group: int, weight: StoredWeight) -> bool:
    inner = weight.shape[-1]
    return weight.group == (inner if group in (-1, 0) or group > inner else group)
