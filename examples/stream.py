"""Prints the answer as it is written: python examples/stream.py IMAGE... QUESTION"""

import os
import sys

import saccade

if len(sys.argv) < 2:
    sys.exit(__doc__)

*images, question = sys.argv[1:]

with (
    saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client,
    client.stream(question, images=images) as stream,  # leaving the block early cancels the work on the server
):
    for delta in stream:
        print(delta.text, end="", flush=True)
    print(f"\n[{stream.final().finish_reason}, seed {stream.seed}]")
