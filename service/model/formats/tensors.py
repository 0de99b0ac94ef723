"""Finds the stored tensors that make one weight.

The tensors in the files decide: a weight of 8 or 4 bits needs its scales, and is an error without them. Formats: block
FP8 (DeepSeek's), NVIDIA modelopt's FP8, FP8_PB_WO and NVFP4, compressed-tensors' float-quantized, int-quantized,
nvfp4-pack-quantized and pack-quantized, GPTQ and AWQ, and this server's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from kernels.weight_forms import kind_and_group

Scheme = Literal[
    "plain", "fp8-tensor", "fp8-channel", "fp8-block", "nvfp4", "int8", "int8-packed", "int4", "gptq", "gptq-int8",
    "awq", "own",
]  # fmt: skip
PACKED: Mapping[str, int] = {"int4": 8, "int8-packed": 4}
"""Schemes of compressed-tensors' pack-quantized -> numbers in a 32-bit word."""
GPTQ: Mapping[int, Scheme] = {4: "gptq", 8: "gptq-int8"}
"""Bits of a number in GPTQ -> its scheme."""
FLOATS = ("F32", "F16", "BF16")
PLAIN_FLOATS = (*FLOATS, "F64")
"""Dtypes of weights that are not quantised."""
NEEDS_SCALES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "U8", "I8")
"""Dtypes that a weight cannot have without scales."""
COMPANIONS: tuple[tuple[str, str, str], ...] = (
    (".weight_packed", ".weight", "values"),
    (".weight_scale_inv", ".weight", "scale"),
    (".weight_scale_2", ".weight", "outer"),
    (".weight_global_scale", ".weight", "divisor"),
    (".weight_scale", ".weight", "scale"),
    (".weight_zero_point", ".weight", "zeros"),
    (".weight_shape", ".weight", "shape"),
    (".weight_g_idx", ".weight", "groups"),
    (".input_scale", ".weight", "input"),
    (".activation_scale", ".weight", "input"),
    (".input_global_scale", ".weight", "input"),
    (".input_zero_point", ".weight", "input zeros"),
    (".qweight", ".weight", "values"),
    (".qzeros", ".weight", "zeros"),
    (".scales", ".weight", "scale"),
    (".g_idx", ".weight", "groups"),
)
"""Suffix of a stored name, its replacement in the weight's name, and the role of the tensor in the weight."""
ATTACHED: tuple[tuple[str, str], ...] = (
    (".values", "values"), (".scale", "scale"), (".outer", "outer"), ("_scale_inv", "scale"), ("_scale_2", "outer"),
    ("_activation_scale", "input"), ("_scale", "scale"),
)  # fmt: skip
"""Suffixes that follow the whole name of a weight, and the role of the tensor: this server's own, and those of stacked
experts, whose names do not end in `weight`."""
OF_ROWS = ("input", "input zeros")
"""Roles of tensors with fixed scales for quantising activations. This server does not use fixed scales."""
CACHE_SCALES = (
    ".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_output_scale", ".q_proj.output_scale",
    ".k_proj.output_scale", ".v_proj.output_scale",
)  # fmt: skip
"""Scales of attention inputs for 8-bit caches. They are not used, since this server's caches are not 8-bit."""


class Entry(NamedTuple):
    """A tensor in a file's table."""

    dtype: str
    """As safetensors writes it."""
    shape: tuple[int, ...]
    nbytes: int


