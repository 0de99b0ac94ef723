"""Asks one question about one or more images: python examples/ask.py IMAGE... QUESTION"""

import os
import sys

import saccade

if len(sys.argv) < 2:
    sys.exit(__doc__)

*images, question = sys.argv[1:]

with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    answer = client.generate(question, images=images, temperature=0)
    print(answer.text)
    print(
        f"({answer.finish_reason}; {answer.usage.prompt_tokens} tokens read, {answer.usage.completion_tokens} written)"
    )
