"""Order between the streams of one GPU: a stream that uses memory of another waits for an event.

A CPU has no streams: streams and events are `None` there, and these functions do nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def side_stream(device: torch.device | str) -> Any:
    """A new stream, which waits for all work queued on the current one so far; `None` on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def on(stream: Any) -> AbstractContextManager[Any]:
    """Inside this context, this thread's work is queued on `stream`; `None` changes nothing."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def mark(device: torch.device | str) -> Any:
    """An event after all work queued on the current stream so far; `None` on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def behind(event: Any, tensor: Tensor) -> Tensor:
    """`tensor`, for use on the current stream: the stream waits for `event` on the device, and torch's allocator does
    not reuse the memory before that use has ended. The host does not wait."""
    if event is not None:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(event)
        tensor.record_stream(stream)
    return tensor
