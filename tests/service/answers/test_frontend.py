"""The frontend over a scripted engine: cancellation, ends of answers, limits from both sides."""

from __future__ import annotations

import asyncio
import gc
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
from fake_engine import FakeEngine

from decoder.request import PromptScore, PromptScores
from service.answers.bounds import FrontendLimits
from service.answers.calls import Calls
from service.answers.coalesce import coalesce
from service.answers.frontend import Frontend
from service.common import errors
from service.common.config import ServerOptions
from service.common.limits import Places
from service.common.types import (
    Delta,
    Event,
    Finished,
    GenerateSpec,
    Image,
    Logprob,
    PromptLogprob,
    RawInput,
    Started,
    TokensInput,
    Usage,
)
from service.engine.types import EngineEvent, EngineRequest
from service.media.patches import local_processor
from service.model.assets import ModelAssets
from service.servers.from_options import load_assets
from service.telemetry.access_log import AccessLog
from service.telemetry.call_context import CallInfo, set_current_call
from service.telemetry.metrics import make_metrics


class Told(FakeEngine):
    """An engine that records requests and sends the events of the test."""

    def __init__(self, max_len: int = 1000) -> None:
        super().__init__(vocabulary=64, max_len=max_len)
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.submitted = asyncio.Event()

    def submit(self, request: EngineRequest) -> None:
        self.requests.append(request)
        self.submitted.set()

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def say(self, *events: EngineEvent) -> None:
        self._emit(list(events))


@pytest.fixture(scope="module")
def assets() -> ModelAssets:
    return load_assets(ServerOptions())


def with_frontend(
    assets: ModelAssets, body: Callable[[Frontend, Told], Awaitable[None]], *, max_len: int = 1000, **limits: Any
) -> None:
    async def run() -> None:
        set_current_call(CallInfo())  # not one that an earlier test has left in this thread's context
        engine = Told(max_len)
        processor = local_processor(FrontendLimits().media, assets.vision, "float32")
        frontend = Frontend(engine, assets, FrontendLimits(**limits), processor=processor)
        frontend.start()
        try:
            async with asyncio.timeout(60):
                await body(frontend, engine)
            assert frontend.live == 0 and frontend.idle.is_set()
        finally:
            await asyncio.to_thread(frontend.close)

    asyncio.run(run())


def spec(name: str = "r", *, ids: int = 5, **fields: Any) -> GenerateSpec:
    return GenerateSpec(name, "", TokensInput((30,) * ids), **{"sampling": {"max_tokens": 9}, **fields})


async def collect(events: AsyncGenerator[Event, None]) -> list[Event]:
    return [event async for event in events]


