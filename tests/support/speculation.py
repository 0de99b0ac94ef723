"""One workload under any options of the decoder, its tokens and its counters.

Tests and soaks compare results of `answers`: the same requests with and without speculation, caches, chunks, memory
pressure and graphs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from operator import itemgetter
from typing import Any

import torch
from constrained import END, constraints
from gated_decoder import grid_positions
from tiny_decoder import FakeSource, random_weights, run, spoil, tiny_config, tokens

from decoder.arena import ArenaLayout
from decoder.config import DecoderConfig, DecoderOptions
from decoder.request import DecoderRequest
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams

MAX_LEN, PAGE = 112, 4
AXES: dict[str, tuple[Any, ...]] = {
    "state_cache": ("none", "align", "all", "auto"),
    "speculative": ("none", "ngram", "mtp"),
    "spec_state": ("replay", "slots"),
    "max_chunk": (1, 7, 64, None),
    "preempted": (False, True),
    "graphs": ("off", "on"),
    "native": ("auto", "off"),
    "overlap": ("off", "on"),
}
"""Options of `answers` that may be combined, with their values."""


def pairwise(axes: Mapping[str, Sequence[Any]], attempts: int = 6) -> list[dict[str, Any]]:
    """A small number of combinations that together contain every pair of values of different axes: the fewest of some
    attempts."""
    return min((_pairwise(axes, random.Random(seed)) for seed in range(attempts)), key=len)


def _pairwise(axes: Mapping[str, Sequence[Any]], draw: random.Random) -> list[dict[str, Any]]:
    """Each combination begins with a missing pair; axis by axis it gets the value with the most missing pairs."""
    names = sorted(axes)
    missing = {
        ((one, a), (two, b)): None for one, two in combinations(names, 2) for a in axes[one] for b in axes[two]
    }  # fmt: skip
    found = []
    while missing:
        case = dict(draw.choice(list(missing)))
        for name in draw.sample(names, len(names)):
            if name not in case:
                values = draw.sample(axes[name], len(axes[name]))
                case[name] = max(values, key=lambda value: sum(
                    tuple(sorted(((name, value), other), key=itemgetter(0))) in missing for other in case.items()
                ))  # fmt: skip
        found.append({name: case[name] for name in names})
        for pair in combinations(found[-1].items(), 2):
            missing.pop(pair, None)
    return found


@dataclass(frozen=True)
class Answers:
    """For each request: its tokens, log-probabilities and end reason; and the runner's counters at the end."""

    drawn: dict[str, tuple[list[int], str | None]]
    logprobs: dict[str, list[float]]
    stats: dict[str, int]


def sampling(kind: int, output: int) -> SamplingParams:
    """Greedy and sampled, with every parameter that depends on the tokens so far."""
    ends = frozenset({5, 11})
    return (
        SamplingParams(max_tokens=output, temperature=0.0, logprobs=2),
        SamplingParams(max_tokens=output, temperature=0.7, seed=kind, logprobs=0),
        SamplingParams(max_tokens=output, temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.1),
        SamplingParams(max_tokens=output, seed=kind, temperature=0.6, top_p=0.9, top_k=20, presence_penalty=0.3),
        SamplingParams(
            max_tokens=output, temperature=0.0, min_tokens=min(9, output), stop_token_ids=ends, logit_bias={5: 3.0}
        ),
        SamplingParams(
            max_tokens=output, seed=3, temperature=0.5, min_tokens=min(4, output), stop_token_ids=ends, min_p=0.05
        ),
    )[kind % 6]


GRIDS = {5: [(1, 5), (5, 1)], 9: [(3, 3), (1, 9), (9, 1)]}
"""(rows, columns) of images with this many tokens, for models that read positions: equal content, different grids."""


def workload(config: DecoderConfig, seed: int, count: int, output: int) -> list[DecoderRequest]:
    """Prompts with few different tokens in repeated runs, some with the same images, some with a common prefix."""
    draw = random.Random(seed)
    runs = [[draw.randrange(12, config.vocab_size) for _ in range(draw.randrange(2, 7))] for _ in range(3)]
    images = [
        torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(seed + rows)) for rows in (5, 9)
    ]
    made, grids = [], random.Random(seed)
    for index in range(count):
        prompt: list[int] = []
        boxes: list[tuple[int, int, int]] = []
        spans = []
        for _ in range(index % 4):
            prompt += draw.choice(runs)
            if draw.random() < 0.6:
                rows = draw.choice(images)
                spans.append(FakeSource(len(prompt), rows.shape[0], rows.numpy().tobytes(), rows))
                prompt += [1] * rows.shape[0]
                boxes.append((spans[-1].start, *grids.choice(GRIDS[rows.shape[0]])))
        while len(prompt) < 8 + 5 * (index % 3):
            prompt += draw.choice(runs)
        kept = _inside(spans, prompt[:64])
        positions = grid_positions(len(prompt[:64]), *boxes[: len(kept)]) if config.position_axes else None
        made.append(DecoderRequest(str(index), prompt[:64], sampling(index, output), kept, positions=positions))
    return made


