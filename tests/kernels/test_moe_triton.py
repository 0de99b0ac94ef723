"""Experts: the kernels compared with loops over the definition, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from triton_kernels import DEVICE, assert_as_good, poisoned

from kernels.activations import ACTIVATIONS
from kernels.dispatch import forced
from kernels.launch import ARCHITECTURES, by_architecture
from kernels.linear import KINDS, Quantised, quantise
from kernels.moe import Experts, kernel, reference, route, route_kernel, route_softmax, run_experts

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


@pytest.fixture(autouse=True)
def kernels_run() -> Iterator[None]:
    with DEVICE, poisoned(), forced("triton"):
        yield


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("experts", "groups", "kept", "top_k"), [(8, 1, 1, 3), (12, 4, 2, 5), (6, 6, 3, 3)])
def test_route_chooses_as_the_reference(experts: int, groups: int, kept: int, top_k: int, normalise: bool) -> None:
    x, gate, correction = torch.randn(19, 24), torch.randn(experts, 24), torch.randn(experts)
    given = (x, gate, correction, top_k, groups, kept, normalise, 2.5, 0.5)
    found, weights = route(*given)
    expected, shares = reference.route(*given)
    assert torch.equal(found, expected)
    torch.testing.assert_close(weights, shares, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 3), (12, 5), (5, 5)])
def test_softmax_routing_chooses_as_the_reference(experts: int, top_k: int) -> None:
    x, gate = torch.randn(19, 24) * 3, torch.randn(experts, 24)
    found, weights = route_softmax(x, gate, top_k)
    expected, shares = reference.route_softmax(x, gate, top_k)
    assert torch.equal(found, expected)
    torch.testing.assert_close(weights, shares, rtol=1e-5, atol=1e-6)


def test_route_of_a_broken_row_names_experts_that_exist() -> None:
    x = torch.full((2, 4), float("nan"))
    found, _ = route(x, torch.randn(6, 4), torch.zeros(6), 3)
    assert bool(((found >= 0) & (found < 6)).all())


def mixed(
    x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, kind: torch.dtype,
    gate: Tensor | None = None, activation: str = "relu2",
) -> Tensor:  # fmt: skip
    act = ACTIVATIONS[activation]
    out = torch.zeros(x.shape, dtype=torch.float64 if kind == torch.float64 else torch.float32)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            hidden = x[token].to(kind) @ up[expert].to(kind).T
            hidden = act(hidden) if gate is None else act(x[token].to(kind) @ gate[expert].to(kind).T) * hidden
            out[token] += weight * (hidden @ down[expert].to(kind).T).to(out.dtype)
    return out.to(kind)


SHAPES = [(False, "relu2"), (True, "silu"), (True, "relu"), (True, "gelu"), (False, "gelu_pytorch_tanh")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "gated", "activation"),
    [
        *((tokens, gated, name) for tokens in (1, 7, 9, 41) for gated, name in SHAPES[:2]),
        *((tokens, *shape) for tokens in (2, 9) for shape in SHAPES[2:]),
    ],
)
def test_run_experts(tokens: int, gated: bool, activation: str, dtype: torch.dtype) -> None:
    """Both paths, with an expert that no token chose and one that all chose."""
    count, width, inner = 6, 40, 52
    x = torch.randn(tokens, width).to(dtype)
    up, down = (torch.randn(count, *size).to(dtype) / 6 for size in ((inner, width), (width, inner)))
    ids = torch.stack([torch.cat((torch.tensor([3]), torch.randperm(3)[:2])) for _ in range(tokens)])
    weights = torch.rand(tokens, 3)
    gate = torch.randn(count, inner, width).to(dtype) / 6 if gated else None
    out = run_experts(x, ids, weights, Experts(up, down, gate, activation))
    exact, plain = (mixed(x, ids, weights, up, down, kind, gate, activation) for kind in (torch.float64, dtype))
    assert_as_good(out, exact, plain)


def rows_of(table: dict[str, Any]) -> list[Any]:
    """The rows of a table of configurations that can run here: on a GPU, others may need more memory than it has."""
    rows = table.values() if DEVICE.type == "cpu" else [by_architecture(table, DEVICE)]
    return list(dict.fromkeys(rows))


@pytest.mark.parametrize("gated", [False, True])
def test_every_configuration_computes_the_same(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each architecture and number of pairs, with sizes that are multiples of the blocks and that are not."""
    for width, inner in ((256, 256), (40, 52)):
        up, down = (torch.randn(2, *size).bfloat16() / 16 for size in ((inner, width), (width, inner)))
        gate = torch.randn(2, inner, width).bfloat16() / 16 if gated else None
        experts = Experts(up, down, gate, "silu")
        x, ids = torch.randn(9, width).bfloat16(), torch.tensor([[0, 1], [1, 0], [1, 0]]).repeat(3, 1)
        shares = torch.rand(9, 2)
        exact, plain = (mixed(x, ids, shares, up, down, kind, gate, "silu") for kind in (torch.float64, torch.bfloat16))
        table = "TILES_GATED" if gated else "TILES"  # the down product never has a gate
        for tile in dict.fromkeys(tile for tiles in rows_of(getattr(kernel, table)) for _, tile in tiles):
            with monkeypatch.context() as changed:
                changed.setattr(kernel, table, dict.fromkeys(ARCHITECTURES, ((0, tile),)))
                for tokens in (2, 9):  # pairs of their own, and sorted pairs
                    given = x[:tokens], ids[:tokens], shares[:tokens]
                    assert_as_good(run_experts(*given, experts), exact[:tokens], plain[:tokens])


