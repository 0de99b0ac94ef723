"""Compiled code for a CPU: built by the machine's own compiler at first use, kept for later starts."""

from kernels.native.library import NativeUnavailable, library
from kernels.native.structs import Activation, Kind, Model, Op, Step, Weight

__all__ = ["Activation", "Kind", "Model", "NativeUnavailable", "Op", "Step", "Weight", "library"]
