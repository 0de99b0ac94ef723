"""Prints the answer while it is generated: python examples/stream.py [IMAGE... QUESTION]

Without arguments it asks about a shipped image.
"""

import os
import sys
from pathlib import Path

import saccade

IMAGES = Path(__file__).resolve().parents[1] / "demo" / "pictures"

arguments = sys.argv[1:] or [str(IMAGES / "shapes.png"), "What does the picture show?"]
*images, question = arguments

with (
    saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client,
    client.stream(question, images=images) as stream,  # leaving the block early cancels the work on the server
):
    for delta in stream:
        print(delta.text, end="", flush=True)
    print(f"\n[{stream.final().finish_reason}, seed {stream.seed}]")
