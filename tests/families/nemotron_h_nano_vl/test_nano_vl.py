"""The family against the released processor, written out in `nano_vl`, and transformers in float32: pixels, prompts,
rows and answers."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import UNAVAILABLE
from cut_images import INFO, check_between_hosts, check_rows, pixels_of, prepared
from hypothesis import given
from hypothesis import settings as tried
from hypothesis import strategies as st
from minicpm import Media, assert_greedy, part, random_image, random_media
from nano_vl import (
    END,
    IMAGE,
    START,
    VIDEO,
    TinyNano,
    clip_text,
    flattened,
    make_nano,
    released_pixels,
    released_tiles,
    rendered,
)
from PIL import Image
from preempted import check_rows_preempted
from quantised_checkpoint import quantise_files
from safetensors.torch import load_file, save_file
from speculation import pairwise
from tiny_checkpoint import changed
from tiny_encoder import relative_error

import saccade
from families import CheckpointError
from families.nemotron_h_nano_vl import FAMILY
from families.nemotron_h_nano_vl.vision import TiledVision
from families.nemotron_h_omni.vision import RadioVision
from families.tool_calls import CALL_LIST
from service.answers.prompts import prompt_ids, widen
from service.common.types import ChatInput, GenerateSpec, Message, RawInput, TokensInput
from service.model.assets import ModelAssets
from service.model.checkpoint import Checkpoint
from service.model.modelconfig import load_config

GREEDY = 12
WORDS = "What is 0<1 in <image 1>"
RELEASED = {
    "image_size": 512, "max_num_tiles": 12, "use_thumbnail": True, "patch_size": 16,
    "norm_mean": [0.48145466, 0.4578275, 0.40821073], "norm_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
"""Settings of the released image processor."""
OPTIONS = pairwise(
    {
        "native": ["off"] if UNAVAILABLE else ["on", "off"],
        "graphs": ["off", "on"],
        "max_chunk": [None, 7],
        "state_cache": ["auto", "none", "align", "all"],
        "speculative": ["none", "ngram"],
        "video_pruning_rate": [0.0, 0.5],
    }
)


def message(media: list[Media], text: str = WORDS) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*map(part, media), {"type": "text", "text": text}]}]


def never(tiny: TinyNano) -> dict[int, float]:
    return {token: -1e9 for name in (IMAGE, VIDEO) if (token := tiny.tokenizer.token_id(name)) is not None}


@pytest.mark.parametrize("seed", range(8))
def test_logits_and_greedy_tokens(tmp_path: Path, seed: int) -> None:
    """Images and clips, as files through the engine; the second time from the caches."""
    tiny, media = make_nano(tmp_path, seed, files=1 + seed % 3), random_media(random.Random(seed)) if seed else []
    options: dict[str, Any] = dict(OPTIONS[seed % len(OPTIONS)])
    ids, rows = tiny.expected(media, WORDS, options["video_pruning_rate"])
    if options["state_cache"] in ("align", "all"):
        options["state_block"] = 16
    with saccade.LocalClient(tmp_path, dtype="float32", max_seqs=2, max_len=2048, threads=1, **options) as client:
        for _ in range(2):
            answer = client.generate(
                message(media), max_tokens=GREEDY, temperature=0, ignore_eos=True, logprobs=20, logit_bias=never(tiny)
            )
            assert answer.usage.prompt_tokens == len(ids)
            assert answer.usage.image_tokens == ids.count(tiny.tokenizer.token_id(IMAGE))
            assert answer.usage.video_tokens == ids.count(tiny.tokenizer.token_id(VIDEO))
            logits = tiny.answer_logits(ids + answer.token_ids[:-1], rows)[len(ids) - 1 :]
            assert_greedy(answer, logits, list(never(tiny)))


STEPS: list[dict[str, Any]] = [
    {"preempt_every": 9, "host_bytes": 0, "max_chunk": 24, "speculative": "ngram", "graphs": "on"},
    {"preempt_every": 5, "host_bytes": 2**24, "state_cache": "auto", "overlap": "on"},
]


@pytest.mark.parametrize("place", range(len(STEPS)))
def test_rows_survive_whatever_happens_to_a_request(tmp_path: Path, place: int) -> None:
    """Two prompts with the same media at a time, then another, preempted again and again, swapped or recomputed."""
    tiny, media = make_nano(tmp_path, 20 + place), random_media(random.Random(place))
    ids, rows = tiny.expected(media, WORDS)
    check_rows_preempted(
        Checkpoint(tmp_path), ids, rows, never(tiny).keys(), lambda whole: tiny.answer_logits(whole, rows),
        STEPS[place], GREEDY,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_pixels_and_input_ids_are_the_released_processors(tmp_path: Path, seed: int) -> None:
    rng = random.Random(100 + seed)
    tiny = make_nano(tmp_path, seed)
    media = [*random_media(rng), random_image(rng)]
    items, patch = prepared(tiny.vision_spec, media), tiny.settings["patch_size"]
    for item, source in zip(items, media, strict=True):
        frames = [source] if isinstance(source, Image.Image) else [Image.fromarray(frame.numpy()) for frame in source]
        most = 1 if isinstance(source, list) else None
        theirs = torch.cat([released_pixels(frame, tiny.settings, most) for frame in frames])
        assert item.layout.num_sequences == len(theirs)
        assert relative_error(item.encoder_item.patches, flattened(theirs, patch)) <= 1e-5
    ids, _ = tiny.expected(media, WORDS)
    config = load_config(tmp_path)
    assets = ModelAssets(config, config.vision)
    text = rendered(media, WORDS).replace(IMAGE, START + IMAGE + END)  # which only messages are completed with
    listed = sorted(items, key=lambda item: bool(item.labels))  # as a request lists them
    plain = tuple(assets.tokenizer.encode(text)) if assets.tokenizer is not None else ()
    forms = (ChatInput((Message("user", (*[None] * len(media), WORDS)),)), RawInput(text), TokensInput(plain))
    for form in forms:
        shown = items if isinstance(form, ChatInput) else listed
        found = widen(prompt_ids(GenerateSpec("", "", form), shown, assets), shown, 0, assets, INFO)
        assert found.ids == ids
        again = widen(
            prompt_ids(GenerateSpec("", "", TokensInput(found.narrow_ids)), listed, assets), listed, 0, assets, INFO
        )
        assert again.ids == ids  # as `tokenize` gives them


@tried(deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(0, 2**32))
def test_pixels_of_any_size_with_any_settings(height: int, width: int, seed: int) -> None:
    rng = random.Random(seed)
    patch, merge = rng.choice([2, 3, 4]), rng.choice([1, 2, 3])
    settings = RELEASED | {
        "image_size": patch * merge * rng.choice([1, 2, 3]), "max_num_tiles": rng.choice([1, 2, 5, 12, 20]),
        "use_thumbnail": rng.random() < 0.7, "patch_size": patch,
    }  # fmt: skip
    source = random_image(rng).resize((width, height), Image.Resampling.BICUBIC)
    item = vision_of(settings, merge).image_rule.patchify(pixels_of(source), torch.float32)
    theirs = released_pixels(source, settings)
    assert item.num_sequences == len(theirs)
    assert relative_error(item.patches, flattened(theirs, patch)) <= 1e-5


def vision_of(settings: dict[str, Any], merge: int = 2) -> TiledVision:
    return TiledVision(
        patch_size=settings["patch_size"], merge_size=merge, image_mean=tuple(settings["norm_mean"]),
        image_std=tuple(settings["norm_std"]), tile_size=settings["image_size"], max_tiles=settings["max_num_tiles"],
        use_thumbnail=settings["use_thumbnail"], video_temporal_patch_size=1,
    )  # fmt: skip


SIZES = [(1, 1), (1, 4000), (4000, 1), (512, 512), (513, 512), (1024, 1024), (1536, 1536), (202, 481), (1779, 1178),
         (256, 3072), (768, 1024), (2048, 1536), (600, 1200), (9, 16), (1080, 1920), (3, 7)]  # fmt: skip


def test_tiles_are_the_released_processors() -> None:
    """Of images of any size with the released settings, without cutting them."""
    rng, rule = random.Random(0), vision_of(RELEASED).image_rule
    random_sizes = [(int(2 ** rng.uniform(0, 13)), int(2 ** rng.uniform(0, 13))) for _ in range(400)]
    shapes = set()
    for height, width in SIZES + random_sizes:
        columns, rows = released_tiles(height, width, 12, 512)
        layout = rule.layout(height, width)
        assert (layout.slices or (0, 0)) == ((rows, columns) if rows * columns > 1 else (0, 0))
        assert layout.tokens == 256 * (rows * columns + (rows * columns > 1))
        shapes.add((rows, columns))
    assert len(shapes) > 15


@pytest.mark.parametrize(
    ("height", "width", "tiles"), [(202, 481, 11), (1779, 1178, 7), (512, 512, 1), (1536, 2048, 13)]
)
def test_worked_tiles_of_the_released_processor(height: int, width: int, tiles: int) -> None:
    """The first two are counts that were published of the released processor."""
    assert vision_of(RELEASED).image_rule.layout(height, width).num_sequences == tiles


def test_a_released_image_has_the_released_pixels() -> None:
    source = random_image(random.Random(3)).resize((512, 250))
    item = vision_of(RELEASED).image_rule.patchify(pixels_of(source), torch.float32)
    assert relative_error(item.patches, flattened(released_pixels(source, RELEASED), 16)) <= 1e-5


@pytest.mark.parametrize("seed", range(6))
def test_packed_or_alone_by_graph_or_not_the_rows_are_transformers(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    tiny = make_nano(tmp_path, seed)
    media = [*random_media(rng), *map(random_image, [rng] * 3)]
    given = [item.encoder_item for item in prepared(tiny.vision_spec, media)]
    check_rows(tiny, tiny.vision_spec, given, max_images=1, tolerance=1e-5)


def test_checkpoints_of_every_kind_are_tried(tmp_path: Path) -> None:
    """By the tests of rows and answers."""
    found = set()
    for seed in range(6):
        vision = make_nano(tmp_path / str(seed), seed).vision_spec
        found |= {f"tiles {vision.max_tiles}", f"thumbnail {vision.use_thumbnail}", f"side {vision.tile_side}"}
        found |= {f"eps {vision.projector_eps}"}
    assert found >= {
        "eps 1e-05", "eps 0.01", "tiles 1", "tiles 12", "thumbnail True", "thumbnail False", "side 2", "side 4",
        "side 6",
    }  # fmt: skip


def test_bytes_become_the_same_numbers(tmp_path: Path) -> None:
    tiny = make_nano(tmp_path, 3)
    side = tiny.settings["image_size"]
    still = random_image(random.Random(5)).resize((side, side))
    media: list[Media] = [still, [pixels_of(still), pixels_of(still.rotate(90))]]
    weights = Checkpoint(tmp_path).vision_weights()
    tower = tiny.vision_spec.build(weights, dtype=torch.float32, device=torch.device("cpu"))
    kept, floats = (prepared(tiny.vision_spec, media, keep_bytes=keep) for keep in (True, False))
    for mine, theirs in zip(kept, floats, strict=True):
        assert mine.encoder_item.patches.dtype == torch.uint8
        made = tower.as_floats(mine.encoder_item.patches, kind=mine.encoder_item.kind)
        assert torch.equal(made, theirs.encoder_item.patches)
    vision = replace(tiny.vision_spec, max_tiles=2, use_thumbnail=True)
    two = pixels_of(still.resize((2 * side, side)))  # as large as its tiles, but the whole image is resized
    assert torch.equal(
        *(vision.image_rule.patchify(two, torch.float32, keep_bytes=keep).patches for keep in (True, False))
    )


def test_images_and_clips_cross_between_hosts(tmp_path: Path) -> None:
    """An encoder in another server."""
    make_nano(tmp_path, 4, max_num_tiles=12)
    rng = random.Random(2)
    prompt = message([*random_media(rng), random_image(rng)])
    with saccade.LocalClient(tmp_path, dtype="float32", max_seqs=2, max_len=2048, threads=1, graphs="off") as client:
        check_between_hosts(client, tmp_path, prompt, "video_tokens", "image_tokens")


def test_text_of_a_clip_has_the_times_of_its_frames() -> None:
    rule = vision_of(RELEASED).video_rule
    labels = rule.labels(3, fps=29.97, indices=[0, 15, 30])
    text = rule.text(None, labels, 0, start="<img>", token=VIDEO, end="</img>")  # type: ignore[arg-type]
    moments = [f" sampled at {seconds:.2f} seconds" for seconds in (0, 15 * 0.033, 30 * 0.033)]
    assert text == clip_text([1, 1, 1], moments)


@pytest.mark.parametrize(
    ("total", "count", "indices"),
    [(10, 4, [0, 3, 6, 9]), (6, 4, [0, 2, 3, 5]), (10, 1, [0]), (3, 5, [0, 1, 2]), (8, 3, [0, 4, 7])],
)
def test_frames_are_sampled_from_the_first_to_the_last(total: int, count: int, indices: list[int]) -> None:
    """(8, 3): 3.5 is rounded to even."""
    rule = vision_of(RELEASED).video_rule
    assert rule.sample(total, count) == rule.sample_file(total, count, lambda: 5.0) == indices
    with pytest.raises(ValueError, match="0 of 5 frames"):
        rule.sample(5, 0)


@pytest.mark.parametrize("form", ["modelopt-fp8", "modelopt-nvfp4"])
def test_quantised_releases(tmp_path: Path, form: str) -> None:
    """As the FP8 and NVFP4 releases: the decoder's matrices are quantised, which only `hf_quant_config.json` says."""
    sizes = {"hidden_size": 32, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2}
    made = make_nano(tmp_path / "plain", 2, text=sizes | {"intermediate_size": 64})
    tiny = replace(made, path=quantise_files(made, tmp_path / form, form).path)
    config = json.loads((tiny.path / "config.json").read_text())
    entry = config.pop("quantization_config")
    (tiny.path / "config.json").write_text(json.dumps(config))
    about = {name: entry[name] for name in ("quant_algo", "group_size") if name in entry}
    excluded = ["lm_head", "vision_model*", "mlp1*"]
    declared = {"producer": {"name": "modelopt"}, "quantization": about | {"exclude_modules": excluded}}
    (tiny.path / "hf_quant_config.json").write_text(json.dumps(declared))
    media: list[Media] = [random_image(random.Random(1))]
    ids, rows = tiny.expected(media, WORDS)
    with saccade.LocalClient(tiny.path, dtype="float32", max_seqs=1, max_len=1024, threads=1) as client:
        answer = client.generate(
            message(media), max_tokens=6, temperature=0, ignore_eos=True, logprobs=5, logit_bias=never(tiny)
        )
    logits = tiny.answer_logits(ids + answer.token_ids[:-1], rows)[len(ids) - 1 :]
    assert_greedy(answer, logits, list(never(tiny)))


