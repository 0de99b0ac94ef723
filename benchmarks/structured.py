"""Structured output: whether answers conform to random schemas, and the cost of compiling and of using a schema.

    python -m benchmarks.structured answers compile speed peer hostile [--folder DIR] [--write]

`answers`: answers of models with random weights (benchmarks/random_models.py), through gRPC, under random schemas, at a
high temperature so that likely tokens often violate the grammar. Every answer that ends by itself must be valid for
`jsonschema`.
`compile`: milliseconds to make the constraint of a common schema, including the first mask, without any cache.
`speed`: tokens per second of the 116 M model with and without a schema at 1 and 32 requests, and with forced tokens,
all sides in turn. Answers without a schema have as many tokens as those with it.
`peer`: the same schema, checkpoint and prompts in vLLM's CPU build and in Saccade, in turn.
`hostile`: how requests with the formats of benchmarks/hostile_formats.py end, and the longest pause of a concurrent
stream, for each format alone and for four requests of each at once.
`--write` writes a dated file for each part. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema

import saccade
from benchmarks import machine, models, random_models
from benchmarks.hostile_formats import HOSTILE
from benchmarks.record import add_options, write_result
from benchmarks.schemas import Schema, common_schema, random_schema
from benchmarks.sides import Peer
from saccade import errors
from service.commands.server_process import ServerProcess
from service.common.types import ConstraintSpec, TextFormat
from service.engine.constraining import Constraining
from service.model.checkpoint import open_checkpoint

BATCHES = (1, 32)
MAX_TOKENS = 300
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
"""A schema that determines most tokens of an answer."""


@contextlib.contextmanager
def served(model: Path, *options: str) -> Iterator[saccade.Client]:
    """A client of a server of this checkout."""
    server = ServerProcess([str(model), "--max-seqs", "32", "--log-level", "error", *options])
    try:
        with saccade.Client(server.address) as client:
            yield client
    finally:
        server.stop()


def verdict(text: str, schema: Schema) -> str:
    """The error that `jsonschema` finds; "" for a valid answer."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    try:
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{error}".splitlines()[0]
    return ""


def answered(client: saccade.Client, count: int, bias: dict[int, float]) -> dict[str, int]:
    """Numbers of `valid`, `invalid`, `length` and `refused` answers under `count` random schemas, and of `tokens`."""
    schemas = [random_schema(random.Random(seed)) for seed in range(count)]
    requests = [
        {
            "prompt": "Go", "response_format": schema, "max_tokens": MAX_TOKENS, "temperature": 1.5, "seed": seed,
            "logit_bias": bias,
        }
        for seed, schema in enumerate(schemas)
    ]  # fmt: skip
    found: Counter[str] = Counter(valid=0, invalid=0, length=0, refused=0, tokens=0)
    for outcome in client.map(requests, concurrency=16):
        try:
            answer = outcome.result()
        except errors.InvalidArgument as error:
            print(f"refused {outcome.index}: {error}", file=sys.stderr)
            found["refused"] += 1
            continue
        found["tokens"] += answer.usage.completion_tokens
        if answer.finish_reason == "length":
            found["length"] += 1
        elif wrong := verdict(answer.text, schemas[outcome.index]):
            print(f"invalid {outcome.index}: {answer.text!r}: {wrong}", file=sys.stderr)
            found["invalid"] += 1
        else:
            found["valid"] += 1
    return dict(found)


def answers(arguments: argparse.Namespace) -> dict[str, Any]:
    """Counts by family. Characters that end values get a bias, because random text hardly ever ends otherwise."""
    found: dict[str, Any] = {"max_tokens": MAX_TOKENS, "passed": True}
    for family, make in random_models.FAMILIES.items():
        with served(make(arguments.folder)) as client:
            found[family] = answered(client, arguments.schemas, random_models.ending_bias(client))
        found["passed"] &= not found[family]["invalid"] and not found[family]["refused"]
        print(f"{family}: {found[family]}", flush=True)
    return found


