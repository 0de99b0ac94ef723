"""On an arena full of NaN, packed images get the rows that they get alone, and graphs those of eager launches;
counters; errors before anything runs."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tiny_encoder import TinyTower, random_image, relative_error, tiny_tower

from encoder import lane as lane_module
from encoder.budget import EncoderBudgets, graph_shape
from encoder.graphs import INPUTS, EncoderArena, EncoderGraphs, Verdict
from encoder.item import EncoderItem, num_image_tokens
from encoder.layout import layout
from encoder.runner import EncoderOptions, EncoderRunner
from families.nemotron_h_omni.vision import RadioVision
from kernels.graphs import ReplayError

GRIDS = [(4, 6), (2, 2), (12, 10), (2, 14), (4, 6), (6, 4), (8, 8), (2, 2), (10, 2)]


@pytest.fixture(scope="module")
def tiny() -> TinyTower:
    return tiny_tower(11, final_layernorm=True)


def make(tiny: TinyTower, graphs: str, **options: object) -> EncoderRunner:
    return EncoderRunner(
        tiny.config,
        EncoderOptions(dtype=torch.float32, graphs=graphs, **options),  # type: ignore[arg-type]
        tiny.weights.items(),
    )


@pytest.fixture
def on(tiny: TinyTower) -> Iterator[EncoderRunner]:
    runner = make(tiny, "on")
    yield runner
    runner.check_integrity()
    runner.close()


def destinations(runner: EncoderRunner, images: list[EncoderItem]) -> list[torch.Tensor]:
    width = runner.spec.row_width
    return [torch.full((image.tokens, width), float("nan"), dtype=runner.options.dtype) for image in images]


def encode(runner: EncoderRunner, images: list[EncoderItem]) -> list[torch.Tensor]:
    out = destinations(runner, images)
    runner.encode(images, out)
    return out


def sample_items(tiny: TinyTower, grids: list[tuple[int, int]] = GRIDS) -> list[EncoderItem]:
    return [random_image(tiny.config, *grid, seed=index) for index, grid in enumerate(grids)]


@torch.inference_mode()
def poison(runner: EncoderRunner) -> None:
    """Sets every float of the arena to NaN and every index out of range: a launch must have written whatever it
    reads."""
    assert runner.lanes["image"].graphs is not None
    for buffer in runner.lanes["image"].graphs.arena.buffers.values():
        buffer.fill_(float("nan") if buffer.is_floating_point() else 10**6)


def test_graph_equals_eager_equals_alone(tiny: TinyTower, on: EncoderRunner) -> None:
    off = make(tiny, "off")
    images = sample_items(tiny)
    packed, eager = encode(on, images), encode(off, images)
    for image, graph_rows, eager_rows in zip(images, packed, eager, strict=True):
        (alone,) = encode(off, [image])
        assert relative_error(eager_rows, alone) <= 1e-5
        assert relative_error(graph_rows, alone) <= 1e-5
    stats = on.stats()
    assert sum(count for name, count in stats.items() if name.startswith("replays_")) == stats["batches"] > 0
    assert not any(name.startswith("eager_") for name in stats)


def test_nothing_unwritten_is_read(tiny: TinyTower, on: EncoderRunner) -> None:
    images = sample_items(tiny)
    clean = encode(on, images)
    poison(on)
    for before, after in zip(clean, encode(on, images), strict=True):
        assert torch.equal(before, after)


def test_any_order_and_any_history_give_the_same_rows(tiny: TinyTower, on: EncoderRunner) -> None:
    images = sample_items(tiny, GRIDS[:5])
    expected = [encode(on, [image])[0] for image in images]
    poison(on)
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 7):
        for index, rows in zip(order, encode(on, [images[i] for i in order]), strict=True):
            assert relative_error(rows, expected[index]) <= 1e-5


@torch.inference_mode()
def test_only_the_stale_tail_is_cleared(tiny: TinyTower) -> None:
    """A large batch, a small one in a small budget, then a small one in the large budget: each clears only the rows
    that it has to."""
    runner = make(tiny, "on", token_budgets=(8, 64))
    arena = runner.lanes["image"].graphs.arena  # type: ignore[union-attr]
    patches = arena.buffers["patches"]
    patches.fill_(5.0)
    big, small = random_image(tiny.config, 12, 16), random_image(tiny.config, 2, 4)
    arena.fill(64, [big], runner.positions)
    assert torch.equal(patches[:192], big.patches) and (patches[192:] == 5).all()
    arena.fill(8, [small], runner.positions)
    assert torch.equal(patches[:8], small.patches)
    assert (patches[8:32] == 0).all() and torch.equal(patches[32:192], big.patches[32:])
    arena.fill(64, [small], runner.positions)
    assert (patches[8:192] == 0).all() and (patches[192:] == 5).all()


def test_each_row_of_a_static_layout_belongs_to_one_sequence() -> None:
    budgets = EncoderBudgets((6, 13), 5)
    for budget in budgets.token_budgets:
        shape = graph_shape(budget, budgets, prefix=3, patches_per_token=4)
        for grids in ([(2, 2)], [(2, 2)] * 5, [(2, 2 * budget)], [(2, 4), (2, 2)]):
            placed = layout(grids, prefix=3, merge=2, shape=shape)
            steps = placed.cu_seqlens.diff()
            assert placed.cu_seqlens[0] == 0 and placed.cu_seqlens[-1] == shape.rows
            assert (steps >= 0).all() and steps[-1] >= 1
            assert (steps > 0).sum() == len(grids) + 1
            assert len(placed.source_R) == shape.rows and (placed.source_R[-int(steps[-1]) :] == 3).all()
            assert placed.token_rows_NM.shape == (shape.capacity, 4)
            assert (placed.token_rows_NM[placed.tokens :] == shape.rows - 1).all()
            assert placed.token_rows_NM.max() < shape.rows


def test_a_planted_unwritten_padding_row_is_found(
    tiny: TinyTower, on: EncoderRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the padding sequence the offsets end early, which the attention rejects."""
    from encoder import graphs

    def without_padding(*arguments: object, **options: object) -> object:
        placed = layout(*arguments, **options)  # type: ignore[arg-type]
        placed.cu_seqlens[-1] = placed.cu_seqlens[-2]
        return placed

    monkeypatch.setattr(graphs, "layout", without_padding)
    with pytest.raises(ValueError, match="offsets must run from 0"):
        encode(on, sample_items(tiny))


