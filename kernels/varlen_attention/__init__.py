"""Attention within each of several packed sequences."""

from functools import wraps

from torch import Tensor

from kernels.dispatch import dispatched, implementation, is_forced
from kernels.varlen_attention import compiled, reference

_dispatched = dispatched(reference.varlen_attention)


@wraps(reference.varlen_attention)
def varlen_attention(
    q_RHD: Tensor, k_RHD: Tensor, v_RHD: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, scale: float
) -> Tensor:
    on_cpu = q_RHD.device.type == "cpu" and not is_forced()
    run = compiled.varlen_attention if on_cpu and compiled.takes(q_RHD, k_RHD, v_RHD, scale) else _dispatched
    return run(q_RHD, k_RHD, v_RHD, cu_seqlens, max_seqlen, scale=scale)


def reads_host(device_type: str) -> bool:
    """Whether attention on such a device reads sequence lengths on the host, so that no graph can be captured. False
    for a CPU, where a replay calls the function again and may read them."""
    return device_type != "cpu" and implementation(device_type)[0] == "reference"


__all__ = ["reads_host", "varlen_attention"]
