"""The same question about many images at once: python examples/many.py QUESTION IMAGE..."""

import os
import sys

import saccade

if len(sys.argv) < 3:
    sys.exit(__doc__)

question, *images = sys.argv[1:]

with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    requests = ({"prompt": question, "images": [image], "temperature": 0} for image in images)
    for outcome in client.map(requests, concurrency=32, ordered=True):
        # One bad image is no reason to lose the others: errors are outcomes, not exceptions.
        answer = outcome.generation.text if outcome.generation else f"failed: {outcome.error}"
        print(f"{images[outcome.index]}: {answer}")
