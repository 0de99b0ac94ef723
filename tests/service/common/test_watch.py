"""Files that are replaced while the server runs: every way of replacing is noticed, and an invalid file changes
nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from service.common.config import ConfigError
from service.common.watch import Watched


def text_of(contents: list[bytes]) -> str:
    text = b"+".join(contents).decode()
    if "bad" in text:
        raise ConfigError("it is bad")
    return text


def stamp(path: Path, seconds: int) -> None:
    os.utime(path, (seconds, seconds))


def test_a_file_of_another_time_size_or_place_is_another_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    stamp(path, 1000)
    watched = Watched("option", [path], text_of)
    path.write_text("two")
    stamp(path, 1001)
    assert watched.current() == "two"
    path.write_text("three")
    stamp(path, 1001)
    assert watched.current() == "three"
    other = tmp_path / "other"
    other.write_text("seven")
    stamp(other, 1001)
    os.replace(other, path)
    assert watched.current() == "seven"


def test_any_of_several_files_counts_and_what_is_unchanged_is_not_parsed_again(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_text("1")
    parsed: list[list[bytes]] = []

    def parse(contents: list[bytes]) -> str:
        parsed.append(contents)
        return text_of(contents)

    watched = Watched("option", paths, parse)
    assert watched.current() == watched.current() == "1+1" and len(parsed) == 1
    paths[1].write_text("22")
    assert watched.current() == watched.current() == "1+22" and len(parsed) == 2
    paths[0].write_text("333")
    assert watched.current() == "333+22"
    paths[1].write_text("bad")
    assert watched.current() == watched.current() == "333+22" and len(parsed) == 4


def test_a_bad_version_is_not_used_and_the_next_good_one_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    watched = Watched("option", [path], text_of)
    path.write_text("bad!")
    assert watched.current() == watched.current() == "one"
    assert len([r for r in caplog.records if "it is bad" in r.getMessage()]) == 1
    path.write_text("three")
    assert watched.current() == "three"
    path.unlink()
    assert watched.current() == "three" and "No such file" in caplog.text


def test_a_file_that_could_not_be_read_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its time, size and place stay the same when its owner or mode are corrected."""
    path = tmp_path / "file"
    path.write_text("one")
    denied = [False]

    def parse(contents: list[bytes]) -> str:
        if denied[0]:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return text_of(contents)

    watched = Watched("option", [path], parse)
    for fault, words in ((lambda: path.write_text("three"), "Permission denied"), (path.unlink, "No such file")):
        denied[0] = True
        fault()
        assert watched.current() == watched.current() == watched.current() != "two"
        assert len([r for r in caplog.records if words in r.getMessage()]) == 1
        denied[0] = False
        if path.exists():
            assert watched.current() == "three"
    path.write_text("two")
    assert watched.current() == "two"


def test_what_is_bad_at_the_start_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(ConfigError, match="option: cannot read .*file: No such file"):
        Watched("option", [path], text_of)
    path.write_text("bad")
    with pytest.raises(ConfigError, match="it is bad"):
        Watched("option", [path], text_of)
