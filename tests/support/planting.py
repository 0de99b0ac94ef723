"""Puts known bugs back into the real code, one line at a time, to verify that the check meant for each of them
fails."""

from __future__ import annotations

import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any


@contextlib.contextmanager
def planted(function: Callable[..., Any], line: str, bug: str) -> Iterator[None]:
    """Within the context, `function` has `bug` where its source has `line`, also for modules that have already imported
    it. `AssertionError` unless the line occurs exactly once, so that a planted bug cannot outlive its code."""
    assert isinstance(function, FunctionType) and not function.__code__.co_freevars
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{function.__qualname__} has {source.count(line)} times {line!r}"
    made: dict[str, Any] = {}
    exec(compile(source.replace(line, bug), f"<planted {function.__qualname__}>", "exec"), function.__globals__, made)
    original = function.__code__
    bugged = made[function.__name__]
    function.__code__ = (bugged.fget if isinstance(bugged, property) else bugged).__code__
    try:
        yield
    finally:
        function.__code__ = original
