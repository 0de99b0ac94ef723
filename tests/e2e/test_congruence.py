"""One suite for the three clients: all of them give the same answers and the same errors."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from images import png
from running import RunningServer
from served import IMAGE_TOKEN
from waiting import until

import saccade
from saccade import cli, errors

Request = dict[str, Any]
KINDS = ["client", "async", "local"]


class Sync:
    """An AsyncClient with the interface of the others: its coroutines run on a loop in a thread."""

    def __init__(self, client: saccade.AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._loop = client, loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            async def run() -> Any:
                result = getattr(self._client, name)(*arguments, **options)
                if isinstance(result, saccade.AsyncClient):
                    return Sync(result, self._loop)
                if isinstance(result, saccade.AsyncStream):
                    return SyncStream(await result, self._loop)
                if inspect.isasyncgen(result):
                    return iter([item async for item in result])
                return await result

            return asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout=120)

        return call


class SyncStream:
    def __init__(self, stream: saccade.AsyncStream, loop: asyncio.AbstractEventLoop) -> None:
        self._stream, self._loop = stream, loop

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=120)

    def __iter__(self) -> Iterator[saccade.Delta]:
        while True:
            try:
                yield self._run(anext(self._stream))
            except StopAsyncIteration:
                return

    def __enter__(self) -> SyncStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def media(self) -> list[saccade.MediaLayout]:
        return self._stream.media

    def final(self) -> saccade.Generation:
        return self._run(self._stream.final())

    def close(self) -> None:
        self._run(self._stream.close())


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="test-loop", daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(params=KINDS)
def any_client(
    request: pytest.FixtureRequest,
    server: RunningServer,
    local: saccade.LocalClient,
    loop: asyncio.AbstractEventLoop,
) -> Iterator[Any]:
    """Each of the three clients. After the test its engine must hold no resources."""
    if request.param == "client":
        with saccade.Client(server.address) as client:
            yield client
        server.drained()
    elif request.param == "async":
        wrapped = Sync(saccade.AsyncClient(server.address), loop)
        yield wrapped
        wrapped.close()
        server.drained()
    else:
        yield local
        until(lambda: not local._service.stats()["live"])
        local._service.stats(integrity=True)


REQUESTS: list[Request] = [
    {"prompt": "hello", "max_tokens": 9, "temperature": 0},
    {"prompt": "hello", "max_tokens": 9, "seed": 4, "top_k": 30, "logprobs": 2},
    {"prompt": "a", "n": 3, "max_tokens": 6, "seed": 5, "temperature": 1.5, "logprobs": 1},
    {"prompt": "what?", "images": [png(1)], "max_tokens": 8, "seed": 1, "presence_penalty": 0.5},
    {"prompt": [9, 10, IMAGE_TOKEN, 11], "images": [png(2)], "max_tokens": 7, "temperature": 0},
    {"prompt": "raw text", "raw": True, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stop": ["e"]},
    {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": ["x", "y"]}], "max_tokens": 5,
     "seed": 2},
    {"prompt": "go on", "max_tokens": 9, "temperature": 0, "continued_token_ids": [40, 41], "logit_bias": {50: 3.0}},
]  # fmt: skip


def ask(client: Any, request: Request, method: str = "generate") -> Any:
    return getattr(client, method)(request["prompt"], **{k: v for k, v in request.items() if k != "prompt"})


def same(one: saccade.Generation | None, other: saccade.Generation) -> bool:
    """Equal except for the rounding of log-probabilities, which depends on the rest of the batch."""

    def parts(answer: saccade.Generation) -> tuple[saccade.Generation, list[float]]:
        logprobs = [p.logprob for s in answer.samples for p in s.logprobs or ()]
        samples = [replace(s, logprobs=None) for s in answer.samples]
        return replace(answer, logprobs=None, samples=samples), logprobs

    assert one is not None
    (found, found_logprobs), (wanted, wanted_logprobs) = parts(one), parts(other)
    return found == wanted and found_logprobs == pytest.approx(wanted_logprobs, abs=1e-4)


@pytest.fixture(scope="module")
def expected(server: RunningServer) -> list[saccade.Generation]:
    with saccade.Client(server.address) as client:
        return [ask(client, request) for request in REQUESTS]


def test_generate_and_stream(any_client: Any, expected: list[saccade.Generation]) -> None:
    for request, answer in zip(REQUESTS, expected, strict=True):
        assert same(ask(any_client, request), answer)
        with ask(any_client, request, "stream") as stream:
            deltas = list(stream)
            assert same(stream.final(), answer)
        for sample in answer.samples:
            mine = [delta for delta in deltas if delta.index == sample.index]
            assert [token for delta in mine for token in delta.token_ids] == sample.token_ids
            assert [delta.sequence for delta in mine] == list(range(len(mine)))


def test_map(any_client: Any, expected: list[saccade.Generation]) -> None:
    requests = [*REQUESTS, {"prompt": "x", "top_p": 2.0, "custom_id": "wrong"}]
    outcomes = list(any_client.map(requests, concurrency=4, ordered=True))
    assert all(same(outcome.generation, answer) for outcome, answer in zip(outcomes[:-1], expected, strict=True))
    assert outcomes[-1].custom_id == "wrong" and isinstance(outcomes[-1].error, errors.InvalidArgument)
    assert {outcome.index for outcome in any_client.map(requests, concurrency=3)} == set(range(len(requests)))


def test_chat_goes_on(any_client: Any) -> None:
    messages: list[dict[str, str]] = [{"role": "user", "content": "hi"}]
    first = any_client.chat(messages, system="be brief", max_tokens=6, seed=1)
    again = [{"role": "system", "content": "be brief"}, *messages]
    assert first == any_client.generate(again, max_tokens=6, seed=1)
    messages += [first.message, {"role": "user", "content": "more"}]
    assert any_client.chat(messages, max_tokens=4, seed=1).usage.prompt_tokens > first.usage.prompt_tokens


def test_models(any_client: Any, client: saccade.Client) -> None:
    (model,) = any_client.models()
    assert model == any_client.get_model() == any_client.get_model(model.name)
    remote = client.get_model()
    assert (model.name, model.version, model.image_token_id) == (remote.name, remote.version, IMAGE_TOKEN)
    assert model.limits.context_length == remote.limits.context_length == 600
    assert model.default_sampling == remote.default_sampling and model.takes_images
    with pytest.raises(errors.NotFound):
        any_client.get_model("none")


def test_tokenize_is_what_generate_reads(any_client: Any) -> None:
    for request in REQUESTS[:7]:
        prompt = {k: v for k, v in request.items() if k in ("images", "raw")}
        tokens = any_client.tokenize(request["prompt"], **prompt)
        answer = ask(any_client, {**request, "max_tokens": 3})
        assert (tokens.prompt_tokens, tokens.image_tokens) == (answer.usage.prompt_tokens, answer.usage.image_tokens)
        assert tokens.token_ids.count(IMAGE_TOKEN) == len(tokens.tokens_per_image) == len(request.get("images", ()))
        assert tokens.media == answer.media and [item.tokens for item in tokens.media] == tokens.tokens_per_image
        assert all(item.tokens * item.merge_size**2 == item.grid[0] * item.grid[1] for item in tokens.media)
        with any_client.stream(**{**request, "max_tokens": 3}) as stream:
            next(iter(stream))
            assert stream.media == tokens.media
        same = {**request, "max_tokens": 3, "prompt": tokens.token_ids}
        same.pop("raw", None)
        assert ask(any_client, same).token_ids == answer.token_ids


def test_embed(any_client: Any, client: saccade.Client) -> None:
    for request in [REQUESTS[i] for i in (0, 3, 4, 5, 6)]:
        prompt = {k: v for k, v in request.items() if k in ("images", "raw")}
        found, wanted = (c.embed(request["prompt"], **prompt) for c in (any_client, client))
        usage = ask(client, {**request, "max_tokens": 1}).usage
        assert (found.prompt_tokens, found.image_tokens) == (usage.prompt_tokens, usage.image_tokens)
        assert found.model_version == client.get_model().version
        for one, other in ((found.last, wanted.last), (found.mean, wanted.mean)):
            assert one.shape == other.shape and one.tolist() == pytest.approx(other.tolist(), abs=1e-4)
    (rows,) = any_client.embed_image(png(5)).shape[:1]
    assert rows == any_client.tokenize("x", images=[png(5)]).image_tokens
    with pytest.raises(errors.InvalidArgument) as caught:
        any_client.embed_image(b"no image")
    assert caught.value.reason == "IMAGE_DECODE_FAILED"
    with pytest.raises(errors.InvalidArgument, match="600"):
        any_client.embed("x" * 2000)


WRONG: list[tuple[Request, type[errors.SaccadeError], str]] = [
    ({"prompt": "x", "top_p": 1.5}, errors.InvalidArgument, "top_p"),
    ({"prompt": "x", "max_tokens": 10_000}, errors.InvalidArgument, "10000"),
    ({"prompt": "x" * 2000}, errors.InvalidArgument, "600"),
    ({"prompt": "x", "images": [b"no image"]}, errors.InvalidArgument, "image"),
    ({"prompt": [9, IMAGE_TOKEN]}, errors.InvalidArgument, "image tokens"),
    ({"prompt": [100_000]}, errors.InvalidArgument, "vocabulary"),
    ({"prompt": "x", "model": "none"}, errors.NotFound, "none"),
    ({"prompt": "x", "n": 2, "continued_token_ids": [9]}, errors.InvalidArgument, "continue"),
    ({"prompt": "x", "stop": [""]}, errors.InvalidArgument, "stop"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, errors.InvalidArgument, "messages have 1"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_refusals(any_client: Any, client: saccade.Client, number: int) -> None:
    request, kind, words = WRONG[number]
    with pytest.raises(kind, match=words) as wanted:
        ask(client, request)
    for method in ("generate", "stream"):
        with pytest.raises(kind) as caught:
            answer = ask(any_client, request, method)
            answer.final()
        assert type(caught.value) is type(wanted.value)
        for name in ("reason", "message", "retryable", "retry_after", "metadata"):
            assert getattr(caught.value, name) == getattr(wanted.value, name), name
        assert bool(caught.value.request_id) == bool(wanted.value.request_id)


NEW_IMAGES = itertools.count(1000)
"""Seeds of images that no request has sent before."""


def test_times_that_run_out(any_client: Any) -> None:
    # 550 tokens take longer than 10 ms, and an image that is in no cache takes longer than 1 ms.
    long: Request = {"max_tokens": 550, "ignore_eos": True}
    with pytest.raises(errors.DeadlineExceeded):
        any_client.generate("x", timeout=0.01, **long)
    with pytest.raises(errors.DeadlineExceeded):
        any_client.with_options(timeout=0.01).stream("x", **long).final()
    new = png(next(NEW_IMAGES), (800, 800))
    with pytest.raises(errors.DeadlineExceeded) as caught:
        any_client.stream("x", first_token_timeout=0.001, images=[new], **long).final()
    assert caught.value.reason == "FIRST_TOKEN_TIMEOUT"


def test_a_stream_left_early_stops_the_work(any_client: Any) -> None:
    with any_client.stream("x", max_tokens=550, ignore_eos=True) as stream:
        for _ in stream:
            break
    with pytest.raises(errors.Cancelled):
        stream.final()


def test_many_threads_share_one(any_client: Any, expected: list[saccade.Generation]) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda request: ask(any_client, request), REQUESTS))
    assert all(map(same, answers, expected))


def test_a_batch(any_client: Any, client: saccade.Client, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(4))
    with open(tmp_path / "in.jsonl", "w") as file:
        for i in range(12):
            content: Any = f"row {i}"
            if i % 3 == 0:
                content = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": str(i)}]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4 + i % 3, "seed": i}
            if i == 7:
                body["max_tokens"] = 10_000
            file.write(json.dumps({"custom_id": f"id {i}", "body": body}) + "\n")

    def rows(output: Path) -> list[Any]:
        found = [json.loads(line) for line in output.read_text().splitlines()]
        for row in found:
            row["response"]["request_id"] = ""
            for name in ("id", "created"):
                row["response"]["body"].pop(name, None)
            row["response"]["body"].get("usage", {}).pop("prompt_tokens_details", None)
        return found

    summary = any_client.run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", ordered=True, concurrency=4)
    assert (summary.completed, summary.failed) == (11, 1)
    client.run_batch(tmp_path / "in.jsonl", tmp_path / "wanted.jsonl", ordered=True)
    assert rows(tmp_path / "out.jsonl") == rows(tmp_path / "wanted.jsonl")


def test_a_copy_leaves_the_client_open(any_client: Any) -> None:
    copy = any_client.with_options(timeout=100, max_retries=1)
    assert copy.generate("a", max_tokens=2).usage.completion_tokens == 2
    copy.close()
    copy.close()
    with pytest.raises(errors.FailedPrecondition) as caught:
        copy.generate("a", max_tokens=2)
    assert caught.value.reason == "CLIENT_CLOSED"
    assert any_client.generate("a", max_tokens=2).usage.completion_tokens == 2


def test_top_sees_the_real_server(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """During an answer that is far too long to end before `top` has shown it."""
    with RunningServer(str(model), max_seqs=2, max_len=20_000, admin=True) as server:
        with saccade.Client(server.address) as client, client.stream("x", max_tokens=19_000, ignore_eos=True) as stream:
            next(stream)
            assert cli.main(["top", "--server", server.address, "--count", "1"]) == 0
    shown = dict(item.split("=") for item in capsys.readouterr().out.split())
    assert (shown["live"], shown["running"], shown["draining"]) == ("1", "1", "0")
    used, total = map(int, shown["blocks"].split("/"))
    assert 0 < used < total
