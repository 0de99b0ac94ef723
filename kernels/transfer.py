"""Copies between host and device without waiting.

Torch's plain copies wait: a copy from ordinary memory to a GPU waits until the stream has done all earlier work, and so
does a copy back. These functions do not wait, so that the host can prepare one step while another runs. On a CPU
nothing is copied.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """`torch.tensor(values)` on a device. The copy is queued on the current stream."""
    if device == "cpu" and dtype == torch.int64 and values and type(values[0]) is int:
        return torch.frombuffer(array("q", values), dtype=dtype)  # a quarter of the time
    if device == "cpu" or torch.device(device).type != "cuda":  # "meta" tensors have no memory to copy to
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def send(values: Tensor, device: torch.device | str) -> Tensor:
    """Copies a host tensor to a device; for a CPU, returns the tensor itself. The copy is queued on the current stream;
    the host may overwrite its tensor at once.
    """
    if torch.device(device).type != "cuda":
        return values
    return values.pin_memory().to(device, non_blocking=True)


class Download:
    """Copies tensors of one device to the host; the copies start when it is constructed."""

    def __init__(self, device: torch.device | str, tensors: Sequence[Tensor]) -> None:
        """Queues the copies on the current stream, after all earlier work."""
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
        """Waits for the copies and returns them; on a CPU returns the tensors themselves."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
