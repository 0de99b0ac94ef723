"""Executes the actions that the core yields, through a transport."""

from __future__ import annotations

from typing import Any, TypeVar

from saccade._async.ports import AsyncExchange
from saccade._core.steps import Action, Actions, Do, Open, Receive, Send, Wait
from saccade.errors import SaccadeError

T = TypeVar("T")


async def run(actions: Actions[T], exchange: AsyncExchange) -> T:
    """Executes the actions and returns their result. Raises SaccadeError."""
    try:
        action = next(actions)
        while True:
            try:
                result = await _perform(action, exchange)
            except (SaccadeError, TimeoutError) as error:
                action = actions.throw(error)
            else:
                action = actions.send(result)
    except StopIteration as stop:
        answer: T = stop.value
        return answer


async def _perform(action: Action, exchange: AsyncExchange) -> Any:
    match action:
        case Receive(patience):
            return await exchange.receive(patience)
        case Send(call, timeout):
            return await exchange.send(call, timeout)
        case Open(call, timeout, request_id):
            return await exchange.open(call, timeout, request_id)
        case Wait(seconds):
            return await exchange.wait(seconds)
        case Do(function):
            return await exchange.do(function)
