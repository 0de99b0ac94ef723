"""The soak runner: a part that fails is reported, and the others still run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import record, soak


def test_a_part_that_raises_fails_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(scale: float) -> soak.Outcome:
        raise AssertionError(f"broken at {scale}")

    made = {"first": breaks, "second": lambda scale: soak.Outcome(True, {"cases": 3})}
    monkeypatch.setattr(soak, "parts", lambda: sorted(made))
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(soak.importlib, "import_module", lambda name: SimpleNamespace(run=made[name.split(".")[-1]]))
    assert soak.main(["--scale", "0.5", "--write"]) == 1
    first, second = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not first["passed"] and "broken at 0.5" in first["error"]
    assert second["passed"] and second["cases"] == 3
    assert {path.name.split("-soak-")[1] for path in tmp_path.iterdir()} == {"first-x0.5.json", "second-x0.5.json"}


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main(["nothing"])
    assert f"nothing: no such part; there are {', '.join(soak.parts())}" in capsys.readouterr().err
