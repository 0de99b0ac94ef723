"""Order between the streams of one GPU: one stream uses memory after another one only behind an event.

On a CPU, where everything has happened by the time that it returns, there are no streams: they and their events are
`None`, and nothing here does anything.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def side_stream(device: torch.device | str) -> Any:
    """A new stream beside the current one, behind all that has been asked of that so far; `None` on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def on(stream: Any) -> AbstractContextManager[Any]:
    """Inside, this thread's work goes to `stream`; `None`: where it went before."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def mark(device: torch.device | str) -> Any:
    """An event behind all that has been asked of the current stream; `None` on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def behind(event: Any, tensor: Tensor) -> Tensor:
    """`tensor`, for the current stream to use: it waits for `event` on the device, and torch's allocator gives the
    memory to nobody else before that use is over. The host waits for nothing.
    """
    if event is not None:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(event)
        tensor.record_stream(stream)
    return tensor
