"""A conversation about an image, with two questions after each other: python examples/chat.py IMAGE"""

import os
import sys

import saccade

if len(sys.argv) < 2:
    sys.exit(__doc__)

with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "image": sys.argv[1]}, {"type": "text", "text": "What is in the picture?"}],
        }
    ]
    for question in ("Where is it?", None):
        answer = client.chat(messages, temperature=0)
        print(answer.text)
        if question:
            messages += [answer.message, {"role": "user", "content": question}]
