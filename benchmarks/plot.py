"""The chart of a comparison: decode tokens/s by concurrency, both sides and the roofline. Drawn with Pillow, which the
project already depends on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

SIZE, LEFT, RIGHT, TOP, BOTTOM = (900, 560), 90, 180, 60, 70
COLOURS = {"floor": "#999999", "ours": "#0b6e4f", "peer": "#c1502e"}


def decode_plot(result: dict[str, Any], peer: str, path: Path) -> bool:
    """Writes a PNG with logarithmic axes. Returns False and writes nothing if fewer than two decode workloads were
    run."""
    rows = [row for row in result["rows"] if row["workload"].startswith("decode ")]
    if len(rows) < 2:
        return False
    xs = [int(row["workload"].split()[1]) for row in rows]
    lines = {
        "floor": [row["ours_tokens_s"] / row["floor_fraction"] for row in rows],
        "ours": [row["ours_tokens_s"] for row in rows],
        "peer": [row["peer_tokens_s"] for row in rows],
    }
    values = [value for line in lines.values() for value in line]
    low, high = 10.0 ** math.floor(math.log10(min(values))), 10.0 ** math.ceil(math.log10(max(values)))
    image = Image.new("RGB", SIZE, "white")
    draw, font, small = ImageDraw.Draw(image), ImageFont.load_default(20), ImageFont.load_default(15)
    width, height = SIZE[0] - LEFT - RIGHT, SIZE[1] - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / xs[0]) / math.log(xs[-1] / xs[0])
        up = math.log(y / low) / math.log(high / low)
        return LEFT + across * width, TOP + height - up * height

    title = f"decode, tokens/s over concurrent requests ({result['date']}, {result['machine']['processor']})"
    draw.text((LEFT, 18), title, "black", font)
    for exponent in range(round(math.log10(low)), round(math.log10(high)) + 1):
        for step in (1, 2, 5):
            value = step * 10.0**exponent
            if low <= value <= high:
                y = place(xs[0], value)[1]
                draw.line((LEFT, y, LEFT + width, y), "#e4e4e4")
                draw.text((LEFT - 10, y), f"{value:,.0f}", "black", small, anchor="rm")
    for x in xs:
        draw.text((place(x, low)[0], TOP + height + 12), str(x), "black", small, anchor="mt")
    names = {"floor": "roofline", "ours": "Saccade (gRPC)", "peer": peer}
    for name, line in lines.items():
        points = [place(x, y) for x, y in zip(xs, line, strict=True)]
        draw.line(points, COLOURS[name], width=3)
        for across, down in points:
            draw.ellipse((across - 5, down - 5, across + 5, down + 5), COLOURS[name])
        draw.text(
            (points[-1][0] + 12, points[-1][1]), f"{names[name]} {line[-1]:,.0f}", COLOURS[name], small, anchor="lm"
        )
    image.save(path)
    return True
