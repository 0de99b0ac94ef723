"""Images and clips that cross processes and hosts: engine process, image workers, encoders elsewhere."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from pictures import picture
from qwen_checkpoint import IDS, make_qwen
from qwen_vision import random_tower, write_rules
from running import RunningEncoder, RunningServer
from tiny_checkpoint import VOCAB

import saccade

IMAGE = IDS["image_token_id"]
OPTIONS: dict[str, Any] = {"max_seqs": 4, "max_len": 400, "threads": 1, "dtype": "float32"}


def test_answers_are_the_same_wherever_images_are_encoded(tmp_path: Path) -> None:
    """In this process, behind the engine's process boundary, and by an encoder that a gRPC stream leads to."""
    rng = random.Random(4)
    tower = random_tower(rng)
    kinds = ["linear_attention", "full_attention", "full_attention"]
    make_qwen(tmp_path, 4, vision=tower, text={"num_hidden_layers": 3, "layer_types": kinds})
    write_rules(tmp_path, tower)
    words = [rng.randint(3, VOCAB - 8) for _ in range(12)]
    asked: dict[str, Any] = {
        "images": [picture(1, (40, 56)), picture(2, (64, 24))],
        "videos": [[picture(place, (40, 24)) for place in (3, 4, 5)]], "max_tokens": 24, "temperature": 0,
        "ignore_eos": True, "logit_bias": {IMAGE: -1e9}, "logprobs": 1,
    }  # fmt: skip
    ids = [*words[:3], IMAGE, *words[3:6], IMAGE, *words[6:8], IMAGE, *words[8:], IMAGE, 5]
    with saccade.LocalClient(tmp_path, **OPTIONS) as client:
        here = client.generate(ids, **asked)
    assert here.usage.image_tokens and here.usage.video_tokens
    with RunningServer(str(tmp_path), **OPTIONS) as server, saccade.Client(server.address) as client:
        apart = client.generate(ids, **asked)
    with (
        RunningEncoder(str(tmp_path)) as encoder,
        RunningServer(str(tmp_path), role="decoder", encoders=(encoder.address,), **OPTIONS) as server,
        saccade.Client(server.address) as client,
    ):
        remote = client.generate(ids, **asked)
    for other in (apart, remote):
        assert other.token_ids == here.token_ids
        assert other.usage.prompt_tokens == here.usage.prompt_tokens
        for found, wanted in zip(other.logprobs or (), here.logprobs or (), strict=True):
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)


def test_a_pruning_rate_is_refused_before_anything_starts(tmp_path: Path) -> None:
    tower = random_tower(random.Random(1))
    make_qwen(tmp_path, 1, vision=tower)
    write_rules(tmp_path, tower)
    with pytest.raises(saccade.SaccadeError, match="video_pruning_rate 0.5: this model's clips are not pruned"):
        saccade.LocalClient(tmp_path, video_pruning_rate=0.5, **OPTIONS)
