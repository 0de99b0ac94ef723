"""Steps of several tokens of a convolution that can be rolled back: inputs are kept, and windows are not written."""

from kernels.conv_replay import reference
from kernels.dispatch import dispatched

conv_replay = dispatched(reference.conv_replay)
conv_advance = dispatched(reference.conv_advance)

__all__ = ["conv_advance", "conv_replay"]
