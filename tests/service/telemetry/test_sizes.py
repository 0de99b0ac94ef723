"""The file of image sizes: counts are added atomically, and failures do not stop the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from service.common.config import ConfigError, ServerOptions
from service.telemetry.sizes import check_sizes_file, read_histogram, record_sizes


def test_runs_add_up(tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    record_sizes(path, {})
    assert not path.exists()
    record_sizes(path, {80: 2, 300: 1})
    record_sizes(path, {80: 3, 20: 1})
    assert read_histogram(path) == {20: 1, 80: 5, 300: 1}
    assert list(json.loads(path.read_text())["image_tokens"]) == ["20", "80", "300"]
    assert list(tmp_path.iterdir()) == [path]


def test_what_goes_wrong_at_the_end_is_logged_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sizes.json"
    path.write_text("something else")
    record_sizes(path, {80: 2})
    assert path.read_text() == "something else" and "is not JSON" in caplog.text
    record_sizes(tmp_path / "absent" / "sizes.json", {80: 2})
    assert caplog.text.count("sizes_file") == 2


def test_a_file_that_could_not_be_added_to_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    check_sizes_file(ServerOptions(model="demo"))
    check_sizes_file(ServerOptions(model="demo", sizes_file=str(path)))
    path.write_text("[]")
    with pytest.raises(ConfigError, match="sizes_file: .*must hold a JSON object"):
        check_sizes_file(ServerOptions(model="demo", sizes_file=str(path)))
    with pytest.raises(ConfigError, match="cannot be written to"):
        check_sizes_file(ServerOptions(model="demo", sizes_file=str(tmp_path / "absent" / "sizes.json")))
