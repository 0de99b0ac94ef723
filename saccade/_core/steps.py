"""What a method asks of whoever carries it out, written once for all clients.

A method is a generator. It yields actions and is sent what came of each; what an action raises is raised where it was
yielded. `Steps` yield whole calls, as if none could fail for a moment; `with_retries` makes `Actions` of them, each of
which is one attempt or one wait.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from saccade._core.retrying import Deadline, Retries
from saccade.errors import SaccadeError

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One call of a service. `message` of a call whose request is a stream is a function that makes its messages
    anew."""

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


@dataclass(frozen=True)
class Send:
    """One attempt of a call with one answer, which is the result. Raises SaccadeError."""

    call: Call
    timeout: float | None
    """Seconds; None for no limit."""


@dataclass(frozen=True)
class Open:
    """Starts an attempt of a call that is answered with a stream, in place of the one that was open. Raises
    SaccadeError."""

    call: Call
    timeout: float | None
    request_id: str = ""
    """What to name in errors."""


@dataclass(frozen=True)
class Receive:
    """The next message of the open stream, or None at its end. Raises SaccadeError, and TimeoutError after `patience`
    seconds."""

    patience: float | None


@dataclass(frozen=True)
class Wait:
    """Lets this many seconds pass. Raises Cancelled if the call is ended meanwhile."""

    seconds: float


@dataclass(frozen=True)
class Do:
    """Calls a function that reads files or encodes images, for which an event loop has no time. The result is what it
    returns."""

    function: Callable[[], Any]


Action: TypeAlias = "Send | Open | Receive | Wait | Do"
Actions: TypeAlias = Generator[Action, Any, T]
Steps: TypeAlias = Generator["Call | Do", Any, T]


def with_retries(steps: Steps[T], max_retries: int | None, deadline: Deadline) -> Actions[T]:
    """The steps, each call over all its attempts."""
    try:
        step = next(steps)
        while True:
            try:
                answer = yield from _one(step, max_retries, deadline)
            except SaccadeError as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result


def _one(step: Call | Do, max_retries: int | None, deadline: Deadline) -> Actions[Any]:
    if isinstance(step, Do):
        return (yield step)
    retries = Retries(max_retries, deadline, registers=bool(step.request_id))
    while True:
        try:
            return (yield Send(step, deadline.left()))
        except SaccadeError as error:
            delay = retries.delay_after(step.judged(error))
        yield Wait(delay)
