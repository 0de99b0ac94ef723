"""The family against transformers in float32: pixels, prompts and answers."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cut_images import (
    check_answers,
    check_bytes,
    check_least_handoff,
    check_prompts,
    check_rows,
    check_same_answer,
    pieces,
    prepared,
)
from images import encoded
from minicpm import IMAGE, TinyMiniCPM, make_minicpm, random_image
from PIL import Image
from running import RunningEncoder, RunningServer
from transformers import AutoConfig
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

import saccade
from encoder.item import EncoderItem
from families import CheckpointError
from families.minicpmv4_6.slicing import best_slices
from families.minicpmv4_6.vision import SlicingVision
from service.model.modelconfig import load_config

GREEDY = 16
WORDS = ("What is 0<1", "the thing\n", "in 42", "?")
"""Texts between images."""


def rendered(content: list[Image.Image | str]) -> str:
    """One user message, as the checkpoint's template writes it."""
    inner = "".join(part if isinstance(part, str) else IMAGE + "\n" for part in content)
    return f"<|im_start|>user\n{inner}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("seed", range(20))
def test_logits_and_greedy_tokens(tmp_path: Path, seed: int) -> None:
    """Zero to three images of any shape, as files through the engine."""
    rng = random.Random(seed)
    tiny = make_minicpm(tmp_path, seed)
    images = [random_image(rng) for _ in range(seed % 4)]
    content = pieces(images, WORDS)
    inputs = tiny.inputs(rendered(content), images)
    check_answers(tiny, content, inputs, rng=rng, graphs=seed % 8 < 4, tokens=GREEDY)


@pytest.mark.parametrize("seed", range(20))
def test_pixels_and_input_ids_are_the_released_processors(tmp_path: Path, seed: int) -> None:
    rng = random.Random(100 + seed)
    tiny = make_minicpm(tmp_path, seed)
    images = [random_image(rng) for _ in range(3)]
    content = pieces(images, WORDS)
    inputs = tiny.inputs(rendered(content), images)
    media = prepared(load_config(tiny.path).vision, images)
    patch = tiny.model.config.vision_config.patch_size
    grids = [grid for item in media for grid in item.layout.grids]
    assert grids == [tuple(size) for size in inputs["target_sizes"].tolist()]
    # [1, 3, p, T p] of transformers: patches side by side
    theirs = inputs["pixel_values"][0].reshape(3, patch, -1, patch).permute(2, 0, 1, 3).flatten(1)
    assert torch.equal(torch.cat([item.encoder_item.patches for item in media]), theirs)
    check_prompts(tiny, content, rendered(content), media, inputs["input_ids"][0].tolist())


def test_large_images_as_released_settings_cut_them(tmp_path: Path) -> None:
    """448 pixels, 9 slices."""
    tiny = make_minicpm(tmp_path, 1, scale_resolution=448, max_slice_nums=9, slice_mode=True)
    rng = random.Random(0)
    for height, width in [
        (448, 448),
        (449, 448),
        (1786, 2526),
        (300, 2000),
        (3000, 200),
        (17, 1200),
        (1, 1),
        (896, 897),
        (600, 600),
    ]:
        image = Image.fromarray(np.full((height, width, 3), rng.randrange(256), np.uint8))
        inputs = tiny.processor._process_images([image], return_tensors="pt", downsample_mode=tiny.mode)[0]
        (item,) = prepared(load_config(tiny.path).vision, [image])
        assert list(item.layout.grids) == [tuple(size) for size in inputs["target_sizes"].tolist()]
        assert item.layout.slices == tuple(inputs["grids"][0])
        assert item.layout.tokens <= load_config(tmp_path).vision.max_image_tokens or max(height, width) > 10 * min(
            height, width
        )  # type: ignore[union-attr]
    assert best_slices(1786, 2526, 9, 448) == (2, 4)


def items(tiny: TinyMiniCPM, seed: int) -> list[EncoderItem]:
    rng = random.Random(seed)
    images = [random_image(rng) for _ in range(5)]
    return [item.encoder_item for item in prepared(load_config(tiny.path).vision, images)]


