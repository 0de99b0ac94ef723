"""Images and clips across processes and hosts: image workers, the engine's wire format, remote encoders."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clips import animation, moving_frames
from images import png
from qwen_checkpoint import IDS, make_qwen
from qwen_vision import random_tower, write_rules
from running import RunningEncoder, RunningServer
from tiny_checkpoint import VOCAB

import saccade
from encoder.frames import open_video

IMAGE = IDS["image_token_id"]
OPTIONS: dict[str, Any] = {"max_seqs": 4, "max_len": 400, "threads": 1, "dtype": "float32", "graphs": "off"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found, tower = tmp_path_factory.mktemp("model"), random_tower(random.Random(4))
    kinds = ["linear_attention", "full_attention", "full_attention"]
    make_qwen(found, 4, vision=tower, text={"num_hidden_layers": 3, "layer_types": kinds})
    write_rules(found, tower)
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with RunningServer(str(folder), **OPTIONS, image_workers=1) as server:
        yield server


def test_answers_are_the_same_wherever_images_are_encoded(folder: Path, server: RunningServer) -> None:
    """Prepared in this process, by image workers, and encoded behind a gRPC stream."""
    rng = random.Random(4)
    words = [rng.randint(3, VOCAB - 8) for _ in range(12)]
    asked: dict[str, Any] = {
        "images": [png(1, (40, 56)), png(2, (64, 24))],
        "videos": [[png(place, (40, 24)) for place in (3, 4, 5)]], "max_tokens": 24, "temperature": 0,
        "ignore_eos": True, "logit_bias": {IMAGE: -1e9}, "logprobs": 1,
    }  # fmt: skip
    ids = [*words[:3], IMAGE, *words[3:6], IMAGE, *words[6:8], IMAGE, *words[8:], IMAGE, 5]
    with saccade.LocalClient(folder, **OPTIONS) as client:
        here = client.generate(ids, **asked)
    assert here.usage.image_tokens and here.usage.video_tokens
    with saccade.Client(server.address) as client:
        apart = client.generate(ids, **asked)
    with (
        RunningEncoder(str(folder)) as encoder,
        RunningServer(str(folder), role="decoder", encoders=(encoder.address,), **OPTIONS) as decoder,
        saccade.Client(decoder.address) as client,
    ):
        remote = client.generate(ids, **asked)
    for other in (apart, remote):
        assert other.token_ids == here.token_ids
        assert other.usage.prompt_tokens == here.usage.prompt_tokens
        for found, wanted in zip(other.logprobs or (), here.logprobs or (), strict=True):
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)


@pytest.mark.parametrize(("form", "taken"), [("GIF", [0, 2, 4, 7, 9]), ("PNG", [0, 2, 4, 7, 9])])
def test_frames_of_a_file_are_taken_at_the_model_s_rate(server: RunningServer, form: str, taken: list[int]) -> None:
    """By an image worker, for ten frames at four per second: as if five of them had been sent."""
    file = animation(moving_frames(10, 40, 24), form)
    frames = [frame.numpy() for frame in open_video(file).frames(range(10))]
    asked: dict[str, Any] = {
        "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logit_bias": {IMAGE: -1e9}, "logprobs": 1
    }  # fmt: skip
    ids = [5, IMAGE, 6, IMAGE, 7, IMAGE, 8]
    with saccade.Client(server.address) as client:
        found = client.generate(ids, videos=[file], **asked)
        wanted = client.generate(ids, videos=[[frames[index] for index in taken]], **asked)
        fewer = client.generate([5, IMAGE, 6], videos=[saccade.Video(file, max_frames=2)], **asked)
    assert found.usage.video_tokens == wanted.usage.video_tokens > 0
    assert found.token_ids == wanted.token_ids
    assert [entry.logprob for entry in found.logprobs or ()] == [entry.logprob for entry in wanted.logprobs or ()]
    assert 0 < fewer.usage.video_tokens < found.usage.video_tokens


def test_a_pruning_rate_is_refused_before_anything_starts(tmp_path: Path) -> None:
    tower = random_tower(random.Random(1))
    make_qwen(tmp_path, 1, vision=tower)
    write_rules(tmp_path, tower)
    with pytest.raises(saccade.SaccadeError, match="video_pruning_rate 0.5: this model's videos cannot be pruned"):
        saccade.LocalClient(tmp_path, video_pruning_rate=0.5, **OPTIONS)
