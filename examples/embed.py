"""How near images are to each other in the model's eyes: python examples/embed.py IMAGE IMAGE..."""

import os
import sys
from math import sqrt

import saccade

if len(sys.argv) < 2:
    sys.exit(__doc__)


def unit(vector: list[float]) -> list[float]:
    length = sqrt(sum(x * x for x in vector))
    return [x / length for x in vector]


with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    means = []
    for image in sys.argv[1:]:
        rows = client.embed_image(image).tolist()  # one row for each of the image's tokens
        means.append(unit([sum(column) for column in zip(*rows)]))
    first = means[0]
    for name, mean in zip(sys.argv[1:], means):
        print(f"{name}: {sum(a * b for a, b in zip(first, mean)):.3f}")
