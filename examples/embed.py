"""Compares images by their embeddings: python examples/embed.py [IMAGE IMAGE...]

Prints the cosine similarity of each image's mean embedding to that of the first image. Without arguments it compares
shipped images.
"""

import os
import sys
from math import sqrt
from pathlib import Path

import saccade

IMAGES = Path(__file__).resolve().parents[1] / "demo" / "pictures"

images = sys.argv[1:] or [str(IMAGES / name) for name in ("shapes.png", "wide.png", "number.png")]


def unit(vector: list[float]) -> list[float]:
    length = sqrt(sum(x * x for x in vector))
    return [x / length for x in vector]


with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    means = []
    for image in images:
        rows = client.embed_image(image).tolist()  # one row for each of the image's tokens
        means.append(unit([sum(column) for column in zip(*rows)]))
    first = means[0]
    for name, mean in zip(images, means):
        print(f"{name}: {sum(a * b for a, b in zip(first, mean)):.3f}")
