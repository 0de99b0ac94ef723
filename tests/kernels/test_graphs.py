"""The replay guard: a graph is only replayed with its own input and output buffers, none of which has been replaced."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from kernels.graphs import GraphPool, ReplayError, StaticGraph

POOL = GraphPool(torch.device("cpu"))


def double(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
    torch.mul(inputs["x"], 2, out=outputs["y"])


def make() -> tuple[StaticGraph, Tensor, Tensor]:
    x, y = torch.zeros(4), torch.full((4,), float("nan"))
    graph = StaticGraph("double", double, {"x": x}, {"y": y}, POOL)
    graph.capture()
    return graph, x, y


def test_replay_reads_and_writes_the_static_buffers() -> None:
    graph, x, y = make()
    for value in (3.0, 5.0):
        x.fill_(value)
        assert graph.replay({"x": x})["y"] is y
        assert (y == 2 * value).all()


def test_a_view_at_the_same_address_and_shape_is_the_same_buffer() -> None:
    graph, x, _ = make()
    graph.replay({"x": x[:]})


@pytest.mark.parametrize("change", ["clone", "slice", "stride", "dtype", "missing", "extra"])
def test_another_buffer_is_refused(change: str) -> None:
    graph, x, y = make()
    given = {
        "clone": {"x": x.clone()},
        "slice": {"x": x[1:]},
        "stride": {"x": x[:1].expand(4)},
        "dtype": {"x": x.view(torch.int32)},
        "missing": {},
        "extra": {"x": x, "z": x},
    }[change]
    with pytest.raises(ReplayError, match="double"):
        graph.replay(given)
    assert y.isnan().all(), "the step ran"


def test_a_replaced_output_is_found() -> None:
    graph, x, y = make()
    graph.outputs["y"] = y.clone()
    with pytest.raises(ReplayError, match="output y"):
        graph.replay({"x": x})


def test_order_of_life() -> None:
    x, y = torch.zeros(1), torch.zeros(1)
    graph = StaticGraph("late", double, {"x": x}, {"y": y}, POOL)
    with pytest.raises(ReplayError, match="not captured"):
        graph.replay({"x": x})
    graph.capture()
    with pytest.raises(AssertionError):
        graph.capture()
    graph.close()
    graph.close()
    with pytest.raises(ReplayError, match="not captured"):
        graph.replay({"x": x})


def test_graphs_need_an_output_and_one_device() -> None:
    with pytest.raises(ValueError, match="0 outputs"):
        StaticGraph("none", double, {"x": torch.zeros(1)}, {}, POOL)
    with pytest.raises(ValueError, match="cpu.*meta"):
        StaticGraph("two", double, {"x": torch.zeros(1)}, {"y": torch.zeros(1, device="meta")}, POOL)
