"""Savings of the prefix cache: one image with ten questions, and one long system prompt with ten users.

    python -m benchmarks.prefix_cache [--family qwen3_5] [--state-cache auto] [--folder DIR] [--write]

Both use `saccade.LocalClient` on a small random model of the family, greedily, one request at a time. Target: from the
second request on, the engine computes at most 16 prompt tokens in addition to those that no earlier request had, and
the image is encoded once. A chat template shows where the system prompt ends; without one the cache learns it from the
second request, and the target applies from the third. Computed tokens are counted by the engine, not derived from its
cache statistics.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import saccade
from benchmarks import machine, models, qwen_model
from benchmarks.noise import noise_png
from benchmarks.record import add_options, show, write_result

SYSTEM_TOKENS = 1700
ANSWER = 8
SIDE = 448
"""Sides of the image, in pixels."""
ALLOWANCE = 16


@dataclasses.dataclass(frozen=True)
class Line:
    """One request. `own`: number of its tokens that no earlier request had."""

    number: int
    prompt: int
    own: int
    cached: int
    computed: int
    encoded: int
    first_token_ms: float


@dataclasses.dataclass(frozen=True)
class Model:
    """The parts of prompts for a model family."""

    write: Callable[[Path], Path]
    image: tuple[int, ...]
    """Token ids that stand for an image in a prompt."""
    chat: bool = False
    """Whether the model has a chat template, which shows where a system prompt ends."""


FAMILIES = {
    "nemotron_h_omni": Model(models.omni_model, (models.IMAGE_TOKEN,)),
    "qwen3_5": Model(qwen_model.small_qwen_model, qwen_model.SMALL_IMAGE, chat=True),
}


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, min(models.VOCAB, qwen_model.SMALL_WORDS) - 10) for _ in range(count)]


def ask(client: saccade.LocalClient, number: int, prompt: Any, own: int, images: Sequence[bytes] = ()) -> Line:
    """Sends one request and returns the engine's counts for it."""
    before = client._service.stats()
    started, first = time.perf_counter(), 0.0
    stream = client.stream(prompt, images=list(images), max_tokens=ANSWER, temperature=0, ignore_eos=True)
    for _ in stream:
        first = first or time.perf_counter() - started
    usage, after = stream.final().usage, client._service.stats()
    computed = after["decoder"]["batched_tokens"] - before["decoder"]["batched_tokens"] - (ANSWER - 1)
    encoded = (after["encoder"]["images"] - before["encoder"]["images"]) if images else 0
    return Line(number, usage.prompt_tokens, own, usage.cached_tokens, computed, encoded, 1e3 * first)


def same_image(client: saccade.LocalClient, image_ids: Sequence[int], count: int = 10) -> list[Line]:
    """The same image each time, followed by a different question."""
    rng, image = random.Random(1), noise_png(random.Random(0), SIDE, SIDE)
    lead = [*words(rng, 12), *image_ids]
    lines = []
    for number in range(1, count + 1):
        question = words(rng, rng.randint(8, 40))
        lines.append(ask(client, number, lead + question, len(question), [image]))
    return lines


def system_prompt(client: saccade.LocalClient, *, chat: bool, count: int = 10) -> list[Line]:
    """1,700 shared tokens, then tokens of one user; as messages if the model has a chat template."""
    rng = random.Random(2)
    shared = words(rng, SYSTEM_TOKENS)
    lines = []
    for number in range(1, count + 1):
        own = words(rng, rng.randint(20, 90))
        messages = [
            {"role": role, "content": " ".join(f"w{word}" for word in of)}
            for role, of in (("system", shared), ("user", own))
        ]
        lines.append(ask(client, number, messages if chat else shared + own, len(own)))
    return lines


def table(title: str, lines: Sequence[Line]) -> str:
    names = [field.name for field in dataclasses.fields(Line)]
    rows = [names, *([f"{v:.0f}" for v in dataclasses.astuple(line)] for line in lines)]
    return f"{title}\n{show(rows)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints both tables, then one line of JSON. Returns 1 if a target is missed under `auto`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="nemotron_h_omni", choices=sorted(FAMILIES))
    parser.add_argument("--state-cache", default="auto", choices=("none", "align", "all", "auto"))
    add_options(parser)
    arguments = parser.parse_args(argv)
    model = FAMILIES[arguments.family]
    path = model.write(arguments.folder)
    options: dict[str, Any] = {"state_cache": arguments.state_cache, "max_seqs": 4, "max_len": 2048, "threads": 1}
    with saccade.LocalClient(str(path), **options) as client:
        images, shared = same_image(client, model.image), system_prompt(client, chat=model.chat)
        decoder = client._service.stats()["decoder"]
    met = {
        "questions": all(line.computed <= line.own + ALLOWANCE for line in images[1:]),
        "encoded_once": sum(line.encoded for line in images) == 1,
        # Token ids do not show where the system prompt ends; the second request does.
        "system_prompt_hits": all(line.computed <= line.own + ALLOWANCE for line in shared[1 if model.chat else 2 :]),
    }
    print(table("same image, ten questions", images), table("1,700 shared tokens", shared), sep="\n\n")
    result = {
        "family": arguments.family,
        "machine": machine.describe(),
        "load": machine.load(),
        "options": options,
        "met": met,
        "same_image": [dataclasses.asdict(line) for line in images],
        "system_prompt": [dataclasses.asdict(line) for line in shared],
        "decoder": {name: value for name, value in decoder.items() if name.startswith("cache_")},
    }
    if arguments.write:
        family = "" if arguments.family == "nemotron_h_omni" else f"-{arguments.family}"
        write_result(f"prefix-cache{family}-{arguments.state_cache}", result)
    print(json.dumps(result))
    return 0 if all(met.values()) or arguments.state_cache != "auto" else 1


if __name__ == "__main__":
    sys.exit(main())
