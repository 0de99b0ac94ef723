"""Router and experts compared with loops over their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.moe import route, run_experts


def chosen(scores: list[float], correction: list[float], top_k: int, groups: int, kept: int) -> set[int]:
    """Experts of one token: the best groups by the sum of their two best, then the best experts in them."""
    choice = [s + c for s, c in zip(scores, correction, strict=True)]
    size = len(choice) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    ranked = sorted(members, key=lambda group: -sum(sorted(choice[e] for e in group)[-2:]))
    allowed = [expert for group in ranked[:kept] for expert in group]
    return set(sorted(allowed, key=lambda expert: -choice[expert])[:top_k])


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("groups", "kept", "top_k"), [(1, 1, 3), (4, 2, 3), (4, 4, 1), (2, 1, 4), (8, 3, 3)])
def test_route(normalise: bool, groups: int, kept: int, top_k: int) -> None:
    x, gate, correction = torch.randn(17, 6), torch.randn(8, 6), torch.randn(8)
    experts, weights = route(x, gate, correction, top_k, groups, kept, normalise, 2.5, 0.5)
    scores = torch.sigmoid(x @ gate.T)
    for token in range(17):
        ids = experts[token].tolist()
        assert set(ids) == chosen(scores[token].tolist(), correction.tolist(), top_k, groups, kept)
        own = scores[token, ids]
        expected = 2.5 * (own / (own.sum() + 0.5) if normalise else own)
        torch.testing.assert_close(weights[token], expected)


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_run_experts(tokens: int) -> None:
    matrices = torch.randn(5, 6, 6)
    calls: list[int] = []

    def expert(index: int, x: Tensor) -> Tensor:
        calls.append(index)
        return x @ matrices[index]

    experts = [lambda x, index=index: expert(index, x) for index in range(5)]
    x, weights = torch.randn(tokens, 6), torch.rand(tokens, 2)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])
    out = run_experts(x, ids, weights, experts)
    expected = torch.zeros(tokens, 6)
    for token in range(tokens):
        for place in range(2):
            expected[token] += weights[token, place] * (x[token] @ matrices[ids[token, place]])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert calls == sorted(set(ids.flatten().tolist())), "each expert that is chosen runs once, others never"
