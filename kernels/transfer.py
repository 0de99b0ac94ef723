"""Numbers between host and device without either waiting for the other.

Torch's plain copies wait: one from ordinary memory to a GPU until the stream has done all that was asked of it before,
one back as well. A host that prepares a step while another runs uses these. On a CPU there is nothing to wait for, and
nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """`torch.tensor(values)` on a device. The copy is queued on the current stream."""
    if device == "cpu" or torch.device(device).type != "cuda":  # of others, "meta" has no memory to copy to
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class Download:
    """Copies of tensors of one device, on their way to the host since this was made."""

    def __init__(self, device: torch.device | str, tensors: Sequence[Tensor]) -> None:
        """Queued on the current stream, behind everything that was asked of it before."""
        self._tensors, self._event = tuple(tensors), None
        if torch.device(device).type == "cpu":
            return
        self._tensors = tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in tensors
        )
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> tuple[Tensor, ...]:
        """The host's copies, once the device has come so far. On a CPU the tensors themselves."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
