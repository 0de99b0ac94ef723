"""The family against transformers in float32: pixels, prompts, rows and answers."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_images import (
    Content,
    check_answers,
    check_between_hosts,
    check_bytes,
    check_least_handoff,
    check_prompts,
    check_rows,
    pieces,
    prepared,
)
from hypothesis import given
from hypothesis import strategies as st
from images import encoded
from lfm2_vl import IMAGE, NAMES, TinyLfm, make_lfm, random_settings, released_pixels, released_processor
from minicpm import byte_tokenizer, random_image
from PIL import Image
from qwen_vision import replace_torchvision
from safetensors.torch import load_file
from tiny_checkpoint import changed

import saccade
from families import CheckpointError
from families.lfm2_vl.tiling import Tiling
from families.lfm2_vl.vision import TiledVision
from service.model.modelconfig import load_config

GREEDY = 16
WORDS = ("What is 0<1", "the <image thing\n", "in 42", "?")
"""Texts between images, one of which only looks like an image."""


@pytest.fixture(autouse=True)
def torchvision_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_torchvision(monkeypatch)


def rendered(content: Content) -> str:
    """One user message, as the checkpoint's template writes it."""
    inner = "".join(part if isinstance(part, str) else IMAGE for part in content)
    return f"<|startoftext|><|im_start|>user\n{inner}<|im_end|>\n<|im_start|>assistant\n"


def vision_of(tiny: TinyLfm) -> TiledVision:
    vision = load_config(tiny.path).vision
    assert isinstance(vision, TiledVision)
    return vision


