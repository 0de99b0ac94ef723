"""Static buffers and the replay guard that both runners share.

A `StaticGraph` is one function over buffers that never move. On a GPU it is captured once as a CUDA graph, whose
replays read and write the same addresses. On a CPU a replay calls the function on the same buffers at their full padded
size, so that stale rows, wrong padding and aliasing fail in tests without a GPU. In both cases a replay first checks
that it gets the buffers of the capture.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Step = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]
"""`step(inputs, outputs)` reads the inputs and writes every output in place; no host decision may depend on a value."""

WARMUP_RUNS = 2
"""Eager runs before a capture: lazy initialisation and autotuning must not be captured."""


class ReplayError(RuntimeError):
    """A buffer was replaced, moved or reshaped after the capture: a bug in the server, whatever the request."""


@dataclass(frozen=True)
class BufferStamp:
    """Properties of a buffer that a captured graph depends on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    address: int

    @classmethod
    def of(cls, tensor: Tensor) -> BufferStamp:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr())


class GraphPool:
    """Memory that the graphs of one runner share, and the stream on which they are captured; both `None` without CUDA.

    One stream for all captures: blocks of a pool belong to the stream on which they were allocated, so graphs of
    different streams would share nothing. Torch also keeps a cuBLAS workspace per stream, 32 MB on Hopper, which a
    graph depends on: separate streams would cost a workspace per graph and, once torch's 32 streams are used up, give
    two runners' graphs the same one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda = device.type == "cuda"
        self.handle: Any = torch.cuda.graph_pool_handle() if cuda else None
        self.stream: Any = torch.cuda.Stream(device) if cuda else None

    def reserved(self) -> int:
        """Bytes of the GPU that torch uses, without cached free memory; 0 on a CPU."""
        if self.handle is None:
            return 0
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved(self.device))


class StaticGraph:
    """One step bound to its buffers. Build, `capture()` once, `replay()` many times, `close()`.

    Inputs and outputs are the caller's memory; the graph keeps references, so they live as long as it does. Capture
    graphs that share a pool from the largest to the smallest. A replay's outputs are overwritten by the next replay of
    the same graph (or of any graph whose outputs are views of the same arena).
    """

    def __init__(
        self, name: str, step: Step, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], pool: GraphPool
    ) -> None:
        """Raises `ValueError` if there is no output or the buffers are on more than one device."""
        devices = {tensor.device for tensor in (*inputs.values(), *outputs.values())}
        if not outputs or len(devices) != 1:
            places = sorted(map(str, devices))
            raise ValueError(f"graph {name} needs outputs and one device, got {len(outputs)} outputs on {places}")
        self.name = name
        self.device = devices.pop()
        self.inputs = dict(inputs)
        self.outputs = dict(outputs)
        self.captured = False
        self._step = step
        self._pool = pool
        self._stamps = {key: BufferStamp.of(tensor) for key, tensor in self._buffers(inputs).items()}
        self._cuda_graph: Any = None

    def _buffers(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        named = (("input", inputs), ("output", self.outputs))
        return {f"{side} {key}": tensor for side, tensors in named for key, tensor in tensors.items()}

    def capture(self) -> None:
        """Makes the graph ready for replays. On a GPU the step runs and is recorded: the buffers must hold a valid
        batch, and outputs are overwritten. On a CPU nothing runs."""
        assert not self.captured, f"graph {self.name} is captured already"
        start = time.perf_counter()
        if self.device.type == "cuda":
            self._capture_cuda()
        self.captured = True
        log.debug("graph %s captured in %.1f ms", self.name, (time.perf_counter() - start) * 1e3)

    def _capture_cuda(self) -> None:
        pool, current = self._pool, torch.cuda.current_stream(self.device)
        # The current stream has filled the buffers. The eager runs load every kernel, because compiling or loading one
        # during a capture is an error.
        pool.stream.wait_stream(current)
        with torch.cuda.stream(pool.stream):
            for _ in range(WARMUP_RUNS):
                self._step(self.inputs, self.outputs)
        current.wait_stream(pool.stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # thread_local: the other runner's thread may allocate or copy meanwhile, which is an error in "global" mode.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream, capture_error_mode=mode):
            self._step(self.inputs, self.outputs)
        self._cuda_graph = graph

    def _check(self, inputs: Mapping[str, Tensor]) -> None:
        given = self._buffers(inputs)
        if given.keys() != self._stamps.keys():
            raise ReplayError(f"graph {self.name} was built on {sorted(self._stamps)}, got {sorted(given)}")
        for key, stamp in self._stamps.items():
            now = BufferStamp.of(given[key])
            if now != stamp:
                raise ReplayError(f"graph {self.name}: {key} was {stamp} and is now {now}")

    def replay(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Runs the step on the static buffers, which the caller has filled, and returns the static outputs.

        On a GPU the work is enqueued on the current stream: no host sync. Raises `ReplayError`, naming the buffer and
        both sides, unless these are the buffers of the capture, or if the graph was never captured or is closed.
        """
        if not self.captured:
            raise ReplayError(f"graph {self.name} is not captured")
        self._check(inputs)
        if self._cuda_graph is not None:
            self._cuda_graph.replay()
        else:
            self._step(self.inputs, self.outputs)
        return self.outputs

    def close(self) -> None:
        """Frees the graph's memory; idempotent."""
        if self._cuda_graph is not None:
            torch.cuda.synchronize(self.device)
            self._cuda_graph.reset()
            self._cuda_graph = None
        self.captured = False
