"""Checks of families that cut large images into slices, against transformers in float32."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import encoded
from minicpm import Media, assert_greedy, random_image
from PIL import Image
from running import RunningEncoder, RunningServer

import saccade
from encoder.item import EncoderItem
from encoder.runner import EncoderOptions, EncoderRunner
from families import VisionSpec
from service.answers.prompts import prompt_ids, widen
from service.common.types import ChatInput, GenerateSpec, Message, RawInput, TokensInput
from service.engine.types import EngineInfo
from service.media.prepared import PreparedItem
from service.model.assets import ModelAssets
from service.model.checkpoint import Checkpoint
from service.model.modelconfig import load_config

INFO = EngineInfo("tiny", "", 4096, 2, 4096, "float32")
Content = list[Image.Image | str]


def pieces(images: Sequence[Image.Image], words: Sequence[str]) -> Content:
    """At most as many images as there are words less one, and the words, alternately."""
    padded = [*images, *(None,) * (len(words) - 1)]
    return [part for pair in zip(padded, words) for part in pair if part is not None]


def pixels_of(image: Image.Image) -> torch.Tensor:
    """`[H, W, 3]` uint8."""
    return torch.from_numpy(np.array(image))


def prepared(vision: VisionSpec | None, media: Sequence[Media], *, keep_bytes: bool = False) -> list[PreparedItem]:
    """As an image worker makes them, in the order of the media."""
    assert vision is not None
    items = []
    for item in media:
        if isinstance(item, list):
            assert (rule := vision.video_rule) is not None
            clip = rule.patchify(item, torch.float32, keep_bytes=keep_bytes)
            items.append(PreparedItem(clip, field="videos", frames=len(item), labels=tuple(rule.labels(len(item)))))
        else:
            image = vision.image_rule.patchify(pixels_of(item), torch.float32, keep_bytes=keep_bytes)
            items.append(PreparedItem(image, field="images"))
    return items


def check_answers(
    tiny: Any, content: Content, inputs: dict[str, Any], *, rng: random.Random, graphs: bool, tokens: int
) -> None:
    """Greedy answers and log-probabilities of one user message, with the images as files, are those of transformers for
    the released processor's `inputs`; the second time from the caches."""
    parts = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": encoded(part)}
        for part in content
    ]
    image_token, ids = tiny.model.config.image_token_id, torch.as_tensor(inputs["input_ids"]).flatten().tolist()
    options: dict[str, Any] = {"max_chunk": rng.choice([None, 7]), "graphs": "on" if graphs else "off"}
    with saccade.LocalClient(tiny.path, dtype="float32", max_seqs=2, max_len=2048, threads=1, **options) as client:
        for _ in range(2):
            answer = client.generate(
                [{"role": "user", "content": parts}], max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=20,
                logit_bias={image_token: -1e9},
            )  # fmt: skip
            assert answer.usage.prompt_tokens == len(ids)
            assert answer.usage.image_tokens == ids.count(image_token)
            logits = tiny.logits(ids + answer.token_ids[:-1], inputs)[len(ids) - 1 :]
            assert_greedy(answer, logits, [image_token])
    attends = "full_attention" in tiny.model.config.text_config.layer_types  # prefixes of others are not kept
    images = any(part["type"] == "image" for part in parts)
    assert answer.usage.cached_tokens > 0 or not images or not attends


def check_prompts(tiny: Any, content: Content, text: str, media: Sequence[PreparedItem], ids: list[int]) -> None:
    """The ids of a prompt given as a message, as its text, and as token ids, are `ids`."""
    config = load_config(tiny.path)
    assets = ModelAssets(config, config.vision)

    def widened(form: ChatInput | RawInput | TokensInput) -> Any:
        return widen(prompt_ids(GenerateSpec("", "", form), media, assets), media, 0, assets, INFO)

    chat = ChatInput((Message("user", tuple(part if isinstance(part, str) else None for part in content)),))
    each = TokensInput(tuple(tiny.processor.tokenizer(text)["input_ids"]))
    for form in (chat, RawInput(text), each):
        prompt = widened(form)
        assert prompt.ids == ids
    # with a token for each slice, as `tokenize` gives them
    assert widened(TokensInput(prompt.narrow_ids)).ids == prompt.ids


