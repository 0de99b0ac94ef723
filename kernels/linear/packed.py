"""A weight in the layout of the compiled kernels, and its product."""

from __future__ import annotations

import contextlib
import copy
import ctypes

import torch
from torch import Tensor

from kernels.host_memory import weight_memory
from kernels.linear.layouts import GATES, MULTIPLIED, Layout, compact_rows, interleaved, lay_out, padded_inputs
from kernels.linear.quantised import Quantised
from kernels.native import Activation, Kind, NativeUnavailable, Weight, library
from kernels.native.structs import GROUP, SUMMED


def operand_elements(kind: int, kpad: int) -> int:
    """Size of a row of `kpad` values in an operand format, in elements of 16 bits, or of 32 bits for float32."""
    if kind == Kind.BYTES:
        return kpad // 2 + 2
    if kind == Kind.SUMMED_BYTES:
        return kpad // 2 + 2 * (kpad // SUMMED + 1)
    return kpad + {Kind.INT8: 4, Kind.INT4: 4 * (kpad // GROUP)}.get(Kind(kind), 0)


class Packed:
    """One weight; a float32 weight is shared, others are copied. Keeps the memory alive that `descriptor` points to. If
    the weight's columns have another order than the inputs, rows are permuted before the product."""

    def __init__(
        self, weight: Tensor | Quantised, bias: Tensor | None, dtype: torch.dtype = torch.float32, *,
        gated: bool = False, int8_rows: bool = False, compact: bool | None = None,
    ) -> None:  # fmt: skip
        """`dtype`: of the rows that an fp8, nvfp4 or grouped integer weight is multiplied with, float32 or bfloat16.
        `gated`: the first half of the outputs are gates of the second, and a product returns half as many outputs,
        f(gate) * up; not for plain float32. `int8_rows` and `compact`: as in `lay_out`. Raises NativeUnavailable if
        there is no compiled code for the weight on this machine."""
        self._library = library()
        self.n, self.k = weight.shape
        if gated:
            assert isinstance(weight, Quantised) or weight.dtype == torch.bfloat16
            self.n //= 2
            bias = None if bias is None else interleaved(bias.detach())
        self.order = None if isinstance(weight, Tensor) else weight.order
        """The input of each column; None if they are in order."""
        self._layout = layout = lay_out(weight, dtype, gated=gated, int8_rows=int8_rows, compact=compact)
        self.kind = layout.rows
        """The form of the rows that the weight is multiplied with."""
        self.kpad = padded_inputs(self.k, layout.stored, layout.rows)
        outputs = -(-self.n // GATES) * GATES * 2 if gated else self.n
        self._bias = None if bias is None else weight_memory(bias.shape, torch.float32).copy_(bias.detach())
        self._descriptor = Weight(
            kind=layout.stored, n=outputs, k=self.k, kpad=self.kpad, data=layout.data.data_ptr(),
            scale=_address(layout.scale), bias=_address(self._bias), gated=gated, operand=layout.rows,
            group=layout.group, zeros=_address(layout.zeros), outer=_address(layout.outer),
            bf16_scale=_address(layout.bf16_scale), compact=_address(layout.compact),
            exceptions=_address(layout.exceptions),
        )  # fmt: skip

    @property
    def descriptor(self) -> Weight:
        """The weight's struct, for compiled code that runs more than this product. Raises NativeUnavailable if rows
        would have to be permuted first."""
        if self.order is not None:
            raise NativeUnavailable("no compiled step permutes the inputs of a product")
        return self._descriptor

    @property
    def operand_elements(self) -> int:
        return operand_elements(self.kind, self.kpad)

    def first(self, outputs: int) -> Packed:
        """The first `outputs` outputs of a weight that is not gated; shares its memory."""
        assert 0 < outputs <= self.n and not self._descriptor.gated
        part = copy.copy(self)
        part.n, part._descriptor = outputs, Weight.from_buffer_copy(self._descriptor)
        part._descriptor.n = outputs
        return part

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of a weight that is not gated, dequantised: `[T, k]` float32. `IndexError` for ids out of range."""
        assert self._layout.stored is not Kind.F32 and not self._descriptor.gated and self.order is None
        return _rows(self._descriptor, ids_T)

    @property
    def stored(self) -> Kind:
        """How the weight is stored."""
        return self._layout.stored

    @property
    def nbytes(self) -> int:
        return self._layout.nbytes

    def __call__(self, x: Tensor, activation: Activation = Activation.NONE) -> Tensor:
        """`[..., k]` -> `[..., n]` in x's dtype, after `activation` (of the gates, if gated). Inputs of other dtypes
        than float32 and bfloat16 are converted to float32."""
        if x.dtype not in MULTIPLIED:
            return self(x.float(), activation).to(x.dtype)
        rows = x.reshape(-1, self.k)
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        elif rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty(rows.shape[0], self.n, dtype=x.dtype)
        if rows.shape[0]:
            # For the integer kinds and for odd rows, inputs are copied into the form that is multiplied.
            operand = torch.empty(
                rows.shape[0], self.operand_elements, dtype=torch.float32 if self.kind is Kind.F32 else torch.int16
            )
            scales = torch.empty(rows.shape[0])
            self._library.saccade_linear(
                ctypes.byref(self._descriptor), rows.data_ptr(), rows.stride(0), int(x.dtype == torch.bfloat16),
                out.data_ptr(), self.n, rows.shape[0], activation, torch.get_num_threads(),
                operand.data_ptr(), self.operand_elements, scales.data_ptr(),
            )  # fmt: skip
        return out.view(*x.shape[:-1], self.n)


class CompactTable:
    """A bfloat16 table, such as an embedding table, in 12 bits per element."""

    def __init__(self, layout: Layout, count: int, k: int) -> None:
        self._layout = layout
        self.descriptor = Weight(
            kind=layout.stored, n=count, k=k, kpad=k, data=layout.data.data_ptr(), operand=layout.rows,
            compact=_address(layout.compact), exceptions=_address(layout.exceptions),
        )  # fmt: skip
        """The table's struct for compiled code."""

    @classmethod
    def of(cls, table_NK: Tensor) -> CompactTable | None:
        """A compact copy of a table `[N, k]`. None if the table cannot be compact (see `compact_rows`), or if there is
        no compiled code for this machine."""
        if table_NK.dtype != torch.bfloat16 or table_NK.device.type != "cpu":
            return None
        with contextlib.suppress(NativeUnavailable):
            layout = compact_rows(table_NK)
            return None if layout is None else cls(layout, *table_NK.shape)
        return None

    @property
    def nbytes(self) -> int:
        return self._layout.nbytes

    def rows(self, ids_T: Tensor) -> Tensor:
        """The rows `ids`: `[T, k]` float32. `IndexError` for ids out of range."""
        return _rows(self.descriptor, ids_T)


def _rows(weight: Weight, ids_T: Tensor) -> Tensor:
    ids, found = ids_T.contiguous(), torch.empty(ids_T.shape[0], weight.k)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < weight.n:
        raise IndexError(f"row ids {int(ids.min())} to {int(ids.max())} of a weight with {weight.n} rows")
    library().saccade_rows(ctypes.byref(weight), ids.data_ptr(), len(ids), found.data_ptr(), torch.get_num_threads())
    return found


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
