"""Finds host operations that would wait for the device.

The tests' device is a CPU, on which nothing would wait, so every call that would wait on a GPU is recorded together
with the line of the project's code that makes it. A GPU runs a kernel where a CPU runs `kernels/*/reference.py`, so
calls from there do not count; nor do those of `kernels/transfer.py`, whose copies do not wait.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
READS: set[Any] = {
    Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.nonzero, Tensor.__bool__, Tensor.__int__,
    Tensor.__float__, Tensor.__index__, Tensor.__contains__, torch.nonzero, torch.equal, torch.masked_select,
}  # fmt: skip
COPIES: set[Any] = {torch.tensor, torch.as_tensor, torch.from_numpy}
READING_OPS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")


@cache
def _name(file: str) -> str | None:
    """Of a file of the project."""
    path = Path(file)
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else None


@cache
def _reads(func: Any) -> tuple[str, bool, bool]:
    """The operation's name, whether it reads, and whether it does so if it is given a mask."""
    name = func.overloadpacket.__name__
    return name, name.startswith(READING_OPS), name.startswith("index")


def _line() -> str | None:
    """The innermost line of the project's code that makes the call; None inside a kernel's reference or in a test."""
    frame = sys._getframe(1)
    innermost = None
    while frame is not None:
        name = _name(frame.f_code.co_filename)
        if name is not None:
            if name.endswith("/reference.py") or name == "kernels/transfer.py":
                return None
            if name.startswith("tests/"):
                if name != "tests/support/host_reads.py":
                    return innermost
            elif innermost is None:
                innermost = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return innermost


class HostReads(TorchFunctionMode):
    """`found`: each such call within the context, once."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._ops = _Ops(self)

    def note(self, what: str) -> None:
        line = _line()
        if line is not None:
            self.found.add(f"{what} at {line}")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in READS:
            self.note(f"a read ({func.__name__})")
        elif func in COPIES:
            self.note(f"a copy from ordinary memory ({func.__name__})")
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> HostReads:
        self._ops.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._ops.__exit__(kind, error, trace)


class _Ops(TorchDispatchMode):
    """torch operations that are reached without one of the names above, for example indexing by a mask."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, reads, indexes = _reads(func)
        indices = args[1] if indexes and len(args) > 1 and isinstance(args[1], list | tuple) else ()
        masks = any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)
        if masks or reads:
            self.reads.note(f"a read (aten.{name}{' of a mask' if masks else ''})")
        return func(*args, **(kwargs or {}))
