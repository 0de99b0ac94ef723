"""The Mamba-2 recurrence for one or several tokens per row."""

from kernels.dispatch import dispatched
from kernels.selective_state_update import reference
from kernels.selective_state_update.reference import discretise

selective_state_update = dispatched(reference.selective_state_update)
selective_state_update_tokens = dispatched(reference.selective_state_update_tokens)

__all__ = ["discretise", "selective_state_update", "selective_state_update_tokens"]
