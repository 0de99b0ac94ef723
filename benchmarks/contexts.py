"""Cost of a token by the length of its context: prompts, and one request's decoding after them.

    python -m benchmarks.contexts [--lengths 1024,8192,32768] [--new-tokens 32] [--rounds 3] [--write]

Two random models with 768 numbers per token, each with layers of one kind alone: 8 of Mamba-2, and 2 of attention
with 4 key/value heads of 64. Both are served in bfloat16; each round requests each length once. A prompt's time is the
server's time to the first token; decoding is timed from the first token to the last. Answers are sent whole, because a
message for each token would take time of the same cores. The result has medians. For attention it also has a memory
bandwidth: a step reads each key and value once, so it is the bytes that the longest context has more than the shortest
one, divided by the difference of their step times. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import saccade
from benchmarks import machine, sized_models
from benchmarks.models import KINDS, TEXT
from benchmarks.record import add_options, write_result
from service.commands.server_process import ServerProcess

VOCAB = 1024
PATTERNS = {"mamba": "MMMMMMMM", "attention": "**"}
STORED = 2
"""Bytes per number of a key or value."""


def model(kind: str, folder: Path) -> Path:
    """The checkpoint with layers of one kind; an existing one is kept."""
    path = folder / f"{kind}-alone"
    if not (path / "complete").exists():
        layers = [KINDS[letter] for letter in PATTERNS[kind]]
        other = {"vocab_size": VOCAB, "layers_block_type": layers, "max_position_embeddings": sized_models.LONGEST}
        sized_models.write(path, {**TEXT, **other})
    return path


def ask(client: saccade.Client, tokens: int, new_tokens: int) -> tuple[float, float]:
    """Seconds of a prompt of so many tokens, and of each token after the first."""
    prompt = random.Random(tokens).choices(range(3, VOCAB), k=tokens)
    usage = client.generate(prompt, max_tokens=new_tokens, temperature=0, ignore_eos=True).usage
    first, last = usage.time_to_first_token, usage.time_to_last_token
    assert usage.completion_tokens == new_tokens and first is not None and last is not None
    return first, (last - first) / (new_tokens - 1)


def measure(path: Path, lengths: Sequence[int], new_tokens: int, rounds: int) -> list[dict[str, float]]:
    """For each length, medians over all rounds."""
    most = str(max(lengths) + new_tokens)
    options = ["--dtype", "bfloat16", "--max-seqs", "1", "--max-len", most, "--state-cache", "none"]
    server = ServerProcess([str(path), *options, "--log-level", "warning"])
    try:
        with saccade.Client(server.address) as client:
            ask(client, min(lengths), new_tokens)
            found = [[ask(client, length, new_tokens) for length in lengths] for _ in range(rounds)]
    finally:
        server.stop()
    rows = []
    for length, times in zip(lengths, zip(*found, strict=True), strict=True):
        prompt, step = (statistics.median(column) for column in zip(*times, strict=True))
        rows.append({"tokens": length, "prompt_us_per_token": 1e6 * prompt / length, "step_ms": 1e3 * step})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024,8192,32768", help="tokens of the contexts, ascending")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    add_options(parser)
    arguments = parser.parse_args(argv)
    lengths = [int(length) for length in arguments.lengths.split(",")]
    before, ceilings = machine.before(), machine.ceilings()
    rows = {
        kind: measure(model(kind, arguments.folder), lengths, arguments.new_tokens, arguments.rounds)
        for kind in PATTERNS
    }
    per_token = 2 * STORED * TEXT["num_key_value_heads"] * TEXT["head_dim"] * len(PATTERNS["attention"])
    first, last = rows["attention"][0], rows["attention"][-1]
    result: dict[str, Any] = {
        **machine.header("contexts", argv, before),
        "ceilings": ceilings,
        "rows": rows,
    }
    if len(lengths) > 1:
        seconds = 1e-3 * (last["step_ms"] - first["step_ms"])
        result["attention_gb_s"] = 1e-9 * per_token * (last["tokens"] - first["tokens"]) / seconds
    for kind, each in rows.items():
        for row in each:
            print(f"{kind:10}{row['tokens']:7} tokens: prompt {row['prompt_us_per_token']:8.1f} us a token, "
                  f"step {row['step_ms']:7.3f} ms")  # fmt: skip
    if arguments.write:
        write_result("contexts", result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