async def asked(frontend: Frontend, engine: Told, given: GenerateSpec, **options: Any) -> asyncio.Task[list[Event]]:
    """Starts an answer and waits until the engine has the request."""
    engine.submitted.clear()
    task = asyncio.create_task(collect(frontend.stream(given, **options)))
    waiting = asyncio.create_task(engine.submitted.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return task


def ends(events: list[Event]) -> list[Finished]:
    return [event for event in events if isinstance(event, Finished)]


# -- who may end what --------------------------------------------------------------------------------------------------


def test_only_a_tenant_s_own_request_is_cancelled(assets: ModelAssets) -> None:
    async def body(frontend: Frontend, engine: Told) -> None:
        task = await asked(frontend, engine, spec(n=2), salt=b"a")
        assert not frontend.cancel("r", salt=b"b") and not frontend.cancel("r") and not frontend.cancel("q", salt=b"a")
        assert frontend.cancel("r", salt=b"a")
        assert [end.reason for end in ends(await task)] == ["aborted", "aborted"]
        assert sorted(engine.aborted) == sorted(engine.requests[0].names) and len(engine.aborted) == 2
        assert not frontend.cancel("r", salt=b"a"), "it is over"

    with_frontend(assets, body)


def test_a_request_whose_files_are_fetched_is_cancelled_at_once(assets: ModelAssets) -> None:
    async def body(frontend: Frontend, engine: Told) -> None:
        asking = asyncio.Event()

        async def never(given: GenerateSpec, salt: bytes) -> GenerateSpec:
            asking.set()
            await asyncio.Event().wait()
            return given

        frontend.resolve = never
        given = spec(media=(Image(b"", "f", media_id="0"),), n=3)
        task = asyncio.create_task(collect(frontend.stream(given)))
        await asking.wait()
        assert frontend.cancel("r")
        assert [end.reason for end in ends(await task)] == ["aborted"] * 3 and not engine.requests

    with_frontend(assets, body)


def test_a_cancellation_before_the_engine_s_first_event_is_not_lost(assets: ModelAssets) -> None:
    async def body(frontend: Frontend, engine: Told) -> None:
        events = frontend.stream(spec(n=3))
        assert isinstance(await anext(events), Started)
        assert frontend.cancel("r")
        assert [end.reason for end in ends(await collect(events))] == ["aborted"] * 3

    with_frontend(assets, body)


def test_names_and_places(assets: ModelAssets) -> None:
    async def body(frontend: Frontend, engine: Told) -> None:
        first = await asked(frontend, engine, spec("a"), salt=b"1")
        with pytest.raises(errors.AlreadyExists):
            await collect(frontend.stream(spec("a"), salt=b"1"))
        second = await asked(frontend, engine, spec("a"), salt=b"2")
        assert (
            frontend.live == 2 and not frontend.idle.is_set() and engine.requests[0].names != engine.requests[1].names
        )
        with pytest.raises(errors.Unavailable, match="has 2 requests, which is its limit") as full:
            await collect(frontend.stream(spec("b"), salt=b"1"))
        assert full.value.reason == "QUEUE_FULL"
        frontend.cancel("a", salt=b"1")
        await first
        third = await asked(frontend, engine, spec("b"), salt=b"1")
        frontend.cancel("a", salt=b"2")
        frontend.cancel("b", salt=b"1")
        await asyncio.gather(second, third)

    with_frontend(assets, body, max_queue=2)


def test_an_answer_that_is_left_is_aborted_and_one_that_ended_is_not(assets: ModelAssets) -> None:
    async def body(frontend: Frontend, engine: Told) -> None:
        events = frontend.stream(spec(n=2))
        assert isinstance(await anext(events), Started)
        done, left = engine.requests[0].names
        engine.say(EngineEvent(done, 5, finish_reason="length"), EngineEvent(left, 6))
        while not isinstance(await anext(events), Finished):
            pass
        await events.aclose()
        assert engine.aborted == [left]

    with_frontend(assets, body)


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "continued", "max_tokens", "fits"),
    [
        (40, 0, 10, True), (40, 0, 11, False), (49, 0, 1, True), (50, 0, None, False), (30, 19, None, True),
        (30, 20, None, False),
    ],
)  # fmt: skip
def test_prompt_and_answer_share_the_context(
    assets: ModelAssets, ids: int, continued: int, max_tokens: int | None, fits: bool
) -> None:
    async def body(frontend: Frontend, engine: Told) -> None:
        sampling = {} if max_tokens is None else {"max_tokens": max_tokens}
        task = await asked(frontend, engine, spec(ids=ids, continued=(30,) * continued, sampling=sampling))
        if fits:
            assert engine.requests[0].sampling.max_tokens in (max_tokens, 50 - ids, None)
            frontend.cancel("r")
            await task
            return
        with pytest.raises(errors.InvalidArgument) as refused:
            await task
        assert refused.value.reason == "CONTEXT_LENGTH_EXCEEDED" and not engine.requests

    with_frontend(assets, body, max_len=50)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 0}, "sampling.n"), ({"n": 65}, "sampling.n"), ({"sampling": {"logprobs": 101}}, "sampling.logprobs"),
        ({"sampling": {"logprobs": -1}}, "sampling.logprobs"),
        ({"sampling": {"prompt_logprobs": 101}}, "sampling.prompt_logprobs"), ({"stop": ("a",) * 33}, "sampling.stop"),
        ({"stop": ("a", "")}, "sampling.stop[1]"), ({"stop": ("a" * 257,)}, "sampling.stop[0]"),
        ({"n": 2, "continued": (1,)}, "continued_token_ids"),
    ],
)  # fmt: skip
def test_more_than_may_be_asked_for(assets: ModelAssets, fields: dict[str, Any], field: str) -> None:
    async def body(frontend: Frontend, engine: Told) -> None:
        with pytest.raises(errors.InvalidArgument) as refused:
            await collect(frontend.stream(spec(**fields)))
        assert refused.value.field == field

    with_frontend(assets, body)


