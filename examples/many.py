"""Asks the same question about many images at once: python examples/many.py [QUESTION IMAGE...]

Without arguments it asks about all shipped images.
"""

import os
import sys
from pathlib import Path

import saccade

IMAGES = Path(__file__).resolve().parents[1] / "demo" / "pictures"

arguments = sys.argv[1:] or ["What does the picture show?", *map(str, sorted(IMAGES.glob("*.png")))]
if len(arguments) < 2:
    sys.exit(__doc__)
question, *images = arguments

with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    requests = ({"prompt": question, "images": [image], "temperature": 0} for image in images)
    for outcome in client.map(requests, concurrency=32, ordered=True):
        # A failed request is an outcome with an error, not an exception, so the other answers are not lost.
        answer = outcome.generation.text if outcome.generation else f"failed: {outcome.error}"
        print(f"{images[outcome.index]}: {answer}")
