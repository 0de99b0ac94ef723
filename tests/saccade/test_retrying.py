"""When a call is retried: its deadline, the server's pushback, and the error that the caller finally gets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from clock import Clock
from fake_server import Failure, Script
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from wires import Wire

import saccade
from saccade import errors
from saccade._core import retrying
from saccade._core.batches import delete_steps as delete_batch
from saccade._core.media import delete_steps as delete_media
from saccade._core.methods import one_call
from saccade._core.requests import build_request
from saccade._core.resuming import StreamState
from saccade._core.retrying import Deadline, Retries, retry_delay
from saccade._core.settings import CallSettings
from saccade._core.steps import Call, Send, Steps, Wait, with_retries
from saccade._sync.driver import run
from saccade._sync.methods import Methods
from saccade._transport.exchange import Exchange
from saccade.v1 import inference_pb2

Code = grpc.StatusCode
GONE = errors.Unavailable("gone", reason="ENGINE_DIED", retryable=True)
LOST = errors.Unavailable("the connection is lost", retryable=True)
IN_USE = errors.AlreadyExists("a request 'x' is running")
Ask = Callable[..., saccade.Generation]


@pytest.fixture(params=["generate", "stream", "async generate", "async stream"])
def ask(request: pytest.FixtureRequest, address: str) -> Ask:
    """`ask(**options)`: one answer, in each way of calling; `settings` are the client's."""

    def by_thread(settings: dict[str, Any] | None = None, **options: Any) -> saccade.Generation:
        with saccade.Client(address, **(settings or {})) as client:
            if request.param == "generate":
                return client.generate("?", **options)
            return client.stream("?", **options).final()

    def by_asyncio(settings: dict[str, Any] | None = None, **options: Any) -> saccade.Generation:
        async def main() -> saccade.Generation:
            async with saccade.AsyncClient(address, **(settings or {})) as client:
                if request.param == "async generate":
                    return await client.generate("?", **options)
                return await client.stream("?", **options).final()

        return asyncio.run(main())

    return by_asyncio if "async" in request.param else by_thread


def test_by_default_the_deadline_ends_the_attempts_and_no_count(
    ask: Ask, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "_LONGEST_WAIT", 0.02)
    soon = Failure(Code.UNAVAILABLE, reason="ENGINE_DIED", retry_after=0.001)
    script.failures = [soon] * 4
    assert ask().text == "a red square" and len(script.requests) == 5
    assert len({request.request_id for request in script.requests}) == 1
    script.requests.clear()
    # The last one asks for a wait beyond the deadline, however slow the attempts before it are.
    script.failures = [*[soon] * 20, Failure(Code.UNAVAILABLE, reason="ENGINE_DIED", retry_after=600)]
    with pytest.raises(errors.Unavailable) as caught:
        ask(timeout=60)
    assert caught.value.reason == "ENGINE_DIED" and len(script.requests) == 21, "the error that says why"


def test_a_count_still_ends_them_where_one_is_given(ask: Ask, script: Script) -> None:
    for count in (0, 2):
        script.requests.clear()
        script.failures = [Failure(Code.UNAVAILABLE, reason="ENGINE_DIED", retry_after=0.001)] * 9
        with pytest.raises(errors.Unavailable):
            ask({"max_retries": count})
        assert len(script.requests) == count + 1


@pytest.mark.parametrize("unit", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("asked", [None, 1.0])
@pytest.mark.parametrize("timeout", [4.0, 30.0, 600.0])
def test_attempts_reach_to_the_end_of_the_deadline(unit: float, asked: float | None, timeout: float) -> None:
    """However long the server is unreachable, the last attempt is made when little time is left, and the waits are
    bounded."""
    clock = Clock(0.0)
    retries = Retries(None, Deadline(timeout, clock), random_unit=lambda: unit)
    error = errors.Unavailable("gone", retryable=True, retry_after=asked)
    waits = []
    with pytest.raises(errors.Unavailable):
        while True:
            waits.append(retries.delay_after(error))
            clock.now += waits[-1]
    assert timeout - max(0.2, asked or 0) * 1.1 <= clock.now < timeout
    assert max(waits) <= 8 + (asked or 0) and len(waits) <= timeout * 4 + 10
    assert all(wait >= (asked or 0) for wait in waits)


def test_numbers_that_a_server_should_not_send() -> None:
    for asked in (-5.0, 0.0):
        error = errors.Unavailable("gone", retryable=True, retry_after=asked)
        assert 0.01 < (retry_delay(error, 1, None, None) or 0) <= 0.1
    assert 4 <= (retry_delay(GONE, 5000, None, None) or 0) <= 8
    far = errors.Unavailable("gone", retryable=True, retry_after=1e9)
    assert retry_delay(far, 1, None, 600.0) is None
    assert retry_delay(far, 1, None, None) is None, "Python's locks do not wait that long"


@pytest.mark.parametrize("pushback", ["9" * 400, "9" * 5000, "²"])
def test_a_pushback_that_is_no_64_bit_number_forbids_retries(pushback: str) -> None:
    assert errors.parse_trailers([("grpc-retry-pushback-ms", pushback)]).no_retry


def test_a_time_to_wait_beyond_pythons_timedelta() -> None:
    status = status_pb2.Status()
    status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=2**62)))
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL"))
    details = errors.parse_trailers([("grpc-status-details-bin", status.SerializeToString())])
    assert details.reason == "QUEUE_FULL" and details.retry_after == 2**62