def check_rows(
    tiny: Any, vision: VisionSpec, given: Sequence[EncoderItem], *, max_images: int, tolerance: float
) -> None:
    """Rows of items that are encoded together or alone, eagerly or by graphs, are those of transformers within
    `tolerance` of their scale."""
    expected, weights = [tiny.rows(item) for item in given], list(Checkpoint(tiny.path).vision_weights())
    for graphs, budgets in (("off", None), ("on", None), ("on", (vision.min_image_tokens, vision.max_image_tokens))):
        options = EncoderOptions(dtype=torch.float32, graphs=graphs, token_budgets=budgets, max_images=max_images)
        runner = EncoderRunner(vision, options, weights)
        out = [torch.empty(item.tokens, vision.row_width) for item in given]
        assert runner.encode(given, out) == [item.sequence_tokens for item in given]
        alone = [torch.empty_like(rows) for rows in out]
        for item, rows in zip(given, alone):
            runner.encode([item], [rows])
        for found, single, rows in zip(out, alone, expected):
            scale = float(rows.abs().max())
            assert float((found - rows).abs().max()) <= tolerance * scale
            assert float((found - single).abs().max()) <= 1e-5 * scale


def check_bytes(path: Path, vision: VisionSpec, prepared: Callable[..., Sequence[PreparedItem]]) -> None:
    """The tower makes the same numbers of bytes as the image rule. `prepared`: images -> items, with `keep_bytes`."""
    tower = vision.build(Checkpoint(path).vision_weights(), dtype=torch.float32, device=torch.device("cpu"))
    image = random_image(random.Random(5))
    (floats,), (kept,) = prepared([image]), prepared([image], keep_bytes=True)
    assert kept.encoder_item.patches.dtype == torch.uint8
    assert torch.equal(tower.as_floats(kept.encoder_item.patches), floats.encoder_item.patches)


def check_same_answer(answer: saccade.Generation, expected: saccade.Generation, *usage: str) -> None:
    """Tokens and log-probabilities are equal, and these counts, which are above 0."""
    assert answer.token_ids == expected.token_ids
    for found, wanted in zip(answer.logprobs or (), expected.logprobs or (), strict=True):
        assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
    for name in usage:
        assert getattr(answer.usage, name) == getattr(expected.usage, name) > 0


def check_between_hosts(client: saccade.LocalClient, path: Path, prompt: Any, *usage: str, **media: Any) -> None:
    """A server whose encoder is in another one answers as `client` does, which has the same model."""
    common: dict[str, Any] = {**media, "max_tokens": 8, "temperature": 0.0, "logprobs": 1}
    expected = client.generate(prompt, **common)
    with ExitStack() as stack:
        encoder = stack.enter_context(RunningEncoder(str(path), graphs="off"))
        elsewhere: dict[str, Any] = {"role": "decoder", "encoders": (encoder.address,)}
        server = stack.enter_context(RunningServer(str(path), max_len=2048, max_seqs=2, **elsewhere))
        remote = stack.enter_context(saccade.Client(server.address))
        answer = remote.generate(prompt, **common)
    check_same_answer(answer, expected, *usage)


def check_least_handoff(path: Path, vision: VisionSpec, size: tuple[int, int]) -> None:
    """A handoff of as many bytes as errors ask for answers the smallest image, of height and width `size`."""
    options: dict[str, Any] = {"threads": 1, "max_seqs": 1, "graphs": "off"}
    with pytest.raises(saccade.errors.InvalidArgument, match="handoff_bytes: 1 holds 0 image tokens") as refused:
        saccade.LocalClient(path, handoff_bytes=1, **options)
    least = int(re.findall(r"at least (\d+) would work", str(refused.value))[0])
    with saccade.LocalClient(path, handoff_bytes=least, **options) as client:
        file = encoded(Image.new("RGB", size[::-1]))
        assert client.generate("?", images=[file], max_tokens=1).usage.image_tokens == vision.min_image_tokens
