"""The record that says which job an output belongs to."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

pytest.importorskip("ray.data")

from saccade.ray.checkpoints import claim


def test_a_record_that_was_not_written_whole_does_not_count(tmp_path: Path) -> None:
    output, description = str(tmp_path / "out"), {"prompt": "x" * 100_000}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError):
            claim(output, description)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not Path(f"{output}.job.json").exists()
    assert [claim(output, description) for _ in range(2)] == [False, True]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out", "out.job.json"]
