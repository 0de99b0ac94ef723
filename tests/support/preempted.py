"""The check that prompts with media have an oracle's answers while they are preempted again and again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import pytest
import torch
from tiny_decoder import FakeSource, greedy_params, image, run, tokens
from torch import Tensor

from decoder.config import DecoderOptions
from decoder.request import DecoderRequest
from decoder.runner import DecoderRunner
from service.model.checkpoint import Checkpoint


def run_starts(inside: Sequence[object]) -> list[int]:
    """The index at which each run of true values begins."""
    return [index for index, here in enumerate(inside) if here and not (index and inside[index - 1])]


def check_preempted(
    runner: DecoderRunner, ids: list[int], sources: Sequence[FakeSource], placeholders: Set[int],
    logits_of: Callable[[list[int], list[int]], Tensor], *, preempt_every: int, steps: int,
    positions_of: Callable[[list[int]], Any] = lambda prompt: None,
) -> None:  # fmt: skip
    """Two prompts that begin with `ids` and the same media run at a time, then another; `preempt_every` as in `run`.

    `sources`: the rows of each run of placeholders. `logits_of`: (prompt, tokens drawn after it) -> the oracle's logits
    of the token after the prompt and of those after each drawn token, `[1 + drawn, vocabulary]`. A request that draws a
    placeholder is not compared, since the oracle would need one more image.
    """
    for names in (("first", "second"), ("third",)):
        prompts = {name: ids + [7 + len(name)] * len(name) for name in names}
        requests = [
            DecoderRequest(
                name, prompt, greedy_params(steps, logprobs=3), tuple(source.again() for source in sources),
                positions=positions_of(prompt),
            )
            for name, prompt in prompts.items()
        ]  # fmt: skip
        found = run(runner, *requests, preempt_every=preempt_every)
        for name, prompt in prompts.items():
            drawn = tokens(found[name])
            if placeholders & set(drawn):
                continue
            logits = logits_of(prompt, drawn[:-1])
            scale = max(1.0, float(logits.abs().max()))
            for row, event in zip(torch.log_softmax(logits, -1), found[name], strict=True):
                assert event.logprob == pytest.approx(float(row[event.token_id]), abs=1e-4 * scale)
                assert float(row.max() - row[event.token_id]) <= 1e-4 * scale
    runner.check_integrity()


def check_rows_preempted(
    checkpoint: Checkpoint, ids: list[int], rows: Tensor, placeholders: Set[int],
    logits_of: Callable[[list[int]], Tensor], chosen: Mapping[str, Any], steps: int,
) -> None:  # fmt: skip
    """`check_preempted` for a model without positions of its own.

    `rows`: those of all runs of placeholders, one after another. `logits_of`: ids -> the oracle's logits of each.
    `chosen`: options of the decoder, and `preempt_every`.
    """
    inside = [*(token in placeholders for token in ids), False]
    starts = run_starts(inside)
    lengths = [inside.index(False, start) - start for start in starts]
    sources = [image(start, part) for start, part in zip(starts, rows.split(lengths), strict=True)]
    settings = {"max_seqs": 3, "max_len": 1024, "max_batched_tokens": 64, "page_size": 4, **chosen}
    preempt_every = settings.pop("preempt_every")
    runner = DecoderRunner(checkpoint.config.decoder, DecoderOptions(**settings), checkpoint.decoder_weights())
    check_preempted(
        runner, ids, sources, placeholders, lambda prompt, drawn: logits_of(prompt + drawn)[len(prompt) - 1 :],
        preempt_every=preempt_every, steps=steps,
    )  # fmt: skip
