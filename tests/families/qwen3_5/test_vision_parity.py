"""From image and clip files to log-probabilities, through the real engine: against transformers in float32."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import NATIVE
from images import png
from preempted import check_preempted, run_starts
from qwen_checkpoint import IDS, make_qwen
from qwen_vision import image_processor, random_tower, video_pixels, write_rules
from speculation import pairwise
from tiny_checkpoint import VOCAB, TinyCheckpoint
from tiny_decoder import image

import saccade
from decoder.config import DecoderOptions
from decoder.runner import DecoderRunner
from encoder.images import decode_image
from encoder.runner import EncoderOptions, EncoderRunner
from families.qwen3_5.vision import QwenVision
from service.model.checkpoint import Checkpoint

SEEDS = 24
GREEDY = 16
IMAGE, VIDEO = IDS["image_token_id"], IDS["video_token_id"]
NEVER = {IMAGE: -1e9, VIDEO: -1e9}
"""In an answer the oracle would take one of these for one more image."""


OPTIONS = pairwise(
    {
        "native": NATIVE,
        "graphs": ["off", "on"],
        "max_chunk": [None, 7],
        "state_cache": ["none", "align", "all", "auto"],
        "speculative": ["none", "ngram", "mtp"],
        "spec_state": ["replay", "slots"],
    }
)


@dataclass
class Asked:
    """A prompt with its media, and the oracle's inputs for it."""

    ids: list[int]
    """With one placeholder for each image and each temporal patch of the clip."""
    files: list[bytes]
    clip: list[bytes]
    """Its frames; empty for no clip."""
    widened: list[int]
    kinds: list[int]
    inputs: dict[str, Any]