def compiling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds for each of many common schemas, on the 116 M model's vocabulary."""
    checkpoint = open_checkpoint(str(models.written_model(arguments.folder)), None)
    ends = checkpoint.config.eos_token_ids
    constraining = Constraining(checkpoint.path / "tokenizer.json", checkpoint.config.decoder.vocab_size, ends)

    def made(schema: Any) -> float:
        spec = ConstraintSpec(TextFormat("json_schema", json.dumps(schema)))
        started = time.perf_counter()
        constraining.begin(spec, ends, frozenset(), ()).result()
        return 1e3 * (time.perf_counter() - started)

    first = made({})
    times = [made(common_schema(random.Random(seed))) for seed in range(arguments.compile)]
    constraining.close()
    return {
        "schemas": len(times), "vocabulary_ms": first, "p50_ms": machine.percentile(times, 0.5),
        "p99_ms": machine.percentile(times, 0.99), "largest_ms": max(times),
    }  # fmt: skip


def rate(client: saccade.Client, lengths: Sequence[int | None]) -> float:
    """Tokens per second of concurrent requests with these numbers of output tokens; None: as the schema determines."""

    def one(seed: int, tokens: int | None) -> int:
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed}
        free = {"max_tokens": tokens, "ignore_eos": True}
        options |= {"response_format": RECORD, "max_tokens": MAX_TOKENS} if tokens is None else free
        return client.generate("Go", **options).usage.completion_tokens

    with ThreadPoolExecutor(len(lengths)) as pool:
        started = time.perf_counter()
        total = sum(pool.map(one, range(len(lengths)), lengths))
        return total / (time.perf_counter() - started)


def schema_lengths(client: saccade.Client) -> list[int]:
    """Numbers of tokens of `rate`'s answers under the schema."""
    return [
        client.generate("Go", temperature=1.0, seed=seed, response_format=RECORD, max_tokens=MAX_TOKENS)
        .usage.completion_tokens
        for seed in range(max(BATCHES))
    ]  # fmt: skip


def in_turn(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, Any]:
    """The median rate of each side, after one round that is not counted, and all rates."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, run in sides.items():
            found[name].append(run())
    kept = {name: rates[1:] for name, rates in found.items()}
    return {**{name: statistics.median(rates) for name, rates in kept.items()}, "all": kept}


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """`cost`: share of the plain rate that is lost with a schema; `gain`: gain of forced tokens over the rate with the
    schema. Both are medians over rounds."""
    model, found = models.written_model(arguments.folder), dict[str, Any]()
    with served(model) as plain, served(model, "--forced-tokens", "on") as forcing:
        lengths = schema_lengths(plain)
        for batch in BATCHES:
            free, under = lengths[:batch], [None] * batch
            sides: dict[str, Callable[[], float]] = {
                "plain": functools.partial(rate, plain, free),
                "schema": functools.partial(rate, plain, under),
                "forced": functools.partial(rate, forcing, under),
            }  # fmt: skip
            timed = in_turn(sides, arguments.rounds if batch > 1 else 3 * arguments.rounds)
            every = timed["all"]
            timed["cost"] = statistics.median(1 - b / a for a, b in zip(every["plain"], every["schema"], strict=True))
            timed["gain"] = statistics.median(b / a for a, b in zip(every["schema"], every["forced"], strict=True))
            found[str(batch)] = timed
            print(f"{batch}: " + ", ".join(f"{k} {v:.4g}" for k, v in timed.items() if k != "all"), flush=True)
    return found


def peer(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of both sides, with and without the schema, and the number of the peer's invalid answers."""
    model, found = models.written_model(arguments.folder), dict[str, Any]()
    log = arguments.folder / "vllm-structured.log"
    with served(model, "--dtype", "bfloat16", "--state-cache", "none") as ours:
        prompt = list(ours.tokenize("Go", raw=True).token_ids)
        other = Peer("vllm", model, False, log, tokenizer=True)
        try:
            lengths = schema_lengths(ours)
            for batch in BATCHES:
                free = lengths[:batch]
                texts: list[str] = []

                def theirs(schema: Schema | None, free: list[int] = free, texts: list[str] = texts) -> float:
                    answer = other.constrained([prompt] * len(free), schema, free if schema is None else MAX_TOKENS)
                    texts += answer["ended"] if schema is not None else []
                    return float(answer["tokens"] / answer["seconds"])

                sides: dict[str, Callable[[], float]] = {
                    "ours plain": functools.partial(rate, ours, free),
                    "ours schema": functools.partial(rate, ours, [None] * len(free)),
                    "peer plain": lambda: theirs(None),
                    "peer schema": lambda: theirs(RECORD),
                }  # fmt: skip
                timed = in_turn(sides, arguments.peer_rounds)
                timed["peer_ended"] = len(texts)
                timed["peer_invalid"] = sum(bool(verdict(text, RECORD)) for text in texts)
                found[str(batch)] = timed
                print(f"{batch}: " + ", ".join(f"{k} {v:.4g}" for k, v in timed.items() if k != "all"), flush=True)
        finally:
            other.close()
    return found


