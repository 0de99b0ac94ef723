"""The random programs over arena, cache and scheduler; `python -m benchmarks.soak machine` runs more of them."""

from __future__ import annotations

from cache_machine import run_machine

STEPS = 2000


def test_random_programs_keep_every_promise() -> None:
    assert run_machine(STEPS, seed=0, derandomize=True) >= STEPS
