"""Merges deltas into fewer, larger ones: the options `chunk_tokens` and `max_chunk_delay` of a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace

from service.common.types import Delta, Event, Finished


class _Sample:
    """Deltas of one sample that have not been sent yet."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.tokens = self.sent = 0

    def add(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.tokens += len(delta.token_ids)

    def take(self) -> list[Delta]:
        """The held deltas merged into one; empty if there are none."""
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
        self.deltas, self.tokens = [], 0
        self.sent += 1
        return [merged]


class _Held:
    """The deltas of all samples that have not been sent yet."""

    def __init__(self, chunk_tokens: int | None) -> None:
        self._chunk_tokens = chunk_tokens
        self._samples: dict[int, _Sample] = {}

    def __bool__(self) -> bool:
        return any(sample.deltas for sample in self._samples.values())

    def add(self, event: Event) -> list[Event]:
        """Adds an event; returns the events that are to be sent now."""
        if isinstance(event, Delta):
            sample = self._samples.setdefault(event.index, _Sample())
            sample.add(event)
            complete = self._chunk_tokens is not None and sample.tokens >= self._chunk_tokens
            return [*sample.take()] if complete else []
        if isinstance(event, Finished) and event.index in self._samples:
            return [*self._samples[event.index].take(), event]
        return [event]

    def take(self) -> list[Delta]:
        """All held deltas, one for each sample that has any."""
        return [delta for sample in self._samples.values() for delta in sample.take()]


async def coalesce(
    events: AsyncGenerator[Event, None], *, chunk_tokens: int | None, max_delay: float | None
) -> AsyncGenerator[Event, None]:
    """The same events with deltas of at least `chunk_tokens` tokens, none held back for more than `max_delay` seconds.

    Held deltas are sent before the end of their sample, and before an error. Without `chunk_tokens`, only the delay
    ends a chunk."""
    queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()
    held, due = _Held(chunk_tokens), None
    loop = asyncio.get_running_loop()
    # In a task, because a timeout around `anext` would cancel the generator in the middle of a step.
    task = loop.create_task(_pump(events, queue))
    try:
        while True:
            try:
                async with asyncio.timeout_at(due):
                    event = await queue.get()
            except TimeoutError:
                due = None
                for delta in held.take():
                    yield delta
                continue
            if event is None or isinstance(event, BaseException):
                for delta in held.take():
                    yield delta
                if event is not None:
                    raise event
                return
            for ready in held.add(event):
                yield ready
            if not held:
                due = None
            elif due is None and max_delay is not None:
                due = loop.time() + max_delay
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _pump(events: AsyncGenerator[Event, None], queue: asyncio.Queue[Event | BaseException | None]) -> None:
    """Moves the events to the queue, followed by the error with which they end, or None."""
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                queue.put_nowait(event)
    except Exception as error:
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)
