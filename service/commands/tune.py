"""`saccade tune HISTOGRAM.json`: the encoder budgets that waste least on the images a server has seen."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from encoder.tune import Histogram, LadderReport, compare_ladders
from service.telemetry.sizes import read_histogram


def main(argv: Sequence[str]) -> int:
    """Prints doublings, sqrt(2) steps and the tuned ladders with their padding, and the option to serve with.

    Returns 0. Raises `ValueError`, in words for the user, for a file or numbers that make no sense.
    """
    parser = argparse.ArgumentParser(
        "saccade tune", description="Choose encoder token budgets for a recorded histogram of image sizes."
    )
    parser.add_argument("histogram", type=Path, help="JSON: an object of image tokens -> images")
    parser.add_argument("--budgets", type=int, default=8, help="graphs to spend, at most (default: %(default)s)")
    parser.add_argument("--lo", type=int, help="tokens of the smallest legal image (default: the smallest seen)")
    parser.add_argument("--hi", type=int, help="tokens of the largest legal image (default: the largest seen)")
    parser.add_argument("--max-images", type=int, help="images of one batch, which no budget may be below")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(list(argv))
    for name in ("budgets", "lo", "hi", "max_images"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    histogram = read_histogram(options.histogram)
    reports = compare_ladders(histogram, options.budgets, lo=options.lo, hi=options.hi, max_images=options.max_images)
    print(_as_json(reports) if options.json else _as_table(histogram, reports))
    return 0


def _as_table(histogram: Histogram, reports: Sequence[LadderReport]) -> str:
    name_width = max(len(report.name) for report in reports)
    lines = [f"{sum(histogram.values())} images, padded work over real work:"]
    lines.append(f"{'ladder'.ljust(name_width)}  graphs  alone  packed by 16")
    for report in reports:
        lines.append(
            f"{report.name.ljust(name_width)}  {len(report.ladder):6}  {report.alone:5.3f}  {report.packed:12.3f}"
        )
    lines.append("")
    # Batches are packed, so the ladder for packed batches is the one to use.
    lines.append("saccade serve --token-budgets " + ",".join(map(str, reports[-1].ladder)))
    return "\n".join(lines)


def _as_json(reports: Sequence[LadderReport]) -> str:
    return json.dumps(
        [
            {"name": report.name, "token_budgets": report.ladder, "alone": report.alone, "packed": report.packed}
            for report in reports
        ]
    )
