"""The same question about many pictures at once: python examples/many.py QUESTION PICTURE..."""

import os
import sys

import saccade

if len(sys.argv) < 3:
    sys.exit(__doc__)

question, *pictures = sys.argv[1:]

with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    requests = ({"prompt": question, "images": [picture], "temperature": 0} for picture in pictures)
    for outcome in client.map(requests, concurrency=32, ordered=True):
        # One bad picture is no reason to lose the others: errors are outcomes, not exceptions.
        answer = outcome.generation.text if outcome.generation else f"failed: {outcome.error}"
        print(f"{pictures[outcome.index]}: {answer}")
