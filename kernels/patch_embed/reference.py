"""Patch projection, position and prefix rows of packed images, in torch; the maths is in README.md.

T patches of P values, D features, K prefix rows, R tower rows.
"""

from __future__ import annotations

from torch import Tensor

from kernels.linear import Linear


def patch_embed(
    patches_TP: Tensor,
    projection: Linear,
    positions_TD: Tensor,
    table_KD: Tensor,
    source_R: Tensor,
    pixels: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """A new tensor `[R, D]` in the table's dtype: row r is entry `source_R[r]` of `table_KD`, followed by the embedded
    patches.

    `table_KD` has the prefix tokens and any padding row, so source 0..K-1 selects one of these and source K + t selects
    patch t. `source_R` is int64 on the same device; no host sync. `pixels`: float32 scale and shift `[P]` that
    normalise bytes (0..255); without it, patches are normalised already, in the table's dtype.
    """
    if pixels is not None:
        scale_P, shift_P = pixels
        patches_TP = (patches_TP.float() * scale_P + shift_P).to(table_KD.dtype)
    embedded_TD = projection(patches_TP).add_(positions_TD)
    rows = table_KD.new_empty(table_KD.shape[0] + embedded_TD.shape[0], table_KD.shape[1])
    rows[: table_KD.shape[0]] = table_KD
    rows[table_KD.shape[0] :] = embedded_TD
    return rows.index_select(0, source_R)
