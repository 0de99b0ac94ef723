"""The record that says which job an output belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest
from full_disk import file_size_limit

pytest.importorskip("ray.data", reason="Ray is not installed: `make test-ray` installs it")

from saccade.ray.checkpoints import claim


def test_a_record_that_was_not_written_whole_does_not_count(tmp_path: Path) -> None:
    output, description = str(tmp_path / "out"), {"prompt": "x" * 100_000}
    with file_size_limit(4096), pytest.raises(OSError):
        claim(output, description)
    assert not Path(f"{output}.job.json").exists()
    assert [claim(output, description) for _ in range(2)] == [False, True]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out", "out.job.json"]
