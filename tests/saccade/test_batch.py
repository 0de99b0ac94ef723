"""Batch jobs against a scripted server: complete, partial, killed, damaged, run twice, and with other jobs' files."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_server import Failure, Script, serve

import saccade
from saccade import cli, errors
from saccade._jobs.input import BatchInvalid
from saccade.progress import Progress, duration

CHECKOUT = Path(__file__).resolve().parents[2]
Code = grpc.StatusCode
Run = Callable[..., saccade.BatchSummary]


def write_input(path: Path, count: int, **body: Any) -> Path:
    with open(path, "w") as file:
        for i in range(count):
            messages = [{"role": "user", "content": f"row {i}"}]
            file.write(json.dumps({"custom_id": f"id {i}", "body": {"messages": messages, **body}}) + "\n")
    return path


def text_of(request: Any) -> str:
    return str(request.chat.messages[0].parts[-1].text)


def echo(request: Any) -> list[str]:
    return [text_of(request), "!"]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def answers(path: Path) -> dict[str, str]:
    """custom_id -> text; each id once."""
    rows = read(path)
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}


def expected(count: int) -> dict[str, str]:
    return {f"id {i}": f"row {i}!" for i in range(count)}


@pytest.fixture(params=["sync", "async"])
def run(request: pytest.FixtureRequest, address: str) -> Run:
    """`run(source, output, **options)`, with either client."""

    def sync(*arguments: Any, **options: Any) -> saccade.BatchSummary:
        with saccade.Client(address, timeout=20) as client:
            return client.run_batch(*arguments, **options)

    def by_asyncio(*arguments: Any, **options: Any) -> saccade.BatchSummary:
        async def main() -> saccade.BatchSummary:
            async with saccade.AsyncClient(address, timeout=20) as client:
                return await client.run_batch(*arguments, **options)

        return asyncio.run(main())

    return sync if request.param == "sync" else by_asyncio


@pytest.mark.parametrize("ordered", [False, True])
def test_a_few_hundred_rows(run: Run, script: Script, tmp_path: Path, ordered: bool) -> None:
    script.answer = echo
    source, output = write_input(tmp_path / "in.jsonl", 200), tmp_path / "out.jsonl"
    summary = run(source, output, concurrency=16, ordered=ordered)
    assert answers(output) == expected(200)
    if ordered:
        assert [row["custom_id"] for row in read(output)] == [f"id {i}" for i in range(200)]
    assert (summary.total, summary.completed, summary.failed, summary.resumed) == (200, 200, 0, 0)
    assert (summary.prompt_tokens, summary.completion_tokens) == (1800, 400)
    assert summary.finished and summary.model == "fake" and summary.tokens_per_second > 0
    assert {request.priority for request in script.requests} == {-10}
    again = run(source, output)
    assert again.resumed == 200 and len(script.requests) == 200
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.journal"]


def test_what_the_journal_describes_is_not_read_again(run: Run, script: Script, tmp_path: Path) -> None:
    """Reading millions of answers would take minutes at each start."""
    script.answer = echo
    source, output = write_input(tmp_path / "in.jsonl", 20), tmp_path / "out.jsonl"
    run(source, output)
    lines = output.read_bytes().splitlines(keepends=True)
    lines[3] = b"-" * (len(lines[3]) - 1) + b"\n"
    output.write_bytes(b"".join(lines))
    assert run(source, output).resumed == 20 and len(script.requests) == 20


def test_errors_are_rows_and_only_passing_ones_are_asked_again(run: Run, script: Script, tmp_path: Path) -> None:
    def answer(request: Any) -> list[str]:
        number = int(text_of(request).split()[1])
        if number % 10 == 1:
            raise Failure(Code.INVALID_ARGUMENT, "too long", reason="CONTEXT_LENGTH_EXCEEDED")
        if number % 10 == 2:
            raise Failure(Code.INTERNAL, "oops")
        return echo(request)

    script.answer = answer
    source, output = write_input(tmp_path / "in.jsonl", 50), tmp_path / "out.jsonl"
    summary = run(source, output)
    assert (summary.completed, summary.failed) == (40, 10)
    assert summary.errors == {"CONTEXT_LENGTH_EXCEEDED": 5, "Internal": 5}
    rows = {row["custom_id"]: row for row in read(output)}
    assert len(rows) == 50 and rows["id 1"]["response"]["status_code"] == 400
    assert rows["id 2"]["error"]["code"] == "Internal" and rows["id 3"]["error"] is None

    script.answer = echo
    script.requests.clear()
    summary = run(source, output, ordered=True)
    assert sorted(map(text_of, script.requests)) == ["row 12", "row 2", "row 22", "row 32", "row 42"]
    assert (summary.completed, summary.failed, summary.resumed) == (45, 5, 45)
    assert [row["custom_id"] for row in read(output)] == [f"id {i}" for i in range(50)]  # sorted at the end


def test_a_mended_row_replaces_its_answer(run: Run, script: Script, tmp_path: Path) -> None:
    script.answer = echo
    source, output = write_input(tmp_path / "in.jsonl", 20), tmp_path / "out.jsonl"
    run(source, output)
    lines = source.read_text().splitlines()
    lines[3] = lines[3].replace("row 3", "another")
    source.write_text("\n".join(lines[1:]))  # the first row is gone
    script.requests.clear()
    run(source, output)
    assert [text_of(request) for request in script.requests] == ["another"]
    wanted = expected(20) | {"id 3": "another!"}
    del wanted["id 0"]
    assert answers(output) == wanted


def test_another_model_or_another_file_is_not_written_over(run: Run, script: Script, tmp_path: Path) -> None:
    script.answer = echo
    source, output = write_input(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl"
    run(source, output)
    before = output.read_bytes()
    script.version = "2"
    with pytest.raises(errors.AlreadyExists, match="none of them"):
        run(source, output)
    assert output.read_bytes() == before
    run(source, output, overwrite=True)
    assert {row["response"]["body"]["system_fingerprint"] for row in read(output)} == {"2"}
    for foreign in (b"my notes\n", b"my notes", b'{"a": 1}\n', b"[1]\n", before):
        output.write_bytes(foreign)
        Path(f"{output}.journal").unlink()
        with pytest.raises(errors.AlreadyExists):
            run(source, output)
        assert output.read_bytes() == foreign
    with pytest.raises(errors.InvalidArgument, match="overwrite"):
        run(source, source)


def test_an_input_that_has_the_name_of_a_helper_file_is_kept(run: Run, script: Script, tmp_path: Path) -> None:
    for suffix in (".journal", ".tmp"):
        source = write_input(tmp_path / f"out.jsonl{suffix}", 2)
        before = source.read_bytes()
        with pytest.raises(errors.InvalidArgument, match="overwrite the input"):
            run(source, tmp_path / "out.jsonl", overwrite=True)
        assert source.read_bytes() == before and not script.requests


def test_an_output_that_is_a_link_stays_one(run: Run, script: Script, tmp_path: Path) -> None:
    script.answer = echo
    source, output = write_input(tmp_path / "in.jsonl", 20), tmp_path / "link.jsonl"
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "out.jsonl"
    output.symlink_to(target)
    run(source, output)
    lines = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(reversed(lines)))
    Path(f"{target}.journal").unlink()
    assert run(source, output, ordered=True).resumed == 20
    assert output.is_symlink() and [row["custom_id"] for row in read(target)] == [f"id {i}" for i in range(20)]


@pytest.mark.parametrize("name", ["pipe", "", "a\0b", "folder", "journal", "scratch"])
def test_an_output_that_cannot_be_written_is_an_error(run: Run, script: Script, tmp_path: Path, name: str) -> None:
    source = write_input(tmp_path / "in.jsonl", 2)
    os.mkfifo(tmp_path / "pipe")
    for folder in ("folder", "journal.journal", "scratch.tmp"):
        (tmp_path / folder).mkdir()
    with pytest.raises(errors.FailedPrecondition, match="cannot write"):
        run(source, tmp_path / name if name else "")
    assert not script.requests


def test_an_output_needs_its_folder(run: Run, script: Script, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 2)
    for output in (tmp_path / "none" / "out.jsonl", source / "out.jsonl"):
        with pytest.raises(errors.FailedPrecondition, match=f"there is no folder '{output.parent}'"):
            run(source, output)
    assert not script.requests


def test_an_output_that_cannot_be_sorted_is_an_error(run: Run, script: Script, tmp_path: Path) -> None:
    script.answer = lambda request: echo(request)
    source, output = write_input(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    run(source, output)
    output.write_bytes(b"".join(reversed(output.read_bytes().splitlines(keepends=True))))
    Path(f"{output}.journal").unlink()
    scratch = Path(f"{output}.tmp")
    with pytest.raises(errors.FailedPrecondition, match="cannot sort"):
        run(source, output, ordered=True, on_start=lambda _: scratch.mkdir())
    scratch.rmdir()
    assert run(source, output, ordered=True).resumed == 3 and len(script.requests) == 3
    assert [row["custom_id"] for row in read(output)] == ["id 0", "id 1", "id 2"]


def test_a_line_with_deeply_nested_values_is_named(run: Run, script: Script, tmp_path: Path) -> None:
    script.answer = echo
    nested: Any = 1
    for depth in range(1, 400):
        nested = {"a": nested}
        if depth in (30, 31, 126, 399):
            source, output = write_input(tmp_path / f"{depth}", 1, chat_template_kwargs=nested), tmp_path / "out.jsonl"
            if depth == 30:
                assert run(source, output).completed == 1
                continue
            with pytest.raises(BatchInvalid) as caught:
                run(source, output)
            limit = "chat_template_kwargs: nested more than 30 levels deep"
            whole = "nested 401 deep; at most 128 are allowed"
            assert caught.value.problems == [f"line 1: {limit if depth <= 126 else whole}"]


def test_a_wrong_file_starts_nothing(run: Run, script: Script, tmp_path: Path) -> None:
    source, output = write_input(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    with open(source, "a") as file:
        file.write('{"custom_id": "id 1", "body": {"messages": []}}\n')
    with pytest.raises(BatchInvalid) as caught:
        run(source, output)
    assert caught.value.problems == ["line 4: messages: expected a list of at least one message"]
    for missing in (tmp_path / "nothing.jsonl", tmp_path):
        with pytest.raises(errors.InvalidArgument, match="cannot read"):
            run(missing, output)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(errors.InvalidArgument, match="no requests"):
        run(empty, output)
    with pytest.raises(errors.InvalidArgument, match=r"'gpt'.*'fake'.*\(--any-model\)"):
        run(write_input(tmp_path / "other.jsonl", 2, model="gpt"), output)
    assert not output.exists() and not script.requests
    script.answer = echo
    assert run(tmp_path / "other.jsonl", output, any_model=True).completed == 2
    assert {request.model for request in script.requests} == {""}


WRONG_OPTIONS: list[dict[str, Any]] = [
    {"concurrency": 0}, {"max_errors": -1}, {"timeout": 0}, {"concurency": 3}, {"concurrency": "4"},
    {"max_errors": 1.5}, {"priority": "low"}, {"priority": 2**31}, {"overwrite": "false"}, {"max_retries": "3"},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_OPTIONS, ids=str)
def test_wrong_options(run: Run, tmp_path: Path, wrong: dict[str, Any]) -> None:
    (tmp_path / "out.jsonl").write_text("kept")
    with pytest.raises(errors.InvalidArgument, match=next(iter(wrong))):
        run(write_input(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl", **wrong)
    assert (tmp_path / "out.jsonl").read_text() == "kept"


@pytest.mark.parametrize("source", [5, b"in.jsonl", "in\0.jsonl", None], ids=str)
def test_what_is_no_path_is_refused(run: Run, source: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="source: expected a path|null byte"):
        run(source, "out.jsonl")


def test_too_many_errors(run: Run, script: Script, tmp_path: Path) -> None:
    script.answer = lambda request: (_ for _ in ()).throw(Failure(Code.INVALID_ARGUMENT, "no"))
    source, output = write_input(tmp_path / "in.jsonl", 100), tmp_path / "out.jsonl"
    with pytest.raises(errors.FailedPrecondition) as caught:
        run(source, output, max_errors=5, concurrency=2)
    assert caught.value.reason == "BATCH_ERRORS" and len(read(output)) == 6
    script.answer = echo
    assert run(source, output).failed == 6  # an invalid request is not tried again


def test_a_server_that_is_gone_stops_the_job(run: Run, script: Script, tmp_path: Path) -> None:
    script.answer = lambda request: (_ for _ in ()).throw(Failure(Code.UNAVAILABLE, "gone", pushback="-1"))
    source, output = write_input(tmp_path / "in.jsonl", 100), tmp_path / "out.jsonl"
    with pytest.raises(errors.Unavailable, match="could not be sent"):
        run(source, output, concurrency=3)
    assert len(read(output)) == 3
    script.answer = echo
    assert run(source, output).completed == 100
    assert answers(output) == expected(100)


def test_rows_whose_image_s_host_is_gone_do_not_stop_the_job(run: Run, script: Script, tmp_path: Path) -> None:
    """The server answers, and would answer the same whenever the job is run again."""

    def answer(request: Any) -> list[str]:
        if request.chat.messages[0].parts[0].image.uri.startswith("https://gone"):
            raise Failure(Code.UNAVAILABLE, "connection refused", reason="MEDIA_FETCH_FAILED", pushback="-1")
        return echo(request)

    script.answer = answer
    names = ["https://gone/a.png"] * 20 + ["https://here/b.png"] * 5
    source, output = image_rows(tmp_path / "in.jsonl", names), tmp_path / "out.jsonl"
    for _ in range(2):
        summary = run(source, output, concurrency=3)
        assert (summary.completed, summary.failed) == (5, 20)
        assert codes(output) == ["MEDIA_FETCH_FAILED"] * 20 + [None] * 5


def test_a_key_that_is_refused_stops_the_job_at_once(run: Run, script: Script, tmp_path: Path) -> None:
    script.answer = lambda request: (_ for _ in ()).throw(Failure(Code.PERMISSION_DENIED, "no"))
    with pytest.raises(errors.PermissionDenied):
        run(write_input(tmp_path / "in.jsonl", 100), tmp_path / "out.jsonl", concurrency=2)
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_file_that_changes_underneath_is_an_error(run: Run, script: Script, tmp_path: Path) -> None:
    source, output = write_input(tmp_path / "in.jsonl", 400), tmp_path / "out.jsonl"

    def answer(request: Any) -> list[str]:
        source.write_bytes(source.read_bytes().replace(b"row", b"raw"))
        return echo(request)

    script.answer = answer
    with pytest.raises(errors.FailedPrecondition) as caught:
        run(source, output, concurrency=1)
    assert caught.value.reason == "BATCH_INPUT_CHANGED"


def test_an_input_that_is_a_pipe_is_refused(run: Run, tmp_path: Path) -> None:
    """It is read twice; opening a pipe by its name would wait for its next writer, without end."""
    os.mkfifo(tmp_path / "named")
    reading, writing = os.pipe()
    os.close(writing)
    for source in (tmp_path / "named", f"/dev/fd/{reading}", "/dev/null"):
        with pytest.raises(errors.InvalidArgument, match=f"cannot read '{source}': it is a pipe or a device"):
            run(source, tmp_path / "out.jsonl")
    os.close(reading)
    assert [path.name for path in tmp_path.iterdir()] == ["named"]


def test_an_input_that_disappears_is_an_error_of_ours(run: Run, script: Script, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 3)
    with pytest.raises(errors.FailedPrecondition, match="cannot be read any more: No such file") as caught:
        run(source, tmp_path / "out.jsonl", on_start=lambda summary: source.unlink())
    assert caught.value.reason == "BATCH_INPUT_CHANGED" and not script.requests


@pytest.mark.parametrize("replaced", [False, True])
def test_an_output_that_is_deleted_meanwhile_is_an_error(
    run: Run, script: Script, tmp_path: Path, replaced: bool
) -> None:
    """The answers are in a file without a name, and lost; another file of this name is not touched."""
    script.answer = echo
    source, output = write_input(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"

    def delete(*_: object) -> None:
        output.unlink(missing_ok=True)
        if replaced:
            output.write_text("mine")

    with pytest.raises(errors.FailedPrecondition, match="deleted or replaced while it was written"):
        run(source, output, on_progress=delete)
    assert output.read_text() == "mine" if replaced else not output.exists()
    output.unlink(missing_ok=True)
    assert run(source, output).completed == 3 and answers(output) == expected(3)


def test_progress_has_the_counts_so_far(run: Run, script: Script, tmp_path: Path) -> None:
    source, output = write_input(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    seen: list[tuple[int, ...]] = []

    def note(summary: Any, tokens: int, failed: bool) -> None:
        seen.append((summary.completed, summary.failed, summary.prompt_tokens, summary.completion_tokens))

    last = run(source, output, on_progress=note)
    assert [counts[:2] for counts in seen] == [(1, 0), (2, 0), (3, 0)]
    assert seen[-1][2:] == (last.prompt_tokens, last.completion_tokens) and seen[0][3] > 0


def test_an_image_of_the_folder(run: Run, script: Script, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"pixels")
    parts = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "what?"}]
    row = {"custom_id": "a", "body": {"messages": [{"role": "user", "content": parts}]}}
    (tmp_path / "in.jsonl").write_text(json.dumps(row))
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl").completed == 1
    assert script.requests[0].chat.messages[0].parts[0].image.data == b"pixels"


@pytest.mark.parametrize("overwrite", [False, True])
def test_one_process_at_a_time(run: Run, script: Script, tmp_path: Path, address: str, overwrite: bool) -> None:
    source, output = write_input(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    second: list[BaseException] = []

    def answer(request: Any) -> list[str]:
        if not second:
            second.append(errors.SaccadeError("none"))
            try:
                with saccade.Client(address) as other:
                    other.run_batch(source, output, overwrite=overwrite)
            except errors.FailedPrecondition as error:
                second.append(error)
        return echo(request)

    script.answer = answer
    assert run(source, output, concurrency=1).completed == 2
    assert isinstance(second[-1], errors.FailedPrecondition) and second[-1].reason == "BATCH_RUNNING"
    assert answers(output) == expected(2)


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
def test_an_output_that_is_sorted_keeps_its_permissions(run: Run, script: Script, tmp_path: Path) -> None:
    script.answer = echo
    source, output = write_input(tmp_path / "in.jsonl", 20), tmp_path / "out.jsonl"
    run(source, output)
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(reversed(lines)))
    (tmp_path / "out.jsonl.journal").unlink()
    output.chmod(0o600)
    run(source, output, ordered=True)
    assert [row["custom_id"] for row in read(output)] == [f"id {i}" for i in range(20)]
    assert stat.S_IMODE(output.stat().st_mode) == 0o600


def image_rows(path: Path, names: list[str]) -> Path:
    """A file with a row for each name of a file or URL."""
    with open(path, "w") as file:
        for i, name in enumerate(names):
            content = [{"type": "image_url", "image_url": {"url": name}}, {"type": "text", "text": f"row {i}"}]
            body = {"messages": [{"role": "user", "content": content}]}
            file.write(json.dumps({"custom_id": f"id {i}", "body": body}) + "\n")
    return path


def codes(path: Path) -> list[str | None]:
    rows = sorted(read(path), key=lambda row: int(row["custom_id"].split()[1]))
    return [row["error"] and row["error"]["code"] for row in rows]


@pytest.mark.parametrize("reason", ["MEDIA_HOST_DENIED", "SOMETHING_NEW"])
def test_a_row_that_the_server_may_not_answer_is_a_row(run: Run, script: Script, tmp_path: Path, reason: str) -> None:
    def answer(request: Any) -> list[str]:
        image = request.chat.messages[0].parts[0].image
        if image.uri.startswith("https://elsewhere"):
            raise Failure(Code.PERMISSION_DENIED, "this host is not allowed", reason=reason)
        return echo(request)

    script.answer = answer
    names = ["https://here/a.png"] * 20 + ["https://elsewhere/b.png"] + ["https://here/c.png"] * 20
    source, output = image_rows(tmp_path / "in.jsonl", names), tmp_path / "out.jsonl"
    for _ in range(2):
        summary = run(source, output, concurrency=2)
        assert (summary.completed, summary.failed) == (40, 1)
        assert codes(output) == [None] * 20 + [reason] + [None] * 20


@pytest.mark.parametrize(
    "failure",
    [Failure(Code.PERMISSION_DENIED, reason=reason) for reason in ("", "PERMISSION_DENIED", "KEY_REVOKED")]
    + [Failure(Code.UNAUTHENTICATED, reason="ANY")],
    ids=lambda failure: f"{failure.code.name}-{failure.reason}",
)
def test_what_is_wrong_with_the_key_stops_the_job(run: Run, script: Script, tmp_path: Path, failure: Failure) -> None:
    script.answer = lambda request: (_ for _ in ()).throw(failure)
    with pytest.raises((errors.PermissionDenied, errors.Unauthenticated)):
        run(write_input(tmp_path / "in.jsonl", 30), tmp_path / "out.jsonl", concurrency=2)
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_file_that_cannot_be_read_is_its_rows_error(run: Run, script: Script, tmp_path: Path) -> None:
    script.answer = echo
    for name in ("a", "c", "late"):
        (tmp_path / f"{name}.png").write_bytes(name.encode())
    (tmp_path / "folder.png").mkdir()
    names = ["a.png", "missing.png", "c.png", "folder.png", "late.png"]
    source, output = image_rows(tmp_path / "in.jsonl", names), tmp_path / "out.jsonl"
    with pytest.raises(BatchInvalid) as caught:
        run(source, output, strict=True)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["line 2", "line 4"]
    assert not output.exists() and not script.requests

    summary = run(source, output)
    assert (summary.completed, summary.failed) == (3, 2)
    assert codes(output) == [None, "IMAGE_UNREADABLE", None, "IMAGE_UNREADABLE", None]
    assert [row["response"]["status_code"] for row in read(output) if row["error"]] == [400, 400]
    script.requests.clear()
    assert run(source, output).failed == 2 and not script.requests, "nothing has changed"
    (tmp_path / "missing.png").write_bytes(b"found")
    assert run(source, output).completed == 4
    assert [r.chat.messages[0].parts[0].image.data for r in script.requests] == [b"found"]
    outside = image_rows(tmp_path / "outside.jsonl", ["a.png", "../secret.png"])
    (tmp_path.parent / "secret.png").write_bytes(b"secret")
    with pytest.raises(BatchInvalid, match="outside"):
        run(outside, tmp_path / "other.jsonl")
    (tmp_path.parent / "secret.png").unlink()


@pytest.mark.parametrize("becomes", [None, b"other"])
def test_a_file_that_changes_underneath_is_its_rows_error(
    run: Run, script: Script, tmp_path: Path, becomes: bytes | None
) -> None:
    names = [f"{i}.png" for i in range(5)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    source, output = image_rows(tmp_path / "in.jsonl", names), tmp_path / "out.jsonl"

    def answer(request: Any) -> list[str]:
        (tmp_path / "4.png").unlink(missing_ok=True)
        if becomes is not None:
            (tmp_path / "4.png").write_bytes(becomes)
        return echo(request)

    script.answer = answer
    assert run(source, output, concurrency=1).failed == 1
    wanted = "IMAGE_UNREADABLE" if becomes is None else "BATCH_INPUT_CHANGED"
    assert codes(output) == [None] * 4 + [wanted]
    (tmp_path / "4.png").write_bytes(b"new")
    script.answer = echo
    script.requests.clear()
    assert run(source, output).completed == 5 and len(script.requests) == 1


def test_a_job_that_is_copied_elsewhere_goes_on_there(run: Run, script: Script, tmp_path: Path) -> None:
    """The folder and modification times of the files are not part of the job's identity."""
    script.answer = echo
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    for name in ("a.png", "b.png"):
        (here / name).write_bytes(name.encode())
    run(image_rows(here / "in.jsonl", ["a.png", "b.png"]), here / "out.jsonl")
    there.mkdir()
    for file in here.iterdir():
        (there / file.name).write_bytes(file.read_bytes())
        os.utime(there / file.name, (1, 1))
    script.requests.clear()
    assert run(there / "in.jsonl", there / "out.jsonl").resumed == 2
    (there / "out.jsonl.journal").unlink()
    assert run(there / "in.jsonl", there / "out.jsonl").resumed == 2 and not script.requests
    (there / "a.png").write_bytes(b"c.png")  # of the same size and with the same modification time
    os.utime(there / "a.png", (1, 1))
    summary = run(there / "in.jsonl", there / "out.jsonl")
    assert (summary.resumed, summary.completed) == (1, 2) and len(script.requests) == 1


