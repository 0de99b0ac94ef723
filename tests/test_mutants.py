"""The lists of mutants are up to date, and the program that applies them tells caught mutants from survivors."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import mutants, record
from benchmarks.mutants import CHECKOUT, Mutant, Results

MUTANTS = [mutant for area in mutants.areas() for mutant in mutants.read(area)]


def test_each_mutant_changes_what_is_there_and_names_tests_that_are_there() -> None:
    assert len(MUTANTS) >= 100
    wrong = []
    for mutant in MUTANTS:
        try:
            changed = mutant.applied((CHECKOUT / mutant.path).read_text("utf-8"))
            if mutant.path.endswith(".py"):
                compile(changed, mutant.path, "exec")
        except (OSError, ValueError, SyntaxError) as error:
            wrong.append(str(error))
        wrong += [test for test in mutant.tests if not (CHECKOUT / test.partition("::")[0]).exists()]
        wrong += [] if mutant.tests else [f"{mutant.path}: {mutant.new!r} has no tests"]
    assert not wrong, "mend these entries of benchmarks/mutants_lists:\n" + "\n".join(wrong)
    assert [change for change, count in Counter((m.path, m.old, m.new) for m in MUTANTS).items() if count > 1] == []


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a function of two decisions and a test that checks one of them."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which the tests of this folder do without
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "pytest.ini").write_text("[pytest]\n")
    (root / "thing.py").write_text("def clamp(x):\n    return max(0, min(x, 9))\n")
    (root / "test_thing.py").write_text("from thing import clamp\n\ndef test_above():\n    assert clamp(12) == 9\n")
    return root


def mutant(old: str, new: str) -> Mutant:
    return Mutant("here", "thing.py", old, new, ("test_thing.py",))


def test_caught_and_survived(checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tried = [
        mutant("min(x, 9)", "min(x, 8)"),
        mutant("max(0,", "max(1,"),
        mutant("def clamp", "import nothing_of_that_name\ndef clamp"),
    ]
    state = tmp_path / "state" / "known.jsonl"
    rows = mutants.run(tried, checkout, Results(state), jobs=2)
    assert [row["outcome"] for row in rows] == ["caught", "survived", "caught"]
    assert (checkout / "thing.py").read_text() == "def clamp(x):\n    return max(0, min(x, 9))\n"
    *_, counted, survivor = mutants.table(rows).splitlines()
    assert counted.split() == ["all", "3", "2", "1"] and survivor.startswith("survived: thing.py")

    state.write_text(state.read_text() + '{"key": "cut')  # as after a run that was killed while it wrote
    capsys.readouterr()
    assert mutants.run(tried, checkout, Results(state)) == rows
    assert capsys.readouterr().err == ""
    assert mutants.run([*tried, mutant("x, 9", "x, 5")], checkout, Results(state), seconds=0) == rows
    (checkout / "test_thing.py").write_text("from thing import clamp\n\ndef test_below():\n    assert clamp(-1) == 0\n")
    assert mutants.run(tried[1:2], checkout, Results(state))[0]["outcome"] == "caught"


def test_tests_that_hang_are_ended_and_noticed(checkout: Path) -> None:
    endless = mutant("return max", "return [0 for _ in iter(int, 1)] or max")
    assert mutants.try_mutant(checkout, endless, timeout=1)[0] == "hung"


def test_tests_that_fail_without_a_mutant_are_named(checkout: Path, tmp_path: Path) -> None:
    (checkout / "test_thing.py").write_text("def test_it():\n    assert False\n")
    with pytest.raises(SystemExit, match="fail without any mutant: test_thing.py"):
        mutants.run([mutant("9", "8")], checkout, Results(tmp_path / "known.jsonl"))
    (checkout / "test_thing.py").write_text("")
    with pytest.raises(SystemExit, match="test_thing.py"):
        mutants.run([mutant("9", "8")], checkout, Results(tmp_path / "known.jsonl"))


def test_a_stale_entry_is_named_before_anything_runs(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="thing.py holds 2 times 'a', expected once"):
        mutant("a", "b").applied("a a")
    with pytest.raises(ValueError, match="holds 0 times 'min_of'"):
        mutants.run([mutant("9", "8"), mutant("min_of", "b")], checkout, Results(tmp_path / "known.jsonl"))


def test_the_last_line_is_json_and_few_caught_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"area": "here", "path": "p", "old": "a", "new": "b", "tests": [], "seconds": 1.0}
    outcomes = [{**row, "outcome": outcome} for outcome in ("caught", "survived")]
    monkeypatch.setattr(mutants, "run", lambda *given, **named: outcomes)
    monkeypatch.setattr(mutants, "Results", lambda *given, **named: None)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert mutants.main(["--write"]) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["mutants"], told["caught"], told["percent"]) == (2, 1, 50.0) and told["not_tried"] == len(MUTANTS) - 2
    (written,) = tmp_path.glob("*-mutants.json")
    assert json.loads(written.read_text())["rows"][1]["outcome"] == "survived"
    assert mutants.main(["--least", "50"]) == 0
