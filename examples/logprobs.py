"""Prints the probability of each token of an answer: python examples/logprobs.py [IMAGE QUESTION]

Without arguments it asks about a shipped image.
"""

import math
import os
import sys
from pathlib import Path

import saccade

IMAGES = Path(__file__).resolve().parents[1] / "demo" / "pictures"

arguments = sys.argv[1:] or [str(IMAGES / "shapes.png"), "What does the picture show?"]
if len(arguments) < 2:
    sys.exit(__doc__)
image, question = arguments[:2]

with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    answer = client.generate(question, images=[image], temperature=0, logprobs=3)
    for token in answer.logprobs or []:
        others = ", ".join(f"{top.token_id}: {math.exp(top.logprob):.2f}" for top in token.top)
        print(f"token {token.token_id}: {math.exp(token.logprob):.2f} (likeliest {others})")