def _constrained(requests: list[DecoderRequest], kinds: Sequence[str | None]) -> list[DecoderRequest]:
    if not kinds:
        return requests
    return [
        item
        if (kind := kinds[index % len(kinds)]) is None
        else replace(item, constraint=constraints(kind), eos_token_ids=frozenset({END}))
        for index, item in enumerate(requests)
    ]


def _inside(spans: list[FakeSource], prompt: list[int]) -> tuple[FakeSource, ...]:
    return tuple(span for span in spans if span.end <= len(prompt))


class Prompter:
    """Drafts the known continuation with an occasional wrong token, because a random model hardly repeats itself."""

    def __init__(self, whole: list[int], seed: int) -> None:
        self.whole, self.draw = whole, random.Random(seed)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        right = self.whole[len(tokens) : len(tokens) + count]
        return [token if self.draw.random() < 0.8 else (token + 1) % 97 for token in right]


def answers(
    pattern: str = "M-*EM*",
    *,
    config: DecoderConfig | None = None,
    seed: int = 0,
    count: int = 6,
    output: int = 24,
    preempted: bool = False,
    known: Mapping[str, tuple[list[int], str | None]] | None = None,
    constrained: Sequence[str | None] = (),
    **options: Any,
) -> Answers:
    """Runs the workload of `seed` on a random tiny model with this pattern or `config`.

    `preempted`: memory for little more than one request; with graphs, which need a slot for each request, one after the
    other is preempted explicitly instead. `known`: the tokens that the requests will draw, which `ngram` then uses for
    its drafts instead of their own tokens. `constrained`: kinds of constraint, assigned to the requests in turn.
    """
    config = config or tiny_config(pattern, num_nextn_predict_layers=1)
    chosen = DecoderOptions(
        **(
            {"max_seqs": 4, "max_len": MAX_LEN, "page_size": PAGE, "state_block": PAGE, "draft_policy": "fixed"}
            | options
        )
    )
    if preempted:
        # Room for all that is preempted: one that has to compute its prompt again gets nowhere if preempted every few
        # steps.
        squeezed: dict[str, Any] = {"host_bytes": 10**9}
        if not chosen.graphs_on:
            layout = ArenaLayout.of(config, chosen)
            squeezed["memory_bytes"] = (layout.blocks_for(1, MAX_LEN) + layout.slots_per_seq) * layout.block_bytes
        chosen = DecoderOptions(**(vars(chosen) | squeezed))
    runner = DecoderRunner(config, chosen, random_weights(config, seed))
    spoil(runner)
    for ring in runner.arena.rings:
        ring.fill_(float("nan"))
    if known is not None and runner.speculation is not None:
        runner.speculation.new_index = lambda sequence: Prompter(
            [*sequence.request.prompt_ids, *known[sequence.request_id][0]], seed
        )
    every = 7 if preempted and chosen.graphs_on else 0
    events = run(runner, *_constrained(workload(config, seed, count, output), constrained), preempt_every=every)
    stats = runner.stats()
    runner.close()
    runner.check_integrity()
    return Answers(
        {name: (tokens(of), of[-1].finish_reason) for name, of in events.items()},
        {name: [event.logprob for event in of if event.logprob is not None] for name, of in events.items()},
        stats,
    )


def watch_drafts(runner: DecoderRunner) -> list[tuple[DecoderRequest, list[int], list[int]]]:
    """(request, tokens before, drafts) of all later drafts."""
    seen: list[tuple[DecoderRequest, list[int], list[int]]] = []
    assert runner.drafter is not None
    draft = runner.drafter.draft

    def recorded(rows: Any) -> Any:
        found = draft(rows)
        seen.extend((s.request, list(s.tokens), list(drafts)) for s, drafts in found)
        return found

    runner.drafter.draft = recorded  # type: ignore[method-assign]
    return seen
