"""Asks one question about images: python examples/ask.py [IMAGE... QUESTION]

Without arguments it asks about a shipped image. The server is SACCADE_SERVER, or the one that `make serve` starts.
"""

import os
import sys
from pathlib import Path

import saccade

IMAGES = Path(__file__).resolve().parents[1] / "demo" / "pictures"

arguments = sys.argv[1:] or [str(IMAGES / "shapes.png"), "What does the picture show?"]
*images, question = arguments

with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    answer = client.generate(question, images=images, temperature=0)
    print(answer.text)
    usage = answer.usage
    print(f"({answer.finish_reason}; {usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated)")