def test_a_planted_shared_buffer_is_found(tiny: TinyTower, on: EncoderRunner) -> None:
    """An input that was replaced by an equal tensor at another address, dtype or shape is not replayed."""
    graphs = on.lanes["image"].graphs
    assert graphs is not None
    budget = on.budgets.largest
    graph = graphs._graphs[budget]
    view = {name: graphs.arena.view(budget)[name] for name in INPUTS}
    for name, planted in (
        ("positions", view["positions"].clone()),
        ("positions", view["patches"]),
        ("source", view["source"].int()),
        ("token_rows", view["token_rows"][:-1]),
    ):
        with pytest.raises(ReplayError, match=f"input {name}"):
            graph.replay({**view, name: planted})
    with pytest.raises(ReplayError, match="built on"):
        graph.replay({name: view[name] for name in INPUTS[1:]})


def test_a_planted_floor_division_is_found(tiny: TinyTower, monkeypatch: pytest.MonkeyPatch) -> None:
    from encoder import budget

    monkeypatch.setattr(budget, "rows_per_image", lambda tokens, images: tokens // images)
    with pytest.raises(AssertionError):
        make(tiny, "on", token_budgets=(13, 60), max_images=7)


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_a_job_may_be_left_after_each_layer(tiny: TinyTower, graphs: str) -> None:
    """With zero seconds, the shortest possible step. The rows equal those of an uninterrupted job, whatever is encoded
    in between."""
    runner, uninterrupted = make(tiny, graphs), make(tiny, graphs)
    images = sample_items(tiny)
    out, expected, between = (
        destinations(runner, images),
        encode(uninterrupted, images),
        sample_items(tiny, [(6, 6)]),
    )
    job = runner.begin(images, out)
    launches, steps = uninterrupted.stats()["batches"], 1
    while job.step(0.0):
        steps += 1
        encode(runner, between)
        runner.check_integrity()
    assert steps == launches * (1 if graphs == "on" else tiny.config.num_layers + 1)
    for rows, whole in zip(out, expected, strict=True):
        assert torch.equal(rows, whole)


def test_budget_views_share_one_arena(tiny: TinyTower, on: EncoderRunner) -> None:
    arena = on.lanes["image"].graphs.arena  # type: ignore[union-attr]
    largest = arena.view(on.budgets.largest)
    for budget in on.budgets.token_budgets:
        for name, tensor in arena.view(budget).items():
            assert tensor.data_ptr() == largest[name].data_ptr()
            assert tensor.shape[0] <= largest[name].shape[0]
    assert arena.bytes == sum(t.numel() * t.element_size() for t in largest.values())


def test_an_image_above_every_budget_runs_eagerly_alone(tiny: TinyTower) -> None:
    runner = make(tiny, "on", token_budgets=(4, 10))
    images = sample_items(tiny, [(2, 4), (12, 10), (2, 2)])
    off = make(tiny, "off")
    for image, rows in zip(images, encode(runner, images), strict=True):
        assert relative_error(rows, encode(off, [image])[0]) <= 1e-5
    stats = runner.stats()
    assert stats["eager_too_large"] == 1 and stats["replays_4"] == 1
    assert stats["real_tokens"] == 2 + 30 + 1 and stats["padded_tokens"] == 1
    assert (stats["images"], stats["batches"]) == (3, 2)


def test_auto_leaves_a_losing_graph_unused_and_says_so(tiny: TinyTower, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "encoder"):
        runner = make(tiny, "auto")
    assert caplog.text.count("encoder graph") == len(runner.budgets.token_budgets)
    images = sample_items(tiny)
    for image, rows in zip(images, encode(runner, images), strict=True):
        assert relative_error(rows, encode(make(tiny, "off"), [image])[0]) <= 1e-5
    stats = runner.stats()
    used = runner.lanes["image"].used_budgets
    assert stats["unused_graphs"] == len(runner.budgets.token_budgets) - len(used)
    runner.check_integrity()


def test_a_mixed_verdict_runs_each_budget_its_way(tiny: TinyTower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EncoderGraphs, "calibrate", lambda *_, **__: {4: Verdict(True, 1, 2), 30: Verdict(False, 2, 1)})
    runner = make(tiny, "auto", token_budgets=(4, 30))
    images = sample_items(tiny, [(2, 4), (12, 10)])
    for image, rows in zip(images, encode(runner, images), strict=True):
        assert relative_error(rows, encode(make(tiny, "off"), [image])[0]) <= 1e-5
    stats = runner.stats()
    assert (stats["replays_4"], stats["eager_slower_graph"], stats["unused_graphs"]) == (1, 1, 1)


@torch.inference_mode()
def test_calibration_times_graph_and_eager(tiny: TinyTower) -> None:
    runner = make(tiny, "on")
    graphs = runner.lanes["image"].graphs
    assert graphs is not None
    verdicts = graphs.calibrate(runner.lanes["image"].run_eagerly, seconds=math.inf)
    assert list(verdicts) == list(runner.budgets.token_budgets)
    for verdict in verdicts.values():
        assert verdict.graph_seconds and verdict.eager_seconds
        assert verdict.use == (verdict.graph_seconds < 0.95 * verdict.eager_seconds)
    unspent = graphs.calibrate(runner.lanes["image"].run_eagerly, seconds=-1)
    assert not any(verdict.use or verdict.graph_seconds for verdict in unspent.values())


def test_a_bad_image_is_named_before_anything_runs(tiny: TinyTower, on: EncoderRunner) -> None:
    images = sample_items(tiny, [(2, 4), (4, 4), (2, 2)])
    bad = [
        (EncoderItem((3, 4), torch.zeros(12, 48)), "image 1: .*3x4"),
        (EncoderItem((2, 4), torch.zeros(8, 47)), "image 1: .*47.*48"),
    ]
    for image, message in bad:
        out = destinations(on, images)
        with pytest.raises(ValueError, match=message):
            on.encode([images[0], image, images[2]], out)
        assert all(rows.isnan().all() for rows in out)
    out = destinations(on, images)
    with pytest.raises(ValueError, match="destination 2: .*bfloat16"):
        on.encode(images, [*out[:2], out[2].bfloat16()])
    with pytest.raises(ValueError, match="destination 0"):
        on.encode(images, [out[1], out[1], out[2]])
    with pytest.raises(ValueError, match="3 items need as many destinations, got 2"):
        on.encode(images, out[:2])
    assert on.stats()["batches"] == 0
    on.encode([], [])


def test_options_that_cannot_hold_name_their_numbers(tiny: TinyTower) -> None:
    with pytest.raises(ValueError, match="'sometimes'"):
        EncoderOptions(graphs="sometimes")
    with pytest.raises(ValueError, match="0"):
        EncoderOptions(max_tokens_per_step=0)
    with pytest.raises(ValueError, match="lo 4 and hi 3"):
        make(tiny, "off", max_tokens_per_step=3)
    with pytest.raises(ValueError, match="100.*64"):
        make(tiny, "off", token_budgets=(100,))


def test_a_step_limit_bounds_every_launch(tiny: TinyTower) -> None:
    runner = make(tiny, "on", max_tokens_per_step=16)
    images = sample_items(tiny, [(4, 8)] * 9)
    encode(runner, images)
    stats = runner.stats()
    assert runner.budgets.largest == 16 and stats["batches"] >= 5
    assert runner.budgets.token_budgets == (4, 8, 16)


@torch.inference_mode()
def test_close_is_idempotent_and_graphs_do_not_replay_after_it(tiny: TinyTower) -> None:
    runner = make(tiny, "on")
    graphs = runner.lanes["image"].graphs
    assert graphs is not None
    runner.close()
    runner.close()
    with pytest.raises(ReplayError, match="not captured"):
        graphs.run(4, sample_items(tiny, [(2, 2)]))


def test_an_eager_launch_on_a_cpu_is_bounded(tiny: TinyTower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "EAGER_TOKENS_ON_CPU", 10)
    runner = make(tiny, "off")
    encode(runner, sample_items(tiny, [(4, 8)] * 4))
    assert runner.stats()["eager_off"] == 4


@torch.inference_mode()
def test_arena_refuses_what_does_not_fit(tiny: TinyTower, on: EncoderRunner) -> None:
    arena = EncoderArena(on.tower, EncoderBudgets((4, 8), 2))
    with pytest.raises(AssertionError, match="do not fit"):
        arena.fill(4, sample_items(tiny, [(4, 6)]), on.positions)
    with pytest.raises(AssertionError, match="do not fit"):
        arena.fill(8, sample_items(tiny, [(2, 2)] * 3), on.positions)


def test_sizes_are_recorded_for_tuning(tiny: TinyTower) -> None:
    runner = make(tiny, "off")
    encode(runner, sample_items(tiny, [(2, 4), (12, 10), (4, 2)]))
    encode(runner, sample_items(tiny, [(4, 6)]))
    assert runner.histogram() == {2: 2, 6: 1, 30: 1}
    runner.check_integrity()


def test_a_part_filled_budget_of_a_nine_step_ladder_gives_numbers(tiny: TinyTower) -> None:
    """1,196 tokens in the budget of 2,048, nine budgets over one poisoned arena: padding reads no stale memory."""
    config = replace(tiny.config, min_num_patches=256, max_num_patches=65536, max_model_len=20000)
    options = EncoderOptions(dtype=torch.float32, graphs="on", max_tokens_per_step=16384)
    runner = EncoderRunner(config, options, tiny.weights.items())
    assert len(runner.budgets.token_budgets) == 9
    poison(runner)
    image = random_image(config, 46, 104)
    (rows,) = encode(runner, [image])
    assert runner.stats()["replays_2048"] == 1 and runner.stats()["padded_tokens"] == 2048 - 1196
    (alone,) = encode(make(tiny, "off"), [image])
    assert relative_error(rows, alone) <= 1e-5
    runner.close()


def test_the_default_step_covers_the_largest_legal_image() -> None:
    config = RadioVision()
    budgets = EncoderOptions().budgets(config)
    largest = config.max_image_tokens
    assert budgets.largest == largest == 3328
    for height, width in ((3024, 4032), (1080, 1920), (100, 2000), (6000, 6000)):
        assert budgets.fit(num_image_tokens(config.image_rule.grid(height, width))) is not None
