"""Wrong values in `config.json`: an error with the field, before any weight is read."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from minicpm import make_minicpm
from qwen_checkpoint import make_qwen
from qwen_vision import random_tower
from served import make_served
from text_families import make_text_checkpoint

from families.files import CheckpointError, optional_json
from service.model.checkpoint import open_checkpoint

HUGE = 2**31
NO_COUNT = ("x", "", 1.5, True, [], {}, math.nan, -1, 0)
NO_FACTOR = ("x", "1", True, [], math.nan, math.inf, -1, 0)
NO_FLAG = ("false", "", 0, 1, [])
IMAGES, VIDEOS = "preprocessor_config.json", "video_preprocessor_config.json"
NEMOTRON = [
    *((("text_config", name), value) for name in ("vocab_size", "hidden_size", "mamba_num_heads", "head_dim",
      "max_position_embeddings") for value in ("x", 1.5, True, [], {}, math.nan)),
    *((("text_config", name), value) for name in ("use_conv_bias", "norm_topk_prob") for value in ("x", 1, [], {})),
    *((("text_config", name), value) for name in ("layer_norm_epsilon",) for value in ("x", True, [], math.nan)),
    *((("text_config", "max_position_embeddings"), value) for value in (-1, 0)),
    (("text_config", "is_causal"), False),
    *((("text_config", name), value) for name in ("layers_block_type", "mtp_layers_block_type")
      for value in (3, "x", {}, [[]], [None])),
    *((("text_config", "time_step_limit"), value) for value in (3, "ab", [], [1], [2, 1], ["0", 1], [math.nan, 1])),
    *((("vision_config", name), value) for name in ("hidden_size", "num_hidden_layers", "patch_size")
      for value in NO_COUNT),
    *((("vision_config", name), value) for name in ("qkv_bias", "use_swiglu_ffn") for value in NO_FLAG),
    *((("video_pruning_rate",), value) for value in ("x", [], 1, -1, math.nan)),
    *((("vision_config", name), value) for name in ("layer_norm_eps", "mlp_ratio")
      for value in ("x", [], -1, math.nan)),
    (("vision_config", "num_hidden_layers"), HUGE),
    *((("vision_config", "args", "teachers"), value) for value in (3, "ab", [1, 2], {"a": 1})),
    *((("vision_config", "args", name), value) for name in ("register_multiple", "cpe_num_registers")
      for value in NO_COUNT if value),
    *((("downsample_ratio",), value) for value in ("x", [], 0, math.nan)),
    *(((name,), value) for name in ("norm_mean", "norm_std")
      for value in ("x", 1, [1, 1], [1, True, 1], [math.nan, 1, 1], [1, 1, math.inf])),
    *(((name,), value) for name in ("text_config", "vision_config") for value in (3, "x", [1])),
]  # fmt: skip
QWEN = [
    (("vision_config", "depth"), HUGE),
    *((("text_config", name), value) for name in ("num_hidden_layers", "head_dim") for value in (HUGE, 2**70)),
    *((("text_config", "rope_parameters", "partial_rotary_factor"), value) for value in (1.5, HUGE, 1e308)),
    *((("vision_config", name), value) for name in ("hidden_size", "depth", "num_heads", "patch_size")
      for value in NO_COUNT),
    *((("vision_config", "rope_parameters"), value) for value in (3, "x", [1])),
    *(((name,), value) for name in ("text_config", "vision_config") for value in (3, "x", [1])),
]  # fmt: skip


MINICPM = [
    *((("vision_config", "num_hidden_layers"), value) for value in (HUGE, 1.5, 0)),
    *((("vision_config", "layer_norm_eps"), value) for value in NO_FACTOR),
    *((("tie_word_embeddings",), value) for value in NO_FLAG),
    *((("insert_layer_id",), value) for value in ("x", 1.5, True, [], math.nan, -1)),
]
TEXT_ONLY = [
    *((("num_hidden_layers",), value) for value in (HUGE, 0)),
    *(((name,), value) for name in ("tie_word_embeddings", "attention_bias", "mamba_conv_bias", "mamba_proj_bias")
      for value in NO_FLAG),
    *((("rms_norm_eps",), value) for value in NO_FACTOR),
    *((("time_step_limit",), value) for value in (3, "ab", [], [1], [2, 1], ["0", 1], [math.nan, 1])),
]  # fmt: skip
BAMBA = [
    *(("attn_layer_indices", value) for value in (3, "x", ["0"], [0.0], [True], [-1], [99])),
    *(("mlp_bias", value) for value in NO_FLAG),
]
PROCESSORS = [
    *(("minicpm", IMAGES, (name,), value) for name in ("slice_mode", "use_image_id") for value in NO_FLAG),
    *(("minicpm", IMAGES, (name,), value) for name in ("max_slice_nums", "scale_resolution") for value in NO_COUNT),
    *(("nemotron", file, ("video_maintain_aspect_ratio",), value) for file in (IMAGES, VIDEOS) for value in NO_FLAG),
    *(("nemotron", IMAGES, (name,), value) for name in ("min_num_patches", "max_model_len") for value in NO_COUNT),
    *(("nemotron", IMAGES, ("max_num_patches",), value) for value in NO_COUNT[:-1]),
    *(("nemotron", IMAGES, (name,), value) for name, value in (("resample", 2), ("do_rescale", False),
      ("do_normalize", False), ("do_convert_rgb", False), ("rescale_factor", 0.5), ("patch_size", 3),
      ("downsample_ratio", 1.0))),
    *(("nemotron", VIDEOS, (name,), value) for name, value in (("patch_size", 3), ("downsample_ratio", 1.0),
      ("norm_mean", [0.1, 0.1, 0.1]), ("norm_std", "x"), ("video_target_num_patches", 0))),
    *((family, IMAGES, (name,), None) for family in ("minicpm", "nemotron", "qwen")
      for name in ("resample", "do_rescale", "do_normalize", "patch_size")),
    *(("qwen", IMAGES, place, value) for place in (("min_pixels",), ("max_pixels",), ("size", "shortest_edge"))
      for value in NO_COUNT),
    *(("qwen", VIDEOS, (name,), value) for name in ("min_frames", "max_frames") for value in NO_COUNT),
    *(("qwen", VIDEOS, ("cap_pixels_per_frame",), value) for value in NO_FLAG),
    *(("qwen", VIDEOS, ("fps",), value) for value in NO_FACTOR),
    *(("qwen", IMAGES, ("rescale_factor",), value) for value in NO_FACTOR),
]  # fmt: skip


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nemotron")
    make_served(path)
    return path


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen")
    make_qwen(path, 3, vision=random_tower(random.Random(3)))
    return path


@pytest.fixture(scope="module")
def minicpm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("minicpm")
    make_minicpm(path, 3)
    return path


@pytest.fixture(scope="module")
def bamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_checkpoint(tmp_path_factory.mktemp("bamba"), "bamba", 3).path


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_checkpoint(tmp_path_factory.mktemp("granite"), "granitemoehybrid", 3).path


@pytest.fixture(params=["bamba", "granite"])
def text_only(request: pytest.FixtureRequest) -> Path:
    model: Path = request.getfixturevalue(request.param)
    return model


def changed(model: Path, folder: Path, file: str, place: tuple[str, ...], value: Any) -> None:
    """Makes `folder` the model with another value in one of its files."""
    for source in model.iterdir():
        (folder / source.name).symlink_to(source)
    config = optional_json(model / file)
    holder = config
    for name in place[:-1]:
        holder = holder.setdefault(name, {})
    holder[place[-1]] = value
    (folder / file).unlink(missing_ok=True)
    (folder / file).write_text(json.dumps(config))


def refused(
    model: Path, folder: Path, place: tuple[str, ...], value: Any, *, match: str = "", file: str = "config.json"
) -> None:
    """`match`: by default the field's name."""
    changed(model, folder, file, place, value)
    with pytest.raises(CheckpointError, match=match or place[-1]):
        open_checkpoint(str(folder), None, outline=True)