@pytest.mark.parametrize(("pairs", "place"), [(0, 0), (32, 0), (33, 1), (64, 1), (65, 2)])
def test_the_tile_depends_on_the_average_number_of_pairs(pairs: int, place: int) -> None:
    tiles = tuple((least, kernel.Tile(16, 16, 16, 1, pairs)) for least, pairs in ((0, 0), (8, 1), (16, 2)))
    assert kernel.tile_of(tiles, pairs, weights=4) == tiles[place][1]


def numbers(*shape: int) -> Tensor:
    """On a GPU any numbers; otherwise integers, whose sums are exact in float32 and bfloat16: NumPy's products, which
    the interpreter uses, depend on the shape."""
    return torch.randn(shape) if DEVICE.type == "cuda" else torch.randint(-1, 2, shape).float()


COUNTS, MOST = (1, 2, 8, 9, 40), 150
"""Numbers of tokens: few and many, and each entry of the tables."""


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, id=f"{kind}-{dtype}".replace("torch.", ""))
        for kind in ("plain", "gated", "fp8", "int4")
        for dtype in (torch.float32, torch.bfloat16)
        if dtype == torch.bfloat16 or kind in ("plain", "gated")
    ],
)
def test_the_number_of_tokens_changes_no_result(kind: str, dtype: torch.dtype) -> None:
    count, width, inner, top_k = 3, 72, 80, 2
    up, down, gate = numbers(count, inner, width), numbers(count, width, inner), numbers(count, inner, width)
    if kind in KINDS:
        experts = Experts(quantise(up, kind), quantise(down, kind), activation="relu")
    else:
        experts = Experts(up.to(dtype), down.to(dtype), gate.to(dtype) if kind == "gated" else None, "relu")
    x, ids = numbers(MOST, width).to(dtype), torch.rand(MOST, count).topk(top_k)[1]
    shares = numbers(MOST, top_k) / 4
    whole = run_experts(x, ids, shares, experts)
    for tokens in COUNTS:
        assert torch.equal(run_experts(x[-tokens:], ids[-tokens:], shares[-tokens:], experts), whole[-tokens:]), tokens


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_tokens_changes_no_choice(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several parts of the inputs, of which the last is not whole, and each tile, the last from 48 tokens on."""
    width = 2 * route_kernel.PART + 72
    (_, few), (_, many) = route_kernel.TILES
    monkeypatch.setattr(route_kernel, "TILES", ((0, few), (48, many)))
    x, gate = numbers(72, width).to(dtype), numbers(12, width)
    whole, logits = route_softmax(x, gate, 3), F.linear(x.double(), gate.double())
    torch.testing.assert_close(whole[1].double(), logits.gather(1, whole[0]).softmax(1), rtol=1e-4, atol=1e-6)
    for tokens in COUNTS:
        for found, expected in zip(route_softmax(x[-tokens:], gate, 3), whole, strict=True):
            assert torch.equal(found, expected[-tokens:]), tokens


@pytest.mark.parametrize("table", [kernel.TILES, kernel.TILES_GATED], ids=["plain", "gated"])
def test_tiles_of_an_architecture_use_one_instruction(table: dict[str, Any]) -> None:
    """On sm_90 and later a product of fewer than 64 outputs, which are the left operand's rows, would use another."""
    assert all(tile.outputs % 64 == 0 and tile.rows >= 16 for tiles in table.values() for _, tile in tiles)


def quantised(count: int, outputs: int, inner: int, kind: str) -> Quantised:
    """Experts' weights in each layout that published files have."""
    if kind in KINDS:
        weight = quantise(torch.randn(count, outputs, inner) / 6, kind)
        if kind != "fp8":
            return weight
    if kind == "int8 zeros":
        weight = quantise(torch.randn(count, outputs, inner) / 6, "int8-32")
        return replace(weight, zeros=torch.randint(0, 256, weight.scale.shape, dtype=torch.uint8))
    if kind.startswith("fp8"):
        values = torch.randn(count, outputs, inner).to(torch.float8_e4m3fn)
        group = 32 if kind == "fp8 blocks" else inner
        return Quantised("fp8", values, torch.rand(count, outputs, -(-inner // group)) / 6, inner, group)
    if kind == "nvfp4 divided":
        weight = quantise(torch.randn(count, outputs, inner) / 6, "nvfp4")
        assert weight.outer is not None
        return replace(weight, outer=1 / weight.outer, divided=True)
    groups = count, outputs, -(-inner // 16)
    octets = torch.randint(0, 256, (count, outputs, -(-inner // 2)), dtype=torch.uint8)
    scale, zeros, order = torch.randn(groups) / 40, None, None
    if "zeros" in kind:
        zeros = torch.randint(0, 17, groups, dtype=torch.uint8)
    if "ordered" in kind:
        order = torch.stack([torch.randperm(inner) for _ in range(count)])
    return Quantised("int4", octets, scale, inner, 16, zeros, order=order)


@pytest.mark.parametrize(
    ("tokens", "gated", "dtype"), [(1, True, torch.bfloat16), (9, False, torch.float32), (41, True, torch.bfloat16)]
)
@pytest.mark.parametrize(
    "kind", [*KINDS, "int8 zeros", "fp8 blocks", "nvfp4 divided", "int4 groups zeros", "int4 groups ordered"]
)
def test_quantised_experts(kind: str, tokens: int, gated: bool, dtype: torch.dtype) -> None:
    """Of few and many tokens, against loops over the expanded weights; sizes that are no multiples of a block."""
    count, width, inner = 6, 80, 52
    x = torch.randn(tokens, width).to(dtype)
    up, down = quantised(count, inner, width, kind), quantised(count, width, inner, kind)
    gate = quantised(count, inner, width, kind) if gated else None
    ids = torch.stack([torch.cat((torch.tensor([3]), torch.randperm(3)[:2])) for _ in range(tokens)])
    weights = torch.rand(tokens, 3)
    out = run_experts(x, ids, weights, Experts(up, down, gate, "silu"))
    wide = [None if weight is None else weight.dequantise() for weight in (up, down, gate)]
    assert wide[0] is not None and wide[1] is not None
    exact, plain = (mixed(x, ids, weights, wide[0], wide[1], kind, wide[2], "silu") for kind in (torch.float64, dtype))
    assert_as_good(out, exact, plain)


def test_plain_and_quantised_projections_mix() -> None:
    """As where a file's groups do not divide the inputs of one of them."""
    x, ids, weights = torch.randn(5, 32), torch.tensor([[0, 3], [3, 1], [1, 0], [2, 3], [0, 1]]), torch.rand(5, 2)
    up, down = quantised(4, 24, 32, "int8"), torch.randn(4, 32, 24)
    found = run_experts(x, ids, weights, Experts(up, down))
    torch.testing.assert_close(
        found, run_experts(x, ids, weights, Experts(up.dequantise(), down)), rtol=1e-4, atol=1e-5
    )
    with pytest.raises(ValueError, match="whose gate projection is quantised, but whose up projection is not"):
        Experts(up.dequantise(), down, up)


def test_experts_that_do_not_fit_are_refused() -> None:
    up, down = torch.ones(2, 3, 4), torch.ones(2, 4, 3)
    with pytest.raises(ValueError, match="not tanh"):
        Experts(up, down, activation="tanh")
    with pytest.raises(ValueError, match=r"have shape \(2, 3, 4\), but must have \(2, 4, 3\)"):
        Experts(up, up)
    with pytest.raises(ValueError, match=r"gates of \(2, 4, 3\) do not fit experts of \(2, 3, 4\)"):
        Experts(up, down, down)


@pytest.mark.parametrize("gated", [True, False])
def test_stacked_experts_serve_the_reference_too(gated: bool) -> None:
    up, down, x = torch.randn(4, 5, 6), torch.randn(4, 6, 5), torch.randn(3, 6)
    gate = torch.randn(4, 5, 6) if gated else None
    ids, weights = torch.tensor([[0, 3], [3, 1], [1, 0]]), torch.rand(3, 2)
    out = reference.run_experts(x, ids, weights, Experts(up, down, gate, "silu"))
    exact = mixed(x, ids, weights, up, down, torch.float64, gate, "silu").float()
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)
