"""Methods that are made of several calls, written once for all clients: a generator that yields each call and is sent
its answer. What differs between the clients is how a call is made, and that is a loop of a few lines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from saccade.errors import SaccadeError

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One unary call. `message` of a call whose request is a stream is a function that makes its messages anew."""

    service: str
    method: str
    message: Any
    give_up: frozenset[str] = frozenset()
    """Reasons of errors that are not to be tried again: the caller has something better to do."""

    @property
    def request_id(self) -> str:
        """The id under which the server keeps the request while it works on it; empty if it keeps none."""
        return str(getattr(self.message, "request_id", ""))

    def judged(self, error: SaccadeError) -> SaccadeError:
        """Raises an error that is to be given up."""
        if error.reason in self.give_up:
            raise error from error.__cause__
        return error


Steps = Generator[Call, Any, T]


def drive(steps: Steps[T], make: Callable[[Call], Any]) -> T:
    """Makes the calls one after the other. What they raise is raised where the generator yielded them."""
    try:
        call = next(steps)
        while True:
            try:
                answer = make(call)
            except SaccadeError as error:
                call = steps.throw(error)
            else:
                call = steps.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def drive_async(steps: Steps[T], make: Callable[[Call], Awaitable[Any]]) -> T:
    """The same with awaited calls."""
    try:
        call = next(steps)
        while True:
            try:
                answer = await make(call)
            except SaccadeError as error:
                call = steps.throw(error)
            else:
                call = steps.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result
