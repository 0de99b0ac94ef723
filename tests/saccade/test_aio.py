"""The asyncio client against a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from descriptors import open_descriptors
from fake_server import Failure, Script

import saccade
from saccade import errors

Code = grpc.StatusCode


def run(body: Callable[[saccade.AsyncClient], Coroutine[Any, Any, None]], address: str, **options: Any) -> None:
    async def main() -> None:
        async with saccade.AsyncClient(address, timeout=20, **options) as client:
            await body(client)

    asyncio.run(main())


async def ended(script: Script) -> bool:
    return await asyncio.to_thread(script.ended.acquire, timeout=10)


def test_its_answers_are_those_of_the_synchronous_client(address: str, client: saccade.Client) -> None:
    expected = client.generate("?", n=2, logprobs=1)

    async def body(client: saccade.AsyncClient) -> None:
        assert await client.generate("?", n=2, logprobs=1) == expected
        assert await client.stream("?", n=2, logprobs=1).final() == expected
        texts = [delta.text async for delta in client.stream("?")]
        assert texts == ["a ", "red ", "square"]
        async with await client.stream("?") as stream:
            assert (await anext(stream)).text == "a "
            assert stream.text == "a " and stream.seed == 7 and stream.token_ids == [0]

    run(body, address)


def test_many_at_once(address: str) -> None:
    async def body(client: saccade.AsyncClient) -> None:
        answers = await asyncio.gather(*(client.generate("?", seed=seed) for seed in range(1, 33)))
        assert [answer.seed for answer in answers] == list(range(1, 33))

    run(body, address)


def test_errors_and_retries(address: str, script: Script) -> None:
    async def body(client: saccade.AsyncClient) -> None:
        for call in (client.generate, lambda prompt, **options: client.stream(prompt, **options).final()):
            script.requests.clear()
            script.failures = [Failure(Code.UNAVAILABLE, reason="WARMING", retry_after=0.01)]
            assert (await call("?")).text == "a red square"
            assert len({request.request_id for request in script.requests}) == 1 and len(script.requests) == 2
            script.failures = [Failure(Code.NOT_FOUND, reason="NOT_FOUND")]
            with pytest.raises(errors.NotFound) as caught:
                await call("?")
            assert caught.value.reason == "NOT_FOUND"
            assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)
            script.hang_after = 0
            with pytest.raises(errors.DeadlineExceeded, match="^the timeout of the call has passed "):
                await (
                    client.generate("?", timeout=0.2)
                    if call == client.generate
                    else client.stream("?", timeout=0.2).final()
                )
            script.hang_after = None

    run(body, address)


def test_wrong_arguments_are_raised_when_it_is_awaited(address: str) -> None:
    async def body(client: saccade.AsyncClient) -> None:
        with pytest.raises(errors.InvalidArgument, match="nonsense"):
            await client.generate("?", nonsense=1)  # type: ignore[call-arg]
        with pytest.raises(errors.InvalidArgument, match="no/such/file"):
            await client.stream("?", images=["no/such/file"])

    run(body, address)


def test_a_stream_that_is_left_early_is_cancelled(address: str, script: Script) -> None:
    script.hang_after = 1

    async def body(client: saccade.AsyncClient) -> None:
        async with client.stream("?") as stream:
            assert (await anext(stream)).text == "a "
        assert await ended(script)
        with pytest.raises(errors.Cancelled):
            await stream.final()

    run(body, address)


def test_closing_a_stream_from_another_task(address: str, script: Script) -> None:
    script.hang_after = 1

    async def body(client: saccade.AsyncClient) -> None:
        stream = await client.stream("?")
        await anext(stream)
        reader = asyncio.create_task(stream.final())
        await asyncio.sleep(0)
        await stream.close()
        with pytest.raises(errors.Cancelled):
            await reader
        assert await ended(script)

    run(body, address)


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_cancelled_task_cancels_the_call(address: str, script: Script, how: str) -> None:
    script.hang_after = 1

    async def body(client: saccade.AsyncClient) -> None:
        stream = client.stream("?")
        if how == "stream":
            await anext(stream)
        task = asyncio.create_task(client.generate("?") if how == "generate" else stream.final())
        await asyncio.sleep(0)  # a call that has not started yet has nothing to cancel
        while not script.requests:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await ended(script)

    run(body, address)


def test_closing_the_client_ends_its_running_calls(address: str, script: Script) -> None:
    script.hang_after = 1

    async def body(client: saccade.AsyncClient) -> None:
        stream = client.stream("?")
        await anext(stream)
        reader = asyncio.create_task(stream.final())
        await asyncio.sleep(0)
        await client.close()
        await client.close()
        with pytest.raises(errors.Cancelled):
            await reader
        with pytest.raises(errors.FailedPrecondition):
            await client.generate("?")

    run(body, address)


@pytest.mark.parametrize("what", ["client", "exchange", "task"])
def test_a_call_between_two_attempts_ends_at_once(address: str, what: str) -> None:
    """Not only after the pause, for which a server may request a minute."""

    async def body(client: saccade.AsyncClient) -> None:
        exchange = client.with_options(timeout=300)._exchange()
        waiting = asyncio.create_task(exchange.wait(30))
        await asyncio.sleep(0)
        match what:
            case "client":
                await client.close()
            case "exchange":
                exchange.close()
            case "task":
                waiting.cancel()
        with pytest.raises(asyncio.CancelledError if what == "task" else errors.Cancelled):
            await asyncio.wait_for(waiting, 20)
        with pytest.raises(errors.Cancelled):
            exchange.close()
            await exchange.wait(30)

    run(body, address)


def test_a_second_task_that_reads_a_stream_is_told(address: str) -> None:
    async def body(client: saccade.AsyncClient) -> None:
        stream = client.stream("?")
        answers = await asyncio.gather(stream.final(), stream.final(), return_exceptions=True)
        assert isinstance(answers[0], saccade.Generation) and answers[0].text == "a red square"
        assert isinstance(answers[1], errors.FailedPrecondition)

    run(body, address)


def test_one_client_in_several_event_loops(address: str) -> None:
    client = saccade.AsyncClient(address, timeout=20)  # outside of any loop
    for copy in (client, client, pickle.loads(pickle.dumps(client))):

        async def ask(client: saccade.AsyncClient = copy) -> str:
            return (await client.generate("?")).text

        assert asyncio.run(ask()) == "a red square"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts this process's open files in /proc")
def test_a_loop_that_is_over_leaves_no_connection(address: str) -> None:
    client = saccade.AsyncClient(address, timeout=20)

    async def ask() -> str:
        return (await client.generate("?")).text

    asyncio.run(ask())
    before = open_descriptors()
    for _ in range(12):
        assert asyncio.run(ask()) == "a red square"
    until = time.monotonic() + 10  # gRPC closes its sockets in a thread of its own
    while open_descriptors() > before + 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert open_descriptors() <= before + 4, "each connection has two ends here"
    asyncio.run(client.close())


def test_loops_of_several_threads_share_a_client(address: str, script: Script) -> None:
    """Each has a connection of its own, and keeps it while another one is in use; closing the client ends them all."""
    client = saccade.AsyncClient(address, timeout=20)
    turn = threading.Barrier(2)

    async def main() -> set[int]:
        peers: set[int] = set()
        for _ in range(3):
            await asyncio.to_thread(turn.wait, 20)
            assert (await client.generate("?")).text == "a red square"
            peers.add(id(client._connection._channels[asyncio.get_running_loop()]))
        assert len(client._connection._channels) == 2
        await asyncio.to_thread(turn.wait, 20)
        return peers

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: asyncio.run(main()), range(2))
    assert len(first) == len(second) == 1 and first != second
    asyncio.run(client.close())

    async def after() -> None:
        with pytest.raises(errors.FailedPrecondition):
            await client.generate("?")

    asyncio.run(after())


def test_closing_from_one_loop_ends_the_calls_of_another(address: str, script: Script) -> None:
    script.hang_after = 1
    client = saccade.AsyncClient(address, timeout=60)
    waiting = threading.Event()

    async def read() -> None:
        stream = client.stream("?")
        await anext(stream)
        waiting.set()
        with pytest.raises(errors.Cancelled):
            await stream.final()

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(asyncio.run, read())
        assert waiting.wait(20)
        asyncio.run(client.close())
        reading.result(20)
    assert script.ended.acquire(timeout=10)


def test_a_file_that_cannot_be_read_delays_no_cancellation(tmp_path: Path) -> None:
    """A pipe that nobody writes to."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    async def main() -> None:
        async with saccade.AsyncClient("127.0.0.1:1") as client:
            task = asyncio.create_task(client.generate("?", images=[str(pipe)]))
            writer = None
            while writer is None:  # until the pipe is being opened, and so is read next
                assert not task.done()
                await asyncio.sleep(0)
                with contextlib.suppress(OSError):
                    writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            task.cancel()
            try:
                assert (await asyncio.wait({task}, timeout=10))[0] and task.cancelled()
            finally:
                os.close(writer)  # ends the thread that reads

    asyncio.run(main())
