"""The Mamba-2 recurrence, one token for each row."""

from kernels.dispatch import dispatched
from kernels.selective_state_update import reference
from kernels.selective_state_update.reference import discretise

selective_state_update = dispatched(reference.selective_state_update)

__all__ = ["discretise", "selective_state_update"]
