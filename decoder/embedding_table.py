"""The table of token embeddings, which may share its weight with the vocabulary projection."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.linear import Linear, Packed
from kernels.native import Kind


class EmbeddingTable:
    """`[vocab, d]`: a tensor; or, if tied to a projection that is packed for compiled code, only the packed weight."""

    def __init__(self, rows_VD: Tensor, tied: Linear | None = None) -> None:
        """`tied`: the projection with the same weight."""
        packed = None if tied is None else tied.packed
        self.dtype = rows_VD.dtype
        self._packed: Packed | None = packed if packed is not None and packed.stored is Kind.BF16 else None
        self._rows = None if self._packed is not None else rows_VD

    @property
    def kind(self) -> Kind:
        return Kind.BF16 if self.dtype == torch.bfloat16 else Kind.F32

    @property
    def address(self) -> int:
        """Address for compiled code."""
        if self._packed is not None:
            return int(self._packed.descriptor.data)
        assert self._rows is not None
        return self._rows.data_ptr()

    @property
    def packed_inputs(self) -> int:
        """Number of padded inputs, which compiled code needs to find a row in a packed weight; 0: rows are
        contiguous."""
        return 0 if self._packed is None else int(self._packed.kpad)

    def __call__(self, ids_T: Tensor) -> Tensor:
        """`[T, d]`: the rows of these ids."""
        if self._packed is not None:
            return self._packed.rows(ids_T)
        assert self._rows is not None
        return F.embedding(ids_T, self._rows)
