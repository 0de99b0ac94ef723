"""Server-side batches: each row answered once, across restarts, at lower priority than calls, separate between
tenants."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from images import data_url, png
from PIL import Image
from rpc import connect, reason, upload
from running import RunningServer, children
from waiting import until

import saccade
import service.common.errors
from saccade import cli, errors
from saccade.v1 import batch_pb2, media_pb2
from service.batches import batches
from service.batches.batch_store import BatchRecord, BatchStore
from service.common.config import ConfigError
from service.servers.preflight import check_options

LIMITS: dict[str, Any] = {"max_seqs": 8, "max_len": 400}


def row(i: int, *, source: str | None = None, tokens: int = 6, **body: Any) -> dict[str, Any]:
    content: Any = f"row {i}"
    if source is not None:
        content = [{"type": "image_url", "image_url": {"url": source}}, {"type": "text", "text": f"row {i}"}]
    messages = [{"role": "user", "content": content}]
    return {"custom_id": str(i), "body": {"messages": messages, "max_tokens": tokens, "seed": i, **body}}


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in rows)


def write_keys(path: Path, keys: dict[str, str]) -> None:
    """`c` may not use batches."""
    text = ""
    for name, key in keys.items():
        text += f'[[key]]\nname = "{name}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n'
        text += 'scopes = ["inference"]\n' if name == "c" else ""
    path.write_text(text)


def answers(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert len({item["custom_id"] for item in found}) == len(found)
    return {item["custom_id"]: item["response"] for item in found}


def test_a_batch_from_beginning_to_end(server: RunningServer, client: saccade.Client, tmp_path: Path) -> None:
    media = client.media.upload(png(3))
    sources = [None, data_url(png(2)), f"media:{media.media_id}"]
    rows = [row(i, source=sources[i % 3], return_token_ids=i > 0) for i in range(20)] + [row(20, tokens=10_000)]
    (tmp_path / "in.jsonl").write_bytes(lines(rows))
    batch = client.batches.create(tmp_path / "in.jsonl", ordered=True, metadata={"run": "7"}, input_name="in")
    seen = list(client.batches.watch(batch.batch_id))
    assert [one.state for one in seen][-1] == "completed" and not any(one.over for one in seen[:-1])
    last = seen[-1]
    assert (last.metadata, last.input_name) == ({"run": "7"}, "in")
    assert (last.total, last.completed, last.failed) == (21, 20, 1) and last.ended is not None
    assert last.model_version == client.get_model().version
    path = client.batches.download(batch.batch_id, tmp_path / "out.jsonl")
    assert path.stat().st_size == last.output_bytes
    found = answers(path)
    assert list(found) == [str(i) for i in range(21)] and found["20"]["status_code"] == 400
    for i in (0, 1, 2, 19):
        images = [[], [png(2)], [media]][i % 3]
        wanted = client.generate(f"row {i}", images=images, max_tokens=6, seed=i)
        (choice,) = found[str(i)]["body"]["choices"]
        assert choice["message"]["content"] == wanted.text
        assert choice.get("token_ids") == (wanted.token_ids if i else None)
        prompt = client.tokenize(f"row {i}", images=images).token_ids
        assert found[str(i)]["body"].get("prompt_token_ids") == (prompt if i else None)
    # from the middle, as after a download that broke off
    partial = tmp_path / "partial.jsonl"
    partial.write_bytes(path.read_bytes()[:777])
    assert client.batches.download(batch.batch_id, partial, resume=True).read_bytes() == path.read_bytes()
    with pytest.raises(errors.FailedPrecondition, match="resume"):
        client.batches.download(batch.batch_id, partial)
    with connect(server.address) as stubs:
        stub = stubs.batch
        request = batch_pb2.DownloadBatchOutputRequest(batch_id=batch.batch_id, offset=last.output_bytes)
        assert not list(stub.DownloadBatchOutput(request))
        request.offset += 1
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.DownloadBatchOutput(request))
        assert reason(caught.value)[0] == "OUT_OF_RANGE"
    assert client.batches.get(batch.batch_id) == last and last in client.batches.list()
    client.batches.delete(batch.batch_id)
    with pytest.raises(errors.NotFound):
        client.batches.get(batch.batch_id)
    server.server.batches.store.check_integrity()  # type: ignore[union-attr]


def test_the_same_from_asyncio(server: RunningServer, tmp_path: Path) -> None:
    async def main() -> None:
        async with saccade.AsyncClient(server.address) as client:
            (tmp_path / "in.jsonl").write_bytes(lines([row(i) for i in range(6)]))
            batch = await client.batches.create(tmp_path / "in.jsonl", request_id="again")
            assert (await client.batches.create(tmp_path / "in.jsonl", request_id="again")).batch_id == batch.batch_id
            with pytest.raises(errors.AlreadyExists):
                await client.batches.create(lines([row(1)]), request_id="again")
            with pytest.raises(errors.AlreadyExists):
                await client.batches.create(tmp_path / "in.jsonl", request_id="again", metadata={"a": "b"})
            assert (await client.batches.wait(batch.batch_id)).completed == 6
            path = await client.batches.download(batch.batch_id, tmp_path / "out.jsonl")
            assert set(answers(path)) == set("012345")
            assert [one.batch_id for one in await client.batches.list()] == [batch.batch_id]
            await client.batches.delete(batch.batch_id)
            assert await client.batches.list() == []

    asyncio.run(main())


def test_the_commands_mark_that_cannot_be_written_is_named(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines([row(1)]))
    (mark := tmp_path / "out.jsonl.batch").mkdir()
    files = [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    assert cli.main(["batch", *files, "--server-side", "--server", server.address, "--quiet"]) == 2
    assert f"cannot write '{mark}': Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("in.batch", "would overwrite the input"), ("in", "would overwrite the input"), (".", "it is a folder"),
        ("/dev/null", "not a plain file"), ("none/out", "there is no folder"),
    ],
)  # fmt: skip
def test_the_command_writes_only_over_its_output(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str, words: str
) -> None:
    """`.batch` is the suffix of the file with the batch's id."""
    source = tmp_path / "in.batch"
    source.write_bytes(lines([row(1)]))
    files = [str(source), str(tmp_path / output)]
    command = ["batch", *files, "--server-side", "--server", server.address, "--quiet"]
    for more in ([], ["--overwrite"]):
        assert cli.main([*command, *more]) == 2
        assert words in capsys.readouterr().err
        assert source.read_bytes() == lines([row(1)]) and [*tmp_path.iterdir()] == [source]


