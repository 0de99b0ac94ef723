"""The gated delta rule: one or several tokens per row, whole prompts, and steps that can be rolled back."""

from kernels.dispatch import dispatched
from kernels.gated_delta import reference
from kernels.gated_delta.reference import DeltaTerms

delta_gates = dispatched(reference.delta_gates)
gated_delta_update = dispatched(reference.gated_delta_update)
gated_delta_tokens = dispatched(reference.gated_delta_tokens)
gated_delta_scan = dispatched(reference.gated_delta_scan)
gated_delta_replay = dispatched(reference.gated_delta_replay)
gated_delta_advance = dispatched(reference.gated_delta_advance)

__all__ = [
    "DeltaTerms",
    "delta_gates",
    "gated_delta_advance",
    "gated_delta_replay",
    "gated_delta_scan",
    "gated_delta_tokens",
    "gated_delta_update",
]