def test_as_much_as_may_be_asked_for(assets: ModelAssets) -> None:
    async def body(frontend: Frontend, engine: Told) -> None:
        sampling = {"logprobs": 100, "prompt_logprobs": 100, "max_tokens": 3}
        task = await asked(frontend, engine, spec(n=64, stop=("a" * 256,) * 32, sampling=sampling))
        assert len(engine.requests[0].names) == 64
        frontend.cancel("r")
        await task

    with_frontend(assets, body)


# -- where answers end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("continued", [(), (30,), (30, 31, 32)], ids=["none", "some", "all"])
def test_log_probabilities_of_the_prompt_come_with_the_end_or_an_error(
    assets: ModelAssets, continued: tuple[int, ...]
) -> None:
    """Also where a stream broke between its last token and its end, so that nothing is left but the end."""
    scores = (PromptScore(1, 30, -0.5),)
    given = spec(ids=2, sampling={"max_tokens": 3, "prompt_logprobs": 0}, continued=continued)

    async def body(frontend: Frontend, engine: Told) -> None:
        task = await asked(frontend, engine, given)
        (name,) = engine.requests[-1].names
        engine.say(EngineEvent(name, 33, prompt_scores=scores, finish_reason="length"))
        (end,) = ends(await task)
        assert [(score.position, score.token.logprob) for score in end.prompt_logprobs] == [(1, -0.5)]
        task = await asked(frontend, engine, given)
        (name,) = engine.requests[-1].names
        first = [EngineEvent(name, 33, prompt_scores=scores)] if len(continued) < 3 else []
        engine.say(*first, EngineEvent(name, error="died"))
        with pytest.raises(errors.Unavailable):
            await task

    with_frontend(assets, body)


def test_log_probabilities_of_a_long_prompt_are_made_one_by_one(assets: ModelAssets) -> None:
    """As objects, those of 32,768 tokens with 20 alternatives take a hundred megabytes."""
    count = 3000
    scores = PromptScores(1, *(array("q", range(count)) for _ in range(2)), array("f", [-0.5] * count),
                          array("q", [7] * count), array("f", [-0.25] * count))  # fmt: skip
    given = spec(ids=2, sampling={"max_tokens": 3, "prompt_logprobs": 1})

    async def body(frontend: Frontend, engine: Told) -> None:
        task = await asked(frontend, engine, given)
        (name,) = engine.requests[-1].names
        engine.say(EngineEvent(name, 33, prompt_scores=scores, finish_reason="length"))
        (end,) = ends(await task)
        assert len(end.prompt_logprobs) == count
        assert sum(isinstance(thing, PromptLogprob) for thing in gc.get_objects()) < 10
        last, token = end.prompt_logprobs[-1], assets.tokenizer
        assert token is not None
        texts = (token.token_bytes(count - 1), token.token_bytes(7))
        assert last == PromptLogprob(count - 1, Logprob(count - 1, -0.5, ((7, -0.25),), texts))
        assert list(end.prompt_logprobs)[5:9] == list(end.prompt_logprobs[5:9])

    with_frontend(assets, body)


