"""A batch of 20,000 rows, every tenth with an image. The server is killed three times and its journal damaged."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.soak import Outcome

ROWS, KILLS = 20_000, 3


def run(scale: float) -> Outcome:
    """Checks that each row is answered once. `peak_bytes_of_each_run`: resident memory of the server, which must not
    grow with the rows."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
    import faults
    from served import make_served

    with tempfile.TemporaryDirectory() as folder:
        model = str(make_served(Path(folder) / "model").path)
        return Outcome(True, faults.batch_killed(model, Path(folder), max(100, round(ROWS * scale)), KILLS))