def test_the_second_side_of_each_limit() -> None:
    one = lambda: 1.0  # noqa: E731
    assert retry_delay(GONE, 1, 1, None, one) == 0.5 and retry_delay(GONE, 2, 1, None, one) is None
    assert retry_delay(GONE, 1, 0, None, one) is None
    assert retry_delay(GONE, 1, None, 0.5, one) == 0.25  # half of what is left, where all of it would go
    assert retry_delay(GONE, 1, None, 0.51, one) == 0.5
    assert retry_delay(GONE, 1, None, 0.2, one) == 0.1 and retry_delay(GONE, 1, None, 0.19, one) is None
    asked = errors.Unavailable("gone", retryable=True, retry_after=1.0)
    assert retry_delay(asked, 1, None, 1.1, one) == 1.0 and retry_delay(asked, 1, None, 1.0, one) is None
    assert [retry_delay(GONE, n, None, None, one) for n in range(1, 7)] == [0.5, 1, 2, 4, 8, 8]


# -- the id of an attempt that the server thinks is running ------------------------------------------------------------


def test_an_id_that_only_the_failed_attempt_holds_is_waited_for(ask: Ask, script: Script) -> None:
    script.failures = [
        Failure(Code.UNAVAILABLE, retry_after=0.001),
        Failure(Code.ALREADY_EXISTS, "running", retry_after=0.001),
    ]
    assert ask(request_id="mine").text == "a red square"
    assert len(script.requests) == 3


def test_an_id_that_somebody_else_holds_is_an_error_at_once(ask: Ask, script: Script) -> None:
    script.failures = [Failure(Code.ALREADY_EXISTS, "running")]
    with pytest.raises(errors.AlreadyExists):
        ask(request_id="mine")
    assert len(script.requests) == 1


def test_who_gives_up_hears_of_the_failure_and_not_of_his_own_id(ask: Ask, script: Script) -> None:
    failure = Failure(Code.UNAVAILABLE, reason="ENGINE_DIED", retry_after=0.001)
    script.failures = [failure, *[Failure(Code.ALREADY_EXISTS, "running", retry_after=0.001)] * 9]
    with pytest.raises(errors.Unavailable) as caught:
        ask({"max_retries": 2})
    assert caught.value.reason == "ENGINE_DIED" and isinstance(caught.value.__cause__, grpc.RpcError)
    assert len(script.requests) == 3


def test_the_wait_for_an_id_is_what_the_server_asks_for() -> None:
    retries = Retries(None, Deadline(None), registers=True, random_unit=lambda: 1.0)
    assert retries.delay_after(GONE) == 0.5
    asked = errors.AlreadyExists("running", retry_after=0.1)
    assert retries.delay_after(asked) == pytest.approx(0.1 + 0.2 * 1.0)


def test_calls_that_register_no_id_are_not_tried_again_for_one() -> None:
    retries = Retries(None, Deadline(None))
    retries.delay_after(GONE)
    with pytest.raises(errors.AlreadyExists):
        retries.delay_after(IN_USE)


def test_a_deadline_that_hides_failures_names_the_last() -> None:
    retries = Retries(None, Deadline(None))
    retries.delay_after(GONE)
    late = errors.DeadlineExceeded("late")
    with pytest.raises(errors.DeadlineExceeded) as caught:
        retries.delay_after(late)
    told = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])  # Python 3.10 has no notes
    assert "1 failed" in told and "ENGINE_DIED" in told


