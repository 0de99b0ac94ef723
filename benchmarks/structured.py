"""Structured output: whether answers keep to random schemas, what compiling costs, what a schema costs and gains.

    python -m benchmarks.structured [--schemas 2000] [--compile 200] [--speed] [--model demo]

`schemas`: answers of a model under random schemas, at a high temperature so that its logits push against the grammar,
judged by `jsonschema`; an answer that ends by itself must pass. `compile`: milliseconds to make the constraint of a
common schema, first mask included, each schema for the first time. `speed`: tokens per second with and without a schema
at 1 and 32 requests, both sides in turn; without one, as many tokens as with it. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema

import saccade
from benchmarks.schemas import common_schema, random_schema
from saccade import errors
from service.common.types import ConstraintSpec, TextFormat
from service.engine.constraining import Constraining
from service.model.checkpoint import open_checkpoint

RECORD = {
    "type": "object",
    "properties": {
        "identification_number": {"type": "integer", "minimum": 1000, "maximum": 9999},
        "classification_result": {"enum": ["positive", "negative", "undecided"]},
        "confidence_percentage": {"type": "integer", "minimum": 0, "maximum": 100},
        "requires_manual_review": {"type": "boolean"},
        "measured_coordinates": {
            "type": "object",
            "properties": dict.fromkeys(("left", "top", "right"), {"type": "integer", "minimum": 0, "maximum": 999}),
            "required": ["left", "top", "right"],
            "additionalProperties": False,
        },
    },
    "required": ["identification_number", "classification_result", "confidence_percentage", "requires_manual_review",
                 "measured_coordinates"],
    "additionalProperties": False,
}  # fmt: skip
"""Most of an answer to it is certain beforehand."""


def answered(client: saccade.LocalClient, count: int) -> dict[str, int]:
    """Ends of answers under `count` random schemas: `valid`, `invalid`, `cut` or `refused`."""
    schemas = [random_schema(random.Random(seed)) for seed in range(count)]
    requests = [
        {"prompt": "Go", "response_format": schema, "max_tokens": 200, "temperature": 1.5, "seed": seed}
        for seed, schema in enumerate(schemas)
    ]
    found: Counter[str] = Counter()
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for outcome in client.map(requests, concurrency=16):
        try:
            answer = outcome.result()
        except errors.InvalidArgument as error:
            print(f"refused {outcome.index}: {error}", file=sys.stderr)
            found["refused"] += 1
            continue
        if answer.finish_reason != "stop":
            found["cut"] += 1
            continue
        try:
            validator = jsonschema.Draft202012Validator(schemas[outcome.index], format_checker=checker)
            validator.validate(json.loads(answer.text))
            found["valid"] += 1
        except (ValueError, jsonschema.ValidationError) as error:
            print(f"invalid {outcome.index}: {answer.text!r}: {error}", file=sys.stderr)
            found["invalid"] += 1
    return dict(found)


def compiled(model: str, count: int) -> dict[str, float]:
    """Milliseconds for each of `count` common schemas."""
    checkpoint = open_checkpoint(model, None)
    ends = checkpoint.config.eos_token_ids
    constraining = Constraining(checkpoint.path / "tokenizer.json", checkpoint.config.decoder.vocab_size, ends)

    def made(schema: Any) -> float:
        spec = ConstraintSpec(TextFormat("json_schema", json.dumps(schema)))
        started = time.perf_counter()
        constraining.begin(spec, ends, frozenset(), ()).result()
        return 1e3 * (time.perf_counter() - started)

    first = made({})
    times = sorted(made(common_schema(random.Random(seed))) for seed in range(count))
    constraining.close()
    return {
        "vocabulary_ms": first, "p50_ms": statistics.median(times), "p99_ms": times[int(0.99 * (count - 1))],
        "largest_ms": times[-1],
    }  # fmt: skip


def speed(client: saccade.LocalClient, batch: int, rounds: int) -> dict[str, float]:
    """Median tokens per second of `batch` requests at a time: `plain` and with the schema."""

    def one(seed: int, tokens: int | None) -> int:
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed}
        options |= {"response_format": RECORD, "max_tokens": 300} if tokens is None else {
            "max_tokens": tokens, "ignore_eos": True,
        }  # fmt: skip
        return client.generate("Go", **options).usage.completion_tokens

    found: dict[str, list[float]] = {"plain": [], "schema": []}
    lengths = [one(seed, None) for seed in range(batch)]
    with ThreadPoolExecutor(batch) as pool:
        for _ in range(rounds + 1):
            for side in found:
                started = time.perf_counter()
                asked = lengths if side == "plain" else [None] * batch
                total = sum(pool.map(one, range(batch), asked))
                found[side].append(total / (time.perf_counter() - started))
    return {side: statistics.median(rates[1:]) for side, rates in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--schemas", type=int, default=2000, metavar="N")
    parser.add_argument("--compile", type=int, default=200, metavar="N")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--forced-tokens", default="auto", help="the engine's option (default: auto)")
    options = parser.parse_args()
    result: dict[str, Any] = {"model": options.model, "forced_tokens": options.forced_tokens}
    if options.compile:
        result["compile"] = compiled(options.model, options.compile)
    with saccade.LocalClient(options.model, forced_tokens=options.forced_tokens, max_seqs=32) as client:
        if options.schemas:
            result["answers"] = answered(client, options.schemas)
        if options.speed:
            result["tokens_s"] = {str(batch): speed(client, batch, options.rounds) for batch in (1, 32)}
    print(json.dumps(result))
    return 1 if result.get("answers", {}).get("invalid") else 0


if __name__ == "__main__":
    raise SystemExit(main())
