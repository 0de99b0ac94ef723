"""`saccade top` against a scripted server."""

from __future__ import annotations

import io

import pytest

from saccade import cli, top
from saccade.top import run, size


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def options(address: str, *further: str) -> object:
    return cli._parser().parse_args(["top", "--server", address, *further])


def test_a_line_for_each_look_where_there_is_no_terminal(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--server", address, "--count", "2", "--interval", "0"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("live=5 running=3 waiting=1 blocks=10/40 handoff=1536/1048576")
    assert first.endswith("draining=0") and second.startswith("live=6") and second.endswith("draining=1")


def test_a_view_that_is_redrawn_on_a_terminal(address: str) -> None:
    terminal, pauses = Terminal(), list[float]()
    assert run(options(address, "--count", "3", "--interval", "0.5"), terminal, pauses.append) == 0  # type: ignore[arg-type]
    assert pauses == [0.5, 0.5]
    views = terminal.getvalue().split("\x1b[H")[1:]
    assert len(views) == 3 and all(view.endswith("\x1b[J") for view in views)
    assert f"{address}  fake\x1b[K\n" in views[0] and "DRAINING" in views[1]
    assert "5 in the server: 3 running, 1 waiting" in views[0]
    assert "[########                      ]  25%  10 of 40 blocks" in views[0]
    assert "1.5 KiB of 1.0 MiB" in views[0]
    lines = views[0].splitlines()[1:-1]
    assert len({len(line) - len(line.partition(" ")[2].lstrip()) for line in lines}) == 1, (
        "values are not in one column"
    )


def test_nobody_to_ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "ANSWER_SECONDS", 0.5)
    assert cli.main(["top", "--server", "127.0.0.1:1", "--count", "1", "--interval", "0"]) == 1
    assert "saccade:" in capsys.readouterr().err


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1536, 2**30, 2**60)] == ["0 B", "1023 B", "1.5 KiB", "1.0 GiB", "1048576.0 TiB"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--interval", "-1", "--interval: expected 0 or more seconds, got -1"),
        ("--interval", "nan", "got nan"),
        ("--count", "0", "--count: expected 1 or more updates, got 0"),
    ],
)
def test_options_out_of_range(option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--server", "127.0.0.1:1", option, value]) == 1
    assert message in capsys.readouterr().err