def test_a_call_that_fails_for_long_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    retries = Retries(None, Deadline(None))
    with caplog.at_level(logging.INFO, "saccade"):
        for count in range(10):
            assert len(caplog.records) == (count >= 4)
            retries.delay_after(GONE)
    assert caplog.records[0].levelno == logging.WARNING and "ENGINE_DIED" in caplog.text


# -- what a stream that has failed says afterwards ---------------------------------------------------------------------


def test_a_failed_stream_says_the_same_again(client: saccade.Client, address: str, script: Script) -> None:
    script.failures, script.fail_after = [Failure(Code.INTERNAL, "broken", reason="WHY")] * 2, 2
    stream = client.stream("?")
    with pytest.raises(errors.Internal) as first:
        list(stream)
    for read in (stream.final, lambda: next(stream), lambda: list(stream), stream.final):
        with pytest.raises(errors.Internal) as again:
            read()
        assert again.value is first.value and isinstance(again.value.__cause__, grpc.RpcError)
    assert stream.text == "a red "
    stream.close()
    with pytest.raises(errors.Internal):
        stream.final()

    async def main() -> None:
        async with saccade.AsyncClient(address, timeout=20) as other:
            async with other.stream("?") as stream:
                with pytest.raises(errors.Internal) as first:
                    async for _ in stream:
                        pass
                for _ in range(2):
                    with pytest.raises(errors.Internal) as again:
                        await stream.final()
                    assert again.value is first.value
                with pytest.raises(errors.Internal):
                    await anext(stream)

    asyncio.run(main())


# -- patience over attempts --------------------------------------------------------------------------------------------


def stream_state(**settings: Any) -> StreamState:
    return StreamState(build_request("?"), CallSettings(**settings), Deadline(None), resume=True)


def test_the_first_pieces_time_is_that_of_all_attempts() -> None:
    state = stream_state(first_token_timeout=2.0, idle_timeout=5.0)
    state.waited(0.75)
    assert state.patience() == 1.25
    assert state.delay_after(GONE) <= 0.625, "the pause is part of the time"
    state.waited(0.5)
    assert state.patience() == 0.75
    state.take(inference_pb2.StreamGenerateResponse(started=inference_pb2.Started(seed=1)))
    assert state.patience() == 0.75, "a stream that has started has brought no piece yet"
    state.waited(0.7)
    with pytest.raises(errors.Unavailable):
        state.delay_after(GONE)  # too little time is left for an attempt
    state.waited(7)
    assert state.patience() == 0.001
    assert state.out_of_patience().reason == "FIRST_TOKEN_TIMEOUT"


@pytest.mark.parametrize(("timeout", "patience"), [(600.0, 2.0), (2.0, 600.0), (None, 2.0), (2.0, None)])
def test_the_shorter_of_deadline_and_patience_counts(timeout: float | None, patience: float | None) -> None:
    retries = Retries(None, Deadline(timeout))
    assert 1 <= retries.delay_after(errors.Unavailable("gone", retryable=True, retry_after=1.0), patience) < 2
    with pytest.raises(errors.Unavailable):
        retries.delay_after(errors.Unavailable("gone", retryable=True, retry_after=2.5), patience)


def test_each_further_piece_has_its_own_time() -> None:
    state = stream_state(first_token_timeout=2.0, idle_timeout=5.0)
    piece = inference_pb2.StreamGenerateResponse(delta=inference_pb2.Delta(text="a", token_ids=[1]))
    state.waited(1.5)
    state.take(piece)
    assert state.patience() == 5.0
    state.waited(4)
    assert state.patience() == 1.0
    state.delay_after(GONE)
    assert state.patience() == 1.0, "a break is no piece"
    state.take(piece)
    assert state.patience() == 5.0 and state.out_of_patience().reason == "IDLE_TIMEOUT"
    assert stream_state(idle_timeout=1.0).patience() is None


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_server_that_stays_away_ends_the_wait_for_the_first_piece(address: str, script: Script, kind: str) -> None:
    """Repeated failures end with the reader's timeout, even if the deadline allows more time."""
    script.failures = [Failure(Code.UNAVAILABLE, reason="ENGINE_DIED", retry_after=0.02)] * 10_000

    async def by_asyncio() -> None:
        async with saccade.AsyncClient(address) as client:
            await client.stream("?", first_token_timeout=0.5, timeout=60).final()

    with pytest.raises(errors.SaccadeError) as caught:
        if kind == "sync":
            with saccade.Client(address) as client:
                client.stream("?", first_token_timeout=0.5, timeout=60).final()
        else:
            asyncio.run(by_asyncio())
    assert caught.value.reason in ("ENGINE_DIED", "FIRST_TOKEN_TIMEOUT")
    assert len(script.failures) > 9_900


