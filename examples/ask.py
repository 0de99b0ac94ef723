"""Asks one question about one or more pictures: python examples/ask.py PICTURE... QUESTION"""

import os
import sys

import saccade

if len(sys.argv) < 2:
    sys.exit(__doc__)

*pictures, question = sys.argv[1:]

with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    answer = client.generate(question, images=pictures, temperature=0)
    print(answer.text)
    print(
        f"({answer.finish_reason}; {answer.usage.prompt_tokens} tokens read, {answer.usage.completion_tokens} written)"
    )
