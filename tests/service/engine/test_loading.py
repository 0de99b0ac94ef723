"""The progress bar of a model that is being read."""

from __future__ import annotations

import io
import re
import sys

import pytest

from service.engine.build import weights_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_terminal_sees_bytes_and_bytes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with weights_progress("decoder") as progress:
        assert progress is not None
        for done in range(11):
            progress(done * 10**6, 10**7)
    shown = plain(terminal.getvalue())
    assert "decoder weights" in shown and "10.0/10.0 MB" in shown
    assert re.search(r"\d B/s|[kMG]B/s", shown), shown


def test_whatever_is_no_terminal_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with weights_progress("decoder") as progress:
        assert progress is None
    assert file.getvalue() == ""


def test_an_error_while_reading_is_passed_on_and_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(OSError, match="the disk is gone"), weights_progress("encoder") as progress:
        assert progress is not None
        progress(5, 10)
        raise OSError("the disk is gone")
    hidden, shown = (terminal.getvalue().rfind(f"\x1b[?25{switch}") for switch in "lh")
    assert 0 <= hidden < shown, "the cursor is back"
