"""The actions that a method yields, written once for all clients.

A method is a generator. It yields actions and is sent their results; the error of an action is raised at its `yield`.
`Steps` yield whole calls, as if calls could not fail temporarily; `with_retries` turns them into `Actions`, each of
which is one attempt or one wait.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from saccade._core.retrying import Deadline, Retries
from saccade.errors import NotFound, SaccadeError

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One call of a service. For a call whose request is a stream, `message` is a function that makes its messages,
    called again for each attempt."""

    service: str
    method: str
    message: Any
    give_up: frozenset[str] = frozenset()
    """Reasons of errors that are not retried because the caller handles them."""
    affinity: str = ""
    """The key that chooses the replica, if it does not follow from the message; see `saccade._core.affinity`."""
    moved: int = 0
    """How often replicas have rejected the call so far; after a rejection, the next attempt goes to another replica."""
    stays: bool = False
    """Whether all attempts go to one replica, the one that has the call's files."""
    deletes: bool = False
    """Whether the call deletes something. If the answer of an attempt is lost, NotFound is the success of the next one.
    """

    @property
    def request_id(self) -> str:
        """The id under which the server registers the request while it runs; empty if it does not register the
        request."""
        return str(getattr(self.message, "request_id", ""))

    def after(self, rejections: int) -> Call:
        """The next attempt after this many rejections."""
        return self if self.stays or not rejections else replace(self, moved=rejections)

    def judged(self, error: SaccadeError) -> SaccadeError:
        """Returns the error if it may be retried; raises it otherwise."""
        if error.reason in self.give_up:
            raise error from error.__cause__
        return error


@dataclass(frozen=True)
class Send:
    """One attempt of a unary call; the result is its answer. Raises SaccadeError."""

    call: Call
    timeout: float | None
    """Seconds; None for no limit."""


@dataclass(frozen=True)
class Open:
    """Starts one attempt of a streaming call, closing an open stream first. Raises SaccadeError."""

    call: Call
    timeout: float | None
    request_id: str = ""
    """The request id for errors."""


@dataclass(frozen=True)
class Receive:
    """The next message of the open stream, or None at its end. Raises SaccadeError, and TimeoutError after `patience`
    seconds."""

    patience: float | None


@dataclass(frozen=True)
class Wait:
    """Waits for this many seconds. Raises Cancelled if the call is cancelled meanwhile."""

    seconds: float


@dataclass(frozen=True)
class Do:
    """Calls a function that could block an event loop, such as reading a file or encoding an image. The result is its
    return value."""

    function: Callable[[], Any]


Action: TypeAlias = "Send | Open | Receive | Wait | Do"
Actions: TypeAlias = Generator[Action, Any, T]
Steps: TypeAlias = Generator["Call | Do", Any, T]


def with_retries(steps: Steps[T], max_retries: int | None, deadline: Deadline) -> Actions[T]:
    """Executes the steps, retrying each call."""
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
            return (yield Send(step.after(retries.rejections), deadline.left()))
        except SaccadeError as error:
            if step.deletes and retries.lost and isinstance(error, NotFound):
                return None
            delay = retries.delay_after(step.judged(error))
        yield Wait(delay)
