"""The folder of committed results."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def path_of(name: str) -> Path:
    """Today's file of a name."""
    return RESULTS / f"{datetime.date.today():%Y-%m-%d}-{name}.json"


def write_result(name: str, result: object) -> Path:
    """Writes what can be JSON to the dated file of a name; returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = path_of(name)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
