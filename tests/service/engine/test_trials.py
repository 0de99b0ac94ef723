"""The process in which formats are compiled first: which formats end it, and which do not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from grammar_walks import END, TOKENIZER, VOCABULARY
from waiting import stop

from service.common.types import TextFormat
from service.engine.trials import Trials
from service.engine.types import ConstraintFailed, UnusableConstraint

ROOT = Path(__file__).resolve().parents[3]
DIGIT = TextFormat("regex", "[0-9]")


@pytest.fixture
def trials() -> Iterator[Trials]:
    made = Trials(TOKENIZER, VOCABULARY, {END})
    yield made
    made.close()


def process_of(trials: Trials) -> int:
    assert trials.pid is not None
    return trials.pid


def test_formats_are_checked_by_one_process(trials: Trials) -> None:
    trials.check(DIGIT)
    first = process_of(trials)
    with pytest.raises(UnusableConstraint, match="unclosed") as error:
        trials.check(TextFormat("regex", "("))
    assert error.value.field == "sampling.response_format.regex"
    trials.check(DIGIT)
    assert process_of(trials) == first


def test_a_process_that_has_ended_is_started_again(trials: Trials) -> None:
    trials.check(DIGIT)
    first = process_of(trials)
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    trials.check(DIGIT)
    assert process_of(trials) != first


UNCHECKED = """
import service.engine.grammar_sources as sources
sources.check_sizes = sources.check_numbers = lambda format: None
"""
"""`sitecustomize` of a process that compiles what is refused before."""
SMALL = UNCHECKED + "import service.engine.trials; service.engine.trials.MEMORY_BYTES = 128 << 20\n"
HURRIED = UNCHECKED + "import service.engine.grammars; service.engine.grammars.COMPILE_SECONDS = 0.0\n"
"""The kernel's limit is a whole number of seconds and up to two more."""


@pytest.mark.parametrize(
    ("format", "words", "program"),
    [
        (TextFormat("regex", "x*" * 65_000), "more than the 512 MiB of memory that are allowed", SMALL),
        (TextFormat("json_schema", '{"const": -9223372036854775808}'), "more than the 512 MiB of stack", UNCHECKED),
        (
            TextFormat("json_schema", '{"anyOf": [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65539}]}'),
            "more than the 3 s of processor time that are allowed",
            HURRIED,
        ),
    ],
    ids=["memory", "stack", "time"],
)
def test_a_format_that_ends_the_process_is_refused(
    trials: Trials, format: TextFormat, words: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formats that are known to do so are refused before; there may be others."""
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    with pytest.raises(UnusableConstraint, match=words):
        trials.check(format)
    monkeypatch.undo()
    trials.check(DIGIT)


def test_a_process_that_does_not_reply_is_killed_and_says_nothing_about_the_format(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.check(DIGIT)
    monkeypatch.setattr("service.engine.trials.WAIT_SECONDS", 0.1)
    stop(process_of(trials))
    with pytest.raises(ConstraintFailed, match="was killed"):
        trials.check(DIGIT)
    monkeypatch.undo()
    trials.check(DIGIT)


def test_closing_ends_a_check(trials: Trials) -> None:
    trials.check(DIGIT)
    stop(process_of(trials))
    with ThreadPoolExecutor(1) as pool:
        checked = pool.submit(trials.check, DIGIT)
        trials.close()
        with pytest.raises(ConstraintFailed, match="the server is stopping"):
            checked.result()
    with pytest.raises(ConstraintFailed, match="the server is stopping"):
        trials.check(DIGIT)
