"""The journal of a batch's output alone: crashes at each step of a rewrite, and outputs that the journal does not
describe."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from saccade._jobs.journal import Journal, Written, recount
from saccade.errors import AlreadyExists, FailedPrecondition

CHECKOUT = Path(__file__).resolve().parents[2]
ROWS = 12


def row_id(position: int, job: str = "a") -> str:
    return f"batch_req_{job}{position:05}"


def identify(custom_id: str) -> tuple[int, str] | None:
    position = int(custom_id)
    return (position, row_id(position)) if position < ROWS else None


def line(position: int, job: str = "a", status: int = 200, fill: int = 0) -> bytes:
    usage = {"prompt_tokens": position, "completion_tokens": 2}
    response = {"status_code": status, "body": {"usage": usage, "fill": "x" * (fill or position)}}
    row = {"id": row_id(position, job), "custom_id": f"{position}", "response": response, "error": None}
    return json.dumps(row).encode() + b"\n"


def append(journal: Journal, position: int, **options: Any) -> None:
    written = Written(row_id(position), str(position), position, options.get("status", 200), position, 2)
    journal.append(line(position, **options), written)


@contextmanager
def opened(output: Path) -> Iterator[Journal]:
    journal = Journal(output, identify)
    try:
        yield journal
    finally:
        journal.close()


def ids(output: Path) -> list[int]:
    return [int(json.loads(text)["custom_id"]) for text in output.read_bytes().splitlines()]


def shuffled(output: Path, fill: int = 0) -> list[int]:
    """With `fill`, all lines have the same length, and the last row comes last in both orders."""
    order = [(7 * i) % ROWS for i in range(ROWS)]
    if fill:
        order.append(order.pop(order.index(ROWS - 1)))
    with opened(output) as journal:
        for position in order:
            journal.append(
                line(position, fill=fill and fill - (position > 9) * 2),
                Written(row_id(position), str(position), position, 200, position, 2),
            )
    return order


CRASHES = {
    "before the new output has its name": "os.replace = lambda *names: os._exit(9)",
    "between its name and the journal's word on it": "os.replace = lambda *names: (replace(*names), os._exit(9))",
    "while it is written": "os.fsync = lambda descriptor: os._exit(9)",
}


@pytest.mark.parametrize("crash", CRASHES)
@pytest.mark.parametrize("fill", [0, 30])
def test_a_crash_in_a_rewrite_loses_and_mixes_up_nothing(tmp_path: Path, crash: str, fill: int) -> None:
    """With lines of different lengths, offsets in the old output are invalid in the new one. With equal lengths, they
    are offsets of other lines, and neither size nor end shows it."""
    output = tmp_path / "out.jsonl"
    order = shuffled(output, fill)
    if fill:
        assert len({len(text) for text in output.read_bytes().splitlines()}) == 1
    program = (
        "import os, sys; from pathlib import Path; from saccade._jobs.journal import Journal; replace = os.replace\n"
        f"journal = Journal(Path(sys.argv[1]), lambda name: (int(name), f'batch_req_a{{int(name):05}}'))\n"
        f"{CRASHES[crash]}\njournal.sort()"
    )
    done = subprocess.run([sys.executable, "-c", program, str(output)], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    renamed = "between" in crash
    assert ids(output) == (sorted(order) if renamed else order)
    with opened(output) as journal:
        assert list(journal.positions()) == ids(output)
        offset = 0
        content = output.read_bytes()
        for name, at, length, _ in places(journal):
            assert at == offset, "each line is where the journal says"
            assert json.loads(content[at : at + length])["id"] == name
            offset += length
        assert offset == output.stat().st_size
        assert journal.totals() == {
            "rows": ROWS, "failed": 0, "prompt_tokens": sum(range(ROWS)), "completion_tokens": 2 * ROWS,
            "cached_tokens": 0, "reasoning_tokens": 0,
        }  # fmt: skip
        journal.sort()
    assert ids(output) == sorted(order)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.journal"]


def test_a_journal_of_an_earlier_release_is_made_anew(tmp_path: Path) -> None:
    """It did not count cached tokens and those of reasoning, which the output has."""
    output = tmp_path / "out.jsonl"
    shuffled(output)
    row = json.loads(line(1))
    row["response"]["body"]["usage"] |= {
        "prompt_tokens_details": {"cached_tokens": 1}, "completion_tokens_details": {"reasoning_tokens": 2}
    }  # fmt: skip
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(json.dumps(row).encode() + b"\n" if old == line(1) else old for old in lines))
    with closing(sqlite3.connect(tmp_path / "out.jsonl.journal")) as old:
        old.execute("ALTER TABLE rows DROP COLUMN cached_tokens")
        old.execute("ALTER TABLE rows DROP COLUMN reasoning_tokens")
    with opened(output) as journal:
        totals = journal.totals()
    assert totals == recount(output)
    assert (totals["rows"], totals["cached_tokens"], totals["reasoning_tokens"]) == (ROWS, 1, 2)


def places(journal: Journal) -> list[tuple[str, int, int, int]]:
    return journal._db.execute("SELECT id, offset, length, position FROM rows ORDER BY offset").fetchall()


def test_each_line_is_found_where_the_journal_says(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    shuffled(output)
    with opened(output) as journal:
        journal.sort()
        content = output.read_bytes()
        assert [position for *_, position in places(journal)] == list(range(ROWS))
        for name, offset, length, position in places(journal):
            assert content[offset : offset + length] == line(position) and name == row_id(position)
        file = output.stat().st_ino
        journal.sort()
        assert output.stat().st_ino == file, "what is in order is left alone"


def test_an_interrupted_line_is_neither_written_nor_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.jsonl"
    write = os.write

    def interrupted(file: int, data: bytes) -> int:
        write(file, data)
        raise KeyboardInterrupt

    with opened(output) as journal:
        append(journal, 0)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "write", interrupted)
            append(journal, 1)
        append(journal, 2)
        journal.commit()
        assert ids(output) == [0, 2] and journal.totals()["rows"] == 2


def test_an_output_of_equal_size_with_another_last_line_is_read_again(tmp_path: Path) -> None:
    """Its last line is of another request with the same length: that row is requested again, and no other."""
    output = tmp_path / "out.jsonl"
    with opened(output) as journal:
        for position in range(5):
            append(journal, position)
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join([*lines[:-1], line(4, job="b")]))
    assert len(line(4, job="b")) == len(lines[-1])
    with opened(output) as journal:
        assert list(journal.positions()) == [0, 1, 2, 3]
    assert ids(output) == [0, 1, 2, 3]


def test_another_jobs_output_of_equal_size_is_foreign(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with opened(output) as journal:
        for position in range(5):
            append(journal, position)
    other = b"".join(line(position, job="b") for position in range(5))
    assert len(other) == output.stat().st_size
    output.write_bytes(other)
    with pytest.raises(AlreadyExists) as caught:
        Journal(output, identify)
    assert caught.value.reason == "BATCH_OUTPUT_FOREIGN" and output.read_bytes() == other


@pytest.mark.parametrize(
    "change",
    [
        {"custom_id": "\ud800"},
        {"response": {"status_code": 2**70, "body": {}}},
        *({"response": {"status_code": 200, "body": {"usage": usage}}}
          for usage in ([1], "x", {"prompt_tokens": None}, {"completion_tokens": {}}, {"prompt_tokens": 2**70})),
    ],
    ids=str,
)  # fmt: skip
def test_an_output_with_values_that_no_journal_holds_is_foreign(tmp_path: Path, change: dict[str, Any]) -> None:
    output = tmp_path / "out.jsonl"
    content = json.dumps({**json.loads(line(0)), **change}).encode() + b"\n"
    output.write_bytes(content)
    with pytest.raises(AlreadyExists, match="a line that is not an answer of a batch"):
        Journal(output, identify)
    assert output.read_bytes() == content


def test_an_output_that_is_nested_too_deep_is_foreign(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_bytes(b"[" * 100_000 + b"\n")
    with pytest.raises(AlreadyExists, match="a line that is not an answer of a batch"):
        Journal(output, identify)


def test_lines_that_have_changed_places_are_found(tmp_path: Path) -> None:
    """Size and last line are unchanged; the difference is noticed and repaired when the lines are moved."""
    output = tmp_path / "out.jsonl"
    with opened(output) as journal:
        for position in (3, 1, 2, 0, 4):
            append(journal, position, fill=9)
    first, second, *rest = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join((second, first, *rest)))
    with opened(output) as journal:
        journal.sort()
    assert ids(output) == [0, 1, 2, 3, 4]
    content = output.read_bytes().splitlines(keepends=True)
    assert content == [line(position, fill=9) for position in range(5)]


def test_a_repair_keeps_the_new_answers_of_rows_that_an_earlier_run_had_lost(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with opened(output) as journal:
        append(journal, 2, fill=9)
        append(journal, 1, status=503)
    with opened(output) as journal:
        for position in (1, 0, 3):
            append(journal, position, fill=9)
        journal.commit()
        first, second, *rest = output.read_bytes().splitlines(keepends=True)
        with open(output, "r+b") as file:
            file.write(b"".join((second, first, *rest)))
        journal.sort()
    assert output.read_bytes().splitlines(keepends=True) == [line(position, fill=9) for position in range(4)]


def test_lines_that_have_changed_places_beside_a_row_to_answer_again(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with opened(output) as journal:
        for position in (3, 1, 2):
            append(journal, position, status=503 if position == 2 else 200, fill=9)
        append(journal, 0, fill=9)
    first, second, *rest = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join((second, first, *rest)))
    with opened(output) as journal:
        assert sorted(journal.positions()) == [0, 1, 3]
    assert sorted(ids(output)) == [0, 1, 3]


CHANGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a line more": lambda lines: [*lines, line(9)],
    "a line twice": lambda lines: [*lines, lines[1]],
    "a line less": lambda lines: lines[:-1],
    "half a line more": lambda lines: [*lines, line(9)[:30]],
    "a whole line without its end": lambda lines: [*lines, line(9)[:-1]],
    "the first line is gone": lambda lines: lines[1:],
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_written_behind_the_journals_back(tmp_path: Path, change: str) -> None:
    output = tmp_path / "out.jsonl"
    with opened(output) as journal:
        for position in range(5):
            append(journal, position)
    lines = CHANGES[change](output.read_bytes().splitlines(keepends=True))
    output.write_bytes(b"".join(lines))
    wanted = {"a line more": [0, 1, 2, 3, 4, 9], "a line less": [0, 1, 2, 3], "the first line is gone": [1, 2, 3, 4]}
    with opened(output) as journal:
        assert list(journal.positions()) == wanted.get(change, [0, 1, 2, 3, 4])
        append(journal, 10)
    with opened(output) as journal:
        assert sorted(journal.positions()) == [*wanted.get(change, [0, 1, 2, 3, 4]), 10]
    assert output.read_bytes().endswith(line(10))


@pytest.mark.parametrize(("status", "kept"), [(200, True), (400, True), (404, True), (501, True), (413, True),
                                              (403, False), (401, False), (429, False), (499, False), (500, False),
                                              (503, False)])  # fmt: skip
def test_which_errors_are_asked_again(tmp_path: Path, status: int, kept: bool) -> None:
    output = tmp_path / "out.jsonl"
    with opened(output) as journal:
        append(journal, 0)
        append(journal, 1, status=status)
    with opened(output) as journal:
        assert list(journal.positions()) == ([0, 1] if kept else [0])
        assert journal.totals()["failed"] == (kept and status != 200)


def test_a_full_disk_for_a_journal_that_is_rebuilt(tmp_path: Path) -> None:
    """A limit on file sizes simulates a full disk."""
    output = tmp_path / "out.jsonl"
    content = b"".join(line(position) for position in range(2000))
    output.write_bytes(content)
    program = (
        "import resource, signal, sys; from pathlib import Path; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY)); "
        "from saccade._jobs.journal import Journal; Journal(Path(sys.argv[1]), lambda custom_id: None)"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", program, str(output)], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert done.stderr.splitlines()[-1].startswith("saccade.errors.FailedPrecondition: cannot write ")
    assert output.read_bytes() == content


def test_one_process_at_a_time_and_the_second_changes_nothing(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with opened(output) as journal:
        append(journal, 0)
        with pytest.raises(FailedPrecondition) as caught:
            Journal(output, identify)
        assert caught.value.reason == "BATCH_RUNNING"
        append(journal, 1)
    with opened(output) as journal:
        assert list(journal.positions()) == [0, 1]