@pytest.mark.parametrize(
    ("continued", "sampling", "reason"),
    [
        ("eos", {}, "stop"), ("eos", {"ignore_eos": True}, None), ("eos", {"min_tokens": 3}, None),
        ("eos", {"min_tokens": 2}, "stop"), ("plain", {"stop_token_ids": frozenset({30})}, "stop"),
        ("plain", {"max_tokens": 3}, "length"), ("plain", {"max_tokens": 4}, None), ("plain", {}, None),
    ],
)  # fmt: skip
def test_an_answer_that_had_ended_is_not_gone_on_with(
    assets: ModelAssets, continued: str, sampling: dict[str, Any], reason: str | None
) -> None:
    last = min(assets.config.eos_token_ids) if continued == "eos" else 30

    async def body(frontend: Frontend, engine: Told) -> None:
        given = spec(continued=(31, 32, last), sampling={"max_tokens": 20, **sampling})
        task = await asked(frontend, engine, given)
        if reason is None:
            assert engine.requests[0].output_ids == (31, 32, last)
            frontend.cancel("r")
            await task
            return
        started, end = await task
        assert isinstance(started, Started) and isinstance(end, Finished) and not engine.requests
        assert end.reason == reason and end.stop_token == (last if "stop_token_ids" in sampling else None)
        assert end.usage.completion_tokens == 3

    with_frontend(assets, body)


@pytest.mark.parametrize("given", [False, True])
def test_the_model_s_own_end_is_no_stop_token_of_the_request(assets: ModelAssets, given: bool) -> None:
    end = min(assets.config.eos_token_ids)

    async def body(frontend: Frontend, engine: Told) -> None:
        stopping = {"stop_token_ids": frozenset({end})} if given else {}
        task = await asked(frontend, engine, spec(sampling={"max_tokens": 9, **stopping}))
        name = engine.requests[-1].request_id
        engine.say(EngineEvent(name, 5), EngineEvent(name, end, finish_reason="stop", stop_token=end))
        (finished,) = ends(await task)
        assert (finished.reason, finished.stop_token) == ("stop", end if given else None)

    with_frontend(assets, body)


