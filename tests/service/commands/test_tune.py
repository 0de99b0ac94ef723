"""`saccade tune`: the table, the suggested option, and errors for bad files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from service.commands import tune
from service.common.config import EngineOptions
from service.common.settings import parse_value


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "histogram.json"
    path.write_text(json.dumps({"image_tokens": {"80": 100, "300": 20, "1000": 1}}))
    return path


def test_the_last_line_is_an_option_that_the_server_takes(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main([str(recorded), "--budgets", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("121 images")
    assert [line.split("  ")[0] for line in lines[2:6]] == [
        "doublings",
        "sqrt(2) steps",
        "tuned, each alone",
        "tuned, packed",
    ]
    command = lines[-1].split()
    assert command[:3] == ["saccade", "serve", "--token-budgets"]
    budgets = parse_value(EngineOptions, "token_budgets", command[3])
    assert len(budgets) <= 2 and budgets[-1] == 1000


def test_json(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        tune.main([str(recorded), "--budgets", "3", "--lo", "64", "--hi", "1024", "--max-images", "4", "--json"]) == 0
    )
    reports = json.loads(capsys.readouterr().out)
    assert reports[-2]["token_budgets"] == [80, 300, 1024]
    assert reports[-2]["alone"] < reports[0]["alone"]
    assert reports[-1]["packed"] <= reports[-2]["packed"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "must hold a JSON object"),
        ("{", "is not JSON"),
        ('{"a": 1}', "'a': 1"),
        ('{"64": 1.5}', "1.5"),
        ('{"64": true}', "True"),
        ('{"-3": 1}', "-3"),
        ("{}", "no image"),
        ('{"0": 1}', "0 tokens"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as refused:
        tune.main([str(path)])
    assert str(path) in str(refused.value)


def test_bad_numbers_and_a_missing_file_are_named(recorded: Path) -> None:
    with pytest.raises(ValueError, match="--max-images .*0"):
        tune.main([str(recorded), "--max-images", "0"])
    with pytest.raises(ValueError, match=r"absent\.json cannot be read"):
        tune.main([str(recorded.with_name("absent.json"))])
