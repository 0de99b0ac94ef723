"""docs/architecture.svg: the processes through which an image passes, and the packages of service/ in import order."""

from __future__ import annotations

import re
from html import escape

from . import DOCS

WIDTH, HEIGHT = 1120, 700
_STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1c2733 }
  .small { font-size: 12px; fill: #46586a } .title { font-weight: 600 }
  .process { fill: #eef3fb; stroke: #7f9cc9 } .part { fill: #fff; stroke: #7f9cc9 }
  .package { fill: #f5f1e6; stroke: #b9a66b }
  .arrow { stroke: #2f5d9b; stroke-width: 1.6; fill: none; marker-end: url(#head) }
  .step { fill: #2f5d9b } .number { fill: #fff; font-size: 12px; font-weight: 600; text-anchor: middle }
"""
# (x, y, width, height, title)
_PROCESSES = [
    (20, 60, 130, 330, "client"),
    (200, 60, 330, 330, "frontend process"),
    (580, 60, 230, 150, "image worker"),
    (580, 240, 520, 150, "engine process"),
]
# (x, y, width, title, second line)
_PARTS = [
    (35, 100, 100, "saccade", "generate"),
    (215, 100, 300, "rpc, answers/door.py", "keys, limits, parsing, statuses"),
    (215, 170, 300, "answers/prepare.py, media/", "reserves memory, sends files to a worker"),
    (215, 240, 300, "answers/prompts.py", "template, tokens, one per row of an image"),
    (215, 310, 300, "answers/relay.py", "text, tool calls, stop strings"),
    (595, 130, 200, "media/image_worker.py", "decodes, resizes, cuts patches"),
    (595, 310, 140, "encoder/", "patches to rows"),
    (765, 310, 150, "handoff", "rows, also a cache"),
    (945, 310, 140, "decoder/", "rows, ids to ids"),
]
# (number, points of the arrow, position of the number)
_STEPS = [
    (1, [(135, 122), (215, 122)], (175, 122)),
    (2, [(515, 182), (548, 182), (548, 152), (595, 152)], (565, 152)),
    (3, [(695, 174), (695, 222), (548, 222), (548, 255), (515, 255)], (640, 222)),
    (4, [(515, 275), (560, 275), (560, 332), (595, 332)], (560, 300)),
    (5, [(735, 332), (765, 332)], (750, 332)),
    (6, [(915, 332), (945, 332)], (930, 332)),
    (7, [(1015, 354), (1015, 374), (548, 374), (548, 342), (515, 342)], (780, 374)),
    (8, [(215, 332), (85, 332), (85, 144)], (170, 332)),
]
_LEGEND = [
    "1 a request with an image file",
    "2 the file; this process has no keys",
    "3 patches in a sealed memory file",
    "4 token ids, and the memory file",
    "5 rows of embeddings",
    "6 rows, leased until they are read",
    "7 token ids",
    "8 text, streamed",
]


def packages() -> list[tuple[str, str]]:
    """(name, purpose) of the packages of service/, from the table in architecture.md, in import order."""
    table = (DOCS / "architecture.md").read_text("utf-8").partition("| package |")[2].partition("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", table, re.MULTILINE)


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{escape(words)}</text>'


def _box(x: int, y: int, width: int, height: int, kind: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="{kind}"/>'


def svg() -> str:
    """The text of the SVG file."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>The path of an image through Saccade's processes, and the packages of service/</title>",
        f"<style>{_STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L10 5L0 10z" fill="#2f5d9b"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(20, 36, "The path of an image", "title"),
    ]
    for x, y, width, height, title in _PROCESSES:
        lines += [_box(x, y, width, height, "process"), _text(x + 12, y + 24, title, "title")]
    for x, y, width, title, second in _PARTS:
        lines += [_box(x, y, width, 44, "part"), _text(x + 10, y + 19, title), _text(x + 10, y + 36, second, "small")]
    for number, points, (x, y) in _STEPS:
        path = "M" + " L".join(f"{px} {py}" for px, py in points)
        lines.append(f'<path d="{path}" class="arrow"/>')
        lines.append(f'<circle cx="{x}" cy="{y}" r="9" class="step"/>')
        lines.append(_text(x, y + 4, str(number), "number"))
    for index, words in enumerate(_LEGEND):
        lines.append(_text(20 + 280 * (index % 4), 416 + 20 * (index // 4), words, "small"))
    lines.append(_text(20, 480, "Packages of service/: each imports only those before it", "title"))
    for index, (name, purpose) in enumerate(packages()):
        x, y = 20 + 365 * (index % 3), 496 + 50 * (index // 3)
        lines += [_box(x, y, 350, 42, "package"), _text(x + 10, y + 18, f"{index + 1}  {name}")]
        lines.append(
            _text(x + 10, y + 34, purpose if len(purpose) < 58 else purpose[:55].rpartition(" ")[0] + " ...", "small")
        )
    return "\n".join([*lines, "</svg>", ""])
