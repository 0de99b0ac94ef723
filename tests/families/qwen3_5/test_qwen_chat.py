"""Conversations with files of images and frames through the real server, against transformers from end to end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from images import png
from qwen_checkpoint import make_qwen
from qwen_prompt import SPECIAL, processor, processor_ids, write_prompting
from qwen_vision import image_processor, random_tower, video_pixels, write_rules

import saccade
from encoder.images import decode_image
from families.qwen3_5.vision import QwenVision
from service.model.modelconfig import load_config

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
ANSWER = 12


@pytest.mark.parametrize("seed", range(3))
def test_a_conversation_with_an_image_and_a_clip(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids of the messages, and greedy tokens of two samples; then a follow-up, which begins where the first answer
    ended."""
    tokenizer = write_prompting(tmp_path)
    names = zip(("vision_start", "vision_end", "image", "video"), SPECIAL[3:], strict=True)
    ids = {f"{name}_token_id": int(tokenizer.convert_tokens_to_ids(token)) for name, token in names}
    tower = random_tower(random.Random(seed))
    shape = {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "max_position_embeddings": 2048}
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    tiny = make_qwen(tmp_path, seed, vision=tower, text=shape | kinds, ids=ids, tied=False)
    write_rules(tmp_path, tower)
    vision = load_config(tmp_path).vision
    assert isinstance(vision, QwenVision)
    still, frames = png(seed), [png(10 + n, (40, 24)) for n in range(3)]

    made = image_processor(vision)(images=[decode_image(still).numpy()], return_tensors="pt")
    pixels, grid = video_pixels(vision, [decode_image(frame) for frame in frames], monkeypatch)
    inputs = {
        "pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"],
        "pixel_values_videos": pixels, "video_grid_thw": torch.tensor([grid]),
    }  # fmt: skip
    clip = {"grid": grid, "fps": None, "indices": range(len(frames))}
    [[_, *image]] = made["image_grid_thw"].tolist()

    def expected(messages: list[dict[str, Any]]) -> list[int]:
        text = tokenizer.apply_chat_template(
            messages, tools=TOOLS, enable_thinking=False, add_generation_prompt=True, tokenize=False
        )
        return processor_ids(processor(tokenizer), text, [(image[0], image[1])], [clip])

    @torch.no_grad()
    def greedy(prompt: list[int], drawn: list[int]) -> torch.Tensor:
        whole = torch.tensor([prompt + drawn[:-1]])
        kinds = (whole == ids["image_token_id"]).long() + 2 * (whole == ids["video_token_id"]).long()
        return tiny.model(input_ids=whole, mm_token_type_ids=kinds, use_cache=False, **inputs).logits[
            0, len(prompt) - 1 :
        ]

    content: list[dict[str, Any]] = [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "what is naïve?"}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": content}]
    given: dict[str, Any] = {
        "images": [still], "videos": [frames], "chat_template_kwargs": {"tools": TOOLS, "enable_thinking": False}
    }  # fmt: skip
    never = {ids[name]: -1e9 for name in ("image_token_id", "video_token_id")}
    with saccade.LocalClient(tmp_path, max_seqs=2, max_len=1024, threads=1, dtype="float32", graphs="off") as client:
        for turn in range(2):
            prompt = expected(messages)
            assert client.tokenize(messages, **given).prompt_tokens == len(prompt)
            how: dict[str, Any] = {"max_tokens": ANSWER, "ignore_eos": True, "logit_bias": never, **given}
            answer = client.generate(messages, temperature=0, logprobs=1, n=2, **how)
            assert [sample.token_ids for sample in answer.samples] == [answer.token_ids] * 2
            drawn = client.generate(messages, temperature=1, seed=turn, n=2, **how)
            assert drawn.samples[0].token_ids == client.generate(messages, temperature=1, seed=turn, **how).token_ids
            logits = greedy(prompt, answer.token_ids)
            scale = max(1.0, float(logits.abs().max()))
            rows = torch.log_softmax(logits, -1)
            logits[:, list(never)] = -torch.inf
            assert answer.logprobs is not None and len(answer.token_ids) == ANSWER
            for row, raw, entry in zip(rows, logits, answer.logprobs, strict=True):
                assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4 * scale)
                assert float(raw.max() - raw[entry.token_id]) <= 1e-4 * scale
            assert (answer.usage.cached_tokens > 0) == (turn > 0)
            messages += [{"role": "assistant", "content": "seen"}, {"role": "user", "content": "and now?"}]
