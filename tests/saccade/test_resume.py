"""Streams that break and continue, and readers' timeouts: the synchronous and the asyncio client with the same
tests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from fake_server import Failure, Script
from waiting import until
from wires import Wire

import saccade
from saccade import errors
from saccade._core import retrying
from saccade._core.resuming import StreamState
from saccade._core.retrying import Deadline
from saccade._core.settings import CallSettings
from saccade._sync.methods import Methods
from saccade._transport.watchdog import Watchdog

Code = grpc.StatusCode
Streamed = Callable[..., tuple[saccade.Generation, list[saccade.Delta]]]
WORDS = [f"word{i} " for i in range(14)]


@pytest.fixture(params=["sync", "async"])
def streamed(request: pytest.FixtureRequest, address: str, script: Script, monkeypatch: pytest.MonkeyPatch) -> Streamed:
    """`streamed(prompt, client settings, **options)` -> the whole answer and its deltas. Waits before retries are
    short."""
    script.words = WORDS
    monkeypatch.setattr(retrying, "_LONGEST_WAIT", 0.02)

    def sync(prompt: str, settings: dict[str, Any] | None = None, **options: Any) -> Any:
        with saccade.Client(address, timeout=20) as client:
            with client.with_options(**(settings or {})).stream(prompt, **options) as stream:
                deltas = list(stream)
                return stream.final(), deltas

    def by_asyncio(prompt: str, settings: dict[str, Any] | None = None, **options: Any) -> Any:
        async def main() -> Any:
            async with saccade.AsyncClient(address, timeout=20) as client:
                async with client.with_options(**(settings or {})).stream(prompt, **options) as stream:
                    deltas = [delta async for delta in stream]
                    return await stream.final(), deltas

        return asyncio.run(main())

    return sync if request.param == "sync" else by_asyncio


BREAKS = [[0], [11], [2, 0, 5]]


@pytest.mark.parametrize("breaks", BREAKS, ids=str)
@pytest.mark.parametrize("options", [{}, {"logprobs": 2}, {"seed": 5}, {"continued_token_ids": [0, 1]}], ids=str)
def test_a_broken_answer_is_the_whole_one(
    streamed: Streamed, script: Script, breaks: list[int], options: dict[str, Any]
) -> None:
    whole, deltas = streamed("?", **options)
    script.requests.clear()
    script.break_after = list(breaks)
    joined, pieces = streamed("?", **options)
    assert joined == whole and joined.usage == whole.usage and joined.seed == whole.seed
    assert pieces == deltas  # including the sequence numbers
    assert len({request.request_id for request in script.requests}) == 1
    assert len(script.requests) == len(breaks) + 1
    first, *further = script.requests
    given = len(options.get("continued_token_ids", ()))
    for broken, request in zip(breaks, further, strict=True):
        given += broken
        assert list(request.continued_token_ids) == list(range(given))
        assert request.sampling.seed == (options.get("seed") or 7)
        assert request.chat == first.chat and request.prompt == first.prompt


@pytest.mark.parametrize("breaks", [[0], [13], [2, 5, 9]], ids=str)
def test_several_samples_are_repeated_and_what_was_delivered_is_not(
    streamed: Streamed, script: Script, breaks: list[int]
) -> None:
    whole, deltas = streamed("?", n=3, logprobs=1)
    script.requests.clear()
    script.break_after = list(breaks)
    joined, pieces = streamed("?", n=3, logprobs=1)
    assert joined == whole and pieces == deltas
    assert {request.sampling.seed for request in script.requests[1:]} == {7}
    assert not any(request.continued_token_ids for request in script.requests)


def test_it_does_not_go_on_without_leave(streamed: Streamed, script: Script) -> None:
    for settings, options in (({}, {"resume": False}), ({"max_retries": 0}, {})):
        script.requests.clear()
        script.break_after = [2]
        with pytest.raises(errors.Unavailable) as caught:
            streamed("?", settings, **options)
        assert caught.value.reason == "ENGINE_DIED" and len(script.requests) == 1


def test_progress_renews_the_right_to_fail(streamed: Streamed, script: Script) -> None:
    script.break_after = [1] * 5
    assert streamed("?", {"max_retries": 1})[0].text == "".join(WORDS)


def test_retries_without_progress_end(streamed: Streamed, script: Script) -> None:
    script.break_after = [3, 0, 0, 0, 0]
    with pytest.raises(errors.Unavailable):
        streamed("?", {"max_retries": 2})
    assert len(script.requests) == 3  # the break after three words, and two more without any word


def test_an_error_that_is_no_break_ends_the_stream(streamed: Streamed, script: Script) -> None:
    script.failures, script.fail_after = [Failure(Code.INTERNAL)], 2
    with pytest.raises(errors.Internal):
        streamed("?")
    assert len(script.requests) == 1


def test_another_model_does_not_go_on(streamed: Streamed, script: Script) -> None:
    def answer(request: Any) -> list[str]:
        script.version = "2"  # applies from the next request on
        return WORDS

    script.answer, script.break_after = answer, [2]
    with pytest.raises(errors.Unavailable) as caught:
        streamed("?")
    assert caught.value.reason == "RESUME_DIVERGED" and not caught.value.retryable


def test_another_answer_is_not_joined(streamed: Streamed, script: Script) -> None:
    script.answer = lambda request: WORDS if len(script.requests) == 1 else ["other "] * 14
    script.break_after = [2]
    with pytest.raises(errors.Unavailable) as caught:
        streamed("?", n=2)
    assert caught.value.reason == "RESUME_DIVERGED"


def test_an_attempt_that_the_server_thinks_is_running_is_waited_for(streamed: Streamed, script: Script) -> None:
    script.words = WORDS[:3]

    def answer(request: Any) -> list[str]:
        if len(script.requests) == 2:
            raise Failure(Code.ALREADY_EXISTS, "still running", retry_after=0.001)
        return WORDS

    script.answer, script.break_after = answer, [2]
    joined, _ = streamed("?")
    assert joined.text == "".join(WORDS) and len(script.requests) == 3


# -- pieces that straddle the seam, without a server -------------------------------------------------------------------


def state(**options: Any) -> StreamState:
    from saccade._core.requests import build_request

    request = build_request("?", **options)
    return StreamState(request, CallSettings(), Deadline(None), resume=True)


def started() -> Any:
    from saccade.v1 import inference_pb2

    return inference_pb2.StreamGenerateResponse(started=inference_pb2.Started(seed=3, model_version="v"))


def delta(index: int, text: str, ids: list[int]) -> Any:
    from saccade.v1 import inference_pb2

    return inference_pb2.StreamGenerateResponse(delta=inference_pb2.Delta(index=index, text=text, token_ids=ids))


def test_pieces_are_cut_where_the_delivered_part_ends() -> None:
    stream = state(n=2)
    for message in (started(), delta(0, "ab", [1, 2]), delta(1, "x", [9])):
        stream.take(message)
    assert stream.next_request().sampling.seed == 3
    assert stream.take(started()) is None
    assert stream.take(delta(0, "a", [1])) is None
    assert stream.take(delta(1, "xyz", [9, 8])) == saccade.Delta("yz", [8], 1, None, 1)
    # the last delivered token had half of a character's bytes: its text comes with the next one
    assert stream.take(delta(0, "bcé", [2, 3])) == saccade.Delta("cé", [3], 0, None, 1)
    assert stream.take(delta(0, "!", [4])) == saccade.Delta("!", [4], 0, None, 2)
    assert stream.assembler.text(0) == "abcé!" and stream.assembler.token_ids(1) == [9, 8]


def test_text_that_comes_later_than_its_ids_is_cut_too() -> None:
    stream = state(n=2)
    for message in (started(), delta(0, "ab", [1, 2])):
        stream.take(message)
    stream.next_request()
    assert stream.take(delta(0, "a", [1, 2])) is None, "the ids are all there, and a part of the text is not"
    assert stream.take(delta(0, "bc", [3])) == saccade.Delta("c", [3], 0, None, 1)


def thought(index: int, reasoning: str, text: str, ids: list[int]) -> Any:
    message = delta(index, text, ids)
    message.delta.reasoning = reasoning
    return message


def test_reasoning_is_cut_where_the_delivered_part_ends() -> None:
    stream = state(n=2)
    for message in (started(), thought(0, "so", "", [1, 2]), thought(1, "ah", "x", [5, 6])):
        stream.take(message)
    stream.next_request()
    assert stream.take(thought(0, "s", "", [1])) is None
    assert stream.take(thought(0, "o.", "red", [2, 3])) == saccade.Delta("red", [3], 0, None, 1, ".")
    assert stream.take(thought(1, "ah", "xy", [5, 6])) == saccade.Delta("y", [], 1, None, 1)
    assert stream.assembler.reasoning(0) == "so." and stream.assembler.reasoning(1) == "ah"
    stream = state(n=2)
    for message in (started(), thought(0, "so", "", [1, 2])):
        stream.take(message)
    stream.next_request()
    with pytest.raises(errors.Unavailable, match="differs"):
        stream.take(thought(0, "no", "", [1, 2]))


def test_logprobs_are_cut_with_their_ids() -> None:
    from saccade.v1 import types_pb2

    def scored(text: str, ids: list[int]) -> Any:
        message = delta(0, text, ids)
        message.delta.logprobs.extend(types_pb2.TokenLogprob(token_id=i, logprob=-float(i)) for i in ids)
        return message

    stream = state(n=2, logprobs=0)
    for message in (started(), scored("ab", [1, 2])):
        stream.take(message)
    stream.next_request()
    piece = stream.take(scored("abc", [1, 2, 3]))
    assert piece is not None and [item.token_id for item in piece.logprobs or ()] == piece.token_ids == [3]


def test_a_later_attempt_does_not_tell_the_cached_tokens_again() -> None:
    stream = state()
    first, later = delta(0, "a", [1]), delta(0, "b", [2])
    first.delta.cached_tokens, later.delta.cached_tokens = 4, 6
    told = [stream.take(message) for message in (started(), first)]
    stream.next_request()
    told += [stream.take(message) for message in (started(), later)]
    assert [piece and (piece.text, piece.cached_tokens) for piece in told] == [None, ("a", 4), None, ("b", 0)]


def test_an_answer_whose_end_has_come_needs_no_attempt_more() -> None:
    from saccade.v1 import inference_pb2

    finished = inference_pb2.StreamGenerateResponse(finished=inference_pb2.Finished())

    class Broken:
        def __init__(self) -> None:
            self.messages = [started(), delta(0, "a", [1]), finished]

        def receive(self, patience: float | None) -> Any:
            if not self.messages:
                raise errors.Unavailable("gone", retryable=True)
            return self.messages.pop(0)

        def close(self) -> None:
            return

    opened: list[Any] = []

    def start(message: Any) -> Broken:
        opened.append(message.request)
        return Broken()

    client = Methods(Wire(open=start), CallSettings())
    assert client.stream("?").final().text == "a" and len(opened) == 1


# -- patience ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("after", "name"), [(0, "first_token_timeout"), (3, "idle_timeout")])
@pytest.mark.parametrize("where", ["client", "call"])
def test_a_silent_stream_is_given_up(streamed: Streamed, script: Script, after: int, name: str, where: str) -> None:
    script.idle_after = script.hang_after = after
    for seconds in (0.2, 2.0, 15.0):  # until the call reaches the server in its time, as a busy machine may prevent
        began = time.monotonic()
        with pytest.raises(errors.DeadlineExceeded, match=name) as caught:
            streamed("?", {name: seconds}) if where == "client" else streamed("?", **{name: seconds})
        assert caught.value.reason == name.upper() and not caught.value.retryable
        assert seconds <= time.monotonic() - began < seconds + 10
        if script.requests:
            break
    assert script.ended.acquire(timeout=10)  # the server learns of it


def test_patience_that_suffices(streamed: Streamed) -> None:
    answer, _ = streamed("?", {"first_token_timeout": 15, "idle_timeout": 15})
    assert answer.text == "".join(WORDS)


def test_only_the_reader_loses_patience(address: str, script: Script) -> None:
    """Time that the caller spends between deltas does not count towards the timeout."""
    now_idle = 0.3
    with saccade.Client(address, timeout=20) as client:
        with client.stream("?", idle_timeout=now_idle) as stream:
            next(stream)
            time.sleep(2 * now_idle)  # this is what the test is about; no thread is waited for
            assert stream.final().text == "a red square"


@pytest.mark.parametrize("name", ["timeout", "first_token_timeout", "idle_timeout"])
def test_times_are_positive(name: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=name):
        saccade.Client("localhost:1").with_options(**{name: 0})  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument, match="patience"):
        saccade.Client("localhost:1").with_options(patience=1)  # type: ignore[call-arg]


def test_a_watchdog_ends_with_its_call() -> None:
    class Call:
        cancelled = False

        def cancel(self) -> None:
            self.cancelled = True

    call = Call()
    watchdog = Watchdog(call)
    watchdog.arm(30)
    watchdog.disarm()
    thread = watchdog._thread
    assert thread is not None and thread.is_alive()
    del call
    thread.join(timeout=10)
    assert not thread.is_alive() and not watchdog.expired


class Cancellable:
    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


def test_a_watchdog_that_is_disarmed_does_not_bite() -> None:
    for seconds in (0.1, 1.0, 10.0):  # until it is disarmed in time, as a busy machine may prevent
        call = Cancellable()
        watchdog = Watchdog(call)
        began = time.monotonic()
        watchdog.arm(seconds)
        watchdog.disarm()
        if time.monotonic() - began < seconds:
            break
    assert not call.cancelled.wait(4 * seconds) and not watchdog.expired
    watchdog.arm(0.01)
    assert call.cancelled.wait(10) and watchdog.expired


def test_a_watchdog_wakes_for_an_earlier_time() -> None:
    call = Cancellable()
    watchdog = Watchdog(call)
    watchdog.arm(60)
    thread = watchdog._thread
    assert thread is not None
    until(lambda: watchdog._wakes != float("inf"))  # it sleeps for a minute
    watchdog.arm(0.01)
    assert call.cancelled.wait(10) and watchdog.expired


# -- options and further methods ---------------------------------------------------------------------------------------


def test_a_copy_shares_the_connection_and_leaves_it_open(address: str, script: Script) -> None:
    with saccade.Client(address, timeout=20, api_key="k") as client:
        copy = client.with_options(timeout=5, max_retries=0).with_options(idle_timeout=3)
        assert copy._calls == CallSettings(5, 0, None, 3) and client._calls.timeout == 20
        assert copy.generate("?").text == "a red square"
        assert copy._connection is client._connection
        script.failures = [Failure(Code.UNAVAILABLE, retry_after=0.001)]
        with pytest.raises(errors.Unavailable):
            copy.generate("?")
        copy.close()
        with pytest.raises(errors.FailedPrecondition):
            copy.generate("?")
        assert client.generate("?").text == "a red square"
        copy = client.with_options(timeout=None)
    with pytest.raises(errors.FailedPrecondition):
        copy.generate("?")


def test_a_copy_of_a_copy_outlives_it(address: str) -> None:
    with saccade.Client(address, timeout=20) as client:
        first = client.with_options(timeout=5)
        second = first.with_options(idle_timeout=3)
        first.close()
        assert second.generate("?").text == "a red square"

    async def main() -> None:
        async with saccade.AsyncClient(address, timeout=20) as client:
            first = client.with_options(timeout=5)
            second = first.with_options(idle_timeout=3)
            await first.close()
            assert (await second.generate("?")).text == "a red square"

    asyncio.run(main())


def test_a_cancelled_call_does_not_wait_for_its_next_attempt(address: str, script: Script) -> None:
    script.failures = [Failure(Code.UNAVAILABLE, retry_after=15)] * 3
    with saccade.Client(address, timeout=60) as client:
        from saccade._core.requests import build_request

        exchange = client._exchange()
        exchange.close()
        with pytest.raises(errors.Cancelled):
            client._generate(build_request("?"), None, exchange)
    assert not script.requests


def test_chat_models_and_tokens(client: saccade.Client, address: str, script: Script) -> None:
    def check(answer: saccade.Generation, models: list[saccade.Model], tokens: saccade.Tokens) -> None:
        assert answer.message == {"role": "assistant", "content": "a red square"}
        request = script.requests[-1].chat
        assert [part.text for message in request.messages for part in message.parts if part.text] == ["short!", "what?"]
        assert request.messages[1].parts[0].image.data == b"png"
        assert [model.name for model in models] == ["fake", "other"]
        assert models[0].takes_images and models[0].limits.image_formats == ("PNG",)
        assert models[0].default_sampling == {"temperature": 0.5} and models[0].image_token_id == 99
        assert models[0].limits.context_length == 512 and models[1].image_token_id is None
        assert tokens == saccade.Tokens([99, 97, 98], 6, 4, [4])

    options: dict[str, Any] = {"system": "short!", "images": [b"png"]}
    check(client.chat("what?", **options), client.models(), client.tokenize("ab", images=[b"png"]))

    async def main() -> None:
        async with saccade.AsyncClient(address, timeout=20) as other:
            check(
                await other.chat([{"role": "user", "content": "what?"}], **options),
                await other.models(),
                await other.tokenize("ab", images=[b"png"]),
            )
            assert await other.get_model("other") == client.get_model("other")
            with pytest.raises(errors.NotFound):
                await other.get_model("none")

    asyncio.run(main())
    for wrong in ([1, 2], []):
        with pytest.raises(errors.InvalidArgument):
            client.chat(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "resumed"),
    [
        ("The actor died unexpectedly before finishing this task.\n\tclass_name: ServeReplica:default:Saccade", True),
        ("The actor 8bd7 is unavailable: The actor is temporarily unavailable: IOError", True),
        ("the pool is damaged; The actor died", False),
    ],
)
def test_a_lost_replica_of_ray_serve_is_like_a_lost_server(
    client: saccade.Client, script: Script, message: str, resumed: bool
) -> None:
    script.fail_after = 1
    script.failures.append(Failure(grpc.StatusCode.INTERNAL, message))
    stream = client.stream("?")
    if resumed:
        assert stream.final().text == "a red square"
        assert len(script.requests) == 2
    else:
        with pytest.raises(errors.Internal):
            stream.final()