def tiling_of(settings: dict[str, Any]) -> Tiling:
    names = (
        "min_image_tokens", "max_image_tokens", "tile_size", "min_tiles", "max_tiles", "use_thumbnail",
        "max_pixels_tolerance",
    )  # fmt: skip
    return Tiling(
        **{name: settings[name] for name in names}, splits=settings["do_image_splitting"],
        mean=tuple(settings["image_mean"]), std=tuple(settings["image_std"]),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_logits_and_greedy_tokens(tmp_path: Path, seed: int) -> None:
    """Zero to three images of any shape, as files through the engine."""
    rng = random.Random(seed)
    tiny = make_lfm(tmp_path, seed)
    images = [random_image(rng) for _ in range(seed % 4)]
    content = pieces(images, WORDS)
    inputs = tiny.inputs(rendered(content), images)
    check_answers(tiny, content, inputs, rng=rng, graphs=seed % 8 < 4, tokens=GREEDY)


@pytest.mark.parametrize("seed", range(10))
def test_pixels_and_input_ids_are_the_released_processors(tmp_path: Path, seed: int) -> None:
    rng = random.Random(100 + seed)
    tiny = make_lfm(tmp_path, seed)
    images = [random_image(rng) for _ in range(3)]
    content = pieces(images, WORDS)
    inputs = tiny.inputs(rendered(content), images)
    media = prepared(vision_of(tiny), images)
    grids = [grid for item in media for grid in item.layout.grids]
    assert grids == [tuple(size) for size in inputs["spatial_shapes"].tolist()]
    theirs = [pixels[: rows * columns] for pixels, (rows, columns) in zip(inputs["pixel_values"], grids)]
    assert torch.equal(torch.cat([item.encoder_item.patches for item in media]), torch.cat(theirs))
    check_prompts(tiny, content, rendered(content), media, inputs["input_ids"])


@given(st.integers(12, 90), st.integers(12, 90), st.integers(0, 2**32))
def test_pixels_of_any_size_with_any_settings(height: int, width: int, seed: int) -> None:
    rng = random.Random(seed)
    patch, merge = rng.choice([2, 3, 4]), rng.choice([1, 2, 3])
    settings = random_settings(rng, patch, merge)
    image = random_image(rng).resize((width, height), Image.Resampling.BICUBIC)
    with pytest.MonkeyPatch.context() as replaced:
        replace_torchvision(replaced)
        processor = released_processor(byte_tokenizer((IMAGE,)), settings)
        inputs = released_pixels(processor, settings, [image])
    vision = TiledVision(8, 1, 1, 8, 8, patch_size=patch, merge_size=merge, image=tiling_of(settings))
    (item,) = prepared(vision, [image])
    grids = item.layout.grids
    assert list(grids) == [tuple(size) for size in inputs["spatial_shapes"].tolist()]
    theirs = [pixels[: rows * columns] for pixels, (rows, columns) in zip(inputs["pixel_values"], grids)]
    assert torch.equal(item.encoder_item.patches, torch.cat(theirs))


def test_sizes_and_tiles_are_the_released_processors() -> None:
    """Of images of any size, with random and with the released settings, without cutting them."""
    rng = random.Random(0)
    processor = released_processor(byte_tokenizer((IMAGE,)), {"use_thumbnail": True}).image_processor
    sizes = [(1786, 2526), (3000, 200), (512, 512), (725, 724), (1024, 512), (1448, 1448), (1, 1), (4000, 4000)]
    tried = 0
    for round_ in range(400):
        patch, merge = (16, 2) if round_ < 100 else (rng.choice([2, 4, 16]), rng.choice([1, 2, 3]))
        settings = random_settings(rng, patch, merge) | {"do_image_splitting": True}
        tiling = Tiling() if round_ < 100 else tiling_of(settings)
        height, width = sizes[round_] if round_ < len(sizes) else (rng.randint(1, 3000), rng.randint(1, 3000))
        given = {"downsample_factor": merge, "encoder_patch_size": patch, "max_image_tokens": tiling.max_image_tokens}
        theirs = processor.smart_resize(height, width, min_image_tokens=tiling.min_image_tokens, **given)
        assert tiling.whole_size(height, width, patch * merge) == theirs[::-1]
        large = processor._is_image_too_large(
            height, width, max_pixels_tolerance=tiling.max_pixels_tolerance, **given
        )  # fmt: skip
        layout = processor._get_grid_layout(height, width, tiling.min_tiles, tiling.max_tiles, tiling.tile_size)
        tiles = tiling.tiles(height, width, patch, patch * merge)
        assert tiles == ((layout[1], layout[0]) if large else (0, 0))
        tried += large
    assert 100 < tried < 390


@pytest.mark.parametrize(
    ("height", "width", "least", "most", "tiles"),
    [(1000, 1000, 2, 10, (2, 2)), (1448, 1448, 2, 10, (3, 3)), (600, 1200, 3, 5, (2, 2))],
)
def test_of_tile_grids_with_equal_errors_the_area_decides(
    height: int, width: int, least: int, most: int, tiles: tuple[int, int]
) -> None:
    """2 x 2 and 3 x 3 tiles fit a square alike; nine are taken of an image with half of their pixels. Grids are
    compared by their number of tiles."""
    processor = released_processor(byte_tokenizer((IMAGE,)), {"use_thumbnail": True}).image_processor
    theirs = processor._get_grid_layout(height, width, least, most, 512)[:2]
    assert theirs[::-1] == tiles == Tiling(min_tiles=least, max_tiles=most).tiles(height, width, 16, 32)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "tiles-alone"])
def test_tiles_cross_between_hosts(tmp_path: Path, whole: bool) -> None:
    """An encoder in another server."""
    settings: dict[str, Any] = {"do_image_splitting": True, "max_tiles": 12, "max_pixels_tolerance": 0.7}
    make_lfm(tmp_path, 7, special=True, use_thumbnail=whole, **settings)
    rng = random.Random(7)
    images = [encoded(random_image(rng)) for _ in range(3)]
    with saccade.LocalClient(tmp_path, dtype="float32", max_seqs=2, max_len=2048, threads=1, graphs="off") as client:
        layouts = client.tokenize("what?", images=images).media
        assert any(layout.slices_first and (layout.grid != (0, 0)) == whole for layout in layouts)
        check_between_hosts(client, tmp_path, "what?", "image_tokens", images=images)


