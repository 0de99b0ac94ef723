"""The folder of committed results."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def path_of(name: str) -> Path:
    """The path of today's result file with this name."""
    return RESULTS / f"{datetime.date.today():%Y-%m-%d}-{name}.json"


def write_result(name: str, result: object) -> Path:
    """Writes a JSON-serialisable result to today's file with this name; returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = path_of(name)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
