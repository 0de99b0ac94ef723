"""Compiled code for CPUs: built by the machine's compiler at first use and cached for later starts."""

from kernels.native.instruction_sets import NativeUnavailable
from kernels.native.library import library
from kernels.native.structs import Activation, Kind, Model, Op, Step, Weight

__all__ = ["Activation", "Kind", "Model", "NativeUnavailable", "Op", "Step", "Weight", "library"]