@pytest.mark.parametrize(("place", "value"), NEMOTRON, ids=str)
def test_nemotron(nemotron: Path, tmp_path: Path, place: tuple[str, ...], value: Any) -> None:
    refused(nemotron, tmp_path, place, value)


@pytest.mark.parametrize(("place", "value"), QWEN, ids=str)
def test_qwen(qwen: Path, tmp_path: Path, place: tuple[str, ...], value: Any) -> None:
    refused(qwen, tmp_path, place, value)


def test_the_smallest_image_has_a_bound(nemotron: Path, tmp_path: Path) -> None:
    """The encoder is timed on it, at the start."""
    match = "min_num_patches is 1048576; at most 32768 is served"
    refused(nemotron, tmp_path, ("min_num_patches",), 2**20, match=match, file="preprocessor_config.json")


def test_the_resolution_of_slices_has_a_bound(minicpm: Path, tmp_path: Path) -> None:
    """The smallest image is found by trying the sides that an image may be resized to."""
    match = "scale_resolution is 16385; at most 16384 is served"
    refused(minicpm, tmp_path, ("scale_resolution",), 2**14 + 1, match=match, file="preprocessor_config.json")


def test_the_largest_image_is_no_larger_than_the_context(minicpm: Path, tmp_path: Path) -> None:
    """The encoder's buffers are allocated for it."""
    changed(minicpm, tmp_path, "preprocessor_config.json", ("max_slice_nums",), HUGE)
    vision = open_checkpoint(str(tmp_path), None, outline=True).config.vision
    assert vision is not None
    assert vision.max_image_tokens > HUGE and vision.limited(max_model_len=2000).max_image_tokens == 2000
    assert vision.limited(max_model_len=1).max_image_tokens == vision.min_image_tokens


