"""Tool calls in random texts, valid and broken: a parse in any division equals the parse of the whole."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

from benchmarks.soak import Outcome

TEXTS = 10_000


def run(scale: float) -> Outcome:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
    from tool_texts import check_text, random_text

    count, found = max(1, round(TEXTS * scale)), Counter[str]()
    rng = random.Random(count)
    for _ in range(count):
        markup, text = random_text(rng)
        found[f"{markup.body}_texts"] += 1
        found["complete_calls"] += check_text(rng, markup, text)
        found["characters"] += len(text)
    return Outcome(True, {"texts": count, **found})