# -- attempts whose answers are lost -----------------------------------------------------------------------------------


@pytest.mark.parametrize("delete", [delete_batch, delete_media])
def test_what_a_lost_attempt_has_deleted_is_not_missing(delete: Callable[[str], Steps[None]]) -> None:
    missing = errors.NotFound("there is none", reason="NOT_FOUND")
    full = errors.Overloaded("full", reason="QUEUE_FULL", retryable=True)

    def deleted_after(*failures: errors.SaccadeError) -> None:
        actions = with_retries(delete("a"), None, Deadline(60.0))
        assert isinstance(next(actions), Send)
        for failure in failures:
            assert isinstance(actions.throw(failure), Wait)
            assert isinstance(actions.send(None), Send)
        with pytest.raises(StopIteration):
            actions.throw(missing)

    deleted_after(LOST)
    deleted_after(LOST, full)
    for failures in ([], [full]):
        with pytest.raises(errors.NotFound):
            deleted_after(*failures)


# -- who cancels while an attempt is being opened ----------------------------------------------------------------------


class Attempt:
    """Replaces a call of the client. It ends when it is cancelled, and never otherwise."""

    def __init__(self) -> None:
        self.cancelled = False

    def result(self) -> Any:
        assert self.cancelled, "nobody has cancelled it: this would wait for ever"
        raise errors.Cancelled("cancelled")

    def receive(self, patience: float | None) -> Any:
        return self.result()

    def cancel(self) -> None:
        self.cancelled = True

    close = cancel


def ask_over(exchange: Exchange) -> Any:
    steps = one_call(Call("inference", "Generate", build_request("?")))
    return run(with_retries(steps, None, Deadline(None)), exchange)


def test_a_call_cancelled_while_it_is_being_opened_is_cancelled() -> None:
    opened: list[Attempt] = []

    def begin(call: Call) -> Attempt:
        exchange.close()  # cancels from another thread, just before there is anything to cancel
        opened.append(Attempt())
        return opened[-1]

    exchange = Exchange(Wire(begin))
    with pytest.raises(errors.Cancelled):
        ask_over(exchange)
    assert len(opened) == 1 and opened[0].cancelled


def test_a_call_cancelled_between_attempts_opens_no_other() -> None:
    class Failing(Attempt):
        def result(self) -> Any:
            assert len(opened) == 1, "it has been cancelled, and was opened again"
            exchange.close()
            raise GONE

    opened: list[Attempt] = []

    def begin(call: Call) -> Attempt:
        opened.append(Failing())
        return opened[-1]

    exchange = Exchange(Wire(begin))
    with pytest.raises(errors.Cancelled):
        ask_over(exchange)
    assert len(opened) == 1 and opened[0].cancelled


def test_an_interrupt_cancels_the_attempt() -> None:
    class Interrupted(Attempt):
        def result(self) -> Any:
            raise KeyboardInterrupt

    attempt = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        ask_over(Exchange(Wire(lambda call: attempt)))
    assert attempt.cancelled


def test_a_stream_closed_while_it_is_opened_again_is_cancelled() -> None:
    class Broken(Attempt):
        def receive(self, patience: float | None) -> Any:
            raise errors.Unavailable("gone", retryable=True, retry_after=0.0)

    opened: list[Attempt] = []

    def start(message: Any) -> Attempt:
        if opened:
            stream.close()
        opened.append(Attempt() if opened else Broken())
        return opened[-1]

    stream = Methods(Wire(open=start), CallSettings()).stream("?")
    with pytest.raises(errors.Cancelled):
        next(stream)
    assert len(opened) == 2 and all(attempt.cancelled for attempt in opened)
    assert list(stream) == []


def test_an_async_stream_closed_while_it_is_opened_asks_nobody(address: str, script: Script) -> None:
    async def main() -> None:
        async with saccade.AsyncClient(address, timeout=20) as client:

            class Slow(list[Any]):
                def __iter__(self) -> Any:  # read beside the loop, which closes the stream meanwhile
                    asyncio.run_coroutine_threadsafe(stream.close(), loop).result()
                    return super().__iter__()

            loop = asyncio.get_running_loop()
            stream = client.stream(Slow([{"role": "user", "content": "?"}]))
            with pytest.raises(errors.Cancelled):
                await stream.final()
            await client.generate("behind it on the same connection")

    asyncio.run(main())
    assert [request.prompt.text for request in script.requests] == ["behind it on the same connection"]
