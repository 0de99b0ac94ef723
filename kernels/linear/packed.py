"""A weight in the layout of the compiled kernels, and its product; the layouts are in kernels/native/README.md."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.linear.quantised import Quantised
from kernels.native import Activation, Kind, NativeUnavailable, Weight, library
from kernels.native.structs import GROUP, PANEL

STEPS = {Kind.F32: 1, Kind.BF16: 2, Kind.INT8: 16, Kind.INT4: GROUP}
"""Inputs are padded to multiples of these."""
GATES = 16
"""Of a gated weight, as many gates lie together, and then the outputs that they are for."""
MOST_INPUTS = 131_071
"""Of quantised weights: products of bytes are summed in 32 bits."""
MULTIPLIED = (torch.bfloat16, torch.float32)
"""Dtypes of plain weights and of rows."""


class Packed:
    """One weight; float32 is shared, all else copied. Holds what `descriptor` points to."""

    def __init__(self, weight: Tensor | Quantised, bias: Tensor | None, *, gated: bool = False) -> None:
        """`gated`: the first half of the outputs are gates of the second, and a product gives half as many numbers,
        f(gate) * other; not for float32. Raises NativeUnavailable where there is no compiled code for the weight and
        this machine.
        """
        stored = weight if isinstance(weight, Tensor) else weight.values
        if stored.device.type != "cpu" or (isinstance(weight, Tensor) and weight.dtype not in MULTIPLIED):
            raise NativeUnavailable(f"no compiled product for {stored.dtype} on {stored.device}")
        if isinstance(weight, Quantised) and weight.in_features > MOST_INPUTS:
            raise NativeUnavailable(f"{weight.in_features} inputs are more than the {MOST_INPUTS} that 32 bits can sum")
        self._library = library()
        self.n, self.k = weight.shape
        if gated:
            assert isinstance(weight, Quantised) or weight.dtype == torch.bfloat16
            self.n //= 2
            weight, bias = _interleaved(weight, bias)
        rows = weight.shape[0]
        self._scale: Tensor | None = None
        if isinstance(weight, Quantised):
            self.kind = Kind.INT8 if weight.kind == "int8" else Kind.INT4
            self._data, self._scale = _pack_int8(weight) if weight.kind == "int8" else _pack_int4(weight)
        elif weight.dtype == torch.bfloat16:
            self.kind, self._data = Kind.BF16, _panels(weight.detach(), STEPS[Kind.BF16], 2)
        else:
            self.kind, self._data = Kind.F32, weight.detach().contiguous()
        self.kpad = -(-self.k // STEPS[self.kind]) * STEPS[self.kind]
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self.descriptor = Weight(
            self.kind,
            rows,
            self.k,
            self.kpad,
            self._data.data_ptr(),
            _address(self._scale),
            _address(self._bias),
            gated,
        )

    @property
    def operand_elements(self) -> int:
        """Of 16 bits, or of 32 for float32, that a row takes in the form that it is multiplied in."""
        return self.kpad + {Kind.INT8: 4, Kind.INT4: 4 * (self.kpad // GROUP)}.get(self.kind, 0)

    @property
    def nbytes(self) -> int:
        return self._data.nbytes + (0 if self._scale is None else self._scale.nbytes)

    def __call__(self, x: Tensor, activation: Activation = Activation.NONE) -> Tensor:
        """`[..., k]` -> `[..., n]` in x's dtype, through `activation`; a gated one's gates through `activation`. Dtypes
        other than float32 and bfloat16 go by way of float32.
        """
        if x.dtype not in MULTIPLIED:
            return self(x.float(), activation).to(x.dtype)
        rows = x.reshape(-1, self.k)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty(rows.shape[0], self.n, dtype=x.dtype)
        if rows.shape[0]:
            # The integer kinds, and odd rows, are copied into the form that they are multiplied in.
            operand = torch.empty(
                rows.shape[0], self.operand_elements, dtype=torch.float32 if self.kind is Kind.F32 else torch.int16
            )
            scales = torch.empty(rows.shape[0])
            self._library.saccade_linear(
                ctypes.byref(self.descriptor), rows.data_ptr(), rows.stride(0), int(x.dtype == torch.bfloat16),
                out.data_ptr(), self.n, rows.shape[0], activation, torch.get_num_threads(),
                operand.data_ptr(), self.operand_elements, scales.data_ptr(),
            )  # fmt: skip
        return out.view(*x.shape[:-1], self.n)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _interleaved(weight: Tensor | Quantised, bias: Tensor | None) -> tuple[Tensor | Quantised, Tensor | None]:
    """16 gates, then the 16 outputs that they are for, and so on; what is missing at the end has zeros."""
    inner = weight.shape[0] // 2
    gates = torch.arange(-(-inner // GATES) * GATES).view(-1, GATES)
    order = torch.stack((gates, gates + inner), 1).flatten()
    there = (gates < inner).repeat(1, 2).flatten()
    order = torch.where(there, order, 0)

    def rows(of: Tensor) -> Tensor:
        return of[order].mul_(there.view(-1, *[1] * (of.dim() - 1)))

    bias = None if bias is None else rows(bias.detach())
    if isinstance(weight, Tensor):
        return rows(weight.detach()), bias
    return Quantised(weight.kind, weight.values[order], rows(weight.scale), weight.in_features), bias


def _panels(weight: Tensor, step: int, together: int) -> Tensor:
    """`[n, k]` -> `[panels, k / together, 64, together]`, padded with zeros: some inputs of 64 outputs lie together."""
    n, k = weight.shape
    padded = F.pad(weight, (0, -k % step, 0, -n % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // together, together).permute(0, 2, 1, 3).contiguous()


def _pack_int8(weight: Quantised) -> tuple[Tensor, Tensor]:
    """Bytes without a sign: 128 more than the values."""
    data = _panels(weight.values, STEPS[Kind.INT8], 4).view(torch.uint8).bitwise_xor_(128)
    return data, F.pad(weight.scale, (0, -weight.shape[0] % PANEL)).contiguous()


def _pack_int4(weight: Quantised) -> tuple[Tensor, Tensor]:
    """8 more than the values; a byte holds the same place of outputs 0..31 (low half) and 32..63 (high half)."""
    n, groups = weight.shape[0], math.ceil(weight.in_features / GROUP)
    panels = _panels(weight.integers(), GROUP, 4).add_(8).to(torch.uint8).flatten(2)
    data = panels[..., : 2 * PANEL] | panels[..., 2 * PANEL :] << 4
    scale = F.pad(weight.scale, (0, 0, 0, -n % PANEL)).view(-1, PANEL, groups).transpose(1, 2).contiguous()
    return data.contiguous(), scale
