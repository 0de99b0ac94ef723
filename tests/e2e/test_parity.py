"""The whole path against transformers in fp32, on random tiny models: from image files to log-probabilities."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from images import png
from tiny_checkpoint import IMAGE_TOKEN, VOCAB, TinyCheckpoint, make_checkpoint, oracle_images

import saccade

PATTERNS = [
    "M", "*", "-", "E", "M*", "*M", "MM", "**", "ME", "M-", "*E", "*-", "-*", "EM", "M*-E", "ME*-", "MM*M", "M-M*-",
    "*-*E", "EME*M", "M*M*", "E-E", "MEME*E", "-M-", "**M",
]  # fmt: skip
GREEDY = 32


def build(tmp_path: Path, seed: int) -> tuple[TinyCheckpoint, list[int], list[bytes]]:
    """Model, prompt ids with one image token per image, and the images, all from one seed."""
    rng = random.Random(1000 + seed)
    vision = seed % 4 != 3
    tiny = make_checkpoint(
        tmp_path, seed, vision=vision, naming=rng.choice(["released", "native"]), mtp=vision and rng.random() < 0.3,
        text={"pattern": PATTERNS[seed % len(PATTERNS)]},
    )  # fmt: skip
    count = rng.randint(0, 3) if vision else 0
    ids = [rng.randint(3, VOCAB - 2) for _ in range(rng.randint(1, 200))]
    for _ in range(count):
        ids.insert(rng.randint(0, len(ids)), IMAGE_TOKEN)
    return tiny, ids, [png(seed * 10 + i) for i in range(count)]


@pytest.mark.parametrize("seed", range(len(PATTERNS)))
def test_logits_greedy_tokens_and_logprobs(tmp_path: Path, seed: int) -> None:
    tiny, ids, files = build(tmp_path, seed)
    with saccade.LocalClient(tmp_path, dtype="float32", max_seqs=2, max_len=512, threads=1) as client:
        # the oracle would treat an image token in the answer as one more image, so it must not be drawn
        answer = client.generate(
            ids, images=files, max_tokens=GREEDY, temperature=0, ignore_eos=True, logprobs=VOCAB,
            logit_bias={IMAGE_TOKEN: -1e9},
        )  # fmt: skip
    images = oracle_images(tmp_path, files) if files else []
    sizes = iter(images)
    widened = [i for token in ids for i in ([token] * next(sizes).tokens if token == IMAGE_TOKEN else [token])]
    assert answer.usage.prompt_tokens == len(widened)
    assert answer.usage.image_tokens == sum(image.tokens for image in images)
    # one forward pass over the generated tokens gives the oracle's logits for each position
    oracle = tiny.logits(widened + answer.token_ids[:-1], [(i.grid, i.patches) for i in images])[len(widened) - 1 :]
    expected = torch.log_softmax(oracle, -1)
    assert answer.logprobs is not None
    found = torch.empty_like(expected)
    for row, entry in zip(found, answer.logprobs, strict=True):
        for token, logprob in entry.top:
            row[token] = logprob
    scale = max(float(oracle.abs().max()), 1.0)
    error = float((found - expected).abs().max())
    assert error <= 1e-4 * scale, f"log-probabilities differ by {error} at a scale of {scale}"
    oracle[:, IMAGE_TOKEN] = -torch.inf
    for place, (token, row) in enumerate(zip(answer.token_ids, oracle, strict=True)):
        margin = float(row.max() - row[token])
        assert margin <= 10 * error, f"token {place} is {token}, {margin} below the oracle's choice"
        assert abs(answer.logprobs[place].logprob - float(expected[place, token])) <= 1e-3
