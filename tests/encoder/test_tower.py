"""A tower unlike any served one works: runner, lanes, graphs and plans only need the protocol."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from encoder.item import EncoderItem, Grid
from encoder.pieces import Pieces
from encoder.plan import describe
from encoder.runner import EncoderOptions, EncoderRunner
from encoder.tower import PackedBatch, TowerSpec


@dataclass(frozen=True)
class SumSpec:
    """No prefix tokens, 3 x 3 patches per token, position width 2, rows of width 7, and depth maps as another kind."""

    num_prefix_tokens: int = 0
    merge_size: int = 3
    patches_per_token: int = 9
    patch_widths: Mapping[str, int] = field(default_factory=lambda: {"image": 5, "depth": 2})
    position_width: int = 2
    row_width: int = 7
    activation_width: int = 7
    min_image_tokens: int = 2
    least_budget: int = 2
    max_image_tokens: int = 32

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        return {f"{kind}.weight": (7, width + 2) for kind, width in self.patch_widths.items()}

    def optional_weights(self) -> frozenset[str]:
        return frozenset({"depth.weight"})

    def kinds(self, weights: Collection[str]) -> tuple[str, ...]:
        return tuple(kind for kind in self.patch_widths if f"{kind}.weight" in weights)

    def build(
        self, weights: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype, device: torch.device, native: str = "off",
        max_rows: int = 0,
    ) -> SumTower:  # fmt: skip
        return SumTower(self, {name: weight.to(dtype) for name, weight in weights}, dtype, device)


@dataclass
class SumTower:
    """A row is the sum of a linear layer's outputs for its patches, minus the mean of its sequence."""

    sizes: SumSpec
    weights: dict[str, Tensor]
    dtype: torch.dtype
    device: torch.device

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.sizes.kinds(self.weights)

    def positions(self, grid: Grid) -> Tensor:
        return torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).to(self.dtype)

    def as_floats(self, patches: Tensor, *, kind: str) -> Tensor:
        return patches.to(self.dtype) / 255

    def pieces(self, batch: PackedBatch, *, kind: str) -> Pieces[Tensor]:
        embedded_TD = torch.cat([batch.patches_TP, batch.positions_TD], 1) @ self.weights[f"{kind}.weight"].T
        rows_RD = torch.cat([embedded_TD.new_zeros(1, 7), embedded_TD])[batch.source_R]
        yield
        bounds = batch.cu_seqlens.tolist()
        for first, end in zip(bounds, bounds[1:]):
            if end > first:
                rows_RD[first:end] -= rows_RD[first:end].mean(0)
        return rows_RD[batch.token_rows_NM].sum(1)


def weights(spec: SumSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in spec.expected_weights().items()}


def alone(spec: SumSpec, item: EncoderItem) -> Tensor:
    """Rows of an item, computed directly."""
    weight, made = weights(spec)[f"{item.kind}.weight"], []
    values = item.patches.float() / 255 if item.patches.dtype == torch.uint8 else item.patches
    places = torch.cartesian_prod(torch.arange(item.grid[0]), torch.arange(item.grid[1])).float()
    for patches in values.split(item.grid[0] * item.grid[1]):
        embedded = torch.cat([patches, places], 1) @ weight.T
        cells = (embedded - embedded.mean(0)).view(item.grid[0] // 3, 3, item.grid[1] // 3, 3, 7)
        made.append(cells.sum((1, 3)).view(-1, 7))
    return torch.cat(made)


def some_items(spec: SumSpec) -> list[EncoderItem]:
    generator = torch.Generator().manual_seed(5)

    def item(grid: Grid, kind: str, sequences: int = 1) -> EncoderItem:
        shape = (sequences * grid[0] * grid[1], spec.patch_widths[kind])
        patches = torch.randint(0, 256, shape, generator=generator)
        dtype = torch.uint8 if grid[0] == 3 else torch.float32
        return EncoderItem(grid, patches.to(dtype), kind=kind, num_sequences=sequences, merge_size=3)

    return [item((6, 9), "image"), item((3, 6), "depth", 4), item((3, 3), "image"), item((12, 6), "depth")]


@pytest.mark.parametrize("graph_kinds", [("image",), None])
@pytest.mark.parametrize("graphs", ["off", "on"])
@torch.inference_mode()
def test_any_tower_runs(graphs: str, graph_kinds: tuple[str, ...] | None) -> None:
    spec: TowerSpec = SumSpec()
    given = weights(SumSpec())
    options = EncoderOptions(dtype=torch.float32, graphs=graphs, graph_kinds=graph_kinds)
    runner = EncoderRunner(spec, options, given.items())
    items = some_items(SumSpec())
    for buffers in [lane.graphs.arena.buffers for lane in runner.lanes.values() if lane.graphs is not None]:
        for buffer in buffers.values():
            buffer.fill_(float("nan") if buffer.is_floating_point() else 10**6)
    out = [torch.full((item.tokens, 7), float("nan")) for item in items]
    counts = runner.encode(items, out)
    for rows, count, item in zip(out, counts, items, strict=True):
        torch.testing.assert_close(rows, alone(SumSpec(), item), atol=1e-3, rtol=1e-4)
        assert count == item.sequence_tokens
    runner.check_integrity()
    stats = runner.stats()
    assert (stats["images"], stats["depth_sequences"]) == (2, 5)
    replays = sum(value for name, value in stats.items() if name.startswith("replays_"))
    assert replays == (0 if graphs == "off" else stats["image_batches" if graph_kinds else "batches"])
    runner.close()


def test_its_plan_follows_from_its_sizes() -> None:
    spec, budgets = SumSpec(), EncoderOptions().budgets(SumSpec())
    (*_, row) = describe(spec, budgets, torch.float32, spec.patch_widths)
    assert row.tower_rows == row.capacity * 9 + 1 and row.activation_bytes == row.tower_rows * 7 * 4


def test_what_the_weights_cannot_take_is_refused() -> None:
    given: dict[str, Any] = weights(SumSpec())
    del given["depth.weight"]
    runner = EncoderRunner(SumSpec(), EncoderOptions(dtype=torch.float32, graphs="off"), given.items())
    items = some_items(SumSpec())
    with pytest.raises(ValueError, match="depth 1: .*no projection"):
        runner.encode(items[:2], [torch.empty(item.tokens, 7) for item in items[:2]])
    with pytest.raises(ValueError, match=r"destination 0: \(6, 8\).*\(6, 7\)"):
        runner.encode(items[:1], [torch.empty(6, 8)])