def test_a_whole_answer_comes_in_few_deltas(assets: ModelAssets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.answers.frontend.WHOLE_PAUSE", 3600.0)

    async def body(frontend: Frontend, engine: Told) -> None:
        task = await asked(frontend, engine, spec(whole=True))
        name = engine.requests[-1].request_id
        for number in range(20):
            engine.say(EngineEvent(name, 5 + number))
            await asyncio.sleep(0.001)  # together longer than the interval between a stream's deltas
        engine.say(EngineEvent(name, 30, finish_reason="length"))
        deltas = [event.token_ids for event in await task if isinstance(event, Delta)]
        assert deltas == [(5,), (*range(6, 25), 30)]

    with_frontend(assets, body)


@pytest.mark.parametrize("whole", [False, True])
def test_a_stop_string_counts_from_min_tokens_on(
    assets: ModelAssets, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr("service.answers.frontend.WHOLE_PAUSE", 3600.0)
    assert assets.tokenizer is not None
    ids = assets.tokenizer.encode("zz")
    assert ids

    async def body(frontend: Frontend, engine: Told) -> None:
        for minimum, tokens in ((0, 1), (3, 3)):
            given = spec(stop=("z",), sampling={"max_tokens": 20, "min_tokens": minimum}, whole=whole)
            task = await asked(frontend, engine, given)
            name = engine.requests[-1].request_id
            z = assets.tokenizer.encode("z")[-1]  # type: ignore[union-attr]
            for _ in range(5):
                engine.say(EngineEvent(name, z))
                await asyncio.sleep(0)  # the first one is taken separately
                await asyncio.sleep(0)
            (end,) = ends(await task)
            assert (end.reason, end.stop_string, end.usage.completion_tokens) == ("stop", "z", tokens)
            assert name in engine.aborted, "the engine would go on"

    with_frontend(assets, body)


def test_the_engine_is_told_what_is_left_of_the_time(assets: ModelAssets) -> None:
    async def body(frontend: Frontend, engine: Told) -> None:
        task = await asked(frontend, engine, spec(), timeout=50.0)
        left = engine.requests[0].timeout
        assert left is not None and 0 < left < 50.0
        frontend.cancel("r")
        await task
        calls = Calls(
            frontend, default_timeout=30.0, closed=lambda: None, metrics=make_metrics(), access=AccessLog(),
            spans=None, places=Places(1, "requests"),
        )  # fmt: skip
        for timeout in (0.0, -1.0):
            with pytest.raises(errors.DeadlineExceeded) as late:
                await collect(calls.stream(spec(), timeout=timeout))
            assert late.value.metadata["phase"] == "admission"
        with pytest.raises(errors.DeadlineExceeded) as late:
            await collect(calls.stream(spec(), timeout=0.05))
        assert late.value.metadata["phase"] == "queued"
        engine.submitted.clear()
        waiting = asyncio.create_task(collect(calls.stream(spec(), timeout=None)))
        await engine.submitted.wait()
        left = engine.requests[-1].timeout
        assert left is not None and 0 < left <= 30.0, "a caller without a deadline gets the server's"
        await calls.cancel("r")
        await waiting
        with pytest.raises(errors.NotFound):
            await calls.cancel("r")

    with_frontend(assets, body)


# -- coalescing --------------------------------------------------------------------------------------------------------


def test_chunks_end_exactly_where_they_are_full() -> None:
    async def run() -> None:
        def delta(index: int, sequence: int) -> Delta:
            return Delta(index, "x", (1,), (), sequence)

        async def replay() -> AsyncGenerator[Event, None]:
            for sequence in range(6):
                yield delta(0, sequence)
            yield delta(1, 0)
            yield Finished(0, "stop", Usage(1, 0, 0, 0, 0.0, 0.0))
            yield Finished(1, "stop", Usage(1, 0, 0, 0, 0.0, 0.0))

        out = await collect(coalesce(replay(), chunk_tokens=3, max_delay=None))
        assert [(e.index, len(e.token_ids)) for e in out if isinstance(e, Delta)] == [(0, 3), (0, 3), (1, 1)]
        kinds = [(type(e).__name__, e.index) for e in out if not isinstance(e, Started)]
        assert kinds[2:] == [("Finished", 0), ("Delta", 1), ("Finished", 1)], "one's end lets go of nobody else's"

    asyncio.run(run())


def test_the_delay_runs_from_the_first_that_is_held() -> None:
    """Later deltas do not extend it."""

    async def run() -> None:
        async def steady() -> AsyncGenerator[Event, None]:
            for sequence in range(10_000):
                yield Delta(0, "x", (1,), (), sequence)
                if sequence >= 5:  # the first ones come at once: they are held together, also on a busy machine
                    await asyncio.sleep(0.01)

        events = coalesce(steady(), chunk_tokens=10_000, max_delay=0.1)
        async with asyncio.timeout(30):
            first, second = await anext(events), await anext(events)
        await events.aclose()
        assert isinstance(first, Delta) and isinstance(second, Delta)
        assert 1 < len(first.token_ids) < 100 and second.sequence == 1

    asyncio.run(run())


def test_raw_text_needs_a_tokenizer_s_ids(assets: ModelAssets) -> None:
    async def body(frontend: Frontend, engine: Told) -> None:
        told = await frontend.tokenize(GenerateSpec("t", "", RawInput("hello")))
        assert told.prompt_tokens == len(told.ids) > 0 and frontend.live == 0

    with_frontend(assets, body)
