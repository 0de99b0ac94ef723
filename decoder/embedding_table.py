"""The table of token embeddings, which may share its weight with the vocabulary projection."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.host_memory import kept_copy
from kernels.linear import CompactTable, Linear, Packed, Quantised
from kernels.native import Kind, NativeUnavailable
from kernels.native.structs import Weight


class EmbeddingTable:
    """`[vocab, d]`: a tensor, compact where compiled code can read it; or, if tied to a projection that is packed or
    quantised, only the projection's weight.

    Rows of a quantised weight are its numbers as `Quantised.dequantise` gives them, however it is stored.
    """

    def __init__(self, weight_VD: Tensor | Quantised, dtype: torch.dtype, tied: Linear | None = None) -> None:
        """`dtype`: of the rows, and of the weight unless it is quantised. `tied`: the projection that shares this
        weight. Without one, the weight must be a tensor, which is copied."""
        self.dtype = dtype
        self._packed: Packed | CompactTable | None = None
        self._rows: Tensor | Quantised | None = None
        if tied is None:
            assert isinstance(weight_VD, Tensor)
            self._packed = CompactTable.of(weight_VD)
            self._rows = kept_copy(weight_VD) if self._packed is None else None
        elif tied.packed is not None and tied.packed.stored is not Kind.F32 and tied.packed.order is None:
            self._packed = tied.packed
        elif isinstance(weight_VD, Tensor):
            self._rows = weight_VD
        else:
            self._rows = tied.weight if isinstance(tied.weight, Quantised) else weight_VD.dequantise(dtype)

    @property
    def kind(self) -> Kind:
        return Kind.BF16 if self.dtype == torch.bfloat16 else Kind.F32

    @property
    def packed(self) -> Weight | None:
        """The packed weight, for compiled code; None: rows are at `address`."""
        return None if self._packed is None else self._packed.descriptor

    @property
    def address(self) -> int | None:
        """Address of contiguous rows, for compiled code; None if there is only a packed weight. Raises
        NativeUnavailable for quantised rows of a projection that could not be packed."""
        if isinstance(self._rows, Quantised):
            raise NativeUnavailable("compiled code reads quantised embeddings only from packed weights")
        return None if self._rows is None else self._rows.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of the table if it is not the projection's weight."""
        beside = self._rows if self._packed is None else self._packed
        return beside.nbytes if isinstance(beside, Tensor | CompactTable) else 0

    def __call__(self, ids_T: Tensor) -> Tensor:
        """`[T, d]`: the rows of these ids."""
        if self._packed is not None:
            return self._packed.rows(ids_T).to(self.dtype)
        if isinstance(self._rows, Quantised):
            return self._rows.rows(ids_T).dequantise(self.dtype)
        assert self._rows is not None
        return F.embedding(ids_T, self._rows)
