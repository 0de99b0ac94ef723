"""The events of a step, and answers to queries, as the engine process sends them to a frontend process.

Control messages are pickled by `multiprocessing.connection`, which is safe because both ends are processes of this
program on a socket pair without an address. The patches of each image lie in a sealed memory file, whose descriptor is
sent after the message (`EngineRequest.packed`); only the engine maps it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from service.engine.types import EngineEvent

PackedEvents = tuple[list[str], list[int], list[int], list[tuple[int, float]], list[EngineEvent]]


def pack_events(events: list[EngineEvent]) -> PackedEvents:
    """Events in the form in which they are sent: plain tokens in three lists, with the indices and times of first
    tokens; all other events, and those that follow one in the same request, as objects. Most events are plain tokens,
    and pickling each as an object would cost the engine's thread more than drawing it."""
    packed: PackedEvents = [], [], [], [], []
    names, tokens, cached, scheduled, others = packed
    apart = set[str]()
    for event in events:
        if not event.plain or event.request_id in apart:
            others.append(event)
            apart.add(event.request_id)
        else:
            assert event.token_id is not None
            if event.scheduled is not None:
                scheduled.append((len(names), event.scheduled))
            names.append(event.request_id)
            tokens.append(event.token_id)
            cached.append(event.cached_tokens)
    return packed


def unpack_events(packed: PackedEvents) -> list[EngineEvent]:
    """The inverse of `pack_events`. The events of each request are in order."""
    names, tokens, cached, scheduled, others = packed
    plain = [EngineEvent(n, t, cached_tokens=c) for n, t, c in zip(names, tokens, cached, strict=True)]
    for place, moment in scheduled:
        plain[place] = plain[place]._replace(scheduled=moment)
    return plain + others


def answer(number: int, future: Future[dict[str, Any]]) -> tuple[str, int, dict[str, Any] | None, str | None]:
    """The message with the result of query `number`, which is done, or with its error."""
    error = future.exception()
    return "answer", number, None if error else future.result(), repr(error) if error else None