# -- crashes -----------------------------------------------------------------------------------------------------------


# The test runner may ignore SIGINT, as shells do for background jobs; child processes inherit that.
PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from saccade.cli import main; sys.exit(main(sys.argv[1:]))"
)


def start(*arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, "batch", *map(str, arguments)]
    return subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("ordered, moments", [(False, [1, 30, 131]), (True, [2, 70, 110])])
def test_killed_again_and_again_it_ends_with_each_row_once(
    address: str, script: Script, tmp_path: Path, ordered: bool, moments: list[int]
) -> None:
    """kill -9 when the n-th request of each run arrives: before the first answer, between commits, after a commit."""
    source, output = write_input(tmp_path / "in.jsonl", 220), tmp_path / "out.jsonl"
    victim: list[subprocess.Popen[str]] = []
    written: set[str] = set()
    seen: list[str] = []
    moment, arrivals = 0, itertools.count(1)

    def answer(request: Any) -> list[str]:
        seen.append(text_of(request))
        if next(arrivals) == moment:  # one step, so that of two requests at once exactly one is the n-th
            victim[0].kill()
        return echo(request)

    script.answer = answer
    options = ["--server", address, "--concurrency", 8, "--quiet", *(["--ordered"] if ordered else [])]
    for moment in [*moments, 0]:
        arrivals = itertools.count(1)
        seen.clear()
        victim[:] = [start(source, output, *options)]
        stdout, stderr = victim[0].communicate(timeout=60)
        assert not {f"id {text.split()[1]}" for text in seen} & written, "an answered row was asked again"
        if moment:
            assert victim[0].returncode == -signal.SIGKILL, stderr
            if output.exists():
                whole = output.read_bytes().rpartition(b"\n")[0]
                written = {json.loads(line)["custom_id"] for line in whole.splitlines()}
    assert victim[0].returncode == 0, stderr
    assert answers(output) == expected(220)
    summary = json.loads(stdout.splitlines()[-1])
    assert summary["completed"] == 220 and summary["resumed"] == len(written) > 100
    if ordered:
        assert [row["custom_id"] for row in read(output)] == [f"id {i}" for i in range(220)]


