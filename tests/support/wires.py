"""A connection of a synchronous client with attempts made by the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from saccade._core.steps import Call
from saccade._transport.exchange import Exchange


class Wire:
    """`begin` makes the attempts of calls with one answer, `open` those of streams, from the request."""

    def __init__(self, begin: Callable[[Call], Any] | None = None, open: Callable[[Any], Any] | None = None) -> None:
        self._begin, self._open = begin, open

    def begin(self, call: Call, timeout: float | None) -> Any:
        assert self._begin is not None
        return self._begin(call)

    def open(self, call: Call, timeout: float | None, request_id: str) -> Any:
        assert self._open is not None
        return self._open(call.message)

    def exchange(self) -> Exchange:
        return Exchange(self)

    def close(self) -> None: ...