def test_weights_are_quantised_while_they_are_loaded(tmp_path: Path) -> None:
    make_nano(tmp_path, 5, dtype=torch.bfloat16, files=2)
    prompt = message([random_image(random.Random(1))])
    with saccade.LocalClient(tmp_path, weights="int8", max_seqs=1, max_len=1024, threads=1) as client:
        assert len(client.generate(prompt, max_tokens=4, ignore_eos=True).token_ids) == 4


def test_weights_that_the_model_does_not_have_are_named(tmp_path: Path) -> None:
    tiny = make_nano(tmp_path, 0)
    file = tiny.path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"vision_model.radio_model.model.norm.weight": torch.ones(8)}, file)
    with pytest.raises(CheckpointError, match="radio_model.model.norm.weight"):
        Checkpoint(tiny.path)
    del tensors["mlp1.3.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"multi_modal_projector.linear_2.weight|mlp1\.3"):
        Checkpoint(tiny.path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, which tests copy before they change it."""
    return make_nano(tmp_path_factory.mktemp("model"), 1).path


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"ps_version": "v1"}, "ps_version is 'v1'; this model is served with 'v2'"),
        ("config.json", {"ps_version": None}, "ps_version is 'v1'"),
        ("config.json", {"image_tag_type": "nvlm"}, "image_tag_type is 'nvlm'"),
        ("config.json", {"force_image_size": 0}, "force_image_size must be a whole number of at least 1, not 0"),
        ("config.json", {"force_image_size": 10**6}, "force_image_size is 1000000; at most 16384"),
        ("config.json", {"downsample_ratio": 0.3}, "downsample_ratio 0.3 must be the reciprocal"),
        ("config.json", {"vit_hidden_size": 7}, "vit_hidden_size .7. and vision_config.hidden_size"),
        ("config.json", {"img_context_token_id": 10**6}, "img_context_token_id 1000000 is not a token id"),
        (
            "config.json", {"img_context_token_id": 5, "video_context_token_id": 5},
            "img_context_token_id and video_context_token_id are both 5",
        ),
        ("config.json", {"vision_config": {"video_temporal_patch_size": 2}}, "video_temporal_patch_size is 2"),
        ("config.json", {"vision_config": {"vitdet_window_size": 16}}, "vitdet_window_size is 16"),
        ("config.json", {"vision_config": {"args": {"model": "vit_giant_patch14"}}}, "'vit_giant_patch14' is not one"),
        ("config.json", {"llm_config": {"hybrid_override_pattern": "MX"}}, "hybrid_override_pattern over 'M.-E'"),
        ("preprocessor_config.json", {"image_size": 7}, "image_size is 7, and config.json makes it"),
        ("preprocessor_config.json", {"patch_size": 7}, "patch_size is 7, and config.json makes it"),
        ("preprocessor_config.json", {"downsample_ratio": 1}, "downsample_ratio is 1, and config.json makes it 0.5"),
        ("preprocessor_config.json", {"max_num_tiles": 101}, "max_num_tiles is 101; at most 100"),
        ("preprocessor_config.json", {"max_num_tiles": 0}, "max_num_tiles must be a whole number of at least 1"),
        ("preprocessor_config.json", {"use_thumbnail": 1}, "use_thumbnail must be true or false, not 1"),
        ("preprocessor_config.json", {"norm_std": [0, 1, 1]}, "image_std or norm_std must be positive"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(
    folder: Path, tmp_path: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_config(changed(folder, tmp_path, file, changes))


def test_tiles_that_tokens_do_not_divide_are_refused(folder: Path, tmp_path: Path) -> None:
    side = json.loads((folder / "config.json").read_text())["patch_size"] * 3
    both = changed(folder, tmp_path / "first", "config.json", {"force_image_size": side})
    with pytest.raises(CheckpointError, match=f"force_image_size {side} is not a multiple of"):
        load_config(changed(both, tmp_path / "second", "preprocessor_config.json", {"image_size": side}))


def test_an_image_of_more_tokens_than_the_context_is_refused() -> None:
    vision = vision_of(RELEASED).limited(max_model_len=767)
    with pytest.raises(ValueError, match="it takes 768 tokens and the context holds 767"):
        vision.image_rule.patchify(torch.zeros(100, 200, 3, dtype=torch.uint8), torch.float32)
    assert vision.max_image_tokens == 767 and vision_of(RELEASED).max_image_tokens == 13 * 256
    with pytest.raises(ValueError, match="at least one pixel each way, got 0x5"):
        vision.image_rule.grid(0, 5)


def test_later_models_of_this_type_have_no_tiles(folder: Path, tmp_path: Path) -> None:
    """Those whose tower has limits on the patches of an image, as vLLM tells them apart."""
    args = json.loads((folder / "config.json").read_text())["vision_config"]["args"]
    limits = {"min_num_patches": 4, "max_num_patches": 64}
    path = changed(folder, tmp_path, "config.json", {"vision_config": {"args": args | limits}})
    (path / "preprocessor_config.json").unlink()
    vision = load_config(path).vision
    assert isinstance(vision, RadioVision) and (vision.min_num_patches, vision.max_num_patches) == (4, 64)


def test_the_server_knows_the_models_markup(folder: Path) -> None:
    config = load_config(folder)
    assets = ModelAssets(config, config.vision)
    assert assets.reasoning is not None and config.family is FAMILY
    assert FAMILY.tool_markup("use <TOOLCALL>[...]</TOOLCALL>") is CALL_LIST
    assert config.dtype == "float32" and len(config.eos_token_ids) == 2
