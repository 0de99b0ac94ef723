"""The chart of a load over HTTP: throughput, time to first token and inter-token latency by request rate. Drawn with
Pillow, which the project already depends on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

PANEL, MARGIN, TOP, BOTTOM = (420, 300), 70, 70, 50
COLOURS = {"ours": "#0b6e4f", "vllm": "#c1502e", "llamacpp": "#4a5fb0"}
NAMES = {"ours": "Saccade", "vllm": "vLLM", "llamacpp": "llama.cpp"}
METRICS = {
    "output_throughput": "output tokens/s", "ttft_p50_ms": "time to first token, p50 ms",
    "ttft_p99_ms": "time to first token, p99 ms", "itl_p50_ms": "inter-token latency, p50 ms",
    "itl_p99_ms": "inter-token latency, p99 ms",
}  # fmt: skip


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes a PNG: a row of bar charts for each kind of request."""
    kinds = list(dict.fromkeys(cell["kind"] for cell in result["cells"]))
    width = MARGIN + len(METRICS) * (PANEL[0] + MARGIN)
    image = Image.new("RGB", (width, TOP + len(kinds) * (PANEL[1] + TOP + BOTTOM)), "white")
    pen, font, small = ImageDraw.Draw(image), ImageFont.load_default(20), ImageFont.load_default(14)
    title = f"vllm bench serve, requests per second on the x axis ({result['date']}, {result['machine']['processor']})"
    pen.text((MARGIN, 12), title, "black", font)
    for index, name in enumerate(COLOURS):
        pen.rectangle((MARGIN + 150 * index, 44, MARGIN + 150 * index + 14, 58), COLOURS[name])
        pen.text((MARGIN + 150 * index + 20, 51), NAMES[name], "black", small, anchor="lm")
    for at, kind in enumerate(kinds):
        cells = [cell for cell in result["cells"] if cell["kind"] == kind]
        for column, (metric, label) in enumerate(METRICS.items()):
            origin = MARGIN + column * (PANEL[0] + MARGIN), TOP + 30 + at * (PANEL[1] + TOP + BOTTOM)
            pen.text((origin[0], origin[1] - 22), f"{kind}: {label}", "black", small)
            _panel(pen, small, cells, metric, origin)
    image.save(path)


def _panel(pen: ImageDraw.ImageDraw, font: Any, cells: list[dict[str, Any]], metric: str, at: tuple[int, int]) -> None:
    """Bars with logarithmic heights, in groups by rate."""
    rates = list(dict.fromkeys(cell["rate"] for cell in cells))
    values = [max(cell[metric], 0.1) for cell in cells]
    low, high = 10.0 ** math.floor(math.log10(min(values)) - 0.01), 10.0 ** math.ceil(math.log10(max(values)) + 0.1)
    (left, top), (width, height) = at, PANEL
    pen.line((left, top + height, left + width, top + height), "black")
    group = width / len(rates)
    bar = group / (len(COLOURS) + 1)
    for cell in cells:
        share = math.log(max(cell[metric], 0.1) / low) / math.log(high / low)
        x = left + rates.index(cell["rate"]) * group + (list(COLOURS).index(cell["side"]) + 0.5) * bar
        y = top + height * (1 - share)
        pen.rectangle((x, y, x + bar - 3, top + height), COLOURS[cell["side"]])
        pen.text((x + bar / 2, y - 3), f"{cell[metric]:,.0f}", "black", font, anchor="ms")
    for index, rate in enumerate(rates):
        shown = "all at once" if rate == "inf" else rate
        pen.text((left + (index + 0.5) * group, top + height + 8), shown, "black", font, anchor="mt")
