"""The family against transformers in float32: pixels, prompts, rows and answers."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import UNAVAILABLE
from cut_images import INFO, check_between_hosts, check_rows, prepared
from lfm3_vl import RELEASED, TinyLfm3, make_lfm3, rendered
from minicpm import Media, assert_greedy, part, random_image, random_media
from preempted import check_rows_preempted
from qwen_vision import replace_torchvision
from safetensors.torch import load_file
from speculation import pairwise
from tiny_checkpoint import changed
from towers import encode

import saccade
from encoder.item import EncoderItem
from encoder.runner import EncoderOptions, EncoderRunner
from families import CheckpointError
from families.lfm3_vl.vision import GridVision
from service.answers.prompts import prompt_ids, widen
from service.common.types import ChatInput, GenerateSpec, Message, RawInput, TokensInput
from service.model.assets import ModelAssets
from service.model.checkpoint import Checkpoint
from service.model.modelconfig import load_config

GREEDY = 16
WORDS = "What is 0<1 "
"""Text after each image or clip."""


OPTIONS = pairwise(
    {
        "native": ["off"] if UNAVAILABLE else ["on", "off"],
        "graphs": ["off", "on"],
        "max_chunk": [None, 7],
        "state_cache": ["auto", "none", "align", "all"],
        "speculative": ["none", "ngram"],
        "spec_state": ["replay", "slots"],
    }
)


@pytest.fixture(autouse=True)
def torchvision_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_torchvision(monkeypatch)


def with_words(media: list[Media]) -> list[Media | str]:
    return [each for item in media for each in (item, WORDS)]


@pytest.mark.parametrize("seed", range(10))
def test_logits_and_greedy_tokens(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images and clips, as files through the engine; the second time from the caches."""
    rng = random.Random(seed)
    tiny, media = make_lfm3(tmp_path, seed), random_media(rng)
    inputs = tiny.inputs(rendered(with_words(media)), media, monkeypatch)
    ids, config = inputs["input_ids"], tiny.model.config
    never = {config.image_token_id: -1e9, config.video_token_id: -1e9}
    content = [each for item in media for each in (part(item), {"type": "text", "text": WORDS})]
    options: dict[str, Any] = dict(OPTIONS[seed % len(OPTIONS)])
    if options["state_cache"] in ("align", "all"):
        options["state_block"] = 16
    with saccade.LocalClient(tmp_path, dtype="float32", max_seqs=2, max_len=2048, threads=1, **options) as client:
        for _ in range(2):
            answer = client.generate(
                [{"role": "user", "content": content}], max_tokens=GREEDY, temperature=0, ignore_eos=True, logprobs=20,
                logit_bias=never,
            )  # fmt: skip
            assert answer.usage.prompt_tokens == len(ids)
            assert answer.usage.image_tokens == ids.count(config.image_token_id)
            assert answer.usage.video_tokens == ids.count(config.video_token_id)
            assert answer.usage.video_frames == sum(len(item) for item in media if isinstance(item, list))
            assert_greedy(answer, tiny.logits(ids + answer.token_ids[:-1], inputs)[len(ids) - 1 :], list(never))


STEPS: list[dict[str, Any]] = [
    {"preempt_every": 9, "host_bytes": 0, "max_chunk": 24, "speculative": "ngram", "graphs": "on"},
    {"preempt_every": 5, "host_bytes": 2**24, "state_cache": "auto", "overlap": "on"},
    {"preempt_every": 7, "host_bytes": 2**24, "state_cache": "align", "state_block": 64, "spec_state": "slots"},
]


