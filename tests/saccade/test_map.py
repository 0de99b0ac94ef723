"""Many concurrent requests: `map` of the synchronous and of the asyncio client, with the same tests."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import io
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
import pytest
from fake_server import Failure, Script

import saccade
from saccade import errors
from saccade._map.threads import map_requests
from saccade.v1 import inference_pb2

Mapped = Callable[..., list[saccade.Outcome]]


@pytest.fixture(params=["sync", "async"])
def mapped(request: pytest.FixtureRequest, address: str) -> Mapped:
    """`mapped(requests, **options)` -> all outcomes."""

    def sync(requests: Iterable[Any], *, max_retries: int = 2, **options: Any) -> list[saccade.Outcome]:
        with saccade.Client(address, timeout=20, max_retries=max_retries) as client:
            return list(client.map(requests, **options))

    def by_asyncio(requests: Iterable[Any], *, max_retries: int = 2, **options: Any) -> list[saccade.Outcome]:
        async def main() -> list[saccade.Outcome]:
            async with saccade.AsyncClient(address, timeout=20, max_retries=max_retries) as client:
                return [outcome async for outcome in client.map(requests, **options)]

        return asyncio.run(main())

    return sync if request.param == "sync" else by_asyncio


def echo(request: Any) -> list[str]:
    text = request.prompt.text
    if text.startswith("bad"):
        raise Failure(grpc.StatusCode.INVALID_ARGUMENT, text, reason="BAD")
    return [text]


@pytest.mark.parametrize("ordered", [False, True])
def test_each_request_has_its_outcome(mapped: Mapped, script: Script, ordered: bool) -> None:
    script.answer = echo
    requests = [{"prompt": f"{'bad ' * (i % 7 == 3)}{i}", "custom_id": f"id {i}"} for i in range(60)]
    outcomes = mapped(iter(requests), concurrency=7, ordered=ordered)
    if ordered:
        assert [o.index for o in outcomes] == list(range(60))
    assert sorted(o.index for o in outcomes) == list(range(60))
    for outcome in outcomes:
        assert outcome.custom_id == f"id {outcome.index}"
        if outcome.index % 7 == 3:
            assert isinstance(outcome.error, errors.InvalidArgument) and outcome.generation is None
            with pytest.raises(errors.InvalidArgument, match=f"bad {outcome.index}"):
                outcome.result()
        else:
            assert outcome.result().text == str(outcome.index)


def test_what_cannot_be_sent_is_an_outcome_too(mapped: Mapped) -> None:
    part = {"type": "image_url", "image_url": {"uri": "misspelt"}}
    wrong: list[Any] = [
        {"prompt": "?", "nonsense": 1}, {"prompt": "?", "images": ["no/such.png"]}, {}, {"prompt": "?", 5: 6},
        {"prompt": "?", "raw": "yes"}, {"prompt": "?", "tools": 5}, {"prompt": [{"role": "user", "content": [part]}]},
    ]  # fmt: skip
    found = {o.index: o.error for o in mapped([*wrong, {"prompt": "?"}])}
    assert [type(found[i]) for i in range(len(wrong))] == [errors.InvalidArgument] * len(wrong)
    assert found[len(wrong)] is None


def test_no_requests_and_no_concurrency(mapped: Mapped) -> None:
    assert mapped([]) == []
    with pytest.raises(errors.InvalidArgument, match="concurrency"):
        mapped([], concurrency=0)


def test_a_refusal_is_tried_again(mapped: Mapped, script: Script) -> None:
    script.failures = [Failure(grpc.StatusCode.UNAVAILABLE, reason="QUEUE_FULL", retry_after=0.001)] * 4
    outcomes = mapped([{"prompt": str(i)} for i in range(10)], concurrency=3, max_retries=4)
    assert all(o.error is None for o in outcomes) and len(script.requests) == 14


@pytest.mark.parametrize("ordered", [False, True])
def test_requests_are_taken_as_there_is_room(mapped: Mapped, script: Script, ordered: bool) -> None:
    """Never more than `concurrency` requests are at the server, and the source is not read far ahead."""
    lock, now, most, taken, furthest, answered = threading.Lock(), 0, 0, 0, 0, 0

    def source() -> Iterator[dict[str, Any]]:
        nonlocal taken, furthest
        for i in range(50):
            with lock:
                taken += 1
                furthest = max(furthest, taken - answered)
            yield {"prompt": str(i)}

    barrier = threading.Barrier(4)

    def answer(request: Any) -> list[str]:
        nonlocal now, most, answered
        with lock:
            now += 1
            most = max(most, now)
        if int(request.prompt.text) < 48:
            barrier.wait(timeout=20)  # the barrier is passed only if four requests run at the same time
        with lock:
            now -= 1
            answered += 1
        return ["x"]

    script.answer = answer
    assert len(mapped(source(), concurrency=4, ordered=ordered)) == 50
    assert most == 4 and furthest <= 8


def test_the_first_holds_back_no_more_than_a_window(mapped: Mapped, script: Script) -> None:
    first = threading.Event()
    seen: list[int] = []

    def answer(request: Any) -> list[str]:
        number = int(request.prompt.text)
        if number == 0:
            first.wait(timeout=20)
        else:
            seen.append(number)
            if len(seen) == 15:  # as many as the window of 2 x 8 holds beside the first
                first.set()
        return [str(number)]

    script.answer = answer
    outcomes = mapped([{"prompt": str(i)} for i in range(40)], concurrency=2, ordered=True)
    assert [o.result().text for o in outcomes] == [str(i) for i in range(40)]
    assert max(seen[:15]) == 15


def test_leaving_the_iterator_cancels_what_runs(client: saccade.Client, script: Script) -> None:
    script.hang_after = 0
    script.failures = [Failure(grpc.StatusCode.INTERNAL)]
    outcomes = client.map(({"prompt": str(i)} for i in range(1000)), concurrency=3)
    assert isinstance(next(outcomes).error, errors.Internal)
    outcomes.close()  # type: ignore[attr-defined]
    for _ in range(len(script.requests) - 1):  # requests that have arrived at the server
        assert script.ended.acquire(timeout=10)
    assert len(script.requests) <= 3


def test_leaving_the_async_iterator_cancels_what_runs(address: str, script: Script) -> None:
    script.hang_after = 0
    script.failures = [Failure(grpc.StatusCode.INTERNAL)]

    async def main() -> None:
        async with saccade.AsyncClient(address, timeout=20) as client:
            outcomes = client.map(({"prompt": str(i)} for i in range(1000)), concurrency=3)
            assert isinstance((await anext(outcomes)).error, errors.Internal)
            await outcomes.aclose()
            for _ in range(len(script.requests) - 1):
                assert await asyncio.to_thread(script.ended.acquire, timeout=10)
            assert len(script.requests) <= 3

    asyncio.run(main())


def test_an_error_in_the_source_is_raised(mapped: Mapped) -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield {"prompt": "a"}
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        mapped(source(), concurrency=1)


def test_an_async_source(address: str) -> None:
    async def main() -> None:
        async def source() -> Any:
            for i in range(5):
                yield {"prompt": str(i)}

        async with saccade.AsyncClient(address, timeout=20) as client:
            assert [o.index async for o in client.map(source(), concurrency=2, ordered=True)] == list(range(5))

    asyncio.run(main())


def test_an_async_source_that_awaits_what_is_cancelled_ends_the_map(address: str) -> None:
    async def main() -> None:
        async def source() -> Any:
            yield {"prompt": "0"}
            (task := asyncio.create_task(asyncio.sleep(60))).cancel()
            await task

        async def consume() -> None:
            async with saccade.AsyncClient(address) as client, contextlib.aclosing(client.map(source())) as outcomes:
                async for _ in outcomes:
                    pass

        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(consume(), 20)

    asyncio.run(main())


# -- sources that wait -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sync", "async"])
def followed(request: pytest.FixtureRequest, address: str) -> Callable[..., list[saccade.Outcome]]:
    """`followed(requests, seen, **options)`: all outcomes; `seen` is called with each one as it arrives."""

    def sync(requests: Iterable[Any], seen: Callable[[Any], None], **options: Any) -> list[saccade.Outcome]:
        with saccade.Client(address, timeout=20) as client:
            return [(seen(outcome), outcome)[1] for outcome in client.map(requests, **options)]

    def by_asyncio(requests: Iterable[Any], seen: Callable[[Any], None], **options: Any) -> list[saccade.Outcome]:
        async def main() -> list[saccade.Outcome]:
            async with saccade.AsyncClient(address, timeout=20) as client:
                return [(seen(outcome), outcome)[1] async for outcome in client.map(requests, **options)]

        return asyncio.run(main())

    return sync if request.param == "sync" else by_asyncio


@pytest.mark.parametrize("ordered", [False, True])
def test_a_source_may_depend_on_the_outcomes(followed: Any, script: Script, ordered: bool) -> None:
    """Each request but the first depends on an answer, while there is always room for more."""
    script.answer = echo
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def source() -> Iterator[dict[str, Any]]:
        yield {"prompt": "a"}
        for _ in range(4):
            yield {"prompt": answers.get(timeout=20) + "b"}

    outcomes = followed(source(), lambda outcome: answers.put(outcome.result().text), concurrency=8, ordered=ordered)
    assert [outcome.result().text for outcome in outcomes] == ["a", "ab", "abb", "abbb", "abbbb"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout came with Python 3.11")
def test_an_async_source_may_depend_on_the_outcomes(address: str, script: Script) -> None:
    script.answer = echo

    async def main() -> None:
        answers: asyncio.Queue[str] = asyncio.Queue()

        async def source() -> Any:
            async with asyncio.timeout(20):  # spans several items, so all of them have to be read in one task
                yield {"prompt": "a"}
                for _ in range(4):
                    yield {"prompt": await answers.get() + "b"}

        texts = []
        async with saccade.AsyncClient(address, timeout=20) as client:
            async for outcome in client.map(source(), concurrency=8):
                texts.append(outcome.result().text)
                answers.put_nowait(texts[-1])
        assert texts == ["a", "ab", "abb", "abbb", "abbbb"]

    asyncio.run(main())


def test_leaving_does_not_wait_for_a_source_that_blocks(client: saccade.Client, address: str) -> None:
    never = threading.Event()

    def source() -> Iterator[dict[str, Any]]:
        yield {"prompt": "a"}
        never.wait(60)

    began = time.monotonic()
    outcomes = client.map(source(), concurrency=2)
    assert next(outcomes).error is None
    outcomes.close()  # type: ignore[attr-defined]

    async def main() -> None:
        async with saccade.AsyncClient(address, timeout=20) as other:
            left = other.map(source(), concurrency=2)
            assert (await anext(left)).error is None
            await left.aclose()

            async def endless() -> Any:
                yield {"prompt": "a"}
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.append(True)

            ended: list[bool] = []
            left = other.map(endless(), concurrency=2)
            assert (await anext(left)).error is None
            await left.aclose()
            assert ended, "an asynchronous source is told"

    asyncio.run(main())
    assert time.monotonic() - began < 30
    never.set()


def test_leaving_waits_for_no_thread() -> None:
    """The garbage collector leaves an abandoned iterator, and may run in a thread that is starting and holds the lock
    of `threading` that every ending thread needs."""
    begun, release = threading.Event(), threading.Event()

    class Client:
        def _exchange(self) -> Any:
            return io.BytesIO()  # can be closed

        def _generate(self, request: Any, timeout: float | None, exchange: Any = None) -> Any:
            if request.request_id == "slow":
                begun.set()
                release.wait(60)
            begun.wait(60)
            raise errors.InvalidArgument(request.request_id)

    def prepare(item: str) -> tuple[inference_pb2.GenerateRequest, None]:
        return inference_pb2.GenerateRequest(request_id=item), None

    results = map_requests(Client(), ["slow", "quick"], prepare, concurrency=2, ordered=False)
    assert next(results)[1] == "quick"
    leaving = threading.Thread(target=results.close)
    leaving.start()
    leaving.join(20)
    left = not leaving.is_alive()
    release.set()
    leaving.join()
    assert left


def test_a_source_is_read_in_the_context_of_the_program(mapped: Mapped, script: Script) -> None:
    script.answer = echo
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")
    name.set("me")
    assert [o.result().text for o in mapped({"prompt": name.get()} for _ in range(1))] == ["me"]


def test_what_is_no_iterable_is_an_error(mapped: Mapped) -> None:
    with pytest.raises(TypeError):
        mapped(7)


INTERRUPTED = """
import os, signal, threading, time
from saccade._map.threads import map_requests
from saccade.errors import Cancelled
from saccade.v1 import inference_pb2

closed = threading.Event()

class Client:
    def _exchange(self):
        return self

    def close(self):
        closed.set()

    def _generate(self, request, timeout, exchange):
        time.sleep(0.2)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.kill(os.getpid(), signal.SIGINT)
        closed.wait(60)
        raise Cancelled("closed")

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs of a shell
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
try:
    prepare = lambda item: (inference_pb2.GenerateRequest(), None)
    list(map_requests(Client(), [1], prepare, concurrency=1, ordered=False))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_that_does_not_end_the_wait_for_an_answer_is_noticed() -> None:
    """A signal that arrives just before the main thread begins to wait does not end the wait. Here another thread gets
    it, with the same effect."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=50)
    assert done.stdout == "interrupted\n", done.stderr
