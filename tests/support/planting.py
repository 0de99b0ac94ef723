"""Known bugs, put back into the real code one line at a time, to see that the check that is meant for them fails."""

from __future__ import annotations

import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any


@contextlib.contextmanager
def planted(function: Callable[..., Any], line: str, bug: str) -> Iterator[None]:
    """Within the context `function` has `bug` where its source has `line`, for everybody who has imported it.

    `AssertionError` unless the line is there exactly once: a plant must not outlive the code that it was made for.
    """
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
