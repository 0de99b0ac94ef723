"""How sure the model was of each token: python examples/logprobs.py IMAGE QUESTION"""

import math
import os
import sys

import saccade

if len(sys.argv) < 3:
    sys.exit(__doc__)

with saccade.Client(os.environ.get("SACCADE_SERVER", "127.0.0.1:50051")) as client:
    answer = client.generate(sys.argv[2], images=[sys.argv[1]], temperature=0, logprobs=3)
    for token in answer.logprobs or []:
        others = ", ".join(f"{top.token_id}: {math.exp(top.logprob):.2f}" for top in token.top)
        print(f"token {token.token_id}: {math.exp(token.logprob):.2f} (likeliest {others})")
