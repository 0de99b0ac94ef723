"""Asks a question with the engine in this process, without a server: python examples/local.py [IMAGE... QUESTION]

Without arguments it asks about a shipped image.
"""

import sys
from pathlib import Path

import saccade

IMAGES = Path(__file__).resolve().parents[1] / "demo" / "pictures"

arguments = sys.argv[1:] or [str(IMAGES / "shapes.png"), "What does the picture show?"]
*images, question = arguments

with saccade.LocalClient("demo") as client:
    print(client.generate(question, images=images, temperature=0).text)