def ask(rng: random.Random, config: QwenVision, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """0 to 3 images of different shapes, and in a third of all cases a clip."""
    files = [png(rng.randint(0, 999)) for _ in range(rng.randint(0, 3))]
    frames = rng.choice([0, 0, 1, 2, 5])
    clip = [png(rng.randint(0, 999), (40, 24)) for _ in range(frames)]
    inputs: dict[str, Any] = {}
    tokens: list[tuple[int, int]] = []
    if files:
        images = [decode_image(file).numpy() for file in files]
        made = image_processor(config)(images=images, return_tensors="pt")
        inputs |= {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
        tokens += [(1, int(grid.prod()) // 4) for grid in made["image_grid_thw"]]
    if clip:
        decoded = [decode_image(frame) for frame in clip]
        pixels, grid = video_pixels(config, decoded if len(decoded) > 1 else decoded * 2, monkeypatch)
        inputs |= {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([grid])}
        tokens += [(2, grid[1] * grid[2] // 4)] * grid[0]

    def words(least: int, most: int) -> list[int]:
        return [rng.randint(3, VOCAB - 8) for _ in range(rng.randint(least, most))]

    ids = words(0, 40)
    widened, kinds = list(ids), [0] * len(ids)
    for kind, count in tokens:
        ids.append(IMAGE)
        widened += [IMAGE if kind == 1 else VIDEO] * count
        kinds += [kind] * count
        between = words(1, 12)
        ids, widened, kinds = ids + between, widened + between, kinds + [0] * len(between)
    if not ids:
        ids, widened, kinds = [5], [5], [0]
    return Asked(ids, files, clip, widened, kinds, inputs)


@torch.no_grad()
def oracle(tiny: TinyCheckpoint, asked: Asked, more: list[int]) -> torch.Tensor:
    """Logits of the prompt's last token and of the tokens of `more`."""
    kinds = torch.tensor([asked.kinds + [0] * len(more)])
    found = tiny.model(
        input_ids=torch.tensor([asked.widened + more]), mm_token_type_ids=kinds, use_cache=False, **asked.inputs
    ).logits[0]
    return found[len(asked.widened) - 1 :].float()


def compare(answer: saccade.Generation, logits: torch.Tensor) -> None:
    """Within 1e-4 of the logits' scale; each token is the oracle's choice if that has a margin."""
    expected = torch.log_softmax(logits, -1)
    found = torch.empty_like(expected)
    assert answer.logprobs is not None
    for row, entry in zip(found, answer.logprobs, strict=True):
        for top in entry.top:
            row[top.token_id] = top.logprob
    scale = max(float(logits.abs().max()), 1.0)
    error = float((found - expected).abs().max())
    assert error <= 1e-4 * scale, f"log-probabilities differ by {error} at a scale of {scale}"
    logits[:, [IMAGE, VIDEO]] = -torch.inf
    for place, (token, row) in enumerate(zip(answer.token_ids, logits, strict=True)):
        margin = float(row.max() - row[token])
        assert margin <= 10 * error, f"token {place} is {token}, {margin} below the oracle's choice"


def made(path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[TinyCheckpoint, QwenVision, Asked]:
    """A model with at least one layer that reads positions, and a prompt."""
    rng = random.Random(seed)
    tower = random_tower(rng)
    kinds = [rng.choice(["linear_attention", "full_attention"]) for _ in range(rng.randint(0, 3))]
    kinds.insert(rng.randint(0, len(kinds)), "full_attention")
    tiny = make_qwen(path, seed, vision=tower, mtp=True, text={"num_hidden_layers": len(kinds), "layer_types": kinds})
    write_rules(path, tower)
    config = Checkpoint(path).config.vision
    assert isinstance(config, QwenVision)
    return tiny, config, ask(rng, config, monkeypatch)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_logits_and_greedy_tokens(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, and then the same with another question: what is cached of the first gives the same result, images
    included."""
    tiny, _, asked = made(tmp_path, seed, monkeypatch)
    chosen = OPTIONS[seed % len(OPTIONS)]
    options: dict[str, Any] = {"max_seqs": 4, "max_len": 400, "threads": 1, "dtype": "float32", **chosen}
    if chosen["state_cache"] in ("align", "all"):
        options["state_block"] = 16
    common: dict[str, Any] = {
        "max_tokens": GREEDY, "temperature": 0, "ignore_eos": True, "logit_bias": NEVER, "logprobs": VOCAB,
        "images": asked.files, "videos": [asked.clip] if asked.clip else [],
    }  # fmt: skip
    with saccade.LocalClient(tmp_path, **options) as client:
        answer = client.generate(asked.ids, **common)
        assert answer.usage.prompt_tokens == len(asked.widened)
        compare(answer, oracle(tiny, asked, answer.token_ids[:-1]))
        more = [7, 11, 13]
        asked.ids += more
        asked.widened += more
        asked.kinds += [0] * len(more)
        answer = client.generate(asked.ids, **common)
        compare(answer, oracle(tiny, asked, answer.token_ids[:-1]))
        if chosen["state_cache"] == "auto" and len(asked.widened) > 40:
            assert answer.usage.cached_tokens > 0


STEPS = pairwise(
    {
        "native": NATIVE,
        "graphs": ["off", "on"],
        "max_chunk": [None, 24],
        "state_cache": ["none", "align", "auto"],
        "speculative": ["none", "ngram", "mtp"],
        "spec_state": ["replay", "slots"],
        "preempt_every": [9, 14],
        "host_bytes": [0, 2**24],
        "overlap": ["off", "on"],
    }
)


@pytest.mark.parametrize("place", range(len(STEPS)))
def test_positions_survive_whatever_happens_to_a_request(
    tmp_path: Path, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts with the same images, several samples of one of them, preempted all the time, swapped or recomputed:
    tokens equal transformers'."""
    tiny, vision, asked = made(tmp_path, 100 + place, monkeypatch)
    checkpoint = Checkpoint(tmp_path)
    tower = EncoderRunner(
        vision, EncoderOptions(dtype=torch.float32, graphs="off", native="off"), checkpoint.vision_weights()
    )
    items = [vision.image_rule.patchify(decode_image(file), torch.float32) for file in asked.files]
    if asked.clip:
        items.append(vision.video_rule.patchify([decode_image(frame) for frame in asked.clip], torch.float32))
    rows = [torch.empty(item.tokens, vision.row_width) for item in items]
    tower.encode(items, rows)
    sequences = [
        (item.grid, part) for item, found in zip(items, rows) for part in found.split(item.sequence_tokens)
    ]  # fmt: skip
    starts = run_starts(asked.kinds)
    blocks = [(start, grid) for start, (grid, _) in zip(starts, sequences, strict=True)]
    chosen = dict(STEPS[place])
    preempt_every = chosen.pop("preempt_every")
    block = {"state_block": 64} if chosen["state_cache"] == "align" else {}
    common = {"max_seqs": 3, "max_len": 256, "max_batched_tokens": 64, "page_size": 4, "draft_policy": "fixed"}
    options = DecoderOptions(**{**common, **block, **chosen})
    runner = DecoderRunner(checkpoint.config.decoder, options, checkpoint.decoder_weights())

    def logits_of(prompt: list[int], drawn: list[int]) -> torch.Tensor:
        kinds = asked.kinds + [0] * (len(prompt) - len(asked.widened))
        return oracle(tiny, replace(asked, widened=prompt, kinds=kinds), drawn)

    check_preempted(
        runner, asked.widened, [image(start, part) for start, (_, part) in zip(starts, sequences, strict=True)],
        {IMAGE, VIDEO}, logits_of, preempt_every=preempt_every, steps=2 * GREEDY,
        positions_of=lambda prompt: vision.positions(prompt, blocks),
    )  # fmt: skip
