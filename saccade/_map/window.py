"""Decides when a map reads, starts and returns requests, without threads or tasks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypedDict, TypeVar

from saccade._core.ranges import check_count
from saccade._core.requests import GenerateOptions, Prompt, build_request
from saccade._map.feeding import End, Fed
from saccade.errors import InvalidArgument, SaccadeError
from saccade.types import Generation, Outcome
from saccade.v1 import inference_pb2

T = TypeVar("T")
Prepared = tuple[inference_pb2.GenerateRequest, float | None]
"""A request and its timeout in seconds (None: the client's)."""
Prepare = Callable[[T], Prepared]

REORDER_WINDOW = 8
"""If the order is kept, up to `concurrency` times this many results may wait for an earlier one."""


class _Prompted(TypedDict):
    prompt: Prompt


class GenerateMapping(_Prompted, GenerateOptions, total=False):
    """The arguments of `generate`, and an optional custom_id."""

    raw: bool
    custom_id: str


MapRequest: TypeAlias = "GenerateMapping | Mapping[str, Any]"


def prepare_mapping(request: Mapping[str, Any]) -> Prepared:
    """The request for a mapping with the arguments of `generate` and an optional custom_id."""
    if not isinstance(request, Mapping) or "prompt" not in request:
        raise InvalidArgument("map: expected mappings with the arguments of generate, including prompt")
    options = {str(key): value for key, value in request.items() if key not in ("custom_id", "timeout", "prompt")}
    return build_request(request["prompt"], **options), request.get("timeout")


def outcome(index: int, request: Any, result: Generation | SaccadeError) -> Outcome:
    custom_id = request.get("custom_id") if isinstance(request, Mapping) else None
    if isinstance(result, SaccadeError):
        return Outcome(index, custom_id, None, result)
    return Outcome(index, custom_id, result, None)


def check_concurrency(concurrency: int) -> int:
    return check_count("concurrency", concurrency, 1)


@dataclass(frozen=True)
class Finished:
    """A request that has ended. An exception other than SaccadeError as its result is a bug or an interrupt, and ends
    the map."""

    index: int
    item: Any
    result: Generation | BaseException


Event: TypeAlias = Fed | Finished
"""Events that a map waits for."""
Result = tuple[int, T, Generation | SaccadeError]


class Window(Generic[T]):
    """State of the requests of a map: requested from the source, running, waiting for an earlier one, returned."""

    def __init__(self, concurrency: int, ordered: bool) -> None:
        self._concurrency = check_concurrency(concurrency)
        self._ordered = ordered
        self._window = concurrency * (REORDER_WINDOW if ordered else 1)
        self._waiting: dict[int, Result[T]] = {}
        self._started = self._given = self._running = 0
        self._asked = self._exhausted = False

    @property
    def over(self) -> bool:
        return self._exhausted and not self._running

    def ask(self) -> bool:
        """Whether to request an item from the source now; if so, it counts as requested."""
        room = self._running < self._concurrency and self._started - self._given < self._window
        if self._asked or self._exhausted or not room:
            return False
        self._asked = True
        return True

    def start(self) -> int:
        """To be called when the source has delivered an item. Returns its index."""
        self._asked = False
        self._started, self._running = self._started + 1, self._running + 1
        return self._started - 1

    def end(self, end: End) -> None:
        """To be called when the source has ended. Raises the source's error."""
        self._exhausted = True
        if end.error is not None:
            raise end.error

    def finish(self, finished: Finished) -> Generator[Result[T], None, None]:
        """Yields the results that may be returned now; each counts as returned when it is taken."""
        self._running -= 1
        result = finished.result
        if isinstance(result, BaseException) and not isinstance(result, SaccadeError):
            raise result
        self._waiting[finished.index] = (finished.index, finished.item, result)
        index = self._given if self._ordered else finished.index
        while index in self._waiting:
            self._given += 1
            yield self._waiting.pop(index)
            index += 1
            if not self._ordered:
                return