@pytest.mark.parametrize("option", ["--concurrency=32", "--timeout=0.001", "--any-model"])
def test_the_command_refuses_options_that_the_server_would_ignore(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines([row(1)]))
    assert cli.main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out"), "--server-side", option]) == 2
    assert f"{option.partition('=')[0]} is not for --server-side" in capsys.readouterr().err


def test_the_commands_output_may_be_a_link(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines([row(1)]))
    (tmp_path / "link").symlink_to(tmp_path / "out.jsonl")
    command = ["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "link"), "--server-side", "--quiet"]
    for more in ([], ["--overwrite"]):
        assert cli.main([*command, "--server", server.address, *more]) == 0
        assert (tmp_path / "link").is_symlink() and list(answers(tmp_path / "out.jsonl")) == ["1"]


def test_the_command_starts_a_failed_batch_again_if_it_is_told_to(
    server: RunningServer, client: saccade.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise a batch that was cancelled, or failed because the disk was full, could not be repeated for a week."""
    (tmp_path / "in.jsonl").write_bytes(lines([row(1), row(2, tokens=10_000)]))
    files = [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    command = ["batch", *files, "--server-side", "--server", server.address, "--quiet", "--max-errors", "0"]
    found = []
    for more in ([], [], ["--overwrite"]):
        assert cli.main([*command, *more]) == 2
        told = capsys.readouterr()
        assert "--overwrite starts it again" in told.err
        found.append(json.loads(told.out)["batch_id"])
    assert found[0] == found[1] != found[2]
    kept = [batch.batch_id for batch in client.batches.list()]
    assert found[2] in kept and found[0] not in kept
    client.batches.delete(found[2])


def test_a_wrong_file_is_refused_with_its_lines(client: saccade.Client) -> None:
    wrong = lines(
        [row(0), row(0), row(2, source="a.png"), row(3, source="media:" + "0" * 64), row(4, temperature=-1),
         row(5, source="https://example.org/a.png")]
    )  # fmt: skip
    batch = client.batches.wait(client.batches.create(wrong + b"no json\n").batch_id)
    assert (batch.state, batch.reason, batch.completed) == ("failed", "BATCH_INVALID", 0)
    assert batch.created and batch.started and batch.ended and batch.created <= batch.started <= batch.ended
    expected = ["line 2: custom_id", "line 3: ", "line 4: ", "line 5: temperature", "line 6: ", "line 7: not JSON"]
    for problem, words in zip(batch.problems, expected, strict=True):
        assert problem.startswith(words)
    assert "not a path" in batch.problems[1] and "no uploaded media" in batch.problems[2]
    other = client.batches.wait(client.batches.create(lines([row(0, model="another")])).batch_id)
    assert (other.state, other.reason) == ("failed", "BATCH_MODEL")
    empty = client.batches.wait(client.batches.create(b"\n\n").batch_id)
    assert (empty.reason, empty.message) == ("BATCH_INVALID", "no requests in it")  # no path on the server
    long = b'{"custom_id": "a", "body": {}, "%s": 1}' % (b"k" * 10_000)
    large = client.batches.wait(client.batches.create(long + b"\n" + lines([row(0)])).batch_id)
    assert large.problems[0].startswith("line 1: unknown keys kkk") and large.problems[0].endswith("(10053 characters)")
    named = client.batches.wait(client.batches.create(lines([row(0, model="m" * 10_000)])).batch_id)
    assert named.reason == "BATCH_MODEL"
    assert len(large.problems[0]) < 1100 and len(large.message) < 1100 and len(named.message) < 1100
    for batch_id in (batch.batch_id, other.batch_id, empty.batch_id, large.batch_id, named.batch_id):
        client.batches.delete(batch_id)


def test_cancelled_too_many_errors_and_no_room(text_model: Path, tmp_path: Path) -> None:
    with (
        RunningServer(str(text_model), batch_bytes=200_000, **LIMITS) as server,
        saccade.Client(server.address) as client,
    ):
        long = lines([row(i, tokens=300, ignore_eos=True) for i in range(150)])
        batch = client.batches.create(long)
        for now in client.batches.watch(batch.batch_id):
            if now.completed:
                break
        with pytest.raises(errors.FailedPrecondition) as running:
            client.batches.download(batch.batch_id, tmp_path / "out.jsonl")
        assert running.value.reason == "BATCH_RUNNING"
        with pytest.raises(errors.FailedPrecondition):
            client.batches.delete(batch.batch_id)
        gone = client.batches.cancel(batch.batch_id)
        assert gone.state == "cancelled" and 0 < gone.completed < 150
        each = client.tokenize("row 0").prompt_tokens
        assert gone.prompt_tokens >= gone.completed * each and gone.completion_tokens == gone.completed * 300
        assert not (tmp_path / "out.jsonl").exists()
        assert len(answers(client.batches.download(batch.batch_id, tmp_path / "out.jsonl"))) >= gone.completed
        assert client.batches.cancel(batch.batch_id) == gone
        client.batches.delete(batch.batch_id)
        failing = client.batches.wait(
            client.batches.create(lines([row(i, tokens=9999) for i in range(9)]), max_errors=2).batch_id
        )
        assert (failing.state, failing.reason, failing.failed) == ("failed", "BATCH_ERRORS", 3)
        client.batches.delete(failing.batch_id)
        with pytest.raises(errors.RateLimited, match="200000") as full:
            client.batches.create(b" " * 200_001)
        assert full.value.reason == "BATCH_SPOOL_FULL"
        blank = client.batches.create(b" " * 150_000, request_id="again")
        assert client.batches.create(b" " * 150_000, request_id="again").batch_id == blank.batch_id
        client.batches.delete(client.batches.wait(blank.batch_id).batch_id)
        rows = [row(i, tokens=150, ignore_eos=True, logprobs=True) for i in range(60)]
        overflowing = client.batches.wait(client.batches.create(lines(rows)).batch_id)
        assert (overflowing.state, overflowing.reason) == ("failed", "BATCH_SPOOL_FULL")
        client.batches.delete(overflowing.batch_id)
        server.server.batches.store.check_integrity()  # type: ignore[union-attr]
        assert server.server.batches.store.used_bytes == 0  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="at most 3"):
        RunningServer(str(text_model), engine=server.engine, max_queue=4, batch_concurrency=4)


def test_an_error_does_not_name_the_folders_of_the_server(text_model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {**LIMITS, "batch_dir": str(tmp_path), "batch_concurrency": 2}
    with RunningServer(str(text_model), **options) as server, saccade.Client(server.address) as client:
        batch = client.batches.create(lines([row(i, tokens=300, ignore_eos=True) for i in range(300)]))
        for now in client.batches.watch(batch.batch_id):
            if now.completed:
                break
        (tmp_path / batch.batch_id / "output.jsonl").unlink()
        message = "'output.jsonl' has been deleted or replaced while it was written"
        assert client.batches.wait(batch.batch_id).message == message


def test_batches_that_are_cancelled_before_their_turn_never_run(server: RunningServer) -> None:
    batches = server.server.batches
    assert batches is not None
    store, data = batches.store, lines([row(0)])

    def make() -> str:
        with store.upload("", len(data)) as upload:
            upload.write(data)
            return upload.commit("").batch_id

    async def body() -> None:
        made = [make() for _ in range(3)]
        cancelling = [asyncio.ensure_future(batches.cancel("", batch_id)) for batch_id in made * 2]
        batches.created()  # the first has a task, and is cancelled before its first step; the others wait
        for record in await asyncio.gather(*cancelling):
            assert (record.state, record.started) == ("cancelled", 0.0)
        for batch_id in made:
            assert [record.state async for record in batches.watch("", batch_id)] == ["cancelled"]
            await batches.delete("", batch_id)
            with pytest.raises(service.common.errors.NotFound):
                await anext(batches.watch("", batch_id))
        assert not batches._tasks and not batches._cancelled and not batches._changes

    server.run(body())


def test_a_watcher_is_told_of_the_end_at_once(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause between two states is not for the last one."""
    monkeypatch.setattr(batches, "WATCH_SECONDS", 1000.0)

    async def main() -> None:
        async with saccade.AsyncClient(server.address) as client, asyncio.timeout(60):
            batch = await client.batches.create(lines([row(i) for i in range(6)]))
            assert (await client.batches.wait(batch.batch_id)).completed == 6
            await client.batches.delete(batch.batch_id)

    asyncio.run(main())


def test_live_calls_go_first_and_a_stop_leaves_the_rest_to_the_next_start(text_model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_dir": str(tmp_path), "max_seqs": 2, "max_len": 400}
    with RunningServer(str(text_model), **options) as server, saccade.Client(server.address) as client:
        rows = [row(i, tokens=250, ignore_eos=True) for i in range(40)]
        batch = client.batches.create(lines(rows))
        for now in client.batches.watch(batch.batch_id):
            if now.completed:
                break
        live = [client.stream("x", max_tokens=30, ignore_eos=True, seed=i) for i in range(4)]
        for stream in live:
            assert stream.final().usage.completion_tokens == 30
        assert client.batches.get(batch.batch_id).state == "running"
        server.run(server.server.batches.stop())  # type: ignore[union-attr]
    with (
        RunningServer(str(text_model), **{**options, "max_seqs": 8}) as server,
        saccade.Client(server.address) as client,
    ):
        last = client.batches.wait(batch.batch_id)
        assert (last.state, last.completed) == ("completed", 40)
        assert len(answers(client.batches.download(batch.batch_id, tmp_path / "out"))) == 40
        (tmp_path / "out").unlink()


def test_max_errors_counts_the_rows_before_a_restart(text_model: Path, tmp_path: Path) -> None:
    failing = [row(i, tokens=9999) for i in (0, 1, 98, 99)]
    rows = failing[:2] + [row(i, tokens=300, ignore_eos=True) for i in range(2, 40)] + failing[2:]
    options: dict[str, Any] = {**LIMITS, "batch_dir": str(tmp_path / "batches"), "batch_concurrency": 2}
    with RunningServer(str(text_model), **options) as server, saccade.Client(server.address) as client:
        batch = client.batches.create(lines(rows), max_errors=2)
        for now in client.batches.watch(batch.batch_id):
            if now.completed and now.failed == 2:
                break
        server.loop.call_soon_threadsafe(server.server.drain)  # the batch would go on until it fails
    with RunningServer(str(text_model), **options) as server, saccade.Client(server.address) as client:
        over = client.batches.wait(batch.batch_id)
        assert (over.state, over.reason, over.failed) == ("failed", "BATCH_ERRORS", 3)
        assert over.message == "3 rows have failed, more than max_errors = 2"


def test_tenants_do_not_see_each_other_and_take_turns(model: Path, tmp_path: Path) -> None:
    keys = {name: f"sk-{name}" for name in "abc"}
    write_keys(tmp_path / "keys.toml", keys)
    with RunningServer(
        str(model), api_keys=str(tmp_path / "keys.toml"), batch_jobs=2, batch_tenant_bytes=200_000, **LIMITS
    ) as server:
        a, b, c = (saccade.Client(server.address, api_key=keys[name]) for name in "abc")
        media = a.media.upload(png(1))
        long = [a.batches.create(lines([row(i, tokens=300, ignore_eos=True) for i in range(300)])) for _ in range(2)]
        short = b.batches.wait(b.batches.create(lines([row(0)])).batch_id)
        assert short.completed == 1 and not a.batches.get(long[1].batch_id).over
        for method in (b.batches.get, b.batches.cancel, b.batches.delete, b.batches.wait):
            with pytest.raises(errors.NotFound):
                method(long[0].batch_id)
        assert [one.batch_id for one in b.batches.list()] == [short.batch_id]
        theirs = b.batches.wait(b.batches.create(lines([row(0, source=f"media:{media.media_id}")])).batch_id)
        assert theirs.reason == "BATCH_INVALID"
        with pytest.raises(errors.PermissionDenied):
            c.batches.list()
        with pytest.raises(errors.RateLimited, match="your batches"):
            a.batches.create(b" " * 199_000)
        # removing a key ends the batches that run with it
        write_keys(tmp_path / "keys.toml", {"b": keys["b"]})
        for one in long:
            assert server.run(_over(server, "a", one.batch_id)) == ("failed", "KEY_REVOKED")
        for one in (a, b, c):
            one.close()


@pytest.mark.parametrize("kind", ["batch", "media"])
def test_an_upload_that_a_rate_rejects_is_sent_once_more(model: Path, tmp_path: Path, kind: str) -> None:
    """When all of it is allowed, and not again and again from its beginning as far as the rate then goes."""
    digest = hashlib.sha256(b"sk-a").hexdigest()
    (tmp_path / "keys.toml").write_text(f'[[key]]\nname = "a"\nsha256 = "{digest}"\nbytes_per_minute = 30_000_000\n')
    with (
        RunningServer(str(model), api_keys=str(tmp_path / "keys.toml"), **LIMITS) as server,
        saccade.Client(server.address, api_key="sk-a", max_retries=1) as client,
    ):
        client.batches.create(b" " * 29_900_000)
        if kind == "batch":
            client.batches.create(b" " * 500_000)
        else:
            noise = Image.frombytes("RGB", (400, 400), random.Random(1).randbytes(480_000))
            assert client.media.upload(noise).size_bytes > 480_000


def test_a_rows_timeout_includes_its_waiting(text_model: Path, tmp_path: Path) -> None:
    """The first row uses up more than the tokens of a minute, and the others would wait for the next ones."""
    digest = hashlib.sha256(b"sk-a").hexdigest()
    (tmp_path / "keys.toml").write_text(f'[[key]]\nname = "a"\nsha256 = "{digest}"\ntokens_per_minute = 10\n')
    options = {"api_keys": str(tmp_path / "keys.toml"), "batch_concurrency": 1, "batch_row_timeout": 5.0, **LIMITS}
    with RunningServer(str(text_model), **options) as server:
        with saccade.Client(server.address, api_key="sk-a") as client:
            rows = [row(i, tokens=40, ignore_eos=True) for i in range(4)]
            batch = client.batches.wait(client.batches.create(lines(rows)).batch_id)
            assert (batch.state, batch.completed, batch.failed) == ("completed", 1, 3)
            found = answers(client.batches.download(batch.batch_id, tmp_path / "out.jsonl"))
    for i in (1, 2, 3):
        assert found[str(i)]["status_code"] == 504
        assert "within the batch_row_timeout of 5 seconds" in found[str(i)]["body"]["error"]["message"]


def test_a_batch_that_ends_before_it_resumes_counts_its_answers(text_model: Path, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.toml", {"a": "sk-a", "b": "sk-b"})
    options: dict[str, Any] = {
        **LIMITS, "batch_dir": str(tmp_path / "batches"), "api_keys": str(tmp_path / "keys.toml"),
        "batch_concurrency": 2,
    }  # fmt: skip
    rows = [row(i, tokens=9999 if i == 1 else 300, ignore_eos=True) for i in range(100)]
    with RunningServer(str(text_model), **options) as server:
        with saccade.Client(server.address, api_key="sk-a") as client:
            batch = client.batches.create(lines(rows) + b"\n \n")
            for now in client.batches.watch(batch.batch_id):
                if now.completed > 2:
                    break
        server.loop.call_soon_threadsafe(server.server.drain)  # the batch would go on until it is complete
    output = tmp_path / "batches" / batch.batch_id / "output.jsonl"
    whole = [json.loads(line) for line in output.read_bytes().splitlines()]
    size = output.stat().st_size
    with output.open("ab") as file:
        file.write(b'{"id": "batch_req_')  # what a crash leaves
    write_keys(tmp_path / "keys.toml", {"b": "sk-b"})
    with RunningServer(str(text_model), **options) as server:
        assert server.run(_over(server, "a", batch.batch_id)) == ("failed", "KEY_REVOKED")
        assert server.server.batches is not None
        over = server.server.batches.store.record(batch.batch_id)
    assert (over.total, over.completed, over.failed) == (100, len(whole) - 1, 1) and over.completed > 2
    assert over.completion_tokens == over.completed * 300
    assert over.output_bytes == output.stat().st_size == size


async def _over(server: RunningServer, tenant: str, batch_id: str) -> tuple[str, str]:
    assert server.server.batches is not None
    async for record in server.server.batches.watch(tenant, batch_id):
        last = record
    return last.state, last.reason


def test_an_upload_that_pauses_gives_its_room_back(text_model: Path) -> None:
    """Neither a batch nor an image upload that stops in the middle may keep its reservation."""
    go_on = threading.Event()

    def parts(make: Any, header: Any) -> Iterator[Any]:
        yield make(header=header)
        yield make(chunk=b"{")
        go_on.wait(60)

    with RunningServer(str(text_model), stall_timeout=0.2, **LIMITS) as server, connect(server.address) as stubs:
        for call, make, header in (
            (stubs.batch.CreateBatch, batch_pb2.CreateBatchRequest, {"size_bytes": 100}),
            (stubs.media.UploadMedia, media_pb2.UploadMediaRequest, {"size_bytes": 100}),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(parts(make, header))
            assert reason(caught.value) == ("DEADLINE_EXCEEDED", "SLOW_WRITER")
        go_on.set()
        store = server.server.batches.store  # type: ignore[union-attr]
        assert store.used_bytes == 0 and server.server.spool.used_bytes == 0
        store.check_integrity()


def test_media_do_not_expire_before_their_row(model: Path, tmp_path: Path) -> None:
    """Those of a batch that runs, and of one that waits for its turn."""
    options: dict[str, Any] = {**LIMITS, "media_ttl": 1.0, "batch_concurrency": 1}
    with RunningServer(str(model), **options) as server, saccade.Client(server.address) as client:
        used, waiting = (client.media.upload(png(i)) for i in range(2))
        long = [row(i, tokens=350, ignore_eos=True) for i in range(60)] + [row(60, source=f"media:{used.media_id}")]
        first = client.batches.create(lines(long))
        second = client.batches.create(lines([row(0, source=f"media:{waiting.media_id}")]))
        last = client.batches.wait(first.batch_id)
        assert (last.state, last.completed, last.failed) == ("completed", 61, 0)
        assert client.batches.wait(second.batch_id).completed == 1


@pytest.mark.parametrize("option", ["batch_dir", "media_dir"])
def test_two_servers_do_not_share_a_folder(text_model: Path, tmp_path: Path, option: str) -> None:
    with RunningServer(str(text_model), **{option: str(tmp_path)}, **LIMITS) as server:
        second = replace(server.options, port=0)
        with pytest.raises(ConfigError, match=f"{option}: another process uses {tmp_path}"):
            check_options(second)
    check_options(second)


def test_no_batch_is_taken_while_the_server_drains(text_model: Path) -> None:
    with RunningServer(str(text_model), **LIMITS) as server, saccade.Client(server.address, max_retries=0) as client:
        server.loop.call_soon_threadsafe(server.server.drain)
        with pytest.raises(errors.Overloaded, match="shutting down") as caught:
            while True:  # wait until the call above has arrived
                client.batches.create(lines([row(0, tokens=1)]))
        assert caught.value.reason == "DRAINING"


def test_a_stop_does_not_wait_longer_for_a_row_whose_image_is_being_decoded(model: Path) -> None:
    options = {**LIMITS, "image_workers": 1, "image_timeout": 60.0}
    with RunningServer(str(model), **options) as server, saccade.Client(server.address) as client:
        client.generate("x", images=[png(1)], max_tokens=1)
        process = server.server.image_pool._fork_server._process
        assert process is not None
        for pid in [process.pid, *children(process.pid, "service.media.image_worker")]:
            os.kill(pid, signal.SIGSTOP)
        client.batches.create(lines([row(0, source=data_url(png(2)), tokens=1)]))
        until(lambda: server.server.frontend.live > 0)
        began = time.monotonic()
        server.run(server.server.stop(grace=0.1))
        assert time.monotonic() - began < 30 and not server.server.frontend.live


def test_books_can_be_read_while_a_disk_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop reads the accounts, so they must not be locked while a thread waits for a disk."""
    store = BatchStore(tmp_path, 10**6, 100.0)

    def make(name: str) -> BatchRecord:
        with store.upload("a", 2) as upload:
            upload.write(b"{}")
            return upload.commit(name)

    first = make("first")
    waiting, go_on = threading.Event(), threading.Event()
    sync = os.fsync

    def slow(descriptor: int) -> None:
        waiting.set()
        assert go_on.wait(60)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    with ThreadPoolExecutor(2) as pool:
        written = pool.submit(store.save, replace(first, state="running"))
        assert waiting.wait(60)
        waiting.clear()
        made = pool.submit(make, "second")
        assert waiting.wait(60)
        assert store.get("a", first.batch_id).state == "running" and store.used_bytes == 4
        go_on.set()
        written.result(60)
        assert made.result(60).request_id == "second"
    again = BatchStore(tmp_path, 10**6, 100.0)
    assert {r.request_id: r.state for r in again.unfinished()} == {"first": "running", "second": "validating"}
    again.check_integrity()


def test_the_media_of_rows_are_on_the_account(model: Path) -> None:
    """Like those of calls: here media that exceed every budget, next to rows without media."""
    with RunningServer(str(model), max_inflight_bytes=50_000, **LIMITS) as server:
        with saccade.Client(server.address) as client, connect(server.address) as stubs:
            data = png(8, (200, 100))
            assert len(data) > 50_000
            media = stubs.media.UploadMedia(upload(data, chunk=10_000)).media
            rows = [row(0), row(1, source=f"media:{media.media_id}"), row(2)]
            batch = client.batches.wait(client.batches.create(lines(rows)).batch_id)
            assert (batch.state, batch.completed, batch.failed) == ("completed", 2, 1)
        server.drained()  # the budget is as large as before


def test_numbers_of_batches_that_make_no_sense(server: RunningServer) -> None:
    with connect(server.address) as stubs:
        header = batch_pb2.BatchHeader(size_bytes=5, max_errors=-1)
        wrong = [
            (stubs.batch.ListBatches, batch_pb2.ListBatchesRequest(page_size=-1), "page_size is -1"),
            (stubs.batch.CreateBatch, iter([batch_pb2.CreateBatchRequest(header=header)]), "max_errors is -1"),
            (
                stubs.batch.CreateBatch,
                iter([batch_pb2.CreateBatchRequest(header=batch_pb2.BatchHeader(size_bytes=5, request_id="r" * 129))]),
                "request_id has 129 characters; at most 128",
            ),
        ]
        for call, request, words in wrong:
            with pytest.raises(grpc.RpcError, match=words) as caught:
                call(request)
            assert reason(caught.value)[0] == "INVALID_ARGUMENT"
        data = lines([row(0)])
        header = batch_pb2.BatchHeader(size_bytes=len(data), max_errors=0)
        parts = [batch_pb2.CreateBatchRequest(header=header), batch_pb2.CreateBatchRequest(chunk=data)]
        batch = stubs.batch.CreateBatch(iter(parts)).batch
        *_, last = stubs.batch.WatchBatch(batch_pb2.WatchBatchRequest(batch_id=batch.batch_id))
        assert last.batch.state == batch_pb2.BATCH_STATE_COMPLETED
        for offset in (-1, last.batch.output_bytes + 1):
            request = batch_pb2.DownloadBatchOutputRequest(batch_id=batch.batch_id, offset=offset)
            with pytest.raises(grpc.RpcError) as caught:
                list(stubs.batch.DownloadBatchOutput(request))
            assert reason(caught.value)[0] == "OUT_OF_RANGE"
        stubs.batch.DeleteBatch(batch_pb2.DeleteBatchRequest(batch_id=batch.batch_id))
