"""100,000 random and damaged requests; the test suite sends 300."""

from __future__ import annotations

import secrets
import sys
import tempfile
from pathlib import Path

from benchmarks.soak import Outcome

REQUESTS = 100_000


def run(scale: float) -> Outcome:
    """Each must end with a status that describes the request; afterwards the server must answer as before."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
    import faults
    from running import RunningServer
    from served import make_served

    seed = secrets.randbits(32)
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_served(Path(folder) / "model").path)
        with RunningServer(model, max_seqs=8, max_len=96, image_workers=1) as server:
            numbers = faults.random_requests(server, max(100, round(REQUESTS * scale)), seed)
    return Outcome(True, {**numbers, "seed": seed})
