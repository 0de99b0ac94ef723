"""The folder of committed results, and that of the models; tables of results."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
FOLDER = Path("~/.cache/saccade/benchmarks").expanduser()
"""Where benchmarks write the models that they measure, unless they are told another folder."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--folder` and `--write`."""
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the measured models are written")
    parser.add_argument("--write", action="store_true", help="write a dated result under benchmarks/results")


def path_of(name: str) -> Path:
    """The path of today's result file with this name."""
    return RESULTS / f"{datetime.date.today():%Y-%m-%d}-{name}.json"


def write_result(name: str, result: object) -> Path:
    """Writes a JSON-serialisable result to today's file with this name; returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = path_of(name)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def show(rows: Sequence[Sequence[str]]) -> str:
    """The rows of a table as text, with columns aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
