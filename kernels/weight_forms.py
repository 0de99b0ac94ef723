"""Forms in which weights are quantised; without torch, because frontend processes check options against them."""

from __future__ import annotations

from kernels.native.structs import GROUP

FORMS = ("int8", "int8-32", "int4", "int4-32", "fp8", "nvfp4")
"""Kinds of values; after a hyphen, how many inputs share a scale."""
STORED = (*FORMS, "int8-16", "int4-16")
"""Forms of the weights of this server's own format: `FORMS`, and those that only converted files have."""


def kind_and_group(form: str) -> tuple[str, int | None]:
    """The kind of one of `STORED`, and the number of inputs that share a scale; None if all inputs of a row do, or if
    the kind alone determines it."""
    kind, _, group = form.partition("-")
    return kind, int(group) if group else GROUP if kind == "int4" else None
