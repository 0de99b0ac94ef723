"""The tower on a CPU in compiled code: a call for each layer, and one before and after them.

The same maths as `encoder.model`. Between operations a row is float32 (the residual stream) or the operand of a product
(in the tower's dtype). Each row is computed in an order of its own, so that a picture gets the same numbers
alone, beside others and with any number of threads. A graph's replay on a CPU is the same calls on its padded buffers.

R tower rows, T patches, N image tokens, D features.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from encoder.config import VisionConfig
from encoder.item import IMAGE
from encoder.pieces import Pieces
from encoder.plan import scratch_sizes
from kernels.linear import Linear, Packed
from kernels.native import Activation, Kind, NativeUnavailable, library
from kernels.native.tower import Code, Of, Place, Store, Tower, TowerOp, TowerStep
from kernels.varlen_attention.reference import check_offsets

if TYPE_CHECKING:
    from encoder.model import Norm, PackedBatch, VisionTower

log = logging.getLogger(__name__)

NATIVE_MODES = ("auto", "on", "off")
ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "quick_gelu": Activation.GELU_QUICK,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
    "silu": Activation.SILU,
}


def runs_compiled(config: VisionConfig, dtype: torch.dtype, device: torch.device, mode: str) -> bool:
    """Whether such a tower runs in compiled code; a line in the log where it might have. `ValueError` where it must
    (`mode` "on") and cannot."""
    if mode == "off":
        return False
    try:
        _check(config, dtype, device)
        library()
    except NativeUnavailable as reason:
        if mode == "on":
            raise ValueError(f"native: 'on' cannot be had: {reason}; 'auto' would work") from None
        log.info("the encoder runs operation by operation: %s", reason)
        return False
    return True


def _check(config: VisionConfig, dtype: torch.dtype, device: torch.device) -> None:
    if device.type != "cpu":
        raise NativeUnavailable(f"the encoder is on {device}")
    if dtype not in (torch.bfloat16, torch.float32):
        raise NativeUnavailable(f"the dtype is {dtype}")
    for name in ("hidden_size", "intermediate_size", "patch_dim", "projector_hidden_size"):
        if dtype == torch.bfloat16 and getattr(config, name) % 2:
            raise NativeUnavailable(f"{name} {getattr(config, name)} is odd, and bfloat16 is multiplied in pairs")


class NativeTower:
    """The operations of one tower, and the memory between them. One thread at a time."""

    def __init__(self, tower: VisionTower, max_rows: int) -> None:
        """`max_rows`: tower rows of a launch that memory is set aside for; a larger one is given more, for good."""
        self._config, self._dtype = tower.config, tower.dtype
        self._library = library()
        self.on_operation: Callable[[TowerOp, TowerStep, float], None] | None = None
        """For measurements: operations then run one at a time, and this hears of each, its launch and its seconds."""
        self._kept: list[object] = []
        """What the operations point to."""
        self._kind = Kind.BF16 if tower.dtype == torch.bfloat16 else Kind.F32
        self._store = Store.BFLOAT16 if tower.dtype == torch.bfloat16 else Store.FLOAT32
        ops: list[TowerOp] = []

        def stretch(*parts: TowerOp) -> range:
            ops.extend(parts)
            return range(len(ops) - len(parts), len(ops))

        self._embed = {
            kind: stretch(
                self._linear(projection, Place.PIXELS, Place.WIDE, of=Of.PATCHES, store=Store.FLOAT32),
                TowerOp(Code.EMBED),
            )
            for kind, projection in tower.projections.items()
        }
        self._layers = [
            stretch(
                self._norm(layer.norm1),
                self._linear(layer.qkv, Place.NORMED, Place.WIDE),
                TowerOp(Code.ATTENTION),
                self._linear(layer.out, Place.NORMED, Place.STREAM, store=Store.ADD),
                self._norm(layer.norm2),
                *self._mlp(layer.up, layer.down),
            )
            for layer in tower.layers
        ]
        token = TowerOp(Code.TOKEN, Of.TOKENS) if tower.final_norm is None else self._norm(tower.final_norm, Code.TOKEN)
        token.of = Of.TOKENS
        squared = Activation.RELU_SQUARED
        self._project = stretch(
            token,
            self._linear(tower.linear_1, Place.NORMED, Place.WIDE, of=Of.TOKENS, activation=squared),
            self._linear(tower.linear_2, Place.WIDE, Place.OUT, of=Of.TOKENS),
        )
        self._ops = (TowerOp * len(ops))(*ops)
        config = tower.config
        merged = config.patches_per_token
        self._native = Tower(
            len(ops), ctypes.addressof(self._ops), 1, self._kind, config.hidden_size, config.num_heads, merged,
            max(config.hidden_size * merged, 2 * config.intermediate_size), tower.table_KD.shape[0],
            self._floats(tower.table_KD), self._floats(tower.projector_norm), config.projector_eps,
            config.head_dim**-0.5,
        )  # fmt: skip
        self._reserve(max_rows)

    def _reserve(self, rows: int) -> None:
        """Memory that no launch has used yet costs nothing."""
        sizes = scratch_sizes(rows, self._config, self._dtype)
        self._normed, self._wide = (torch.empty(size, dtype=torch.uint8) for size in sizes)
        self._max_rows = rows

    @property
    def bytes(self) -> int:
        """Of the memory between operations."""
        return self._normed.nbytes + self._wide.nbytes

    def pieces(self, batch: PackedBatch, *, kind: str = IMAGE) -> Pieces[Tensor]:
        """`VisionTower.pieces`. Raises `ValueError`, with the offsets, for `cu_seqlens` that leave rows out.

        The residual stream and the result are new memory; the rest is shared with launches that begin in between.
        """
        rows, tokens = batch.source_R.shape[0], batch.token_rows_NM.shape[0]
        if rows > self._max_rows:
            self._reserve(rows)
        x_RD = torch.empty(rows, self._config.hidden_size)
        out = torch.empty(tokens, self._config.text_hidden_size, dtype=self._dtype)
        check_offsets(batch.cu_seqlens.tolist(), rows, rows)
        bounds = batch.cu_seqlens.contiguous()
        patches, positions = batch.patches_TP.contiguous(), batch.positions_TD.contiguous()
        assert patches.dtype == positions.dtype == self._dtype, (patches.dtype, positions.dtype, self._dtype)
        step = TowerStep(
            rows, patches.shape[0], tokens, x_RD.data_ptr(), patches.data_ptr(), positions.data_ptr(),
            batch.source_R.data_ptr(), batch.token_rows_NM.data_ptr(), bounds.shape[0] - 1, bounds.data_ptr(),
            None, None, out.data_ptr(),
        )  # fmt: skip
        self._run(self._embed[kind], step)
        for layer in self._layers:
            self._run(layer, step)
            yield
        self._run(self._project, step)
        return out

    def _run(self, ops: range, step: TowerStep) -> None:
        step.normed, step.wide = self._normed.data_ptr(), self._wide.data_ptr()
        self._native.threads = torch.get_num_threads()
        run, tower, launch = self._library.saccade_tower, ctypes.byref(self._native), ctypes.byref(step)
        if self.on_operation is None:
            run(tower, launch, ops.start, ops.stop)
            return
        for index in ops:
            started = time.perf_counter()
            run(tower, launch, index, index + 1)
            self.on_operation(self._ops[index], step, time.perf_counter() - started)

    # -- operations -----------------------------------------------------------------------------------------------

    def _linear(
        self, linear: Linear, source: Place, target: Place, *, of: Of = Of.ROWS, ld: int | None = None,
        store: Store | None = None, activation: Activation = Activation.NONE,
    ) -> TowerOp:  # fmt: skip
        """Rows lie densely but where `ld` says otherwise of the source."""
        packed = linear.packed
        if packed is None:
            assert isinstance(linear.weight, Tensor)
            packed = Packed(linear.weight, linear.bias)
        self._kept.append(packed)
        store = self._store if store is None else store
        return TowerOp(Code.LINEAR, of, packed.descriptor, source, ld or packed.k, target, packed.n, store, activation)

    def _mlp(self, up: Linear, down: Linear) -> list[TowerOp]:
        config = self._config
        if config.use_swiglu_ffn:
            both = up.out_features
            gate = TowerOp(Code.GATE, ld_source=both, activation=Activation.SILU)
            first = self._linear(up, Place.NORMED, Place.WIDE)
            return [first, gate, self._linear(down, Place.WIDE, Place.STREAM, ld=both, store=Store.ADD)]
        first = self._linear(up, Place.NORMED, Place.WIDE, activation=ACTIVATIONS[config.hidden_act])
        return [first, self._linear(down, Place.WIDE, Place.STREAM, store=Store.ADD)]

    def _norm(self, norm: Norm, code: Code = Code.NORM) -> TowerOp:
        return TowerOp(code, norm=self._floats(norm.weight), bias=self._floats(norm.bias), eps=norm.eps)

    def _floats(self, tensor: Tensor) -> int:
        kept = tensor.float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()
