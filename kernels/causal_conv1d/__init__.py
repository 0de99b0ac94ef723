"""Depthwise causal convolution over packed sequences, and its one-token update."""

from kernels.causal_conv1d.reference import causal_conv1d, causal_conv1d_update

__all__ = ["causal_conv1d", "causal_conv1d_update"]