class FormatError(ValueError):
    """Tensors that do not make a weight; the message names the module."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight in the files."""

    name: str
    """Its name without quantisation: `...q_proj.weight`."""
    scheme: Scheme
    shape: tuple[int, ...]
    """`[..., outputs, inputs]` of the weight itself."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Role of a tensor in the weight -> its stored name."""
    nbytes: int = 0
    """Bytes of all parts."""
    group: int = 0
    """Inputs per scale; 0 if inputs do not share scales."""
    block_rows: int = 1
    """Outputs per scale, for fp8-block."""
    form: str = ""
    """One of `kernels.weight_forms.STORED`, for own."""
    widened: int = 0
    """Bytes that scales in float16 take in memory, where they are float32, beyond those in the files, for own."""

    @property
    def format(self) -> str:
        """How the weight is stored: its scheme, or its form in this server's own format."""
        return self.form or self.scheme

    @property
    def module(self) -> str:
        """The name without `.weight`."""
        return self.name.removesuffix(".weight")

    def with_inputs(self, inputs: int) -> StoredWeight:
        """This weight, of one of the schemes `PACKED`, with `inputs` inputs if they end in its last word; otherwise
        unchanged. The shape in the files' table is that of the words."""
        rows, most = self.shape
        fits = most - PACKED[self.scheme] < inputs < most
        return replace(self, shape=(rows, inputs), group=min(self.group, inputs)) if fits else self


def listed(problems: Sequence[str], most: int = 20) -> str:
    """One line for each of the first problems, and the number of further ones."""
    more = f"\n  ... and {len(problems) - most} more" if len(problems) > most else ""
    return "\n  ".join(problems[:most]) + more


def modules_of(table: Mapping[str, Entry]) -> list[str]:
    """The modules of all weights in these files."""
    return sorted({_role(name, table)[0].removesuffix(".weight") for name in table})


def find_weights(
    table: Mapping[str, Entry],
    *,
    block: tuple[int, int] = (128, 128),
    group_of: Callable[[str], int | None] = lambda module: None,
    packed_of: Callable[[str], Scheme] = lambda module: "int4",
    own_forms: Collection[str] = (),
) -> tuple[dict[str, StoredWeight], list[str]]:
    """Weights by name, and the names of tensors that are not used (scales of activations and caches).

    `block`: the configuration's outputs and inputs of a block, for fp8-block. `group_of`: the configuration's inputs
    per scale of a module in int4 or int8, or None. `packed_of`: which of the schemes `PACKED` a module has if it is
    packed in words, which the tensors do not show. `own_forms`: the forms of weights (`ModelConfig.stored_forms`) of a
    checkpoint that this server wrote. One `FormatError` lists the modules whose tensors do not fit together.
    """
    grouped: dict[str, dict[str, str]] = {}
    unused = [name for name in table if name.endswith(CACHE_SCALES)]
    for name in table.keys() - set(unused):
        logical, role = _role(name, table)
        roles = grouped.setdefault(logical, {})
        if role in roles:
            raise FormatError(f"{logical} has two tensors for its {role}: {roles[role]} and {name}")
        roles[role] = name
    found, problems = {}, []
    for name in sorted(grouped):
        parts = grouped[name]
        try:
            found[name] = _weight(name, parts, table, block, group_of, packed_of, own_forms)
        except FormatError as error:
            problems.append(str(error))
        unused += [parts[role] for role in OF_ROWS if role in parts]
    if problems:
        raise FormatError(f"{len(problems)} quantised weights cannot be read:\n  {listed(problems)}")
    return found, unused


def _role(name: str, table: Mapping[str, Entry]) -> tuple[str, str]:
    """The weight that a tensor belongs to, and its role in it."""
    for suffix, instead, role in COMPANIONS:
        if name.endswith(suffix):
            base = name.removesuffix(suffix)
            gptq = suffix in (".scales", ".g_idx", ".qzeros")
            if not gptq or f"{base}.qweight" in table:
                return base + instead, role
    for suffix, role in ATTACHED:
        base = name.removesuffix(suffix)
        if base != name and (f"{base}.values" in table or (suffix.startswith("_") and base in table)):
            return base, role
    return name, "values"