def test_an_interrupt_says_how_to_go_on(address: str, script: Script, tmp_path: Path) -> None:
    rows = 60
    source, output = write_input(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    for sent in (signal.SIGINT, signal.SIGTERM):
        process: list[subprocess.Popen[str]] = []
        arrivals, over = itertools.count(1), threading.Event()

        def answer(
            request: Any, sent: int = sent, process: Any = process, arrivals: Any = arrivals, over: Any = over
        ) -> list[str]:
            number = next(arrivals)  # one step, so that of two requests at once exactly one is the twentieth
            if number == 20:
                process[0].send_signal(sent)
            if number >= 20:  # no further answer, however late the signal arrives
                over.wait(timeout=60)
            return echo(request)

        script.answer = answer
        process.append(start(source, output, "--server", address, "--concurrency", 2))
        stdout, stderr = process[0].communicate(timeout=60)
        over.set()
        assert process[0].returncode == 130, stderr
        assert "the same command continues from here" in stderr and "Traceback" not in stderr
        assert json.loads(stdout)["completed"] == len(read(output)) >= 18
    last = start(source, output, "--server", address, "--quiet")
    last.communicate(timeout=60)
    assert last.returncode == 0
    assert answers(output) == expected(rows)


DAMAGES = ["cut", "cut-journal", "lost-journal", "noise-journal", "zeros", "deleted-line", "doubled-line", "halved"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a job of 120 rows that has failed after more rows than the journal commits
    together."""
    folder, script = tmp_path_factory.mktemp("stopped"), Script()
    script.answer = lambda r: echo(r) if len(script.requests) < 100 else (_ for _ in ()).throw(Failure(Code.INTERNAL))
    source = write_input(folder / "in.jsonl", 120)
    with serve(script) as address, saccade.Client(address, timeout=20) as client:
        with pytest.raises(errors.FailedPrecondition):
            client.run_batch(source, folder / "out.jsonl", max_errors=0, concurrency=4)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("seed", range(3))
def test_torn_files(
    stopped: Path, client: saccade.Client, script: Script, tmp_path: Path, damage: str, seed: int
) -> None:
    """Whatever the damage to output and journal, the next run ends with each row once and the right answer."""
    rng = random.Random(f"{damage} {seed}")
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    journal = Path(f"{output}.journal")
    data = output.read_bytes()
    lines = data.splitlines(keepends=True)
    assert len(lines) >= 90
    match damage:
        case "cut":
            os.truncate(output, rng.randrange(len(data)))
        case "cut-journal":
            os.truncate(journal, rng.randrange(journal.stat().st_size))
        case "lost-journal":
            journal.unlink()
            os.truncate(output, len(data) - rng.randrange(1, 100))
        case "noise-journal":
            noise = bytearray(journal.read_bytes())
            for _ in range(200):
                noise[rng.randrange(len(noise))] = rng.randrange(256)
            journal.write_bytes(noise)
        case "zeros":  # what a power cut leaves where data had not reached the disk
            output.write_bytes(data + bytes(rng.randrange(1, 5000)))
        case "deleted-line":
            del lines[rng.randrange(len(lines))]
            output.write_bytes(b"".join(lines))
        case "doubled-line":
            output.write_bytes(data + lines[rng.randrange(len(lines))])
        case "halved":
            output.write_bytes(b"".join(lines[: len(lines) // 2]) + lines[-1][: len(lines[-1]) // 2])
    script.answer = echo
    summary = client.run_batch(source, output, ordered=bool(seed % 2))
    assert summary.completed == 120 and summary.finished
    assert answers(output) == expected(120)


def test_a_crash_while_the_output_is_rewritten(client: saccade.Client, script: Script, tmp_path: Path) -> None:
    """A crash between the renaming of the new output and the journal's record of it: the journal must not be
    trusted."""
    script.answer = echo
    source, output = write_input(tmp_path / "in.jsonl", 60), tmp_path / "out.jsonl"
    client.run_batch(source, output)
    lines = output.read_bytes().splitlines(keepends=True)
    random.Random(1).shuffle(lines)
    output.write_bytes(b"".join(lines))
    with sqlite3.connect(f"{output}.journal") as db:
        db.execute("PRAGMA user_version = 1")
    db.close()
    Path(f"{output}.tmp").write_bytes(b"half of a li")
    client.run_batch(source, output, ordered=True)
    assert [row["custom_id"] for row in read(output)] == [f"id {i}" for i in range(60)]
    assert not Path(f"{output}.tmp").exists()


def test_a_full_disk_leaves_whole_lines(address: str, script: Script, tmp_path: Path) -> None:
    """A limit on file sizes simulates a full disk: the write that reaches it is cut short."""
    script.answer = echo
    source, output = write_input(tmp_path / "in.jsonl", 300), tmp_path / "out.jsonl"
    program = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY)); "
        "from saccade.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["batch", str(source), str(output), "--server", address, "--quiet"]
    done = subprocess.run(
        # -B: Python 3.11 would put truncated files of bytecode into the checkout, which later imports fail on.
        [sys.executable, "-B", "-c", program, *arguments], cwd=CHECKOUT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "cannot write" in done.stderr and "Traceback" not in done.stderr
    assert output.read_bytes().endswith(b"\n") and 50 < len(read(output)) < 300
    assert cli.main(arguments) == 0
    assert answers(output) == expected(300)


def test_a_full_disk_for_the_ids_of_an_input(address: str, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"messages": [{"role": "user", "content": "?"}]}
    rows = (json.dumps({"custom_id": f"{i:0500}", "body": body}) for i in range(5000))
    source.write_text("\n".join(rows))
    program = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY)); "
        "from saccade.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", program, "batch", str(source), str(output), "--server", address, "--quiet"],
        cwd=CHECKOUT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "cannot write the temporary file with the ids of the rows" in done.stderr and not output.exists()


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command(address: str, script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.answer = echo
    source, output = write_input(tmp_path / "in.jsonl", 30), tmp_path / "out.jsonl"
    arguments = ["batch", str(source), str(output), "--server", address, "--ordered"]
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["completed"] == 30 and "30/30 rows" in captured.err
    assert cli.main(arguments) == 0
    assert "30 of 30 rows have been answered already" in capsys.readouterr().err

    script.answer = lambda request: (_ for _ in ()).throw(Failure(Code.INVALID_ARGUMENT, "no"))
    assert cli.main([*arguments, "--overwrite", "--quiet"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["errors"] == {"InvalidArgument": 30} and captured.err == ""
    assert cli.main([*arguments, "--overwrite", "--max-errors", "3"]) == 2
    assert "more than max_errors = 3" in capsys.readouterr().err

    with open(source, "a") as file:
        file.write("{\n{}\n")
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "line 31: not JSON" in captured.err and "line 32: custom_id" in captured.err
    nobody = ["batch", str(write_input(source, 1)), str(output), "--server", "127.0.0.1:1", "--max-retries", "0"]
    assert cli.main(nobody) == 2
    with pytest.raises(SystemExit) as caught:
        cli.main(["batch", str(source)])
    assert caught.value.code == 2


class Terminal:
    def __init__(self, terminal: bool) -> None:
        self.text, self._terminal = "", terminal

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        return


def test_progress() -> None:
    now = [0.0]
    log = Terminal(False)
    progress = Progress(1000, 100, stream=log, clock=lambda: now[0])  # type: ignore[arg-type]
    for _ in range(100):
        now[0] += 0.1
        progress.add(5, False)
    progress.add(0, True)
    assert progress.line() == "201/1000 rows, 1 failed, 50 tokens/s, 1m19s left"
    assert 2 <= log.text.count("\n") <= 4  # one line at once, then one every five seconds
    screen = Terminal(True)
    progress = Progress(2, stream=screen, clock=lambda: now[0], use_rich=False)  # type: ignore[arg-type]
    now[0] += 1
    progress.add(3, False)
    progress.add(3, False)
    progress.close()
    assert screen.text.startswith("\r\x1b[K1/2 rows") and screen.text.endswith("2/2 rows, 6 tokens/s, in 1s\n")
    assert [duration(s) for s in (0.4, 59.6, 75.2, 7262)] == ["0s", "1m00s", "1m15s", "2h01m"]


def test_progress_whether_rich_is_installed_or_not() -> None:
    screen = Terminal(True)
    progress = Progress(2, stream=screen)  # type: ignore[arg-type]
    progress.add(3, False)
    progress.close()
    assert "1/2 rows" in screen.text
