"""Attention within each of several packed sequences."""

from kernels.dispatch import dispatched, implementation
from kernels.varlen_attention import reference

varlen_attention = dispatched(reference.varlen_attention)


def reads_host(device_type: str) -> bool:
    """Whether attention on such a device looks at sequence lengths on the host, so that no graph can be captured of it.
    A replay on a CPU calls the function anew and may.
    """
    return device_type != "cpu" and implementation(device_type)[0] == "reference"


__all__ = ["reads_host", "varlen_attention"]
