"""Finds how the models of a GGUF file's architecture are stored. Needs torch, so only a conversion imports it."""

from __future__ import annotations

from families.falcon_h1 import gguf as falcon_h1
from families.files import CheckpointError
from families.gguf_model import Layout
from families.granitemoehybrid import gguf as granitemoehybrid
from families.lfm2 import gguf as lfm2
from families.lfm2_vl import gguf as lfm2_vl
from families.nemotron_h import gguf as nemotron_h
from families.qwen3_5 import gguf as qwen3_5
from families.qwen3_next import gguf as qwen3_next

LAYOUTS: tuple[Layout, ...] = tuple(
    layout
    for family in (qwen3_5, qwen3_next, lfm2, lfm2_vl, nemotron_h, granitemoehybrid, falcon_h1)
    for layout in family.LAYOUTS
)


def layout_of(architecture: str, projector: str = "") -> Layout:
    """The layout of an architecture with this type of projector of a tower; empty: without a tower. Raises
    CheckpointError that lists what can be converted."""
    found = [layout for layout in LAYOUTS if layout.architecture == architecture]
    if not found:
        known = ", ".join(dict.fromkeys(layout.architecture for layout in LAYOUTS))
        raise CheckpointError(f"general.architecture {architecture!r} cannot be converted; those that can are {known}")
    for layout in found:
        if layout.projector == projector:
            return layout
    towers = ", ".join(layout.projector for layout in found if layout.projector) or "none"
    raise CheckpointError(
        f"clip.projector_type {projector!r} cannot be converted with the architecture {architecture!r}; those that can "
        f"are: {towers}"
    )
