"""Counts work instead of time, so that the result is the same on every machine and under any load."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(function: Callable[..., object], *arguments: Any, **named: Any) -> int:
    """The number of Python lines that the call executes, its callees included. C functions such as `sorted` count as
    one. No collection of garbage runs meanwhile: it would count the finalisers of earlier tests' objects."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before, collecting = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        function(*arguments, **named)
    finally:
        sys.settrace(before)
        if collecting:
            gc.enable()
    return count
