"""Neighbouring patches side by side: space to depth over packed images."""

from kernels.pixel_shuffle.reference import pixel_shuffle, shuffle_order

__all__ = ["pixel_shuffle", "shuffle_order"]
