"""Weights in the layouts of the compiled kernels, which kernels/native/README.md describes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.host_memory import drop_pages, weight_memory
from kernels.linear.int8_rows import has_whole_sums, is_summed
from kernels.linear.quantised import INTEGERS, Quantised
from kernels.native import Kind, NativeUnavailable, library
from kernels.native.instruction_sets import compact_weights
from kernels.native.structs import GROUP, PANEL, SUMMED, Compacting, Packing

STEPS = {
    Kind.F32: 1, Kind.BF16: 2, Kind.COMPACT_BF16: 2, Kind.INT8: 16, Kind.INT4: GROUP,
    Kind.FP8: 8, Kind.NVFP4: 16, Kind.UINT4: 8, Kind.UINT8: 8,
}  # fmt: skip
"""The number of inputs is padded to a multiple of these, or, if rows are `SUMMED_BYTES`, of `GROUP`. For the last four
kinds and other rows it must be a multiple already."""
GATES = 16
"""In a gated weight, this many gates alternate with the outputs that they gate."""
MOST_INPUTS = 131_071
"""Largest number of inputs of an int8 or int4 weight: sums of products of bytes must fit 32 bits."""
MOST_SHIFTED = 65_535
"""Largest number of inputs in a group with zero points: sums of products of 255 and 127 must fit 32 bits."""
EXCEPTIONS = 1024
"""A bfloat16 weight is compact if at most one in this many elements has an exponent outside its panel's 16 exponents.
"""
PIECE = 1 << 21
"""Elements of a weight that are converted at a time, before the pages that they were read from are dropped."""
_GROUPED = {"int8": Kind.UINT8, "int4": Kind.INT4}
"""How a weight is stored whose groups are multiplied with rows of integers."""
MULTIPLIED = (torch.bfloat16, torch.float32)
"""Dtypes of plain weights and of rows."""


@dataclass(frozen=True)
class Layout:
    """A weight's tensors as the compiled code reads them."""

    stored: Kind
    """How the weight is stored."""
    rows: Kind
    """The form of the rows that it is multiplied with."""
    data: Tensor
    scale: Tensor | None = None
    zeros: Tensor | None = None
    outer: Tensor | None = None
    group: int = 0
    """Inputs that share a scale, for kinds that are summed group by group."""
    bf16_scale: Tensor | None = None
    """Replaces `scale` if the scales of groups are exact in bfloat16, as those of `quantise` and of most files are."""
    compact: Tensor | None = None
    """int64 `[panels + 1, 2]`, for compact kinds: the index of a panel's first exception, and its lowest exponent << 7.
    """
    exceptions: Tensor | None = None
    """int64, for compact kinds: the elements with other exponents than their panel's 16."""

    @property
    def nbytes(self) -> int:
        parts = (self.data, self.scale, self.zeros, self.outer, self.bf16_scale, self.compact, self.exceptions)
        return sum(tensor.nbytes for tensor in parts if tensor is not None)


