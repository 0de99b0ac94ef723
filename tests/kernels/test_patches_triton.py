"""Patch embedding and token merging: the kernels compared with float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from triton_kernels import DEVICE, assert_as_good, poisoned

from kernels.dispatch import forced
from kernels.linear import Linear
from kernels.patch_embed import patch_embed
from kernels.pixel_shuffle import shuffle_norm

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


@pytest.fixture(autouse=True)
def kernels_run() -> Iterator[None]:
    with DEVICE, poisoned(), forced("triton"):
        yield


def embedded(patches: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, table: Tensor) -> Tensor:
    """All rows that `source` may refer to."""
    found = patches @ weight.T + positions
    return torch.cat((table, found if bias is None else found + bias))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pixels", [False, True], ids=["floats", "bytes"])
def test_patch_embed(dtype: torch.dtype, pixels: bool, bias: bool) -> None:
    patches, depth, width, prefix, rows = 21, 75, 40, 3, 33
    given = torch.randint(0, 256, (patches, depth), dtype=torch.uint8) if pixels else torch.randn(patches, depth)
    scale, shift = torch.rand(depth) / 64, torch.randn(depth)
    weight, offset = torch.randn(width, depth).to(dtype), torch.randn(width).to(dtype)
    positions, table = torch.randn(patches, width).to(dtype), torch.randn(prefix, width).to(dtype)
    source = torch.randint(0, prefix + patches, (rows,))
    source[:3] = torch.tensor([0, prefix - 1, prefix + patches - 1])
    normalised = (given.float() * scale + shift if pixels else given).to(dtype)
    projection = Linear(weight, offset if bias else None)
    projection.weight = weight
    out = patch_embed(
        given if pixels else normalised, projection, positions, table, source, (scale, shift) if pixels else None
    )
    exact, plain = (
        embedded(*(x.to(kind) for x in (normalised, weight)), offset.to(kind) if bias else None,
                 positions.to(kind), table.to(kind))[source]
        for kind in (torch.float64, dtype)
    )  # fmt: skip
    assert_as_good(out, exact, plain)


@pytest.mark.parametrize(("final", "rms"), [(False, True), (True, True), (True, False)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("merge", [1, 2, 3])
def test_shuffle_norm(dtype: torch.dtype, merge: int, final: bool, rms: bool) -> None:
    rows, width, tokens = 30, 36, 7
    x, weight = torch.randn(rows, width).to(dtype), torch.rand(merge**2 * width)
    norm = (torch.rand(width).to(dtype), torch.randn(width).to(dtype), 1e-3)
    order = torch.randint(0, rows, (tokens, merge**2))
    x[set_aside(order, rows)] = float("nan")
    out = shuffle_norm(x, order, weight if rms else None, 1e-3, norm if final else None)

    def maths(kind: torch.dtype) -> Tensor:
        taken = x.to(kind)[order]
        if final:
            centred = taken - taken.mean(-1, keepdim=True)
            taken = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
            taken = taken * norm[0].to(kind) + norm[1].to(kind)
        flat = taken.reshape(tokens, -1)
        if not rms:
            return flat
        return flat / (flat.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.to(kind)

    assert_as_good(out, maths(torch.float64), maths(dtype))


def set_aside(order: Tensor, rows: int) -> Tensor:
    """Rows that no token uses: prefix and padding, whose values must not matter."""
    return torch.tensor([row for row in range(rows) if row not in set(order.flatten().tolist())])


def test_no_tokens() -> None:
    none = torch.empty(0, 4, dtype=torch.int64)
    assert shuffle_norm(torch.randn(5, 8), none, torch.ones(32), 1e-5).shape == (0, 32)
