"""Clips through the runner: rows against transformers' video features, packing, graphs and pruning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from clips import released_pixels
from tiny_encoder import TinyTower, random_image, relative_error, tiny_tower
from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import compute_retention_mask

from encoder.item import EncoderItem
from encoder.runner import EncoderOptions, EncoderRunner
from families.nemotron_h_omni.video_rule import OmniVideoRule, video_grid
from families.nemotron_h_omni.vision import RadioVision


@pytest.fixture(scope="module")
def tiny() -> TinyTower:
    return tiny_tower(21, final_layernorm=True)


def clip(frames: int, height: int, width: int, seed: int = 0, *, still: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator) for _ in range(frames)]
    if still:  # the left half never moves
        for frame in made[1:]:
            frame[:, : width // 2] = made[0][:, : width // 2]
    return made


CLIPS = [(5, 40, 40, 0.0), (2, 24, 60, 0.0), (7, 61, 23, 0.5), (1, 16, 16, 0.9), (4, 30, 50, 0.8)]


def make(tiny: TinyTower, graphs: str, **options: Any) -> EncoderRunner:
    return EncoderRunner(
        tiny.config, EncoderOptions(dtype=torch.float32, graphs=graphs, **options), tiny.weights.items()
    )


def video_config(tiny: TinyTower) -> RadioVision:
    return replace(tiny.config, video_target_num_patches=24)


def prepared(tiny: TinyTower) -> list[EncoderItem]:
    config = video_config(tiny)
    return [
        OmniVideoRule(replace(config, video_pruning_rate=rate)).patchify(
            clip(frames, height, width, seed=i, still=True), torch.float32
        )
        for i, (frames, height, width, rate) in enumerate(CLIPS)
    ]


@torch.no_grad()
def oracle(tiny: TinyTower) -> list[tuple[torch.Tensor, list[int]]]:
    """Rows of each clip and number of rows of each temporal patch: video features, masked with the true grid."""
    results = []
    config = video_config(tiny)
    for i, (frames, height, width, rate) in enumerate(CLIPS):
        values = released_pixels(config, clip(frames, height, width, seed=i, still=True))
        features = tiny.oracle.get_video_features(values).pooler_output
        groups, tokens, _ = features.shape
        flat = features.flatten(0, 1)
        mask = torch.ones(len(flat), dtype=torch.bool)
        if rate:
            rows, columns = video_grid(height, width, config)
            shape = torch.tensor([groups, rows // 2, columns // 2])
            mask = compute_retention_mask(video_embeds=flat, thw=shape, spatial_merge_size=1, q=rate)
        results.append((flat[mask], mask.view(groups, tokens).sum(1).tolist()))
    return results


def encode(runner: EncoderRunner, items: list[Any]) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
    width = runner.spec.row_width
    out = [torch.full((item.tokens, width), float("nan")) for item in items]
    rows = runner.encode(items, out)
    runner.check_integrity()
    return out, rows


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("together", [True, False], ids=["packed", "alone"])
def test_rows_equal_the_oracle_s(tiny: TinyTower, graphs: str, together: bool) -> None:
    runner = make(tiny, graphs, graph_kinds=None)
    clips = prepared(tiny)
    batches = [clips] if together else [[video] for video in clips]
    encoded = [encode(runner, batch) for batch in batches]
    got = [rows for batch, _ in encoded for rows in batch]
    counts = [count for _, batch in encoded for count in batch]
    for rows, count, (expected, expected_count) in zip(got, counts, oracle(tiny), strict=True):
        assert relative_error(rows, expected) <= 1e-5
        assert list(count) == expected_count and sum(count) == len(rows)
    stats = runner.stats()
    assert stats["temporal_patches"] == sum(video.num_sequences for video in clips)
    assert stats["video_batches"] == stats["batches"]
    replays = sum(count for name, count in stats.items() if name.startswith("replays_"))
    assert replays == (stats["batches"] if graphs == "on" else 0), "pruning leaves graphs on"
    runner.close()


def test_three_frames_in_a_patch() -> None:
    tiny = tiny_tower(4, video_temporal_patch_size=3)
    config = video_config(tiny)
    frames = clip(7, 20, 36)
    video = OmniVideoRule(config).patchify(frames, torch.float32)
    (got,), _ = encode(make(tiny, "off"), [video])
    with torch.no_grad():
        expected = tiny.oracle.get_video_features(released_pixels(config, frames)).pooler_output
    assert relative_error(got, expected.flatten(0, 1)) <= 1e-5


@torch.inference_mode()
def test_images_and_clips_in_one_call_on_a_poisoned_arena(tiny: TinyTower) -> None:
    runner = make(tiny, "on", graph_kinds=None)
    clips = prepared(tiny)
    images = [random_image(tiny.config, *grid) for grid in ((4, 6), (2, 2), (12, 10))]
    expected = [encode(runner, [item])[0][0] for item in (*clips, *images)]
    arena = runner.lanes["image"].graphs.arena  # type: ignore[union-attr]
    assert runner.lanes["video"].graphs is not None and runner.lanes["video"].graphs.arena is arena
    items: list[Any] = [clips[0], images[0], clips[2], images[1], clips[1], clips[3], images[2], clips[4]]
    order = [0, 5, 2, 6, 1, 3, 7, 4]
    for buffer in arena.buffers.values():
        buffer.fill_(float("nan") if buffer.is_floating_point() else 10**6)
    for _ in range(2):
        for rows, index in zip(encode(runner, items)[0], order, strict=True):
            assert relative_error(rows, expected[index]) <= 1e-5
    runner.close()


def test_clips_without_graphs_run_eagerly_and_say_why(tiny: TinyTower) -> None:
    runner = make(tiny, "on")
    clips = prepared(tiny)
    items: list[Any] = [*clips, random_image(tiny.config, 4, 6)]
    got, _ = encode(runner, items)
    for rows, (expected, _) in zip(got, oracle(tiny)):
        assert relative_error(rows, expected) <= 1e-5
    stats = runner.stats()
    assert stats["eager_no_video_graphs"] == stats["video_batches"] > 0
    assert stats["batches"] == stats["video_batches"] + 1 and runner.lanes["video"].used_budgets == []
    all_kinds = make(tiny, "on", graph_kinds=None)
    assert all_kinds.lanes["video"].used_budgets == list(runner.budgets.token_budgets)


def test_the_arena_grows_by_the_wider_patches_only(tiny: TinyTower) -> None:
    plain, wide = make(tiny, "on"), make(tiny, "on", graph_kinds=None)
    before, after = (runner.lanes["image"].graphs.arena for runner in (plain, wide))  # type: ignore[union-attr]
    largest = before.shapes[plain.budgets.largest]
    assert after.bytes - before.bytes == largest.patches * tiny.config.patch_dim * 4


def test_a_long_clip_takes_several_launches_with_turns_between(tiny: TinyTower) -> None:
    runner = make(tiny, "on", graph_kinds=None, max_tokens_per_step=16)
    video = OmniVideoRule(replace(video_config(tiny), video_pruning_rate=0.5)).patchify(
        clip(13, 40, 40, still=True), torch.float32
    )
    image = random_image(tiny.config, 4, 6)
    out = [torch.full((item.tokens, tiny.config.text_hidden_size), float("nan")) for item in (video, image)]
    job = runner.begin([video, image], out)
    steps = 0
    while job.step():
        steps += 1
        assert runner.stats()["batches"] == steps
    assert runner.stats()["batches"] == steps + 1 >= 3
    assert not job.step() and not any(rows.isnan().any() for rows in out)
    assert sum(job.rows[0]) == video.tokens and job.rows[1] == (image.tokens,)
    whole, counts = encode(make(tiny, "off"), [video])
    assert relative_error(out[0], whole[0]) <= 1e-5 and counts[0] == job.rows[0]


def test_a_clip_that_does_not_fit_the_model_is_named(tiny: TinyTower) -> None:
    runner = make(tiny, "off")
    video = prepared(tiny)[0]
    rows = torch.empty(video.tokens, tiny.config.text_hidden_size)
    image = random_image(tiny.config, 4, 6)
    with pytest.raises(ValueError, match="video 1: .*expected"):
        runner.encode(
            [image, replace(video, patches=video.patches[..., :48])],
            [torch.empty(6, tiny.config.text_hidden_size), rows],
        )
    with pytest.raises(ValueError, match="video 0: .*merge_size 1"):
        runner.encode([replace(video, merge_size=1)], [rows])
    with pytest.raises(ValueError, match="destination 0"):
        runner.encode([video], [rows[:-1]])
    weights = {k: v for k, v in tiny.weights.items() if "video" not in k}
    still = EncoderRunner(tiny.config, EncoderOptions(dtype=torch.float32, graphs="off"), weights.items())
    with pytest.raises(ValueError, match="video 0: .*no projection"):
        still.encode([video], [rows])


def test_a_launch_never_holds_more_sequences_than_its_graph(tiny: TinyTower) -> None:
    """Five clips of sixteen temporal patches whose tokens fit one launch, but whose sequences do not."""
    config = replace(video_config(tiny), video_target_num_patches=4)
    runner = make(tiny, "on", graph_kinds=None, token_budgets=(40,), max_images=8, max_tokens_per_step=64)
    clips = [OmniVideoRule(config).patchify(clip(32, 8, 8, seed=i), torch.float32) for i in range(5)]
    assert [video.tokens for video in clips] == [16] * 5
    got, _ = encode(runner, clips)
    stats = runner.stats()
    assert stats["batches"] == stats["replays_40"] == 80 // 8
    eager, _ = encode(make(tiny, "off"), clips)
    for rows, expected in zip(got, eager, strict=True):
        assert relative_error(rows, expected) <= 1e-5
    runner.close()


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_bytes_and_floats_share_a_launch(tiny: TinyTower, graphs: str) -> None:
    """Items that need no resize are bytes, next to others: the same rows."""
    runner = make(tiny, graphs, graph_kinds=None)
    config = video_config(tiny)
    fitting = clip(5, 16, 24, seed=3)
    items = [OmniVideoRule(config).patchify(fitting, torch.float32, keep_bytes=keep) for keep in (True, False)]
    assert [item.patches.dtype for item in items] == [torch.uint8, torch.float32]
    other = prepared(tiny)[1]
    (as_bytes, _), _ = encode(runner, [items[0], other])
    (as_floats, _), _ = encode(runner, [items[1], other])
    assert torch.equal(as_bytes, as_floats)
    runner.close()
