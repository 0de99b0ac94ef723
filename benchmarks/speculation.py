"""Gain and cost of drafting: tokens per second compared with plain decoding, acceptance, memory of states.

    python -m benchmarks.speculation [--model demo] [--rounds 15] [--requests 16] [--write]

Each comparison alternates both sides on the same requests through `saccade.LocalClient`. The ratio is the median over
the rounds; `decoder_ratio` is the ratio of the decoder's steps alone, over all rounds. Prompts are cached on both sides
after the first round, which is not counted. Workloads: `captions`, held-out images of the embedded model; `again`, the
same caption a second time in one conversation; `noise`, sampled at a temperature at which nothing repeats, which shows
the cost of drafting without its gain. The answers of both sides must be equal.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import saccade
from benchmarks import machine
from benchmarks.record import show, write_result
from decoder.arena import ArenaLayout
from decoder.config import DecoderConfig, DecoderOptions
from demo import data
from families.nemotron_h.config import NemotronHConfig
from service.commands.plan import AUTO_CHECKPOINTS
from service.model.checkpoint import open_checkpoint

NANO_12B = NemotronHConfig(
    pattern="M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
    vocab_size=131072, hidden_size=5120, num_attention_heads=40, num_key_value_heads=8, head_dim=128,
    intermediate_size=20480, ssm_state_size=128, mamba_num_heads=128, mamba_head_dim=80, n_groups=8,
).decoder  # fmt: skip
NOISE_TOKENS = 96
SLOWEST = 0.97
"""Minimum share of the plain speed on workloads where drafting cannot help."""

Ask = Callable[[saccade.LocalClient], saccade.Generation]


@dataclasses.dataclass(frozen=True)
class Line:
    """One comparison."""

    text: str
    drafts: str
    batch: int
    ratio: float
    decoder_ratio: float
    plain_tokens_s: float
    tokens_s: float
    first_draft: float
    """Share of first drafts that were accepted; nan if there were none."""
    tokens_a_step: float
    same_answers: bool


def captions(count: int, again: bool) -> list[Ask]:
    """Held-out images to describe; `again`: a second time in the same conversation."""
    asks: list[Ask] = []
    for seed in range(count):
        example = data.question_example(seed, "caption")
        turn, out = example.turns[-1], io.BytesIO()
        example.pictures[0].image.save(out, "PNG")
        image = out.getvalue()
        first = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": turn.question}]}
        messages: list[dict[str, Any]] = [first]
        if again:
            messages += [{"role": "assistant", "content": turn.answer}, {"role": "user", "content": turn.question}]

        def ask(client: saccade.LocalClient, messages: Any = messages, image: bytes = image) -> saccade.Generation:
            return client.generate(messages, images=[image], temperature=0, max_tokens=64)

        asks.append(ask)
    return asks


def noise(count: int) -> list[Ask]:
    """Random token ids."""
    draw = random.Random(1)
    asks: list[Ask] = []
    for seed in range(count):
        prompt = [draw.randrange(10, 1000) for _ in range(48)]

        def ask(client: saccade.LocalClient, prompt: list[int] = prompt, seed: int = seed) -> saccade.Generation:
            return client.generate(
                prompt, temperature=8.0, seed=seed, max_tokens=NOISE_TOKENS, ignore_eos=True, raw=True
            )

        asks.append(ask)
    return asks


def timed(client: saccade.LocalClient, asks: Sequence[Ask], batch: int) -> tuple[float, list[list[int]]]:
    """Tokens per second of all requests, `batch` at a time, and their answers."""
    started = time.perf_counter()
    if batch == 1:
        found = [ask(client) for ask in asks]
    else:
        with ThreadPoolExecutor(batch) as pool:
            found = list(pool.map(lambda ask: ask(client), asks))
    seconds = time.perf_counter() - started
    answers = [list(one.token_ids) for one in found]
    return sum(map(len, answers)) / seconds, answers


def decoder_seconds(client: saccade.LocalClient) -> float:
    """Seconds spent in decoder steps since the start, prompts included."""
    return float(client._service.stats()["decode_seconds"])


def grown(after: Mapping[str, int], before: Mapping[str, int], name: str) -> int:
    """By how much a counter of the decoder has grown."""
    return int(after.get(name, 0) - before.get(name, 0))


def compare(
    text: str, asks: Sequence[Ask], plain: saccade.LocalClient, other: saccade.LocalClient, drafts: str, batch: int,
    rounds: int,
) -> Line:  # fmt: skip
    """Runs both sides in turn; the first round of each is not counted."""
    same = timed(plain, asks, batch)[1] == timed(other, asks, batch)[1]
    sides = (plain, other)
    before, spent = other._service.stats()["decoder"], [decoder_seconds(side) for side in sides]
    speeds = []
    for number in range(rounds):
        found = {id(side): timed(side, asks, batch)[0] for side in (sides if number % 2 == 0 else reversed(sides))}
        speeds.append((found[id(plain)], found[id(other)]))
    spent = [decoder_seconds(side) - seconds for side, seconds in zip(sides, spent, strict=True)]
    after = other._service.stats()["decoder"]

    drafted = grown(after, before, "drafted_1")
    return Line(
        text, drafts, batch, statistics.median(b / a for a, b in speeds), spent[0] / spent[1],
        statistics.median(a for a, _ in speeds), statistics.median(b for _, b in speeds),
        grown(after, before, "accepted_1") / drafted if drafted else float("nan"),
        grown(after, before, "output_tokens") / max(1, grown(after, before, "steps")), same,
    )  # fmt: skip


def memory(config: DecoderConfig, draft_tokens: int = 3) -> dict[str, int]:
    """State bytes of one running request: `replay` with the checkpoints that `auto` keeps, and `slots`."""
    base = DecoderOptions(dtype=torch.bfloat16, speculative="ngram", draft_tokens=draft_tokens)
    replay = ArenaLayout.of(config, base)
    slots = ArenaLayout.of(config, dataclasses.replace(base, spec_state="slots"))
    return {
        "slot": replay.slot_bytes,
        "ring": replay.ring_bytes,
        "checkpoints": len(AUTO_CHECKPOINTS) * replay.slot_bytes,
        "held_replay": replay.slot_bytes + replay.ring_bytes,
        "held_slots": slots.slots_per_seq * slots.slot_bytes,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables, then one line of JSON. Returns 1 if a target is missed or answers differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results")
    arguments = parser.parse_args(argv)
    options: dict[str, Any] = {
        "model": arguments.model, "threads": arguments.threads, "max_seqs": 8, "max_len": 1024, "dtype": "bfloat16",
    }  # fmt: skip
    texts = {
        "captions": captions(arguments.requests, again=False),
        "again": captions(arguments.requests, again=True),
        "noise": noise(arguments.requests),
    }
    lines: list[Line] = []
    with saccade.LocalClient(**options) as plain:
        for drafts in ("mtp", "ngram"):
            drafting = {"speculative": drafts, "draft_tokens": arguments.draft_tokens}
            with saccade.LocalClient(**options, **drafting) as other:
                for text, asks in texts.items():
                    for batch in (1, 8):
                        lines.append(compare(text, asks, plain, other, drafts, batch, arguments.rounds))
                        print(dataclasses.astuple(lines[-1]), file=sys.stderr)
    at = {(line.text, line.drafts, line.batch): line for line in lines}
    met = {
        "mtp_first_draft_0.6": at["captions", "mtp", 1].first_draft >= 0.6,
        "mtp_1.15_at_batch_1": at["captions", "mtp", 1].ratio >= 1.15,
        "noise_loses_at_most_3%": all(line.ratio >= SLOWEST for line in lines if line.text == "noise"),
    }
    held = {name: memory(config) for name, config in (("demo", _config(arguments.model)), ("nano-v2-12b", NANO_12B))}
    names = [field.name for field in dataclasses.fields(Line)]
    cells = [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in dataclasses.astuple(line)] for line in lines]
    print(show([names, *cells]))
    columns = list(next(iter(held.values())))
    print("\nbytes of states of one running request, K = 3")
    print(show([["model", *columns], *([name, *(str(of[c]) for c in columns)] for name, of in held.items())]))
    result = {
        "machine": machine.describe(),
        "load": machine.load(),
        "options": options | vars(arguments),
        "met": met,
        "lines": [dataclasses.asdict(line) for line in lines],
        "state_bytes": held,
    }
    if arguments.write:
        write_result("speculation", result)
    print(json.dumps(result))
    return 0 if all(met.values()) and all(line.same_answers for line in lines) else 1


def _config(model: str) -> DecoderConfig:
    return open_checkpoint(model).config.decoder


if __name__ == "__main__":
    sys.exit(main())
