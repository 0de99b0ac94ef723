"""1,000 broken and hostile image files against a real server, with a concurrent caller whose answers must not change.
The test suite sends 18."""

from __future__ import annotations

import secrets
import sys
import tempfile
from pathlib import Path

from benchmarks.soak import Outcome

FILES = 1000


def run(scale: float) -> Outcome:
    """A failure raises, with the seed and the file."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
    from mutants import run_mutants
    from running import RunningServer
    from served import make_served

    seed = secrets.randbits(32)
    with tempfile.TemporaryDirectory() as folder:
        make_served(Path(folder) / "model")
        with RunningServer(str(Path(folder) / "model"), max_seqs=4, max_len=600, image_workers=1) as server:
            numbers = run_mutants(server, max(1, round(FILES * scale)), seed)
    return Outcome(True, numbers)
