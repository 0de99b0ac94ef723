"""The service's faults at full counts: engine and server killed under streams, SIGTERM under load, clients that
disconnect or do not read, a full disk, a clock that jumps, certificates that are replaced. The test suite runs a few of
each."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.soak import Outcome


def run(scale: float) -> Outcome:
    """Each fault runs on its own random tiny model; the first failure ends the part."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
    import faults
    from running import RunningServer
    from served import IMAGE_TOKEN, make_served

    def scaled(count: int, least: int = 1) -> int:
        return max(least, round(count * scale))

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = str(make_served(folder / "model").path)

        def vanishing() -> dict[str, Any]:
            with RunningServer(model, max_seqs=40, max_len=600, image_workers=1) as server:
                return faults.vanishing_clients(server, scaled(50))

        table: dict[str, Callable[[], dict[str, Any]]] = {
            "engine_killed": lambda: faults.engine_killed(model, scaled(64, 4), image_token=IMAGE_TOKEN),
            "frontend_killed": lambda: faults.frontend_killed(model, scaled(32, 2)),
            "sigterm_under_load": lambda: faults.sigterm_under_load(model, scaled(64, 4)),
            "vanishing_clients": vanishing,
            "slow_readers": lambda: faults.slow_readers(model, scaled(32, 2)),
            "disk_full": lambda: faults.disk_full(model, folder, scaled(100)),
            "clock_jump": lambda: faults.clock_jump(model, folder, scaled(20, 2)),
            "certificate_rotated": lambda: faults.certificate_rotated(model, folder, scaled(50)),
        }
        numbers: dict[str, Any] = {}
        for name, fault in table.items():
            print(f"  {name}", file=sys.stderr, flush=True)
            numbers[name] = fault()
    return Outcome(True, numbers)
