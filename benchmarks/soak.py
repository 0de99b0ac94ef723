"""Long tests: random programs, all combinations of options, faults under load.

    python -m benchmarks.soak [PART ...] [--scale 0.01] [--family qwen3_5] [--write]

Each part is a module of `benchmarks.soak_parts` with a function `run(scale) -> Outcome`; `scale` reduces its number of
steps, cases or minutes. A part fails by returning an outcome that did not pass or by raising; the others still run.
Each prints a line and, with `--write`, writes a dated file to benchmarks/results. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
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
from benchmarks.record import write_result

DEFAULT_FAMILY = "nemotron_h"
"""The family that result file names do not mention."""


@dataclass(frozen=True)
class Outcome:
    """The result of a part; `numbers` are written to the result file unchanged."""

    passed: bool
    numbers: dict[str, Any] = field(default_factory=dict)


def parts() -> list[str]:
    """Names of all parts: the modules of `benchmarks.soak_parts`."""
    return sorted(module.name for module in pkgutil.iter_modules(soak_parts.__path__))


def run_part(name: str, scale: float, family: str | None = None) -> dict[str, Any]:
    """Runs one part, on the models of `family` if given. Never raises: an exception becomes a failure with its
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
    """Writes a result to a dated file. Its name shows whether the run was shortened."""
    scale = "" if result["scale"] == 1 else f"-x{result['scale']:g}"
    family = f"-{result['family']}" if result.get("family", DEFAULT_FAMILY) != DEFAULT_FAMILY else ""
    return write_result(f"soak-{result['part']}{family}{scale}", result)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to run: {', '.join(parts())} (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full length (default: 1)")
    parser.add_argument("--family", help="model family, for the parts that take one (product, constrained)")
    parser.add_argument("--write", action="store_true", help="write the results to benchmarks/results")
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
