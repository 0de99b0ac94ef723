"""Experts: the kernels against loops over the definition, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from triton_kernels import DEVICE, assert_as_good, poisoned

from kernels.dispatch import forced
from kernels.moe import Experts, reference, route, run_experts

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


@pytest.fixture(autouse=True)
def kernels_run() -> Iterator[None]:
    with DEVICE, poisoned(), forced("triton"):
        yield


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("experts", "groups", "kept", "top_k"), [(8, 1, 1, 3), (12, 4, 2, 5), (6, 6, 3, 3)])
def test_route_chooses_as_the_reference(experts: int, groups: int, kept: int, top_k: int, normalise: bool) -> None:
    x, gate, correction = torch.randn(19, 24), torch.randn(experts, 24), torch.randn(experts)
    given = (x, gate, correction, top_k, groups, kept, normalise, 2.5)
    found, weights = route(*given)
    expected, shares = reference.route(*given)
    assert torch.equal(found, expected)
    torch.testing.assert_close(weights, shares, rtol=1e-5, atol=1e-6)


def test_route_of_a_broken_row_names_experts_that_exist() -> None:
    x = torch.full((2, 4), float("nan"))
    found, _ = route(x, torch.randn(6, 4), torch.zeros(6), 3)
    assert bool(((found >= 0) & (found < 6)).all())


def mixed(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, kind: torch.dtype) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64 if kind == torch.float64 else torch.float32)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            hidden = (x[token].to(kind) @ up[expert].to(kind).T).relu().square()
            out[token] += weight * (hidden @ down[expert].to(kind).T).to(out.dtype)
    return out.to(kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7, 9, 41], ids=lambda n: f"T{n}")
def test_run_experts(tokens: int, dtype: torch.dtype) -> None:
    """Both paths, with an expert that nobody chose and one that everybody chose."""
    count, width, inner = 6, 40, 52
    x = torch.randn(tokens, width).to(dtype)
    up, down = (torch.randn(count, *size).to(dtype) / 6 for size in ((inner, width), (width, inner)))
    ids = torch.stack([torch.cat((torch.tensor([3]), torch.randperm(3)[:2])) for _ in range(tokens)])
    weights = torch.rand(tokens, 3)
    out = run_experts(x, ids, weights, Experts(up, down))
    exact, plain = (mixed(x, ids, weights, up, down, kind) for kind in (torch.float64, dtype))
    assert_as_good(out, exact, plain)


def test_only_what_the_kernel_computes_is_taken() -> None:
    experts = Experts(torch.ones(2, 3, 4), torch.ones(2, 4, 3), torch.nn.functional.silu)
    with pytest.raises(ValueError, match="relu2 alone"):
        run_experts(torch.ones(1, 4), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), experts)
    with pytest.raises(ValueError, match=r"\(2, 3, 4\) do not fit \(2, 3, 4\)"):
        Experts(torch.ones(2, 3, 4), torch.ones(2, 3, 4))


def test_stacked_experts_serve_the_reference_too() -> None:
    up, down, x = torch.randn(4, 5, 6), torch.randn(4, 6, 5), torch.randn(3, 6)
    ids, weights = torch.tensor([[0, 3], [3, 1], [1, 0]]), torch.rand(3, 2)
    out = reference.run_experts(x, ids, weights, Experts(up, down))
    torch.testing.assert_close(out, mixed(x, ids, weights, up, down, torch.float64).float(), rtol=1e-4, atol=1e-5)
