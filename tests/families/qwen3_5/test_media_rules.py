"""Pixels and sizes of images and clips equal those of transformers' processors."""

from __future__ import annotations

import io
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from qwen_vision import image_processor, tiny_qwen, video_pixels, video_processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as released_resize
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as released_frame
from transformers.video_utils import VideoMetadata

from encoder.images import decode_image
from encoder.item import VIDEO, EncoderItem
from families.family import ModelFiles
from families.files import CheckpointError
from families.qwen3_5.vision import QwenVision, read_vision
from families.qwen_images import smart_resize
from families.qwen_media import Resizing, Sampling
from families.qwen_videos import resized_frame

RELEASED = QwenVision(hidden_size=64, num_layers=1, num_heads=1, intermediate_size=4, text_hidden_size=8)
CLIP = Resizing(65536, 16777216, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


def noise(height: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)


def twice(config: QwenVision, item: EncoderItem) -> torch.Tensor:
    """An image's float patches as the released processor gives them: its frame repeated."""
    planes = item.patches.view(len(item.patches), 3, 1, -1).expand(-1, -1, config.temporal_patch_size, -1)
    return planes.reshape(len(item.patches), -1)


def test_sizes_are_the_released_ones() -> None:
    rng = random.Random(0)
    sizes = [(rng.randint(1, 9000), rng.randint(1, 9000)) for _ in range(2000)]
    sizes += [(48, 80), (16, 16), (1, 200), (200, 1), (31, 5000), (33, 6600), (80, 80), (4096, 4096), (4112, 4080)]
    for height, width in sizes:
        flat = max(height, width) / min(height, width) > 200
        if not flat:
            wanted = released_resize(height, width, 32, 65536, 16777216)
            assert smart_resize(height, width, 32, 65536, 16777216) == wanted, (height, width)
            grid = RELEASED.image_rule.grid(height, width)
            assert grid == (wanted[0] // 16, wanted[1] // 16)


def test_halves_round_to_even_as_python_does() -> None:
    # 272 / 32 = 8.5 and 304 / 32 = 9.5: one down, one up
    assert smart_resize(272, 304, 32, 1024, 1 << 24) == (256, 320)


@pytest.mark.parametrize(("height", "width"), [(201, 1), (1, 201), (30000, 100)])
def test_flat_images_are_refused_with_both_numbers(height: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"{height}x{width} pixels are .* to 1; at most 200 to 1"):
        RELEASED.image_rule.grid(height, width)


@pytest.mark.parametrize("config", [RELEASED, replace(RELEASED, image=CLIP)], ids=["half", "clip"])
@pytest.mark.parametrize(
    ("height", "width"), [(300, 200), (256, 320), (64, 48), (1000, 7), (513, 511), (1786 // 4, 2526 // 4)]
)
def test_pixel_values_are_the_pillow_processors(config: QwenVision, height: int, width: int) -> None:
    image = noise(height, width)
    wanted = image_processor(config)(images=[image.numpy()], return_tensors="pt")
    item = config.image_rule.patchify(image, torch.float32)
    assert [1, *item.grid] == wanted["image_grid_thw"][0].tolist()
    assert torch.equal(twice(config, item), wanted["pixel_values"])


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "CMYK"])
def test_files_of_any_mode_become_the_pillow_processors_pixels(mode: str) -> None:
    pixels = noise(90, 120).numpy()
    image = Image.fromarray(pixels).convert("RGBA" if mode == "LA" else mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.fromarray(pixels[..., 0]))
        image = image.convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "TIFF" if mode == "CMYK" else "PNG")
    wanted = image_processor(RELEASED)(images=[Image.open(buffer)], return_tensors="pt")["pixel_values"]
    item = RELEASED.image_rule.patchify(decode_image(buffer.getvalue()), torch.float32)
    assert torch.equal(twice(RELEASED, item), wanted)


def test_bytes_become_the_same_numbers_in_the_tower() -> None:
    tiny = tiny_qwen()
    config = replace(tiny.config, image=replace(CLIP, min_pixels=64), video=replace(CLIP, min_pixels=64))
    tower = config.build(tiny.weights.items(), dtype=torch.float32, device=torch.device("cpu"))
    image = noise(50, 90)
    floats = config.image_rule.patchify(image, torch.float32)
    kept = config.image_rule.patchify(image, torch.float32, keep_bytes=True)
    assert kept.patches.dtype == torch.uint8 and torch.equal(tower.as_floats(kept.patches), floats.patches)
    clip = config.video_rule.patchify([image, noise(50, 90, 1)], torch.float32)
    kept = config.video_rule.patchify([image, noise(50, 90, 1)], torch.float32, keep_bytes=True)
    assert kept.patches.dtype == torch.uint8 and torch.equal(tower.as_floats(kept.patches, kind=VIDEO), clip.patches)


def test_every_byte_is_scaled_as_the_released_processors_scale_it() -> None:
    config = replace(RELEASED, image=replace(CLIP, min_pixels=1), video=replace(CLIP, min_pixels=1))
    ramp = torch.arange(32 * 32 * 3).view(32, 32, 3).remainder(256).to(torch.uint8)
    item = config.image_rule.patchify(ramp, torch.float32)
    wanted = image_processor(config)(images=[ramp.numpy()], return_tensors="pt")["pixel_values"]
    assert torch.equal(twice(config, item), wanted)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("capped", [None, 4])
def test_pixels_of_clips_are_the_released_ones(count: int, capped: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(RELEASED, video=Resizing(4096, 40 * 1024), sampling=Sampling(frame_tokens=capped), patch_size=8)
    frames = [noise(70, 110, seed) for seed in range(count)]
    item = config.video_rule.patchify(iter(frames), torch.float32, num_frames=count)
    pixels, grid = video_pixels(config, frames if count > 1 else frames * 2, monkeypatch)
    assert [item.num_sequences, *item.grid] == grid
    assert (item.kind, item.num_frames, item.patches.shape[1]) == (VIDEO, count, config.patch_widths[VIDEO])
    assert torch.equal(item.patches, pixels)
    assert item.tokens == config.video_rule.tokens(count, 70, 110)
    assert item.patches.numel() <= config.video_rule.most_numbers(count)


def test_sizes_of_frames_are_the_released_ones() -> None:
    rng = random.Random(1)
    checked = 0
    while checked < 1500:
        frames, height, width = rng.randint(2, 768), rng.randint(1, 3000), rng.randint(1, 3000)
        try:
            wanted = released_frame(frames, height, width, 2, 32, 4096, 25165824)
        except ValueError:
            with pytest.raises(ValueError, match="to 1"):
                resized_frame(frames, height, width, RELEASED)
            continue
        assert resized_frame(frames, height, width, RELEASED) == wanted, (frames, height, width)
        assert -(-frames // 2) * 2 * wanted[0] * wanted[1] * 3 <= RELEASED.video_rule.most_numbers(frames)
        checked += 1
    # counted as four frames, which fit as they are, where five would not
    assert (
        resized_frame(5, 2336, 2336, RELEASED) == released_frame(5, 2336, 2336, 2, 32, 4096, 25165824) == (2336, 2336)
    )


@pytest.mark.parametrize(
    ("frames", "together", "capped", "sizes", "side"),
    [
        (5, 2, None, RELEASED.video, 2496),
        (4, 3, None, RELEASED.video, 2880),
        (32, 2, 10, Resizing(2**19, 2**20), 4096),
    ],
    ids=["five-count-as-four", "four-count-as-three", "capped-frames-above-the-clip-s-limit"],
)
def test_no_clip_of_fewer_frames_has_more_numbers_than_the_bound(
    frames: int, together: int, capped: int | None, sizes: Resizing, side: int
) -> None:
    """Memory for the patches of a file is reserved before its frames are counted."""
    config = replace(RELEASED, temporal_patch_size=together, video=sizes, sampling=Sampling(frame_tokens=capped))
    rule = config.video_rule
    rows, columns = rule.grid(frames, side, side)
    numbers = -(-frames // together) * rows * columns * config.patch_widths[VIDEO]
    assert 0.8 * rule.most_numbers(frames) < numbers <= min(rule.most_numbers(count) for count in range(frames, 64))


def test_frames_are_taken_as_the_released_processor_takes_them() -> None:
    rng = random.Random(2)
    made = video_processor(RELEASED)
    for _ in range(300):
        total, fps = rng.randint(1, 4000), rng.choice([1.0, 23.976, 24.0, 29.97, 60.0, rng.uniform(0.1, 240)])
        metadata = VideoMetadata(total_num_frames=total, fps=fps)
        wanted = made.sample_frames(metadata, fps=2.0).tolist()
        assert RELEASED.video_rule.sample_file(total, 10**6, lambda fps=fps: fps) == wanted  # type: ignore[misc]
        few = RELEASED.video_rule.sample_file(total, 5, lambda fps=fps: fps)  # type: ignore[misc]
        assert few == np.linspace(0, total - 1, min(len(wanted), 5)).round().astype(int).tolist()
    unknown = VideoMetadata(total_num_frames=100)
    assert RELEASED.video_rule.sample_file(100, 768, lambda: None) == made.sample_frames(unknown, fps=2.0).tolist()


def test_frames_that_were_chosen_are_taken_all() -> None:
    rule = RELEASED.video_rule
    assert rule.sample(5, 32) == [0, 1, 2, 3, 4]
    assert rule.sample(100, 3) == [0, 50, 99]
    with pytest.raises(ValueError, match="0 of 5 frames: both must be positive"):
        rule.sample(5, 0)


def test_moments_are_the_released_ones() -> None:
    made = object.__new__(Qwen3VLProcessor)
    for indices, fps in (([0, 12, 24, 36, 47], 23.976), ([0], 2.0), ([3, 9], 30.0)):
        moments = made._calculate_timestamps(list(indices), fps, 2)
        wanted = [f"<{moment:.1f} seconds>" for moment in moments]
        assert RELEASED.video_rule.labels(len(indices), fps=fps, indices=indices) == wanted
    assert RELEASED.video_rule.labels(3) == ["<0.0 seconds>", "<0.1 seconds>"]


@pytest.mark.parametrize(
    ("frames", "count", "words"),
    [
        ([], 0, "a clip needs at least 1 frame"),
        ([noise(40, 40), noise(40, 41)], 2, "frame 1 has 40x41 pixels, the first 40x40"),
        ([noise(40, 40), noise(40, 40).float()], 2, r"frame 1: expected \[H, W, 3\] uint8"),
        ([noise(40, 40)], 2, "got only 1 frames of a clip of 2"),
        ([noise(40, 40)] * 3, 2, "frame 2 is one too many for a clip of 2 frames"),
    ],
)
def test_clips_that_cannot_be_say_which_frame(frames: list[torch.Tensor], count: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RELEASED.video_rule.patchify(iter(frames), torch.float32, num_frames=count)


def test_what_the_context_cannot_hold_is_refused_before_it_is_resized() -> None:
    config = RELEASED.limited(max_model_len=100)
    with pytest.raises(ValueError, match="it takes 1024 tokens and the context holds 100"):
        config.image_rule.patchify(noise(1024, 1024), torch.float32)
    with pytest.raises(ValueError, match="it takes 128 tokens and the context holds 100"):
        config.video_rule.patchify([noise(256, 256)] * 4, torch.float32)
    assert (config.max_image_tokens, RELEASED.max_image_tokens, RELEASED.min_image_tokens) == (100, 16384, 64)
    assert config.image_rule.grid(1024, 1024) == RELEASED.image_rule.grid(1024, 1024)


def test_clips_are_not_pruned_and_a_rate_says_so() -> None:
    assert RELEASED.video_rule.pruning_rate == 0
    RELEASED.limited(max_model_len=100, video_pruning_rate=0.0)
    with pytest.raises(ValueError, match="video_pruning_rate 0.5: this model's videos cannot be pruned"):
        RELEASED.limited(max_model_len=100, video_pruning_rate=0.5)


VISION = {
    "model_type": "qwen3_5", "depth": 12, "hidden_size": 768, "num_heads": 12, "intermediate_size": 3072,
    "out_hidden_size": 1024, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    "num_position_embeddings": 2304, "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": [],
}  # fmt: skip
IMAGES = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip
VIDEOS = {**IMAGES, "size": {"longest_edge": 25165824, "shortest_edge": 4096}, "video_processor_type": "x", "fps": 2}


def read(vision: dict[str, Any], images: dict[str, Any], videos: dict[str, Any]) -> QwenVision:
    return read_vision(vision, 1024, ModelFiles(Path(), {}, images, videos))


def test_limits_of_clips_are_those_of_size() -> None:
    """The released video processor does not read `min_pixels` and `max_pixels`."""
    found = read(VISION, IMAGES, {**VIDEOS, "min_pixels": 8192, "max_pixels": 16384})
    assert found.video == Resizing(4096, 25165824)


def test_a_published_tower_is_what_its_files_say() -> None:
    config = read(VISION, IMAGES, VIDEOS)
    assert config == QwenVision(
        hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072, text_hidden_size=1024,
        image=Resizing(65536, 16777216), video=Resizing(4096, 25165824), sampling=Sampling(2.0, 4, 768),
    )  # fmt: skip
    assert read(VISION, {}, {}) == config, "released files say what is taken without"
    old = {**IMAGES, "min_pixels": 3136, "max_pixels": 12845056, "size": {"shortest_edge": 1}}
    assert read(VISION, old, VIDEOS).image == Resizing(3136, 12845056)
    left_out = {name: value for name, value in IMAGES.items() if not name.startswith("image_")}
    found = read(VISION, left_out, VIDEOS).image
    assert (found.mean, found.std) == (CLIP.mean, CLIP.std), "the processor's own defaults"
    capped = read(VISION, IMAGES, {**VIDEOS, "cap_pixels_per_frame": True})
    assert capped.sampling.frame_tokens == 768 and capped.video_rule.tokens(4, 1080, 1920) < 2 * 768


@pytest.mark.parametrize(
    ("vision", "images", "videos", "words"),
    [
        ({"deepstack_visual_indexes": [5]}, {}, {}, r"deepstack_visual_indexes is \[5\]"),
        ({"in_channels": 1}, {}, {}, "in_channels is 1; 3 is served"),
        ({"out_hidden_size": 512}, {}, {}, r"out_hidden_size \(512\) and the text's hidden_size \(1024\) must agree"),
        ({"rope_parameters": {"rope_type": "yarn"}}, {}, {}, "rope_type 'yarn' is not served; 'axial' is"),
        ({"num_position_embeddings": 2300}, {}, {}, "num_position_embeddings 2300 is not a square"),
        ({"num_heads": 5}, {}, {}, "hidden_size 768 divided by num_heads 5 must be"),
        ({"num_heads": 128}, {}, {}, "hidden_size 768 divided by num_heads 128 must be a multiple of 4"),
        ({"depth": 0}, {}, {}, "depth must be a whole number of at least 1, not 0"),
        ({"hidden_act": "softplus"}, {}, {}, "hidden_act 'softplus' is none of"),
        ({"patch_size": [16, 16]}, {}, {}, "patch_size must be a whole number"),
        ({}, {"patch_size": 14}, {}, "preprocessor_config.json: patch_size is 14; this model is served with 16"),
        ({}, {"resample": 2}, {}, "resample is 2"),
        ({}, {"do_resize": False}, {}, "do_resize is False"),
        ({}, {"rescale_factor": 0.5}, {}, "rescale_factor is 0.5; 1/255 is served"),
        (
            {},
            {"size": {"shortest_edge": 9, "longest_edge": 8}},
            {},
            r"^preprocessor_config\.json: .*min_pixels 9 <= max_pixels 8 must hold",
        ),
        ({}, {"size": 224}, {}, "size 224 holds no shortest_edge"),
        ({}, {"size": {"height": 224, "width": 224}}, {}, "size .'height': 224, .* holds no shortest_edge"),
        ({}, {"image_std": [0.5, 0, 0.5]}, {}, "image_std"),
        ({}, {"image_mean": [0.5]}, {}, r"^preprocessor_config\.json: image_mean must be three finite numbers"),
        ({}, {"image_std": [0.5, float("nan"), 0.5]}, {}, "image_std must be three finite numbers"),
        ({}, {}, {"merge_size": 3}, "video_preprocessor_config.json: merge_size is 3"),
        ({}, {}, {"fps": 0}, "video_preprocessor_config.json: fps must be a number above 0, not 0"),
        (
            {},
            {},
            {"fps": None},
            "^video_preprocessor_config.json: fps is null, with which all frames of a clip are taken",
        ),
        ({}, {}, {"min_frames": 9, "max_frames": 8}, "min_frames 9 <= max_frames 8 must hold for videos"),
        (
            {},
            {},
            {"num_frames": 8},
            r"^video_preprocessor_config\.json: num_frames is 8; it must be unset: clips are sampled by fps",
        ),
    ],
)
def test_files_that_are_refused_say_which_field(
    vision: dict[str, Any], images: dict[str, Any], videos: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        read({**VISION, **vision}, {**IMAGES, **images}, {**VIDEOS, **videos})
