"""The gated delta rule in Triton: `step_kernel` has the recurrence, `scan_kernel` prompts."""

from kernels.gated_delta.gates_kernel import delta_gates
from kernels.gated_delta.scan_kernel import gated_delta_scan
from kernels.gated_delta.step_kernel import (
    gated_delta_advance,
    gated_delta_replay,
    gated_delta_tokens,
    gated_delta_update,
)

__all__ = [
    "delta_gates",
    "gated_delta_advance",
    "gated_delta_replay",
    "gated_delta_scan",
    "gated_delta_tokens",
    "gated_delta_update",
]