@pytest.mark.parametrize("seed", range(8))
def test_packed_or_alone_by_graph_or_not_the_rows_are_transformers(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    tiny = make_lfm(tmp_path, seed, do_image_splitting=True)
    vision = vision_of(tiny)
    given = [item.encoder_item for item in prepared(vision, [random_image(rng) for _ in range(5)])]
    check_rows(tiny, vision, given, max_images=1, tolerance=1e-5)


def test_checkpoints_of_every_kind_are_tried(tmp_path: Path) -> None:
    """By the tests of rows and answers: both names of the tower's weights, and each setting of the projector."""
    found = set()
    for seed in range(8):
        tiny = make_lfm(tmp_path / str(seed), seed)
        names = load_file(tiny.path / "model.safetensors").keys()
        config = tiny.model.config
        found |= {
            f"named as {kind}" for kind, prefix in NAMES.items() if f"model.{prefix}post_layernorm.bias" in names
        } | {
            f"{name} {getattr(config, name)}"
            for name in ("projector_use_layernorm", "projector_bias", "downsample_factor", "tie_word_embeddings")
        } | {f"head {any('.head.' in name for name in names)}"}  # fmt: skip
    assert found == {
        "named as released", "named as saved", "projector_use_layernorm True", "projector_use_layernorm False",
        "projector_bias True", "projector_bias False", "downsample_factor 1", "downsample_factor 2",
        "downsample_factor 3", "tie_word_embeddings True", "tie_word_embeddings False", "head True", "head False",
    }  # fmt: skip


def test_bytes_become_the_same_numbers(tmp_path: Path) -> None:
    vision = vision_of(make_lfm(tmp_path, 3))
    check_bytes(tmp_path, vision, partial(prepared, vision))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, which tests copy before they change it."""
    return make_lfm(tmp_path_factory.mktemp("model"), 1, released=False).path


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (
            "config.json",
            {"text_config": {"model_type": "qwen3"}},
            "text_config.model_type is 'qwen3'; 'lfm2' is served",
        ),
        ("config.json", {"vision_config": {"model_type": "clip"}}, "vision_config.model_type is 'clip'"),
        ("config.json", {"vision_config": {"num_channels": 4}}, "vision_config.num_channels is 4"),
        ("config.json", {"vision_config": {"num_patches": 17}}, "num_patches 17 is not a square; 16 would work"),
        ("config.json", {"vision_config": {"patch_size": [16, 16]}}, "patch_size must be a whole number"),
        ("config.json", {"vision_config": {"hidden_act": "relu6"}}, "hidden_act 'relu6' is none of"),
        ("config.json", {"vision_config": {"num_attention_heads": 7}}, "is not a multiple of num_attention_heads 7"),
        ("config.json", {"projector_hidden_act": "relu6"}, "projector_hidden_act 'relu6' is none of"),
        ("config.json", {"projector_bias": 1}, "projector_bias must be true or false, not 1"),
        ("config.json", {"downsample_factor": 0}, "downsample_factor must be a whole number of at least 1, not 0"),
        ("config.json", {"vision_feature_layer": -2}, "vision_feature_layer is -2"),
        ("config.json", {"image_token_id": 10**6}, "image_token_id 1000000"),
        ("preprocessor_config.json", {"encoder_patch_size": 7}, "encoder_patch_size is 7"),
        ("preprocessor_config.json", {"downsample_factor": 7}, "downsample_factor is 7"),
        ("preprocessor_config.json", {"resample": 3}, "resample is 3"),
        ("preprocessor_config.json", {"do_normalize": False}, "do_normalize is False"),
        ("preprocessor_config.json", {"do_rescale": None}, "do_rescale is None"),
        ("preprocessor_config.json", {"rescale_factor": 1}, "rescale_factor is 1; 1/255 is served"),
        ("preprocessor_config.json", {"do_center_crop": True}, "do_center_crop is True"),
        ("preprocessor_config.json", {"image_processor_type": "Siglip2ImageProcessor"}, "image_processor_type is"),
        ("preprocessor_config.json", {"do_image_splitting": True, "tile_size": 31}, "tile_size 31 is not a multiple"),
        ("preprocessor_config.json", {"tile_size": 10**6}, "tile_size is 1000000; at most 16384"),
        ("preprocessor_config.json", {"max_tiles": 101}, "max_tiles is 101; at most 100"),
        ("preprocessor_config.json", {"min_tiles": 8, "max_tiles": 4}, "min_tiles 8 must be .* at most max_tiles 4"),
        ("preprocessor_config.json", {"do_image_splitting": True, "min_tiles": 1}, "a min_tiles of 2 would work"),
        ("preprocessor_config.json", {"min_image_tokens": 90}, "min_image_tokens 90 must be .* at most max_image"),
        ("preprocessor_config.json", {"max_pixels_tolerance": 0}, "max_pixels_tolerance must be a number above 0"),
        ("preprocessor_config.json", {"use_thumbnail": "no"}, "use_thumbnail must be true or false"),
        ("preprocessor_config.json", {"image_std": [0, 1, 1]}, "^preprocessor_config.json: .*image_std"),
        ("preprocessor_config.json", {"image_mean": ["x", 1, 1]}, "image_mean must be three finite numbers, not .'x'"),
        ("processor_config.json", {"use_image_special_tokens": 1}, "^processor_config.json: use_image_special_tokens"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    settings: Path, tmp_path: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_config(changed(settings, tmp_path, file, changes))


@pytest.mark.parametrize(
    "changes",
    [{"do_resize": False}, {"resample": None}, {"do_pad": False, "size": None, "max_num_patches": 7}],
)
def test_settings_that_transformers_does_not_use(settings: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    before = load_config(settings).vision
    assert load_config(changed(settings, tmp_path, "preprocessor_config.json", changes)).vision == before


def test_flags_that_are_null_are_off_as_in_transformers(settings: Path, tmp_path: Path) -> None:
    nulls = {"do_image_splitting": None, "use_thumbnail": None}
    vision = load_config(changed(settings, tmp_path, "preprocessor_config.json", nulls)).vision
    assert isinstance(vision, TiledVision) and (vision.image.splits, vision.image.use_thumbnail) == (False, False)


def test_videos_are_refused(tmp_path: Path) -> None:
    make_lfm(tmp_path, 0)
    frame = encoded(random_image(random.Random(0)))
    with saccade.LocalClient(tmp_path, threads=1, max_seqs=1, graphs="off") as client:
        with pytest.raises(saccade.errors.FailedPrecondition, match="takes no videos"):
            client.generate("?", videos=[[frame, frame]])
    vision = load_config(tmp_path).vision
    assert vision is not None and vision.limited(max_model_len=64, video_pruning_rate=0.0) is not None
    with pytest.raises(ValueError, match="video_pruning_rate 0.5: this model takes no videos"):
        vision.limited(max_model_len=64, video_pruning_rate=0.5)


@pytest.mark.parametrize("height", [0, -1])
def test_sizes_that_no_image_has(height: int) -> None:
    with pytest.raises(ValueError, match="at least one pixel"):
        TiledVision(8, 1, 1, 8, 8).image_rule.grid(height, 5)


def test_an_image_of_more_tokens_than_the_context_is_refused() -> None:
    vision = TiledVision(8, 1, 1, 8, 8, patch_size=2, image=Tiling(1, 9, tile_size=8))
    image = torch.zeros(40, 60, 3, dtype=torch.uint8)
    tokens = vision.image_rule.patchify(image, torch.float32).tokens
    with pytest.raises(ValueError, match=f"it takes {tokens} tokens and the context holds {tokens - 1}"):
        vision.limited(max_model_len=tokens - 1).image_rule.patchify(image, torch.float32)


@pytest.mark.parametrize("seed", [0, 3, 4, 10])
def test_the_smallest_and_the_largest_image_are_those_of_the_rule(tmp_path: Path, seed: int) -> None:
    """No image of up to 64 pixels a side has fewer tokens than the configuration says, and one of these has just as
    many; only flat ones have more than the largest. A handoff of as many rows as errors ask for answers it."""
    tiny = make_lfm(tmp_path, seed)
    vision = vision_of(tiny)
    sides = [*range(1, 65), 100, 141, 200]
    tokens = {
        (h, w): vision.image_rule.layout(h, w).tokens for h in sides for w in sides if max(h, w) <= 200 * min(h, w)
    }  # fmt: skip
    height, width = min(tokens, key=lambda size: tokens[size])
    assert tokens[height, width] == vision.min_image_tokens >= vision.least_budget
    square = [count for (h, w), count in tokens.items() if max(h, w) <= 4 * min(h, w)]
    assert max(square) <= vision.max_image_tokens
    if seed == 0:
        check_least_handoff(tiny.path, vision, (height, width))
