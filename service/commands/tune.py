"""`saccade tune HISTOGRAM.json`: the encoder token budgets with the least padding for the images a server has seen."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from encoder.tune import Histogram, LadderReport, compare_ladders
from service.telemetry.sizes import read_histogram


def main(argv: Sequence[str]) -> int:
    """Prints the padding of several ladders of budgets (doublings, steps of sqrt(2), tuned) and the option to serve
    with. Returns 0. Raises `ValueError` for a file that cannot be used or invalid numbers."""
    parser = argparse.ArgumentParser(
        "saccade tune", description="Choose encoder token budgets for a recorded histogram of image sizes."
    )
    parser.add_argument(
        "histogram", type=Path, help="JSON object of image tokens -> number of images, as `--sizes-file` writes it"
    )
    parser.add_argument("--budgets", type=int, default=8, help="largest number of budgets (default: %(default)s)")
    parser.add_argument("--lo", type=int, help="tokens of the smallest allowed image (default: the smallest seen)")
    parser.add_argument("--hi", type=int, help="tokens of the largest allowed image (default: the largest seen)")
    parser.add_argument("--max-images", type=int, help="images of one encoder batch; no budget may be smaller")
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
    lines = [f"{sum(histogram.values())} images; work with padding as a multiple of the work without:"]
    lines.append(f"{'ladder'.ljust(name_width)}  graphs  alone  packed by 16")
    for report in reports:
        lines.append(
            f"{report.name.ljust(name_width)}  {len(report.ladder):6}  {report.alone:5.3f}  {report.packed:12.3f}"
        )
    lines.append("")
    # The server packs images into batches, so this suggests the last ladder, which is tuned for packed batches.
    lines.append("saccade serve --token-budgets " + ",".join(map(str, reports[-1].ladder)))
    return "\n".join(lines)


def _as_json(reports: Sequence[LadderReport]) -> str:
    return json.dumps(
        [
            {"name": report.name, "token_budgets": report.ladder, "alone": report.alone, "packed": report.packed}
            for report in reports
        ]
    )