@pytest.mark.parametrize("where", ["process", "host"])
def test_slices_cross_between_processes(tmp_path: Path, where: str) -> None:
    """Image workers, frontend, engine, and an encoder in a separate process or another server."""
    make_minicpm(tmp_path, 7, slice_mode=True, max_slice_nums=9)
    settings = tmp_path / "video_preprocessor_config.json"
    changes = {"slice_mode": True, "max_slice_nums": 4}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | changes))
    rng = random.Random(7)
    images = [encoded(random_image(rng)) for _ in range(3)]
    frames = [encoded(random_image(rng).resize((80, 60))) for _ in range(3)]
    common: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "logprobs": 1}
    common |= {"images": images, "videos": [frames]}
    with saccade.LocalClient(tmp_path, dtype="float32", max_seqs=2, max_len=2048, threads=1, graphs="off") as client:
        expected = client.generate("what?", **common)
        assert client.tokenize("what?", videos=[frames]).media[0].slices != (0, 0)
    with ExitStack() as stack:
        if where == "process":
            apart: dict[str, Any] = {"engine_process": True, "encoder_process": True}
            elsewhere = apart | {"image_workers": 1, "graphs": "off"}
        else:
            encoder = stack.enter_context(RunningEncoder(str(tmp_path), graphs="off"))
            elsewhere = {"role": "decoder", "encoders": (encoder.address,)}
        server = stack.enter_context(RunningServer(str(tmp_path), max_len=2048, max_seqs=2, **elsewhere))
        remote = stack.enter_context(saccade.Client(server.address))
        answer = remote.generate("what?", **common)
    check_same_answer(answer, expected, "image_tokens", "video_tokens")


@pytest.mark.parametrize("seed", range(6))
def test_packed_or_alone_by_graph_or_not_the_rows_are_transformers(tmp_path: Path, seed: int) -> None:
    tiny = make_minicpm(tmp_path, seed, slice_mode=True)
    vision = load_config(tmp_path).vision
    assert vision is not None
    check_rows(tiny, vision, items(tiny, seed), max_images=2, tolerance=1e-4)


