"""Depthwise causal convolution over packed sequences, and its update by one or several tokens."""

from kernels.causal_conv1d import reference
from kernels.dispatch import dispatched

causal_conv1d = dispatched(reference.causal_conv1d)
causal_conv1d_tokens = dispatched(reference.causal_conv1d_tokens)
causal_conv1d_update = dispatched(reference.causal_conv1d_update)

__all__ = ["causal_conv1d", "causal_conv1d_tokens", "causal_conv1d_update"]
