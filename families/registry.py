"""Finds the family that serves a `model_type`."""

from __future__ import annotations

from families import (
    bamba,
    falcon_h1,
    granitemoehybrid,
    lfm2,
    lfm2_vl,
    lfm3,
    lfm3_vl,
    minicpmv4_6,
    minicpmv4_7,
    nemotron_h,
    nemotron_h_nano_vl,
    nemotron_h_omni,
    olmo_hybrid,
    qwen3_5,
    qwen3_next,
    zamba2,
)
from families.family import Family
from families.files import CheckpointError

FAMILIES: tuple[Family, ...] = (
    nemotron_h_omni.FAMILY,
    nemotron_h_nano_vl.FAMILY,
    nemotron_h.FAMILY,
    granitemoehybrid.FAMILY,
    bamba.FAMILY,
    falcon_h1.FAMILY,
    olmo_hybrid.FAMILY,
    zamba2.FAMILY,
    qwen3_5.FAMILY,
    qwen3_5.MOE_FAMILY,
    qwen3_next.FAMILY,
    lfm2.FAMILY,
    lfm2.MOE_FAMILY,
    lfm2_vl.FAMILY,
    lfm3.FAMILY,
    lfm3_vl.FAMILY,
    minicpmv4_6.FAMILY,
    minicpmv4_7.FAMILY,
)


def served_model_types() -> tuple[str, ...]:
    return tuple(family.name for family in FAMILIES)


def family_of(model_type: str) -> Family:
    """The family of `model_type`. Raises CheckpointError listing the served types if there is none."""
    for family in FAMILIES:
        if model_type == family.name or model_type in family.aliases:
            return family
    raise CheckpointError(f"model_type {model_type!r} is not served; served are {', '.join(served_model_types())}")
