"""Concatenates neighbouring patches (space to depth) over packed images, with the norms after it."""

from kernels.dispatch import dispatched
from kernels.pixel_shuffle import reference
from kernels.pixel_shuffle.reference import shuffle_order

pixel_shuffle = dispatched(reference.pixel_shuffle, kernel=False)
shuffle_norm = dispatched(reference.shuffle_norm)

__all__ = ["pixel_shuffle", "shuffle_norm", "shuffle_order"]