def _weight(
    name: str,
    parts: Mapping[str, str],
    table: Mapping[str, Entry],
    block: tuple[int, int],
    group_of: Callable[[str], int | None],
    packed_of: Callable[[str], Scheme],
    own_forms: Collection[str],
) -> StoredWeight:
    module = name.removesuffix(".weight")
    entries = {role: table[stored] for role, stored in parts.items()}
    if "values" not in entries:
        orphans = ", ".join(sorted(parts.values()))
        raise FormatError(f"{module}: {orphans} without the weight to which they belong")
    values, scale = entries["values"], entries.get("scale")
    size = sum(entry.nbytes for entry in entries.values())
    stored = parts["values"]

    def made(scheme: Scheme, shape: tuple[int, ...], *, group: int = 0, block_rows: int = 1) -> StoredWeight:
        return StoredWeight(name, scheme, shape, dict(parts), size, group, block_rows)

    if not values.shape and (values.dtype in NEEDS_SCALES or stored.endswith(".values")):
        raise FormatError(f"{module}: a single number of {values.dtype} is no weight")
    if stored.endswith(".qweight"):
        return _grouped_by_columns(module, entries, group_of(module), made)
    if stored.endswith(".values"):
        if not own_forms:
            raise FormatError(f"{module}: {stored} is in this server's own format, but config.json does not say so")
        if scale is None:
            raise FormatError(f"{module}: {stored} without its scale")
        return _own(module, entries, own_forms, made)
    if stored.endswith(".weight_packed") and values.dtype == "I32":
        return _packed_in_words(module, entries, packed_of(module), group_of(module), made)
    if values.dtype not in NEEDS_SCALES:
        extra = sorted(set(parts) - {"values", "input"})
        if extra:
            raise FormatError(
                f"{module}: {parts[extra[0]]} belongs to a weight of {values.dtype}, which has no such part"
            )
        return made("plain", values.shape)
    if scale is None:
        raise FormatError(f"{module}: a weight of {values.dtype} without its scale")
    if values.dtype == "F8_E4M3":
        return _eight_bit_floats(module, entries, block, made)
    if values.dtype == "U8":
        return _four_bit_floats(module, entries, made)
    if values.dtype == "I8":
        return _eight_bit_integers(module, entries, group_of(module), made)
    raise FormatError(f"{module}: weights of {values.dtype} are not supported")


def _only(module: str, entries: Mapping[str, Entry], *roles: str) -> None:
    if extra := sorted(set(entries) - set(roles)):
        raise FormatError(f"{module}: it has a tensor for its {extra[0]}, which this format does not have")


def _floats(module: str, role: str, entry: Entry) -> None:
    if entry.dtype not in FLOATS:
        raise FormatError(f"{module}: its {role} is {entry.dtype}, not one of {', '.join(FLOATS)}")


def _single(module: str, role: str, entry: Entry | None, leading: tuple[int, ...]) -> None:
    """Checks that there is one floating-point number for each weight of a stack."""
    if entry is None:
        raise FormatError(f"{module}: its {role} is missing")
    _floats(module, role, entry)
    wanted = (leading, (*leading, 1), (*leading, 1, 1))
    if entry.shape not in wanted:
        raise FormatError(f"{module}: its {role} has shape {list(entry.shape)}, not {list(leading)}")


