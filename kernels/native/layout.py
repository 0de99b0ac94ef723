"""Checks that the structs and enums that Python mirrors match those of the compiler."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import Structure, sizeof
from enum import IntEnum

from kernels.native import structs, tower

STRUCTS: tuple[type[Structure], ...] = (
    structs.Weight, structs.Experts, structs.AttentionShape, structs.DeltaShape, structs.Op, structs.Model,
    structs.Step, structs.VarlenAttention, structs.SampleParams, structs.Draw, structs.Drafting, structs.Packing,
    structs.Compacting, tower.TowerOp, tower.Tower, tower.TowerStep,
)  # fmt: skip
CONSTANTS = ("PANEL", "GROUP", "SUMMED", "BLOCK_TOKENS")
ENUMS: Mapping[str, type[IntEnum]] = {
    "Kind": structs.Kind, "Code": structs.Code, "Target": structs.Target, "Activation": structs.Activation,
    "Form": structs.Form, "TowerCode": tower.Code, "Of": tower.Of, "Place": tower.Place, "Store": tower.Store,
}  # fmt: skip


def mirrored() -> dict[str, tuple[int, ...]]:
    """Python's side: sizes of structs, (offset, size) of fields, values of enums, constants. Sizes are in bytes."""
    found: dict[str, tuple[int, ...]] = {name: (getattr(structs, name),) for name in CONSTANTS}
    for struct in STRUCTS:
        found[struct.__name__] = (sizeof(struct),)
        for name, *_ in struct._fields_:
            field = getattr(struct, name)
            found[f"{struct.__name__}.{name}"] = (field.offset, field.size)
    for enum, values in ENUMS.items():
        found |= {f"{enum}.{value.name}": (value.value,) for value in values}
    return found


def check_layout(compiled: str) -> None:
    """Compares Python's side with `compiled`, the text of the library's `saccade_layout` (layout.h). Raises
    `AssertionError` with every difference: calls with such structs would access the wrong memory."""
    lines = [line.split() for line in compiled.splitlines()]
    theirs = {name: tuple(map(int, numbers)) for name, *numbers in lines}
    ours = mirrored()
    wrong = [
        f"{name} is {ours.get(name, 'missing')} in Python and {theirs.get(name, 'missing')} in C++"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if wrong:
        raise AssertionError(f"structs and enums of Python and compiled code differ: {'; '.join(wrong)}")
