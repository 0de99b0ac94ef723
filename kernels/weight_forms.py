"""Forms in which weights are quantised, without torch: frontend processes read them in configurations."""

from __future__ import annotations

from kernels.native.structs import GROUP

FORMS = ("int8", "int4", "int4-32", "fp8", "nvfp4")
"""Kinds of numbers; after a hyphen, how many inputs share a scale."""


def kind_and_group(form: str) -> tuple[str, int]:
    """The kind of one of `FORMS`, and the inputs that share a scale in int4."""
    kind, _, group = form.partition("-")
    return kind, int(group or GROUP)
