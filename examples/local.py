"""The engine in this process, without a server: python examples/local.py IMAGE... QUESTION"""

import sys

import saccade

if len(sys.argv) < 2:
    sys.exit(__doc__)

*images, question = sys.argv[1:]

with saccade.LocalClient("demo") as client:
    print(client.generate(question, images=images, temperature=0).text)