@pytest.mark.parametrize("place", range(len(STEPS)))
def test_rows_survive_whatever_happens_to_a_request(
    tmp_path: Path, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts with the same media at a time, then another, preempted again and again, swapped or recomputed."""
    tiny, media = make_lfm3(tmp_path, 20 + place), random_media(random.Random(place))
    inputs = tiny.inputs(rendered(with_words(media)), media, monkeypatch)
    ids, config, checkpoint = inputs["input_ids"], tiny.model.config, Checkpoint(tmp_path)
    items = [item.encoder_item for item in prepared(tiny.vision, media)]
    tower = EncoderRunner(tiny.vision, EncoderOptions(dtype=torch.float32, graphs="off"), checkpoint.vision_weights())
    rows = encode(tower, items)
    check_rows_preempted(
        checkpoint, ids, torch.cat(rows), {config.image_token_id, config.video_token_id},
        lambda whole: tiny.logits(whole, inputs), STEPS[place], GREEDY,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_pixels_and_input_ids_are_the_released_processors(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(100 + seed)
    tiny = make_lfm3(tmp_path, seed)
    media = [*random_media(rng), random_image(rng)]
    inputs = tiny.inputs(rendered(with_words(media)), media, monkeypatch)
    vision = tiny.vision
    items = prepared(vision, media)
    for kind, pixels, grids in (
        ("image", "pixel_values", "image_grid_thw"), ("video", "pixel_values_videos", "video_grid_thw"),
    ):  # fmt: skip
        mine = [item.encoder_item for item in items if item.encoder_item.kind == kind]
        assert [[item.num_sequences, *item.grid] for item in mine] == inputs[grids].tolist()
        theirs = inputs[pixels]
        if kind == "image":  # the processor repeats the frame
            theirs = theirs.view(len(theirs), 3, vision.temporal_patch_size, -1)[:, :, 0].flatten(1)
        assert torch.equal(torch.cat([item.patches for item in mine]), theirs)
    config = load_config(tmp_path)
    assets = ModelAssets(config, config.vision)
    text = rendered(with_words(media))
    content = tuple(None if not isinstance(each, str) else each for each in with_words(media))
    forms = (
        ChatInput((Message("user", content),)), RawInput(text),
        TokensInput(tuple(tiny.processor.tokenizer(text)["input_ids"])),
    )  # fmt: skip
    listed = sorted(items, key=lambda item: item.encoder_item.kind)  # as a request lists them
    for form in forms:
        given = items if isinstance(form, ChatInput) else listed
        found = widen(prompt_ids(GenerateSpec("", "", form), given, assets), given, 0, assets, INFO)
        assert found.ids == inputs["input_ids"]
    assert config.vision is not None and config.vision.positions(found.ids, []) is None


def test_timestamps_are_those_of_the_middle_of_a_pair(tmp_path: Path) -> None:
    rule = make_lfm3(tmp_path, 1, temporal_patch_size=2).vision.video_rule
    assert rule.labels(3, fps=2.0) == ["<0.2 seconds>", "<1.0 seconds>"]


@pytest.mark.parametrize("seed", range(6))
def test_packed_or_alone_by_graph_or_not_the_rows_are_transformers(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    tiny = make_lfm3(tmp_path, seed)
    given = [item.encoder_item for item in prepared(tiny.vision, [*random_media(rng), *map(random_image, [rng] * 3)])]
    check_rows(tiny, tiny.vision, given, max_images=1, tolerance=1e-5)


def test_checkpoints_of_every_kind_are_tried(tmp_path: Path) -> None:
    """By the tests of rows and answers."""
    found = set()
    for seed in range(6):
        tiny = make_lfm3(tmp_path / str(seed), seed)
        vision, names = tiny.vision, load_file(tiny.path / "model.safetensors").keys()
        found |= {f"released {any(name in each for each in names for name in RELEASED.values())}"}
        found |= {f"merge {vision.merge_size}", f"frames {vision.temporal_patch_size}", f"side {vision.conv_kernel}"}
        found |= {f"bias {vision.projector_bias}", f"tied {tiny.model.config.tie_word_embeddings}", *vision.layer_types}
        found |= {f"grouped {vision.num_heads > vision.num_key_value_heads > 1}"}
    assert found >= {
        "released True", "released False", "merge 1", "merge 2", "merge 3", "frames 2", "frames 3", "side 3", "side 5",
        "bias True", "bias False", "tied True", "tied False", "conv", "full_attention", "grouped True",
    }  # fmt: skip


def test_bytes_become_the_same_numbers(tmp_path: Path) -> None:
    rng = random.Random(5)
    tiny = make_lfm3(tmp_path, 3)
    media = [*random_media(rng), random_image(rng)]
    tower = tower_of(tiny)
    for floats, kept in zip(prepared(tiny.vision, media), prepared(tiny.vision, media, keep_bytes=True), strict=True):
        item: EncoderItem = kept.encoder_item
        assert item.patches.dtype == torch.uint8
        assert torch.equal(tower.as_floats(item.patches, kind=item.kind), floats.encoder_item.patches)


def tower_of(tiny: TinyLfm3) -> Any:
    weights = Checkpoint(tiny.path).vision_weights()
    return tiny.vision.build(weights, dtype=torch.float32, device=torch.device("cpu"))


def test_images_and_clips_cross_between_hosts(tmp_path: Path) -> None:
    """An encoder in another server."""
    make_lfm3(tmp_path, 3)
    content = [each for item in random_media(random.Random(2)) for each in (part(item), {"type": "text", "text": "?"})]
    prompt = [{"role": "user", "content": content}]
    with saccade.LocalClient(tmp_path, dtype="float32", max_seqs=2, max_len=2048, threads=1, graphs="off") as client:
        check_between_hosts(client, tmp_path, prompt, "video_tokens")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, which tests copy before they change it."""
    return make_lfm3(tmp_path_factory.mktemp("model"), 1).path


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"text_config": {"model_type": "lfm2"}}, "text_config.model_type is 'lfm2'; 'lfm3' is served"),
        ("config.json", {"vision_config": {"model_type": "clip"}}, "vision_config.model_type is 'clip'"),
        ("config.json", {"vision_config": {"in_channels": 4}}, "vision_config.in_channels is 4"),
        ("config.json", {"vision_config": {"patch_size": [4, 4]}}, "patch_size must be a whole number"),
        ("config.json", {"vision_config": {"conv_kernel_size": 4}}, "conv_kernel_size is 4; odd numbers up to 15"),
        ("config.json", {"vision_config": {"conv_kernel_size": 17}}, "conv_kernel_size is 17; odd numbers up to 15"),
        ("config.json", {"vision_config": {"num_attention_heads": 7}}, "num_attention_heads 7 must be a multiple of 4"),
        (
            "config.json",
            {"vision_config": {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 3}},
            "num_attention_heads 2 is not a multiple of num_key_value_heads 3",
        ),
        ("config.json", {"vision_config": {"layer_types": ["mamba"]}}, "vision_config.layer_types holds .'mamba'"),
        (
            "config.json",
            {"vision_config": {"layer_types": ["conv"]}},
            "layer_types names 1 layers",
        ),
        (
            "config.json",
            {"vision_config": {"rope_parameters": {"rope_type": "yarn"}}},
            "rope_type 'yarn' is not",
        ),
        ("config.json", {"projector_hidden_act": "relu6"}, "projector_hidden_act 'relu6' is none of"),
        ("config.json", {"projector_bias": 1}, "projector_bias must be true or false, not 1"),
        ("config.json", {"image_token_id": 10**6}, "image_token_id 1000000"),
        ("config.json", {"image_token_id": 5, "video_token_id": 5}, "image_token_id and video_token_id are both 5"),
        ("preprocessor_config.json", {"patch_size": 7}, "preprocessor_config.json: patch_size is 7"),
        ("preprocessor_config.json", {"resample": 2}, "resample is 2"),
        ("video_preprocessor_config.json", {"temporal_patch_size": 7}, "temporal_patch_size is 7"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    settings: Path, tmp_path: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_config(changed(settings, tmp_path, file, changes))


def test_the_fields_of_files_without_them_are_transformers_defaults(tmp_path: Path, settings: Path) -> None:
    shutil.copytree(settings, tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "config.json").read_text())
    content["vision_config"] = {"model_type": "lfm3_vl_vision"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (tmp_path / name).unlink()
    vision = load_config(tmp_path).vision
    assert isinstance(vision, GridVision)
    assert (vision.hidden_size, vision.num_heads, vision.num_key_value_heads, vision.conv_kernel) == (1024, 16, 8, 3)
    assert vision.layer_types == ("conv",) * 2 + ("full_attention", "conv") * 6
    assert (vision.patch_size, vision.merge_size, vision.rope_theta, vision.norm_eps) == (16, 2, 1e6, 1e-5)