def hostile(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each request to the embedded model, how it ended, and the stream's longest pause in milliseconds."""
    pieces: list[float] = []
    stop = threading.Event()

    def beside(client: saccade.Client) -> None:
        for seed in itertools.count():
            with client.stream("Go on", max_tokens=300, ignore_eos=True, temperature=1.0, seed=seed) as stream:
                for _ in stream:
                    pieces.append(time.perf_counter())
                    if stop.is_set():
                        return

    def one(name: str) -> dict[str, Any]:
        started = time.perf_counter()
        try:
            answer = client.generate("Go", response_format=HOSTILE[name], max_tokens=60, temperature=1.0, timeout=60)
            end = str(answer.finish_reason)
        except errors.InvalidArgument as error:
            end = f"{error}"[:100]
        except errors.SaccadeError as error:
            end = f"FAILED: {error}"
        return {"seconds": time.perf_counter() - started, "end": end, "pause_ms": pause(started)}

    def pause(since: float) -> float:
        times = [since, *(at for at in list(pieces) if at > since), time.perf_counter()]
        return 1e3 * max(b - a for a, b in itertools.pairwise(times))

    with served(Path("demo")) as client, ThreadPoolExecutor(1) as other:
        running = other.submit(beside, client)
        while len(pieces) < 100:
            time.sleep(0.05)
        alone = pause(pieces[0])
        found = {name: one(name) for name in HOSTILE}
        started = time.perf_counter()
        with ThreadPoolExecutor(64) as pool:
            together = list(pool.map(one, [name for name in HOSTILE for _ in range(4)]))
        crowd = {"requests": len(together), "seconds": time.perf_counter() - started, "pause_ms": pause(started)}
        stop.set()
        running.result()
    ends = [row["end"] for row in (*found.values(), *together)]
    passed = not any(end.startswith("FAILED") for end in ends)
    return {"passed": passed, "pause_alone_ms": alone, "at_once": crowd, "formats": found}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "answers": answers, "compile": compiling, "speed": speed, "peer": peer, "hostile": hostile,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--schemas", type=int, default=2000, metavar="N", help="random schemas of each family")
    parser.add_argument("--compile", type=int, default=200, metavar="N", help="common schemas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-rounds", type=int, default=3)
    add_options(parser)
    arguments, passed, results = parser.parse_args(argv), True, dict[str, Any]()
    for part in arguments.parts:
        load = machine.load()
        results[part] = PARTS[part](arguments)
        passed &= results[part].get("passed", True)
        if arguments.write:
            described = {"part": part, "machine": machine.describe(), "load_before": load, **results[part]}
            write_result(f"structured-{part}", described)
    print(json.dumps(results))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