def lay_out(
    weight: Tensor | Quantised, dtype: torch.dtype, *, gated: bool = False, int8_rows: bool = False,
    compact: bool | None = None,
) -> Layout:  # fmt: skip
    """Converts a weight with `torch.get_num_threads()` threads. Besides the result, this takes memory for scales and
    for one piece of `PIECE` elements.

    `dtype`: of the rows that an fp8, nvfp4 or grouped integer weight is multiplied with, float32 or bfloat16. `gated`:
    the first half of the rows are gates of the second, and they are interleaved; not for plain float32. `int8_rows`: an
    int8 or int4 weight is multiplied with rows in int8. `compact`: whether a bfloat16 weight is stored in 12 bits per
    element, if at most one element in `EXCEPTIONS` is an exception; the results of products are bitwise equal. None
    stores it so if the instruction set in use is faster with it. Columns keep their stored order; the caller must
    permute inputs. A float32 weight is shared, others are copied. Raises NativeUnavailable if the compiled code has no
    product for the weight.
    """
    stored = weight if isinstance(weight, Tensor) else weight.values
    if stored.device.type != "cpu" or (isinstance(weight, Tensor) and weight.dtype not in MULTIPLIED):
        raise NativeUnavailable(f"no compiled product for {stored.dtype} on {stored.device}")
    order = interleaved_order(weight.shape[0] // 2) if gated else None
    if isinstance(weight, Tensor):
        return _of_floats(weight, order, compact)
    if weight.kind in INTEGERS and (int8_rows or not _is_scaled(weight, dtype)):
        return _of_integers(weight, order, int8_rows)
    return _of_scaled(weight, order, dtype)


def _of_floats(weight: Tensor, order: Tensor | None, compact: bool | None) -> Layout:
    if weight.dtype == torch.float32:
        assert order is None
        return Layout(Kind.F32, Kind.F32, weight.detach().contiguous())
    short = _compact(weight, order) if (compact_weights() if compact is None else compact) else None
    return short or Layout(Kind.BF16, Kind.BF16, _pack(weight, Kind.BF16, Kind.BF16, order))


def _of_integers(weight: Quantised, order: Tensor | None, int8_rows: bool) -> Layout:
    """The layout of an int8 or int4 weight that is multiplied with rows of integers."""
    if weight.in_features > MOST_INPUTS:
        raise NativeUnavailable(f"{weight.in_features} inputs are more than the {MOST_INPUTS} that 32 bits can sum")
    if weight.kind == "int8" and not is_summed(weight):
        rows = Kind.BYTES if int8_rows else Kind.INT8
        return Layout(Kind.INT8, rows, _pack(weight, Kind.INT8, rows, order), _of_outputs(weight.scale[:, 0], order))
    if int8_rows:
        _check_grouped_bytes(weight)
    stored, rows = _GROUPED[weight.kind], Kind.SUMMED_BYTES if int8_rows else Kind.INT4
    layout = Layout(stored, rows, _pack(weight, stored, rows, order), group=weight.group)
    return _in_groups(weight, order, layout, small=int8_rows)


def _of_scaled(weight: Quantised, order: Tensor | None, dtype: torch.dtype) -> Layout:
    """The layout of a weight that is multiplied with rows in `dtype`."""
    kind = {"fp8": Kind.FP8, "nvfp4": Kind.NVFP4, "int4": Kind.UINT4, "int8": Kind.UINT8}[weight.kind]
    _check_scaled(weight, STEPS[kind], dtype)
    rows, group = _row_kind(dtype), weight.scale_group
    data = _pack(weight, kind, rows, order)
    if weight.kind == "nvfp4":
        assert weight.outer is not None
        outer = 1 / weight.outer if weight.divided else weight.outer
        return Layout(kind, rows, data, outer=_of_outputs(outer, order), group=group)
    return _in_groups(weight, order, Layout(kind, rows, data, group=group))


def _in_groups(weight: Quantised, order: Tensor | None, layout: Layout, *, small: bool = True) -> Layout:
    """The layout with the scales and zero points of groups. `small`: scales are kept in bfloat16 if that is exact."""
    zeros = None if weight.zeros is None else _of_groups(weight.zeros.float(), order)
    rounded = weight.scale.bfloat16()
    if small and layout.group < weight.in_features and torch.equal(rounded.float(), weight.scale):
        return replace(layout, zeros=zeros, bf16_scale=_of_groups(rounded, order))
    return replace(layout, zeros=zeros, scale=_of_groups(weight.scale, order))


def padded_inputs(k: int, stored: Kind, rows: Kind) -> int:
    """Inputs of a weight as it is stored, for rows in the form `rows`."""
    step = GROUP if rows is Kind.SUMMED_BYTES else STEPS[stored]
    return -(-k // step) * step


def _row_kind(dtype: torch.dtype) -> Kind:
    return Kind.F32 if dtype == torch.float32 else Kind.BF16


def _is_scaled(weight: Quantised, dtype: torch.dtype) -> bool:
    """Whether an int8 or int4 weight is multiplied with plain rows instead of rows of integers, if both are possible:
    with int4, plain bfloat16 rows are a third faster for many rows; rows of integers support any number of inputs."""
    if weight.kind == "int8":
        return is_summed(weight)
    plain = dtype == torch.bfloat16 and weight.in_features % STEPS[Kind.UINT4] == 0
    return plain or weight.zeros is not None or weight.group != GROUP or weight.order is not None


def _check_grouped_bytes(weight: Quantised) -> None:
    group, inner = weight.group, weight.in_features
    if not has_whole_sums(group, inner):
        raise NativeUnavailable(f"groups of {group} inputs are not multiples of {SUMMED}")
    if weight.zeros is not None and min(group, inner) > MOST_SHIFTED:
        raise NativeUnavailable(f"groups of {group} inputs with zero points are above the maximum of {MOST_SHIFTED}")


def _check_scaled(weight: Quantised, step: int, dtype: torch.dtype) -> None:
    if dtype not in MULTIPLIED:
        raise NativeUnavailable(f"no compiled product multiplies rows of {dtype} with {weight.kind}")
    group, inner = weight.scale_group, weight.in_features
    if inner % step or (group % step and group < inner):
        raise NativeUnavailable(f"{inner} inputs in groups of {group} are not multiples of {step}")


def _pack(weight: Tensor | Quantised, kind: Kind, multiplied: Kind, order: Tensor | None) -> Tensor:
    """The weight's values in panels, for rows in the form `multiplied`; kernels/native/pack.h has the layouts. `order`:
    the row of each output, -1 for zeros. Raises NativeUnavailable for values that the compiled products do not
    support."""
    rows = _Rows.of(weight, kind, multiplied, order)
    kpad, panels = rows.kpad, rows.panels
    forms: dict[Kind, tuple[int, ...]] = {
        Kind.BF16: (kpad // 2, PANEL, 2), Kind.INT8: (kpad // 4, PANEL, 4), Kind.INT4: (kpad // 4, 2 * PANEL),
        Kind.FP8: (kpad // 4, 4, PANEL), Kind.NVFP4: (kpad // 16, 9 * PANEL), Kind.UINT4: (kpad // 8, PANEL, 4),
        Kind.UINT8: (kpad // 4, PANEL, 4),
    }  # fmt: skip
    found = weight_memory((panels, *forms[kind]), torch.bfloat16 if kind is Kind.BF16 else torch.uint8)
    for begin, end in rows.pieces():
        rows.pack(begin, end, found[begin:])
    return found


def _compact(weight: Tensor, order: Tensor | None) -> Layout | None:
    """A bfloat16 weight in 12 bits per element, without loss (kernels/native/compact.h). None if it has too many
    exceptions."""
    rows = _Rows.of(weight, Kind.BF16, Kind.BF16, order)
    pieces, compacting = rows.pieces(), _Compacting(rows.outputs, rows.kpad, weight.numel() // EXCEPTIONS)
    plain = torch.empty(pieces[0][1], rows.kpad // 2, PANEL, 2, dtype=torch.bfloat16)
    for begin, end in pieces:
        rows.pack(begin, end, plain)
        if not compacting.add(plain, begin, end):
            return None
    return compacting.layout(Kind.COMPACT_BF16)


def is_compact_width(k: int) -> bool:
    """Whether rows of `k` elements can be panels of `Kind.COMPACT_ROWS`."""
    return k % (2 * PANEL) == 0


def compact_rows(table: Tensor) -> Layout | None:
    """A bfloat16 table `[rows, k]` in host memory, such as an embedding table, in 12 bits per element, without loss.
    None if k is not a compact width, or the table has too many exceptions. Pages of a mapped file are dropped. Raises
    NativeUnavailable if there is no compiled code for this machine."""
    count, k = table.shape
    if not is_compact_width(k) or not count:
        return None
    compacting = _Compacting(count * PANEL, k // PANEL, table.numel() // EXCEPTIONS)
    step = max(PIECE // k, 1)
    for begin in range(0, count, step):
        part = table[begin : begin + step].detach().contiguous()  # plain panels
        if not compacting.add(part, begin, begin + len(part)):
            return None
        drop_pages(part)
    return compacting.layout(Kind.COMPACT_ROWS)


class _Compacting:
    """Stores plain panels in 12 bits per element, piece by piece."""

    def __init__(self, outputs: int, kpad: int, allowed: int) -> None:
        """`allowed`: the largest number of exceptions."""
        self._outputs, self._kpad, self._allowed = outputs, kpad, allowed
        panels = -(-outputs // PANEL)
        self._data = weight_memory((panels, kpad // 2, 3 * PANEL), torch.uint8)
        self._heads, self._exceptions = torch.zeros(panels + 1, 2, dtype=torch.int64), list[Tensor]()

    def add(self, plain: Tensor, begin: int, end: int) -> bool:
        """Stores panels [begin, end), which are the first of `plain`. False if there are too many exceptions."""
        found, most = self._heads[begin:end], min(self._allowed + 1, self._kpad * PANEL)
        kept = torch.empty(end - begin, most, dtype=torch.int64)
        panels = Compacting(
            plain=plain.data_ptr(), kpad=self._kpad, outputs=min(self._outputs, end * PANEL) - begin * PANEL,
            compact=self._data[begin].data_ptr(), heads=found.data_ptr(), exceptions=kept.data_ptr(), most=most,
        )  # fmt: skip
        library().saccade_compact(ctypes.byref(panels), torch.get_num_threads())
        if int(self._heads[:, 0].sum()) > self._allowed:
            return False
        counts = enumerate(found[:, 0].tolist())
        self._exceptions.append(torch.cat([kept[0, :0], *(kept[i, :count] for i, count in counts if count)]))
        return True

    def layout(self, stored: Kind) -> Layout:
        self._heads[1:, 0], self._heads[0, 0] = self._heads[:-1, 0].cumsum(0), 0
        return Layout(stored, Kind.BF16, self._data, compact=self._heads, exceptions=torch.cat(self._exceptions))


@dataclass(frozen=True)
class _Rows:
    """A weight's rows as files store them, to be packed piece by piece."""

    kind: Kind
    numbers: Tensor
    scales: Tensor | None
    order: Tensor | None
    inputs: int
    kpad: int
    outputs: int

    @classmethod
    def of(cls, weight: Tensor | Quantised, kind: Kind, multiplied: Kind, order: Tensor | None) -> _Rows:
        numbers = _in_rows(weight.detach() if isinstance(weight, Tensor) else weight.values)
        scales = _in_rows(weight.scale) if isinstance(weight, Quantised) and kind is Kind.NVFP4 else None
        outputs, inputs = weight.shape[0] if order is None else len(order), weight.shape[1]
        assert outputs, "a weight without rows"
        return cls(kind, numbers, scales, order, inputs, padded_inputs(inputs, kind, multiplied), outputs)

    @property
    def panels(self) -> int:
        return -(-self.outputs // PANEL)

    def pieces(self) -> list[tuple[int, int]]:
        """(first panel, one past the last) of each piece; no piece has more panels than the first."""
        step = max(PIECE // max(self.inputs, 1) // PANEL, 1)
        return [(begin, min(begin + step, self.panels)) for begin in range(0, self.panels, step)]

    def pack(self, begin: int, end: int, found: Tensor) -> None:
        """Writes panels [begin, end) to the beginning of `found`, and drops the pages that they were read from."""
        packing = Packing(
            kind=self.kind, n=self.outputs, k=self.inputs, kpad=self.kpad, rows=self.numbers.data_ptr(),
            stride=self.numbers.stride(0) * self.numbers.itemsize,
            order=None if self.order is None else self.order.data_ptr(),
            scales=None if self.scales is None else self.scales.data_ptr(),
            scale_stride=0 if self.scales is None else self.scales.stride(0),
            out=found.data_ptr(), begin=begin, end=end,
        )  # fmt: skip
        refused = library().saccade_pack(ctypes.byref(packing), torch.get_num_threads())
        if refused:
            raise NativeUnavailable(refused.decode())
        if self.order is None:
            read = (self.numbers,) if self.scales is None else (self.numbers, self.scales)
            drop_pages(*(each[begin * PANEL : end * PANEL] for each in read))


def _in_rows(numbers: Tensor) -> Tensor:
    return numbers if numbers.stride(-1) == 1 else numbers.contiguous()


def _of_groups(scales: Tensor, order: Tensor | None) -> Tensor:
    """`[n, groups]` -> `[panels, groups, 64]`, of the same dtype."""
    chosen = scales if order is None else scales[order.clamp(min=0)] * (order >= 0)[:, None]
    padded = F.pad(chosen, (0, 0, 0, -len(chosen) % PANEL)).view(-1, PANEL, chosen.shape[1]).transpose(1, 2)
    return weight_memory(padded.shape, padded.dtype).copy_(padded)


def _of_outputs(scales: Tensor, order: Tensor | None) -> Tensor:
    """`[n]` -> `[panels * 64]`."""
    return _of_groups(scales[:, None], order).flatten()


def interleaved_order(inner: int) -> Tensor:
    """int64: the row of each output of a gated weight with `inner` gates: 16 gates, then the 16 outputs that they gate,
    and so on; -1 for padding."""
    gates = torch.arange(-(-inner // GATES) * GATES).view(-1, GATES)
    order = torch.stack((gates, gates + inner), 1)
    return torch.where((gates < inner)[:, None], order, -1).flatten()


def interleaved(bias: Tensor) -> Tensor:
    """The bias of a gated weight, in the order of its rows."""
    order = interleaved_order(bias.shape[0] // 2)
    return bias[order.clamp(min=0)] * (order >= 0)