@pytest.mark.parametrize(("place", "value"), MINICPM, ids=str)
def test_minicpm(minicpm: Path, tmp_path: Path, place: tuple[str, ...], value: Any) -> None:
    refused(minicpm, tmp_path, place, value)


@pytest.mark.parametrize(("place", "value"), TEXT_ONLY, ids=str)
def test_text_only(text_only: Path, tmp_path: Path, place: tuple[str, ...], value: Any) -> None:
    refused(text_only, tmp_path, place, value)


@pytest.mark.parametrize(("name", "value"), BAMBA, ids=str)
def test_bamba(bamba: Path, tmp_path: Path, name: str, value: Any) -> None:
    refused(bamba, tmp_path, (name,), value)


@pytest.mark.parametrize("value", NO_FACTOR, ids=str)
@pytest.mark.parametrize("name", ["embedding", "residual", "attention"])
def test_granite(granite: Path, tmp_path: Path, name: str, value: Any) -> None:
    refused(granite, tmp_path, (f"{name}_multiplier",), value)


@pytest.mark.parametrize(("family", "file", "place", "value"), PROCESSORS, ids=str)
def test_processors(
    family: str, file: str, place: tuple[str, ...], value: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    refused(request.getfixturevalue(family), tmp_path, place, value, file=file)


def test_numbers_too_large_for_any_field(nemotron: Path, minicpm: Path, text_only: Path, tmp_path: Path) -> None:
    places = [(nemotron, ("vision_config", "video_temporal_patch_size")), (nemotron, ("vision_config", "mlp_ratio")),
              (minicpm, ("vision_config", "patch_size")), (text_only, ("mamba_n_heads",))]  # fmt: skip
    for number, (model, place) in enumerate(places):
        (folder := tmp_path / str(number)).mkdir()
        refused(model, folder, place, 1e308 if place[-1] == "mlp_ratio" else math.inf)
