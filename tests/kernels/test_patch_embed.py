"""Patch rows compared with the explicit sum."""

from __future__ import annotations

import torch

from kernels.linear import Linear
from kernels.patch_embed import patch_embed


def test_rows_are_prefix_padding_or_embedded_patches() -> None:
    generator = torch.Generator().manual_seed(0)
    patches, positions = torch.randn(7, 12, generator=generator), torch.randn(7, 5, generator=generator)
    weight, table = torch.randn(5, 12, generator=generator), torch.randn(3, 5, generator=generator)
    source = torch.tensor([0, 1, 3, 4, 9, 0, 1, 5, 2, 2])
    got = patch_embed(patches, Linear(weight), positions, table, source)
    for row, origin in enumerate(source.tolist()):
        expected = table[origin] if origin < 3 else weight @ patches[origin - 3] + positions[origin - 3]
        torch.testing.assert_close(got[row], expected)
    assert got.shape == (10, 5)


def test_inputs_are_left_alone() -> None:
    patches, positions, table = torch.ones(2, 4), torch.ones(2, 4), torch.zeros(1, 4)
    patch_embed(patches, Linear(torch.eye(4)), positions, table, torch.tensor([0, 1, 2])).fill_(9)
    assert (patches == 1).all() and (positions == 1).all() and (table == 0).all()
