"""Merges deltas into fewer, larger ones: the options `chunk_tokens` and `max_chunk_delay` of a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace

from service.common.types import Delta, Event, Finished


class _Held:
    """Deltas of one sample that have not been sent yet."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.sent = 0

    @property
    def tokens(self) -> int:
        return sum(len(delta.token_ids) for delta in self.deltas)

    def take(self) -> list[Delta]:
        """The held deltas as one, if there are any."""
        if not self.deltas:
            return []
        merged = replace(
            self.deltas[0],
            text="".join(delta.text for delta in self.deltas),
            reasoning="".join(delta.reasoning for delta in self.deltas),
            calls=tuple(call for delta in self.deltas for call in delta.calls),
            token_ids=tuple(i for delta in self.deltas for i in delta.token_ids),
            logprobs=tuple(p for delta in self.deltas for p in delta.logprobs),
            sequence=self.sent,
        )
        self.deltas = []
        self.sent += 1
        return [merged]


async def coalesce(
    events: AsyncGenerator[Event, None], *, chunk_tokens: int | None, max_delay: float | None
) -> AsyncGenerator[Event, None]:
    """The same events with deltas of at least `chunk_tokens` tokens, none held back for more than `max_delay` seconds.

    Held deltas are sent before the end of their sample, and before an error. Without `chunk_tokens`, only the delay
    ends a chunk."""
    queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()

    async def pump() -> None:
        # In a task, because a timeout around `anext` would cancel the generator in the middle of a step.
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    queue.put_nowait(event)
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    held: dict[int, _Held] = {}
    due: float | None = None
    loop = asyncio.get_running_loop()
    task = loop.create_task(pump())
    try:
        while True:
            try:
                async with asyncio.timeout_at(due):
                    event = await queue.get()
            except TimeoutError:
                due = None
                for sample in held.values():
                    for delta in sample.take():
                        yield delta
                continue
            if event is None or isinstance(event, BaseException):
                for sample in held.values():
                    for delta in sample.take():
                        yield delta
                if event is not None:
                    raise event
                return
            if isinstance(event, Delta):
                sample = held.setdefault(event.index, _Held())
                sample.deltas.append(event)
                if chunk_tokens is None or sample.tokens < chunk_tokens:
                    if due is None and max_delay is not None:
                        due = loop.time() + max_delay
                    continue
                for delta in sample.take():
                    yield delta
            else:
                if isinstance(event, Finished) and event.index in held:
                    for delta in held[event.index].take():
                        yield delta
                yield event
            if not any(sample.deltas for sample in held.values()):
                due = None
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
