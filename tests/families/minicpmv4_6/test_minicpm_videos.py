"""Videos: frames, pixels, prompts and answers against transformers in float32."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_images import prepared
from hypothesis import example, given
from hypothesis import strategies as st
from images import encoded
from minicpm import (
    Media,
    TinyMiniCPM,
    check_media_answers,
    inputs_of,
    make_minicpm,
    random_image,
    random_media,
    random_video,
    rendered,
)
from qwen_vision import replace_torchvision
from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor
from transformers.video_utils import VideoMetadata

import saccade
from encoder.frames import open_video
from encoder.media_limits import MAX_ASPECT
from encoder.runner import EncoderOptions, EncoderRunner
from encoder.stopwatch import Stopwatch
from families import CheckpointError, VisionSpec
from families.minicpmv4_6.slicing import Slicing
from families.minicpmv4_6.vision import SlicingVision
from service.answers.prompts import prompt_ids, widen
from service.common.types import ChatInput, GenerateSpec, Message, RawInput, TokensInput
from service.engine.types import EngineInfo
from service.media.image_pool import ImagePool
from service.media.images import MediaLimits
from service.media.patches import Patcher
from service.model.assets import ModelAssets
from service.model.checkpoint import Checkpoint
from service.model.modelconfig import load_config

INFO = EngineInfo("tiny", "", 4096, 2, 4096, "float32")


@pytest.fixture(autouse=True)
def torchvision_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_torchvision(monkeypatch)


@pytest.mark.parametrize("seed", range(12))
def test_logits_and_greedy_tokens(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    tiny = make_minicpm(tmp_path, seed)
    media = random_media(rng)
    check_media_answers(tiny, media, "0<1 ", max_chunk=rng.choice([None, 7]), graphs=("off", "on")[seed % 2])


def vision_of(tiny: TinyMiniCPM) -> SlicingVision:
    vision = load_config(tiny.path).vision
    assert isinstance(vision, SlicingVision)
    return vision


@pytest.mark.parametrize("seed", range(20))
def test_pixels_and_input_ids_are_the_released_processors(tmp_path: Path, seed: int) -> None:
    rng = random.Random(100 + seed)
    tiny = make_minicpm(tmp_path, seed)
    media = random_media(rng)
    inputs = inputs_of(tiny, media)
    items = prepared(vision_of(tiny), sorted(media, key=lambda item: isinstance(item, list)))  # images before videos
    videos = [item for item in items if item.frames]
    patch = tiny.model.config.vision_config.patch_size
    grids = [grid for item in videos for grid in item.layout.grids]
    assert grids == [tuple(size) for size in inputs["target_sizes_videos"].tolist()]
    theirs = inputs["pixel_values_videos"][0].reshape(3, patch, -1, patch).permute(2, 0, 1, 3).flatten(1)
    assert torch.equal(torch.cat([item.encoder_item.patches for item in videos]), theirs)
    assets = ModelAssets(load_config(tmp_path), load_config(tmp_path).vision)
    content = tuple(part for item in media for part in (None, "0<1 "))
    in_order = [item for item in items if not item.frames], videos
    chat_media = [in_order[isinstance(item, list)].pop(0) for item in media]
    chat = ChatInput((Message("user", content),))
    raw = RawInput(rendered(media))
    each = TokensInput(tuple(tiny.processor.tokenizer(rendered(media))["input_ids"]))
    wanted = inputs["input_ids"][0].tolist()
    for form, given_media in ((chat, chat_media), (raw, items), (each, items)):
        spec = GenerateSpec("", "", form)
        prompt = widen(prompt_ids(spec, given_media, assets), given_media, 0, assets, INFO)
        assert prompt.ids == wanted
    narrow = GenerateSpec("", "", TokensInput(prompt.narrow_ids))
    assert widen(prompt_ids(narrow, items, assets), items, 0, assets, INFO).ids == wanted


@given(
    total=st.integers(1, 20000), fps=st.sampled_from([0.5, 1.0, 12.5, 24.0, 23.976, 29.97, 30.0, 59.94, 1000.0]),
    count=st.integers(1, 200), most=st.integers(1, 128),
)  # fmt: skip
@example(total=10, fps=10 / 3, count=64, most=128)
def test_frames_are_the_released_processors(total: int, fps: float, count: int, most: int) -> None:
    vision = SlicingVision(
        hidden_size=4, num_layers=1, num_heads=1, intermediate_size=4, text_hidden_size=4, insert_layer=None,
        video=Slicing(), max_video_frames=most,
    )  # fmt: skip
    rule = vision.video_rule
    assert rule is not None
    metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
    released = object.__new__(MiniCPMV4_6VideoProcessor)
    wanted = released.sample_frames(metadata, max_num_frames=min(count, most), stack_frames=1)
    assert rule.sample_file(total, count, lambda: fps) == [min(int(index), total - 1) for index in wanted]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VisionSpec, ImagePool]]:
    """An image worker, and the model for which it prepares videos."""
    vision = vision_of(make_minicpm(tmp_path_factory.mktemp("model"), 7))
    with closing(ImagePool(MediaLimits(), 1, image_seconds=60, video_seconds=60, vision=vision)) as pool:
        yield vision, pool


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_a_frame_that_is_shown_for_long_is_sampled_several_times(
    worker: tuple[VisionSpec, ImagePool], form: str
) -> None:
    vision, pool = worker
    images = [random_image(random.Random(seed)).resize((80, 60)) for seed in range(3)]
    buffer = io.BytesIO()
    options: dict[str, Any] = {"lossless": True} if form == "WEBP" else {}
    images[0].save(buffer, form, save_all=True, append_images=images[1:], duration=2000, loop=0, **options)
    clip = buffer.getvalue()
    frames = list(open_video(clip).frames([0, 1, 2]))
    rule = vision.video_rule
    assert rule is not None
    indices = rule.sample_file(3, 8, lambda: 0.5)
    assert indices == [0, 0, 1, 1, 2, 2]
    expected = rule.patchify([frames[index] for index in indices], torch.float32, keep_bytes=True)
    local = Patcher(MediaLimits(), vision, "float32")
    assert torch.equal(local.video(clip, 8, Stopwatch()).item.encoder_item.patches, expected.patches)
    item = pool.video(clip, 8, Stopwatch()).item
    assert item.layout == expected.description and item.file is not None
    assert torch.equal(replace(item, file=None).opened(item.file.take()).encoder_item.patches, expected.patches)


@given(
    short=st.integers(1, 400), aspect=st.floats(1, MAX_ASPECT), turned=st.booleans(),
    patch=st.sampled_from([2, 14, 16]), merge=st.sampled_from([2, 4]), resolution=st.sampled_from([16, 100, 448]),
    most=st.sampled_from([1, 2, 9, 16]),
)  # fmt: skip
@example(short=124, aspect=193.6, turned=False, patch=14, merge=4, resolution=448, most=9)
def test_no_frame_has_more_pixels_than_the_bound(
    short: int, aspect: float, turned: bool, patch: int, merge: int, resolution: int, most: int
) -> None:
    slicing = Slicing(max_slice_nums=most, scale_resolution=resolution)
    sides = (short, int(short * aspect))
    parts = slicing.parts(*(sides[::-1] if turned else sides), patch * merge)
    assert sum(part.pixels for part in parts) <= slicing.most_pixels(patch * merge)


@pytest.mark.parametrize("seed", range(4))
def test_packed_or_alone_in_bytes_or_floats_the_rows_are_transformers(tmp_path: Path, seed: int) -> None:
    tiny = make_minicpm(tmp_path, seed)
    checkpoint, vision = Checkpoint(tmp_path), vision_of(tiny)
    rng = random.Random(seed)
    media: list[Media] = [random_image(rng), random_video(rng), random_video(rng)]
    given_items = [item.encoder_item for item in prepared(vision, media, keep_bytes=seed % 2 == 0)]
    expected = [tiny.rows(item.encoder_item) for item in prepared(vision, media)]
    weights = list(checkpoint.vision_weights())
    for graphs in ("off", "on"):
        options = EncoderOptions(dtype=torch.float32, graphs=graphs, max_images=2)
        runner = EncoderRunner(vision, options, weights)
        out = [torch.empty(item.tokens, vision.row_width) for item in given_items]
        assert runner.encode(given_items, out) == [item.sequence_tokens for item in given_items]
        for item, found, rows in zip(given_items, out, expected, strict=True):
            alone = torch.empty_like(found)
            runner.encode([item], [alone])
            scale = float(rows.abs().max())
            assert float((found - rows).abs().max()) <= 1e-4 * scale
            assert float((found - alone).abs().max()) <= 1e-5 * scale


def test_images_and_videos_need_tokens_of_their_own(tmp_path: Path) -> None:
    make_minicpm(tmp_path, 0)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"video_token_id": config["image_token_id"]}))
    with pytest.raises(CheckpointError, match="image_token_id and video_token_id are both"):
        load_config(tmp_path)


def test_a_model_without_a_video_token_takes_none(tmp_path: Path) -> None:
    make_minicpm(tmp_path, 0)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"video_token_id": None}))
    frames = [encoded(random_image(random.Random(0))) for _ in range(2)]
    with saccade.LocalClient(tmp_path, dtype="float32", max_seqs=1, max_len=512, threads=1, graphs="off") as client:
        with pytest.raises(saccade.errors.FailedPrecondition, match="takes no videos"):
            client.generate("what?", videos=[frames], max_tokens=1)
