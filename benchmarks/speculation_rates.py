"""Tokens per second with and without drafts, by the share of accepted drafts, on models larger than a CPU's caches.

    python -m benchmarks.speculation_rates [--model nemotron_h,qwen3_5] [--concurrent 1,8] [--rounds 2] [--write]

The checkpoints are those of `benchmarks.scripted_models`, in which text and acceptance are known. Both sides run in
turn through `saccade.LocalClient`, and their answers must be equal. The adaptive policy starts anew with each text, so
the cost of its trials is included. `fixed` always makes `--draft-tokens` drafts, which shows the cost of drafts that
never stop. Prompts are cached before the measurement. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import saccade
from benchmarks import machine, scripted_models
from benchmarks.record import add_options, show, write_result
from benchmarks.scripted_models import RATES, Script
from benchmarks.speculation import Ask, decoder_seconds, grown, timed

MODELS = {"nemotron_h": scripted_models.nemotron_model, "qwen3_5": scripted_models.qwen_model}
PROMPT = 40
PLAIN: dict[str, Any] = {"max_seqs": 8, "max_len": 1024, "dtype": "bfloat16"}
NGRAM_TEXTS = ("repeating", "branching", "rate 1.0")
"""The last one does not repeat."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One text and one number of requests. Rates are tokens per second; `step` is the time of a decoder step with
    drafts relative to a plain one."""

    model: str
    drafts: str
    policy: str
    text: str
    requests: int
    plain: float
    drafted: float
    ratio: float
    step: float
    tokens_a_step: float
    """Tokens per step of one request."""
    accepted: float
    """Share of first drafts; nan if there were none."""
    same_answers: bool


def asks(script: Script, text: str, requests: int, tokens: int) -> list[Ask]:
    def ask(request: int) -> Ask:
        def of(client: saccade.LocalClient) -> saccade.Generation:
            return client.generate(
                script.text(text, request, PROMPT), max_tokens=tokens, ignore_eos=True, raw=True,
                temperature=float(text == "branching"), seed=request,
            )  # fmt: skip

        return of

    return [ask(request) for request in range(requests)]


def compare(
    names: tuple[str, str, str, str], requests: int, plain: saccade.LocalClient, other: saccade.LocalClient,
    tokens: int, rounds: int,
) -> Cell:  # fmt: skip
    """`names`: model, drafts, policy, text."""
    script = Script()
    short, long = (asks(script, names[3], requests, count) for count in (1, tokens))
    speeds: list[list[float]] = [[], []]
    steps, seconds, same, counts = [0, 0], [0.0, 0.0], True, dict[str, int]()
    for side in (plain, other):
        timed(side, short, requests)
    for _ in range(rounds):
        answers = []
        for place, side in enumerate((plain, other)):
            before, spent = side._service.stats()["decoder"], decoder_seconds(side)
            speed, found = timed(side, long, requests)
            after = side._service.stats()["decoder"]
            speeds[place].append(speed)
            answers.append(found)
            steps[place] += grown(after, before, "steps")
            seconds[place] += decoder_seconds(side) - spent
            if place:
                counts = {n: counts.get(n, 0) + grown(after, before, n) for n in ("drafted_1", "accepted_1")}
        same &= answers[0] == answers[1]
    first = counts["accepted_1"] / counts["drafted_1"] if counts["drafted_1"] else float("nan")
    before_s, after_s = (statistics.median(of) for of in speeds)
    return Cell(
        *names, requests, round(before_s, 1), round(after_s, 1),
        round(statistics.median(b / a for a, b in zip(*speeds, strict=True)), 3),
        round(seconds[1] / steps[1] / (seconds[0] / steps[0]), 3), round(rounds * tokens / steps[1], 2),
        round(first, 3), same,
    )  # fmt: skip


def cells(model: str, path: Path, options: argparse.Namespace) -> list[Cell]:
    """Loads the plain side once. For each number of requests, loads the drafting side once for each policy, but the
    adaptive policy once for each text."""
    base = PLAIN | {"threads": options.threads}
    rates = [f"rate {rate}" for rate in RATES]
    plans = [("ngram", "adaptive", [text]) for text in NGRAM_TEXTS]
    plans += [("mtp", "adaptive", [text]) for text in rates]
    plans.append(("mtp", "fixed", rates))
    found: list[Cell] = []
    with saccade.LocalClient(path, **base) as plain:
        for requests in options.concurrent:
            for drafts, policy, texts in plans:
                if drafts not in options.only or policy not in options.policy:
                    continue
                drafting = {"speculative": drafts, "draft_policy": policy, "draft_tokens": options.draft_tokens}
                if drafts == "mtp":
                    drafting["draft_vocab"] = options.draft_vocab
                with saccade.LocalClient(path, **base, **drafting) as other:
                    for text in texts:
                        names = model, drafts, policy, text
                        found.append(compare(names, requests, plain, other, options.tokens, options.rounds))
                        print(dataclasses.astuple(found[-1]), file=sys.stderr, flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table, then one line of JSON. Returns 1 if answers differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--only", type=lambda text: text.split(","), default=["ngram", "mtp"])
    parser.add_argument("--policy", type=lambda text: text.split(","), default=["adaptive", "fixed"])
    parser.add_argument("--concurrent", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--draft-vocab", type=int, help="mtp: draft only ids below this (texts use ids below 10778)")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    add_options(parser)
    machine.add_rough(parser)
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    before = machine.before()
    ceilings = {name: round(value, 1) for name, value in machine.ceilings(rough=options.rough).items()}
    found = [cell for model in options.model for cell in cells(model, MODELS[model](options.folder), options)]
    print(
        show([[f.name for f in dataclasses.fields(Cell)], *([str(v) for v in dataclasses.astuple(c)] for c in found)])
    )
    result = {
        **machine.header("speculation_rates", argv, before),
        "ceilings": ceilings,
        "draft_tokens": options.draft_tokens,
        "draft_vocab": options.draft_vocab,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "cells": [dataclasses.asdict(cell) for cell in found],
    }
    if options.write:
        names = [*options.model, *map(str, options.concurrent)]
        if options.draft_vocab is not None:
            names.append(f"draft-vocab-{options.draft_vocab}")
        write_result(f"speculation-rates-{'-'.join(names)}", result)
    print(json.dumps(result))
    return 0 if all(cell.same_answers for cell in found) else 1


if __name__ == "__main__":
    sys.exit(main())
