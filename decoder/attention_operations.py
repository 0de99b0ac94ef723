"""Operations of compiled code for attention: projection, norms and rotation, attention, gate, output projection."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from decoder.layers.attention import AttentionMixer
from decoder.operation_parts import OperationParts
from kernels.native.structs import AttentionShape, Code, Op


def attention_operations(of: OperationParts, norm: Tensor | None, mixer: AttentionMixer, scale: float) -> list[Op]:
    """Adds `scale` times the attention of the normalised rows to the residual stream."""
    return [*of.projections(norm, mixer.qkv), *projected_attention(of, mixer, scale)]


def projected_attention(of: OperationParts, mixer: AttentionMixer, scale: float, column: int = 0) -> list[Op]:
    """Like `attention_operations`, but for rows whose projections are computed, from `column` of a row on."""
    last = of.packed(mixer.o_proj)
    ops = attended(of, mixer, column)
    gate = Op(Code.GATE if mixer.spec.gates else Code.CONVERT, last.kind, last.k, attention=ops[-1].attention)
    return [*ops, gate, of.residual(last, scale)]


def attended(of: OperationParts, mixer: AttentionMixer, column: int = 0) -> list[Op]:
    """Like `projected_attention`, but without the gate and the output projection: the result is in `mid`."""
    spec, kv = mixer.spec, mixer.kv
    address = ctypes.addressof(_shape(of, mixer, column))
    ops = []
    if spec.rope is not None or spec.qk_norm is not None:
        ops.append(Op(Code.HEADS, attention=address))
    return [*ops, Op(Code.ATTENTION, kv=kv.data_ptr(), kv_stride=kv.stride(0), attention=address)]


def _shape(of: OperationParts, mixer: AttentionMixer, column: int) -> AttentionShape:
    spec = mixer.spec
    q_norm, k_norm = mixer.norms or (None, None)
    shape = AttentionShape(
        q_heads=spec.num_attention_heads, kv_heads=spec.kv_heads, width=spec.head_dim, scale=spec.multiplier,
        norm_eps=spec.qk_norm or 0.0, q_norm=of.pointer(q_norm), k_norm=of.pointer(k_norm), column=column,
        norm_whole=spec.qk_norm_whole, window=spec.window or 0, head_gate=spec.head_gate,
    )  # fmt: skip
    if spec.rope is not None:
        axes = torch.tensor(spec.rope.axes or (0,) * (spec.rope.dims // 2), dtype=torch.int64)
        shape.pairs, shape.rotations, shape.axes = axes.shape[0], of.pointer(mixer.table), axes.data_ptr()
        of.keep(axes)
    of.keep(shape)
    return shape
