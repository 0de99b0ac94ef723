"""Long runs that have to end well: random programs, whole products of options, faults under load.

    python -m benchmarks.soak [PART ...] [--scale 0.01] [--family qwen3_5] [--write]

Each part is a module of `benchmarks.soak_parts` with a function `run(scale) -> Outcome`, where `scale` shrinks whatever
takes its time: steps, cases, minutes. A part fails by an outcome that did not pass or by raising; the others still run.
Each prints a line and, with `--write`, leaves a dated file in benchmarks/results. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import pkgutil
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine, soak_parts

RESULTS = Path(__file__).resolve().parent / "results"
DEFAULT_FAMILY = "nemotron_h"
"""Which the files of results do not name."""


@dataclass(frozen=True)
class Outcome:
    """How a part ended; `numbers` go to the result file as they are."""

    passed: bool
    numbers: dict[str, Any] = field(default_factory=dict)


def parts() -> list[str]:
    """Names of all parts: the modules there are."""
    return sorted(module.name for module in pkgutil.iter_modules(soak_parts.__path__))


def run_part(name: str, scale: float, family: str | None = None) -> dict[str, Any]:
    """Runs one part, on the models of `family` where one is named, and never raises: an exception is a failure with its
    traceback."""
    print(f"{name}:", file=sys.stderr, flush=True)
    load, started = machine.load(), time.perf_counter()
    try:
        chosen = {} if family is None else {"family": family}
        outcome = importlib.import_module(f"{soak_parts.__name__}.{name}").run(scale, **chosen)
    except Exception:
        print(text := traceback.format_exc(), file=sys.stderr, flush=True)
        outcome = Outcome(False, {"error": text})
    return {
        "part": name,
        "passed": outcome.passed,
        "scale": scale,
        "seconds": round(time.perf_counter() - started, 1),
        "load": load,
        "machine": machine.describe(),
        **outcome.numbers,
    }


def write(result: dict[str, Any]) -> Path:
    """Keeps a result as a dated file; one of a shrunk run says so in its name."""
    scale = "" if result["scale"] == 1 else f"-x{result['scale']:g}"
    family = f"-{result['family']}" if result.get("family", DEFAULT_FAMILY) != DEFAULT_FAMILY else ""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{datetime.date.today():%Y-%m-%d}-soak-{result['part']}{family}{scale}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts())}; none named: all")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the whole length (default: 1)")
    parser.add_argument("--family", help="whose models the parts that take a family run on (product)")
    parser.add_argument("--write", action="store_true", help="keep the results in benchmarks/results")
    arguments = parser.parse_args(argv)
    if unknown := sorted(set(arguments.parts) - set(parts())):
        parser.error(f"{', '.join(unknown)}: no such part; there are {', '.join(parts())}")
    if not 0 < arguments.scale <= 1:
        parser.error(f"--scale {arguments.scale} is not above 0 and at most 1")
    results = []
    for name in arguments.parts or parts():
        result = run_part(name, arguments.scale, arguments.family)
        results.append(result)
        print(f"{name}: {'passed' if result['passed'] else 'FAILED'} in {result['seconds']} s", flush=True)
        if arguments.write:
            write(result)
    print(json.dumps(results))
    return 0 if all(result["passed"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