def test_bytes_become_the_same_numbers(tmp_path: Path) -> None:
    make_minicpm(tmp_path, 3)
    vision = load_config(tmp_path).vision
    assert vision is not None
    check_bytes(tmp_path, vision, partial(prepared, vision))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, which tests copy before they change it."""
    return make_minicpm(tmp_path_factory.mktemp("model"), 0).path


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"downsample_mode": "8x"}, "downsample_mode is '8x'"),
        ("config.json", {"merger_times": 2}, "merger_times is 2"),
        ("config.json", {"insert_layer_id": 9}, "insert_layer_id 9 must be at least 0 and below"),
        ("config.json", {"merge_kernel_size": [4, 4]}, "merge_kernel_size"),
        ("config.json", {"text_config": {"model_type": "qwen3"}}, "text_config.model_type is 'qwen3'"),
        (
            "config.json",
            {"text_config": {"model_type": ["qwen3_5_text"]}},
            r"text_config.model_type is \['qwen3_5_text'\]",
        ),
        ("config.json", {"image_token_id": 10**6}, "image_token_id 1000000"),
        ("config.json", {"vision_config": {"hidden_size": 4.5}}, "hidden_size must be a whole number of at least 1"),
        ("preprocessor_config.json", {"scale_resolution": float("inf")}, "scale_resolution must be a whole number"),
        ("preprocessor_config.json", {"downsample_mode": "4x"}, "downsample_mode is '4x'"),
        ("preprocessor_config.json", {"patch_size": 7}, "patch_size is 7"),
        ("preprocessor_config.json", {"resample": 2}, "resample is 2"),
        ("preprocessor_config.json", {"max_slice_nums": 0}, "max_slice_nums must be a whole number"),
        ("preprocessor_config.json", {"image_std": [0, 1, 1]}, "^preprocessor_config.json: .*image_std"),
        ("preprocessor_config.json", {"image_std": [float("nan"), 1, 1]}, "image_std must be three finite numbers"),
        ("preprocessor_config.json", {"image_mean": ["x", 1, 1]}, "image_mean must be three finite numbers, not .'x'"),
        ("video_preprocessor_config.json", {"stack_frames": 3}, "stack_frames is 3"),
        ("video_preprocessor_config.json", {"downsample_mode": "8x"}, "downsample_mode is '8x'"),
        ("video_preprocessor_config.json", {"patch_size": 7}, "patch_size is 7"),
        ("video_preprocessor_config.json", {"max_num_frames": 0}, "max_num_frames must be a whole number"),
        ("video_preprocessor_config.json", {"image_std": [0, 1, 1]}, "^video_preprocessor_config.json: .*image_std"),
        ("video_preprocessor_config.json", {"image_mean": "x"}, "^video_preprocessor_config.json: image_mean"),
        ("video_preprocessor_config.json", {"do_sample_frames": False}, "do_sample_frames is False"),
        ("config.json", {"video_token_id": 10**6}, "video_token_id 1000000"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    settings: Path, tmp_path: Path, file: str, changes: dict[str, object], message: str
) -> None:
    shutil.copytree(settings, tmp_path, dirs_exist_ok=True)
    path = tmp_path / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        load_config(tmp_path)


@pytest.mark.parametrize("file", ["preprocessor_config.json", "video_preprocessor_config.json"])
def test_a_switch_that_is_null_is_off_as_in_transformers(tmp_path: Path, file: str) -> None:
    names = ("slice_mode", "use_image_id")
    make_minicpm(tmp_path, 0)
    path = tmp_path / file
    settings = {name: value for name, value in json.loads(path.read_text()).items() if name not in names}
    for changes, on in (({}, True), (dict.fromkeys(names), False)):
        path.write_text(json.dumps(settings | changes))
        vision = load_config(tmp_path).vision
        assert isinstance(vision, SlicingVision) and vision.video is not None
        slicing = vision.image if file == "preprocessor_config.json" else vision.video
        assert slicing.slice_mode is on is bool(MiniCPMV4_6ImageProcessorPil(**settings, **changes).slice_mode)
        if file == "preprocessor_config.json":
            assert vision.use_image_id is on


def test_the_window_merger_is_placed_by_the_top_level_alone(tmp_path: Path) -> None:
    make_minicpm(tmp_path, 3)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"]["num_hidden_layers"] = 8
    del config["insert_layer_id"]
    path.write_text(json.dumps(config))
    vision, released = load_config(tmp_path).vision, AutoConfig.from_pretrained(tmp_path)
    assert isinstance(vision, SlicingVision)
    assert vision.insert_layer == released.vision_config.insert_layer_id != config["vision_config"]["insert_layer_id"]


@pytest.mark.parametrize("height", [0, -1])
def test_sizes_that_no_image_has(tmp_path: Path, height: int) -> None:
    make_minicpm(tmp_path, 0)
    vision = load_config(tmp_path).vision
    assert vision is not None
    with pytest.raises(ValueError, match="at least one pixel"):
        vision.image_rule.grid(height, 5)


@pytest.mark.parametrize("seed", [3, 5, 6, 7])
def test_the_smallest_image_is_the_one_that_the_rule_makes(tmp_path: Path, seed: int) -> None:
    """Of all sizes up to 64 pixels, and of flat ones: no image has fewer tokens than the configuration says, and one of
    these has just as many. A handoff of as many rows as errors ask for answers it."""
    model = str(make_minicpm(tmp_path, seed).path)
    vision = load_config(Path(model)).vision
    assert isinstance(vision, SlicingVision)
    sides = [*range(1, 65), 100, 141, 200]
    sizes = [(h, w) for h in sides for w in sides if max(h, w) <= 200 * min(h, w)]
    tokens = {size: tokens_of(vision, *size) for size in sizes}
    height, width = min(sizes, key=lambda size: tokens[size])
    assert tokens[height, width] == vision.min_image_tokens >= vision.least_budget
    check_least_handoff(Path(model), vision, (height, width))


def tokens_of(vision: SlicingVision, height: int, width: int) -> int:
    parts = vision.image.parts(height, width, vision.factor)
    return sum(part.pixels for part in parts) // vision.factor**2
