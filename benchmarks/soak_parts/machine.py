"""50,000 steps of random programs on arena, prefix cache and scheduler; the test suite runs 2,000."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

from benchmarks.soak import Outcome

STEPS = 50_000
BATCH = 2000


def run(scale: float) -> Outcome:
    """A failure raises, with the shortest program that hypothesis finds for it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
    from cache_machine import run_machine

    wanted, done, seed = max(1, round(STEPS * scale)), 0, secrets.randbits(32)
    while done < wanted:
        done += run_machine(min(BATCH, wanted - done), seed=seed + done)
        print(f"  {done} of {wanted} steps", file=sys.stderr, flush=True)
    return Outcome(True, {"steps": done, "seed": seed})
