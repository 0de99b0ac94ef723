"""Compiled code stores weights in the layouts that README.md and packed_numbers.h in kernels/native describe; here they
are made in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.linear import Quantised, quantise
from kernels.linear.layouts import GATES, lay_out
from kernels.native import Kind, NativeUnavailable

SIZES = [(1, 16), (64, 128), (70, 144), (200, 1040), (386, 2688)]
"""Outputs and inputs: parts of panels, one word, and more than one block of words."""


def codes(weight: Quantised) -> Tensor:
    """uint8 `[n, k]`, the numbers of four bits as they are stored."""
    return torch.stack((weight.values & 15, weight.values >> 4), -1).flatten(-2)[:, : weight.in_features]


def below(tensor: Tensor, value: float = 0) -> Tensor:
    return F.pad(tensor, (0, 0, 0, -len(tensor) % 64), value=value)


def words(numbers: Tensor, together: int) -> Tensor:
    """`[n, k]` -> `[panels, k / together, 64, together]`."""
    return numbers.view(-1, 64, numbers.shape[1] // together, together).transpose(1, 2)


def pairs(octets: Tensor) -> Tensor:
    """`[n, k]` -> `[panels, k / 4, 256]`: in each 16 bytes, two inputs of four outputs and then the next two inputs."""
    panels = octets.view(-1, 4, 4, 4, octets.shape[1] // 4, 2, 2)  # panel, vector, lane, output, chunk, pair, input
    return panels.permute(0, 4, 1, 2, 5, 3, 6).flatten(2)


def scale_byte(octet: int) -> int:
    """(1 + m / 8) * 2^(8 - d) in e4m3 -> m in bits 4 to 6, d in bit 7 (its lowest bit) and bits 0 to 3."""
    value, d = float(torch.tensor([octet], dtype=torch.uint8).view(torch.float8_e4m3fn)), 8
    if not value:
        return 0
    while value < 1 or value >= 2:
        value, d = (value * 2, d + 1) if value < 1 else (value / 2, d - 1)
    return int((value - 1) * 8) << 4 | (d & 1) << 7 | d >> 1


def bf16(weight: Quantised | Tensor) -> Tensor:
    assert isinstance(weight, Tensor)
    return words(below(F.pad(weight, (0, weight.shape[1] % 2))), 2)


def int8(weight: Quantised) -> Tensor:
    padded = below(F.pad(weight.values, (0, -weight.in_features % 16)))
    return words((padded.int() + 128).byte(), 4)


def uint8(weight: Quantised, step: int = 8) -> Tensor:
    padded = below(F.pad(weight.values, (0, -weight.in_features % step)))
    return words((padded.int() + 128).byte(), 4)


def int4(weight: Quantised) -> Tensor:
    padded = words(below(F.pad(codes(weight), (0, -weight.in_features % 128), value=8), 8), 4).flatten(2)
    return padded[..., :128] | padded[..., 128:] << 4


def fp8(weight: Quantised) -> Tensor:
    return pairs(below(weight.values.view(torch.uint8)))


def nvfp4(weight: Quantised) -> Tensor:
    octets = weight.scale.view(torch.uint8)
    numbers = codes(weight) * (octets != 0).repeat_interleave(16, 1)
    fours = pairs(below(numbers))
    both = (fours[:, 0::2] | fours[:, 1::2] << 4).reshape(len(fours), -1, 512)
    table = torch.tensor([scale_byte(octet) for octet in range(127)], dtype=torch.uint8)
    scales = below(table[octets.long()]).view(len(fours), 64, -1).transpose(1, 2)
    return torch.cat((scales, both), 2)


def uint4(weight: Quantised) -> Tensor:
    of_word = words(below(codes(weight)), 8).view(-1, weight.in_features // 8, 64, 4, 2).transpose(3, 4)
    return of_word[..., 0::2] | of_word[..., 1::2] << 4


LAYOUTS: dict[Kind, tuple[str, torch.dtype, Callable[[Quantised], Tensor]]] = {
    Kind.BF16: ("bfloat16", torch.bfloat16, bf16),
    Kind.INT8: ("int8", torch.bfloat16, int8),
    Kind.INT4: ("int4", torch.float32, int4),
    Kind.FP8: ("fp8", torch.bfloat16, fp8),
    Kind.NVFP4: ("nvfp4", torch.bfloat16, nvfp4),
    Kind.UINT4: ("int4", torch.bfloat16, uint4),
    Kind.UINT8: ("int8-32", torch.bfloat16, uint8),
}
"""How a kind is stored, the dtype of the rows, and its layout."""


def weight_of(kind: str, n: int, k: int) -> Quantised:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k))
    found = weight.bfloat16() if kind == "bfloat16" else quantise(weight, kind)
    if isinstance(found, Quantised) and kind == "nvfp4":
        found.scale.view(torch.uint8).view(-1)[::5] = torch.arange(127).repeat(n * k)[: -(-n * k // 80)].byte()
    if isinstance(found, Quantised) and kind == "int8-32":  # zero points: a single group is not a scale for each row
        found = replace(found, zeros=torch.full_like(found.scale, 128).byte())
    return found  # type: ignore[return-value]


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.flatten().view(torch.uint8), expected.flatten().view(torch.uint8))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_layouts_are_the_described_ones(kind: Kind, n: int, k: int) -> None:
    stored, dtype, expected = LAYOUTS[kind]
    weight = weight_of(stored, n, k)
    found = lay_out(weight, dtype, compact=False)
    assert found.stored is kind and same(found.data, expected(weight))
    rows = torch.stack((weight.values, weight.values)) if isinstance(weight, Quantised) else None
    if rows is not None and rows.dtype != torch.float8_e4m3fn:  # rows that are apart from each other in memory
        apart = Quantised(**{**vars(weight), "values": rows.transpose(0, 1)[:, 1]})
        assert same(lay_out(apart, dtype).data, found.data)


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.INT8, Kind.INT4])
@pytest.mark.parametrize("k", [17, 150])
def test_inputs_are_padded(kind: Kind, k: int) -> None:
    stored, dtype, expected = LAYOUTS[kind]
    weight = weight_of(stored, 70, k)
    assert same(lay_out(weight, dtype, compact=False).data, expected(weight))


@pytest.mark.parametrize("k", [17, 128, 150])
def test_inputs_of_bytes_in_groups_are_padded_as_rows_with_sums(k: int) -> None:
    weight = weight_of("int8-32", 70, k)
    found = lay_out(weight, torch.bfloat16, int8_rows=True)
    assert found.stored is Kind.UINT8 and same(found.data, uint8(weight, 128))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_gates_alternate_with_what_they_gate(kind: Kind) -> None:
    stored, dtype, _ = LAYOUTS[kind]
    weight = weight_of(stored, 2 * 72, 256)
    blocks = [torch.arange(begin, min(begin + GATES, 72)) for begin in range(0, 72, GATES)]
    order = torch.cat([torch.cat((block, block + 72)) for block in blocks])
    found = lay_out(weight, dtype, gated=True, compact=False)
    plain = lay_out(_rows(weight, order), dtype, compact=False)
    for name in ("data", "scale", "zeros", "outer"):
        tensor, expected = getattr(found, name), getattr(plain, name)
        assert (tensor is None) == (expected is None)
        if tensor is not None:  # the last block is half as long, and its padding is in the last panel
            whole = 2 if name != "outer" and tensor.dim() > 1 else 128
            assert same(tensor[:whole], expected[:whole]), name


def _rows(weight: Quantised | Tensor, order: Tensor) -> Quantised:
    return weight.rows(order) if isinstance(weight, Quantised) else weight[order]  # type: ignore[return-value]


@pytest.mark.parametrize(("place", "gated"), [(0, False), (69 * 144 + 143, False), (31, True)])
def test_fp8_that_is_not_a_number_is_refused(place: int, gated: bool) -> None:
    for octet in (0x7F, 0xFF):
        weight = weight_of("fp8", 70, 144)
        weight.values.view(torch.uint8).view(-1)[place] = octet
        with pytest.raises(NativeUnavailable, match="an e4m3 number is not a number"):
            lay_out(weight, torch.bfloat16, gated=gated)


@pytest.mark.parametrize("place", [0, 70 * 9 - 1])
@pytest.mark.parametrize(("octet", "reason"), [(0x7F, "not a number"), (0x80, "negative"), (0xB0, "negative")])
def test_scales_that_no_product_takes_are_refused(place: int, octet: int, reason: str) -> None:
    weight = weight_of("nvfp4", 70, 144)
    weight.scale.view(torch.uint8).view(-1)[place] = octet
    with pytest.raises(NativeUnavailable, match=reason):
        lay_out(weight, torch.float32)


def test_layouts_are_the_same_with_any_number_of_threads() -> None:
    weight, found = weight_of("nvfp4", 386, 2688), []
    for threads in (1, 3, 64):
        torch.set_num_threads(threads)
        found.append(lay_out(weight, torch.bfloat16).data)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