def _own(
    module: str, entries: Mapping[str, Entry], forms: Collection[str], made: Callable[..., StoredWeight]
) -> StoredWeight:
    """This server's own format: the form is the one that the values' dtype and the number of scales fit."""
    values, scale = entries["values"], entries["scale"]
    *rows, inner = values.shape
    fours = "nvfp4" if "outer" in entries else "int4"
    stored = {"I8": "int8", "U8": fours, "F8_E4M3": "fp8"}.get(values.dtype)
    inputs = 2 * inner if stored == fours else inner
    _only(module, entries, "values", "scale", *(("outer",) if stored == "nvfp4" else ()))
    for form in forms:
        kind, group = kind_and_group(form)
        groups = -(-inputs // (16 if kind == "nvfp4" else group or max(inputs, 1)))
        if kind == stored and scale.shape in ((*rows, groups), (*rows,) if groups == 1 else None):
            halves = scale.nbytes if scale.dtype == "F16" else 0
            return replace(made("own", (*rows, inputs), group=group or 0), form=form, widened=halves)
    raise FormatError(
        f"{module}: values of {values.dtype} {list(values.shape)} with scales of shape {list(scale.shape)} have none "
        f"of the forms that config.json names: {', '.join(forms)}"
    )


def _eight_bit_floats(
    module: str, entries: Mapping[str, Entry], block: tuple[int, int], made: Callable[..., StoredWeight]
) -> StoredWeight:
    _only(module, entries, "values", "scale", "input")
    values, scale = entries["values"], entries["scale"]
    _floats(module, "scale", scale)
    if len(values.shape) < 2:
        raise FormatError(f"{module}: a weight of shape {list(values.shape)} in F8_E4M3 is not a matrix")
    *leading, rows, inner = values.shape
    lead = tuple(leading)
    if scale.shape in (lead, (*lead, 1), (*lead, 1, 1)):
        return made("fp8-tensor", values.shape, group=inner)
    if scale.shape in ((*lead, rows, 1), (*lead, rows)):
        return made("fp8-channel", values.shape, group=inner)
    blocks = -(-rows // block[0]), -(-inner // block[1])
    if scale.shape in ((*lead, *blocks), (*lead, blocks[0], 1, blocks[1], 1)):
        return made("fp8-block", values.shape, group=block[1], block_rows=block[0])
    raise FormatError(
        f"{module}: scales of shape {list(scale.shape)} for a weight {list(values.shape)} are neither one, nor one per "
        f"row, nor {list(blocks)} blocks of {block[0]}x{block[1]}"
    )


def _four_bit_floats(module: str, entries: Mapping[str, Entry], made: Callable[..., StoredWeight]) -> StoredWeight:
    _only(module, entries, "values", "scale", "outer", "divisor", "input")
    values, scale = entries["values"], entries["scale"]
    *leading, half = values.shape
    wanted = (*leading, -(-2 * half // 16))
    if scale.dtype != "F8_E4M3" or scale.shape != wanted:
        raise FormatError(
            f"{module}: scales of {scale.dtype} {list(scale.shape)}, not F8_E4M3 {list(wanted)}: one for each 16 "
            "inputs of a row, row by row"
        )
    if "outer" in entries and "divisor" in entries:
        raise FormatError(f"{module}: both weight_scale_2 and weight_global_scale")
    role = "divisor" if "divisor" in entries else "outer"
    name = {"divisor": "weight_global_scale", "outer": "weight_scale_2"}[role]
    _single(module, name, entries.get(role), tuple(leading[:-1]))
    return made("nvfp4", (*leading, 2 * half), group=16)


def _inputs_per_scale(module: str, groups: int, inputs: int, said: int | None, least: int | None = None) -> int:
    """The number of inputs in a group. If the configuration says how many a group has (`said`), the last group may be
    incomplete. `least`: the smallest possible number of inputs, if `inputs` is not known exactly yet."""
    if said is not None and said > 0 and -(-(least or inputs) // said) <= groups <= -(-inputs // said):
        return min(said, inputs)
    if groups < 1 or inputs % groups:
        raise FormatError(f"{module}: {groups} groups do not divide {inputs} inputs")
    return inputs // groups


def _eight_bit_integers(
    module: str, entries: Mapping[str, Entry], group: int | None, made: Callable[..., StoredWeight]
) -> StoredWeight:
    """compressed-tensors' int-quantized: one scale, and one zero point if it is asymmetric, per row or group of it."""
    values, scale = entries["values"], entries["scale"]
    lead, inner = values.shape[:-1], values.shape[-1]
    _only(module, entries, "values", "scale", "zeros", *(("groups",) if len(lead) == 1 else ()), *OF_ROWS)
    _floats(module, "scale", scale)
    grouped = len(scale.shape) == len(values.shape)
    if scale.shape[: len(lead)] != lead or len(scale.shape) > len(values.shape):
        raise FormatError(f"{module}: scales of shape {list(scale.shape)} for int8 rows {list(values.shape)}")
    if "zeros" in entries and (entries["zeros"].dtype, entries["zeros"].shape) != ("I8", scale.shape):
        zeros = entries["zeros"]
        raise FormatError(f"{module}: zero points of {zeros.dtype} {list(zeros.shape)}, not I8 {list(scale.shape)}")
    if "groups" in entries:
        _indices(module, entries["groups"], inner)
    return made("int8", values.shape, group=_inputs_per_scale(module, scale.shape[-1] if grouped else 1, inner, group))


def _indices(module: str, groups: Entry, inputs: int) -> None:
    if groups.dtype != "I32" or groups.shape != (inputs,):
        raise FormatError(f"{module}: g_idx of shape {list(groups.shape)}, not I32 [{inputs}]")


def _packed_in_words(
    module: str,
    entries: Mapping[str, Entry],
    scheme: Scheme,
    group: int | None,
    made: Callable[..., StoredWeight],
) -> StoredWeight:
    """compressed-tensors' pack-quantized: eight or four values of a row in each 32-bit word, and as many zero points of
    neighbouring rows."""
    per_word = PACKED[scheme]
    _only(module, entries, "values", "scale", "zeros", "shape", "groups", "input")
    values, scale = entries["values"], entries.get("scale")
    if scale is None:
        raise FormatError(f"{module}: a weight of packed {scheme[:4]} without its scale")
    _floats(module, "scale", scale)
    if "shape" not in entries:
        raise FormatError(f"{module}: its weight_shape is missing")
    if len(values.shape) != 2 or len(scale.shape) != 2 or scale.shape[0] != values.shape[0] or scale.shape[1] < 1:
        raise FormatError(f"{module}: scales of shape {list(scale.shape)} for packed words {list(values.shape)}")
    if "zeros" in entries:
        zeros, wanted = entries["zeros"], (-(-values.shape[0] // per_word), scale.shape[1])
        if zeros.dtype != "I32" or zeros.shape != wanted:
            raise FormatError(f"{module}: zero points of {zeros.dtype} {list(zeros.shape)}, not I32 {list(wanted)}")
    # Fewer inputs may be in the last word: see `StoredWeight.with_inputs`.
    inputs = per_word * values.shape[1]
    group = _inputs_per_scale(module, scale.shape[1], inputs, group, least=inputs - per_word + 1)
    return made(scheme, (values.shape[0], inputs), group=group)


def _grouped_by_columns(
    module: str, entries: Mapping[str, Entry], group: int | None, made: Callable[..., StoredWeight]
) -> StoredWeight:
    """GPTQ and AWQ: inputs by outputs, with eight numbers in each 32-bit word, or four of GPTQ in 8 bits, along the
    inputs in GPTQ and along the outputs in AWQ. Zero points are along the outputs in both."""
    values, scale = entries["values"], entries.get("scale")
    for role in ("scale", "zeros"):
        if role not in entries:
            raise FormatError(f"{module}: qweight without its {'scales' if role == 'scale' else 'qzeros'}")
    assert scale is not None
    zeros = entries["zeros"]
    _floats(module, "scale", scale)
    if values.dtype != "I32" or zeros.dtype != "I32" or len(values.shape) != 2 or len(scale.shape) != 2:
        raise FormatError(
            f"{module}: qweight {values.dtype} {list(values.shape)} and qzeros {zeros.dtype} are not matrices of I32"
        )
    groups, outputs = scale.shape
    bits = next((bits for bits in GPTQ if zeros.shape[1:] == (outputs * bits // 32,)), 0)
    if not bits or outputs * bits % 32 or zeros.shape[0] != groups:
        raise FormatError(
            f"{module}: qzeros of shape {list(zeros.shape)} for scales {list(scale.shape)}, not {groups} rows of "
            f"{outputs / 8:g} words with 4 bits or {outputs / 4:g} with 8 bits a number"
        )
    if values.shape[1] == outputs:
        scheme, inputs = GPTQ[bits], 32 // bits * values.shape[0]
        _only(module, entries, "values", "scale", "zeros", "groups")
        if "groups" in entries:
            _indices(module, entries["groups"], inputs)
    elif bits == 4 and 8 * values.shape[1] == outputs:
        scheme, inputs = "awq", values.shape[0]
        _only(module, entries, "values", "scale", "zeros")
    else:
        raise FormatError(
            f"{module}: qweight of shape {list(values.shape)} with scales of shape {list(scale.shape)} fits "
            f"neither GPTQ nor AWQ in {bits} bits"
        )
    return made(scheme, (outputs, inputs), group=_inputs_per_scale(module, groups, inputs, group))
