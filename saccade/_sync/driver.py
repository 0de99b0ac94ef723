# Generated from saccade/_async/driver.py by `make sdk`. Do not edit.
"""Executes the actions that the core yields, through a transport."""

from __future__ import annotations

from typing import Any, TypeVar

from saccade._core.steps import Action, Actions, Do, Open, Receive, Send, Wait
from saccade._sync.ports import Exchange
from saccade.errors import SaccadeError

T = TypeVar("T")


def run(actions: Actions[T], exchange: Exchange) -> T:
    """Executes the actions and returns their result. Raises SaccadeError."""
    try:
        action = next(actions)
        while True:
            try:
                result = _perform(action, exchange)
            except (SaccadeError, TimeoutError) as error:
                action = actions.throw(error)
            else:
                action = actions.send(result)
    except StopIteration as stop:
        answer: T = stop.value
        return answer


def _perform(action: Action, exchange: Exchange) -> Any:
    match action:
        case Receive(patience):
            return exchange.receive(patience)
        case Send(call, timeout):
            return exchange.send(call, timeout)
        case Open(call, timeout, request_id):
            return exchange.open(call, timeout, request_id)
        case Wait(seconds):
            return exchange.wait(seconds)
        case Do(function):
            return exchange.do(function)
