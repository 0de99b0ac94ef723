"""A conversation about an image, with two questions, one after the other: python examples/chat.py [IMAGE]

Without arguments it is about a shipped image.
"""

import os
import sys
from pathlib import Path

import saccade

IMAGES = Path(__file__).resolve().parents[1] / "demo" / "pictures"

image = sys.argv[1] if len(sys.argv) > 1 else str(IMAGES / "shapes.png")

with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "image": image}, {"type": "text", "text": "What does the picture show?"}],
        }
    ]
    for question in ("Where is it?", None):
        answer = client.chat(messages, temperature=0)
        print(answer.text)
        if question:
            messages += [answer.message, {"role": "user", "content": question}]
