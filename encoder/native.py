"""Runs a vision tower on a CPU in compiled code: one call per layer, one before and one after the layers.

The same maths as `encoder.vit`. Between operations a row is float32 (the residual stream) or the operand of a product
(in the tower's dtype). The order of the arithmetic of each row depends only on its own sequence, so the results for an
image are bitwise equal alone, in a batch and with any number of threads. On a CPU a graph's replay is the same calls on
padded buffers.

R tower rows, T patches, N image tokens, D features.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from encoder.pieces import Pieces
from encoder.tower import PackedBatch, conv_side, rotation_width
from encoder.vit import Block, Norm, RmsNorm, ViT, ViTSizes, key_value_heads
from kernels.activation_names import COMPILED
from kernels.linear import Linear, Packed
from kernels.native import Activation, Kind, NativeUnavailable, library
from kernels.native.tower import Code, Of, Place, Store, Tower, TowerOp, TowerStep
from kernels.varlen_attention.reference import check_offsets

log = logging.getLogger(__name__)

AnyNorm = Norm | RmsNorm


def runs_compiled(sizes: ViTSizes, dtype: torch.dtype, device: torch.device, mode: str) -> bool:
    """Whether the tower runs in compiled code. If it cannot, mode "auto" logs the reason, and "on" raises a
    `ValueError` with it."""
    if mode == "off":
        return False
    try:
        if reason := not_compiled(sizes, dtype, device):
            raise NativeUnavailable(reason)
        library()
    except NativeUnavailable as error:
        if mode == "on":
            raise ValueError(f"native: 'on' is not possible: {error}; 'auto' would work") from None
        log.info("the encoder runs operation by operation: %s", error)
        return False
    return True


def not_compiled(sizes: ViTSizes, dtype: torch.dtype, device: torch.device) -> str:
    """Why there is no compiled code for such a tower; empty if there is, on a machine that can run it."""
    if device.type != "cpu":
        return f"the encoder is on {device}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"the dtype is {dtype}"
    widths = {name: getattr(sizes, name) for name in ("hidden_size", "intermediate_size", "projector_hidden_size")}
    widths |= {f"the width of {kind} patches": width for kind, width in sizes.patch_widths.items()}
    for name, width in widths.items():
        if dtype == torch.bfloat16 and width % 2:
            return f"{name} {width} is odd, and bfloat16 is multiplied in pairs"
    return ""


def scratch_sizes(rows: int, sizes: ViTSizes, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the two scratch buffers for a launch of `rows` tower rows: normalised rows, and outputs of the wide
    products. Assumes that at most `rows` patches have float32 embeddings."""
    tokens = rows // sizes.patches_per_token
    inner = sizes.intermediate_size * (2 if sizes.use_swiglu_ffn else 1)
    wide = rows * max(3 * sizes.hidden_size, inner), tokens * sizes.projector_hidden_size
    embedded = rows * sizes.hidden_size * torch.float32.itemsize
    return rows * sizes.hidden_size * dtype.itemsize, max(embedded, max(wide) * dtype.itemsize)


class CompiledTower:
    """The compiled operations of one tower and their scratch memory. For one thread at a time.

    A subclass adds the operations, calls `build`, and runs them.
    """

    def __init__(self, sizes: ViTSizes, dtype: torch.dtype, max_rows: int) -> None:
        """`max_rows`: tower rows to allocate scratch memory for; a larger launch enlarges it permanently."""
        self.sizes, self.dtype = sizes, dtype
        self.rotates = rotation_width(sizes) > 0
        self.on_operation: Callable[[TowerOp, TowerStep, float], None] | None = None
        """For measurements: if set, operations run one at a time, and this is called with each operation, its launch
        and its seconds."""
        self._library = library()
        self._kept: list[object] = []
        """Objects that the operations point to."""
        self._kind = Kind.BF16 if dtype == torch.bfloat16 else Kind.F32
        self._store = Store.BFLOAT16 if dtype == torch.bfloat16 else Store.FLOAT32
        self._added: list[TowerOp] = []
        self._reserve(max_rows)

    def build(self, table_KD: Tensor, projector_norm: Tensor | None = None) -> None:
        """Makes the added operations ready to run. `table_KD`: prefix tokens, and a row of zeros for padding;
        `projector_norm`: weight of the RMS norm of joined rows."""
        sizes, merged = self.sizes, self.sizes.patches_per_token
        self._ops = (TowerOp * len(self._added))(*self._added)
        self._native = Tower(
            count=len(self._ops), ops=ctypes.addressof(self._ops), threads=1, kind=self._kind,
            hidden=sizes.hidden_size, heads=sizes.num_heads, kv_heads=key_value_heads(sizes),
            taps=conv_side(sizes) ** 2, merged=merged,
            scratch=max(sizes.hidden_size * merged, 2 * sizes.intermediate_size),
            table_rows=table_KD.shape[0], table=self._floats(table_KD),
            token_norm=None if projector_norm is None else self._floats(projector_norm),
            token_eps=sizes.projector_eps, scale=(sizes.hidden_size // sizes.num_heads) ** -0.5,
        )  # fmt: skip

    @property
    def bytes(self) -> int:
        """Bytes of scratch memory."""
        return self._normed.nbytes + self._wide.nbytes

    def begin(self, batch: PackedBatch, x_RD: Tensor, bounds: Tensor, out: Tensor) -> TowerStep:
        """A launch on the residual stream `x_RD`, float32, which operations change in place. The caller keeps all
        tensors. Raises `ValueError` with the offsets if `bounds`, int32, does not cover all rows."""
        rows = len(x_RD)
        if rows > self._max_rows:
            self._reserve(rows)
        check_offsets(bounds.tolist(), rows, rows)
        patches, positions, rotations = batch.patches_TP, batch.positions_TD, batch.rotations_TF
        neighbours = batch.neighbours_RK
        assert patches.dtype == positions.dtype == self.dtype, (patches.dtype, positions.dtype, self.dtype)
        assert patches.is_contiguous() and positions.is_contiguous() and bounds.is_contiguous()
        assert (rotations is not None) == self.rotates
        assert rotations is None or (rotations.dtype == torch.float32 and rotations.is_contiguous())
        assert (neighbours is not None) == bool(conv_side(self.sizes))
        assert neighbours is None or (neighbours.dtype == torch.int32 and neighbours.is_contiguous())
        return TowerStep(
            rows=rows, patches=patches.shape[0], tokens=len(out), x=x_RD.data_ptr(), pixels=patches.data_ptr(),
            positions=positions.data_ptr() if positions.shape[1] else None,
            source=batch.source_R.data_ptr(), token_rows=batch.token_rows_NM.data_ptr(),
            sequences=bounds.shape[0] - 1, bounds=bounds.data_ptr(),
            rotations=None if rotations is None else rotations.data_ptr(),
            neighbours=None if neighbours is None else neighbours.data_ptr(), out=out.data_ptr(),
        )  # fmt: skip

    def run(self, ops: range, step: TowerStep) -> None:
        """Runs operations. The scratch memory is shared with other launches between two calls."""
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

    def set_operands(self, rows_RK: Tensor) -> None:
        """Writes the rows that the next product reads from `Place.NORMED`."""
        size = rows_RK.numel() * self.dtype.itemsize
        self._normed[:size].view(self.dtype).view(rows_RK.shape).copy_(rows_RK)

    def operands(self, rows: int, width: int) -> Tensor:
        """`[rows, width]` in the tower's dtype: a view of what the last operation wrote to `Place.NORMED`."""
        return self._normed[: rows * width * self.dtype.itemsize].view(self.dtype).view(rows, width)

    # -- operations -----------------------------------------------------------------------------------------------

    def add(self, *ops: TowerOp) -> range:
        """Adds operations; returns their indices, for `run`."""
        self._added.extend(ops)
        return range(len(self._added) - len(ops), len(self._added))

    def embed(self, projection: Linear, norm: AnyNorm | None = None) -> range:
        """Patches to rows of the residual stream, with an optional norm of these."""
        product = self.linear(projection, Place.PIXELS, Place.WIDE, of=Of.PATCHES, store=Store.FLOAT32)
        return self.add(product, TowerOp(Code.EMBED) if norm is None else self.norm(norm, Code.EMBED))

    def block(self, block: Block) -> range:
        """Attention and MLP, added to the residual stream."""
        attention = self.attention(block.norm1, block.qkv, block.out)
        return self.add(*attention, self.norm(block.norm2), *self.mlp(block.up, block.down))

    def attention(
        self, norm: AnyNorm, qkv: Linear, out: Linear, head_norms: tuple[RmsNorm, RmsNorm] | None = None
    ) -> list[TowerOp]:
        """Attention, added to the residual stream. `head_norms`: of each head's queries and keys, with one epsilon; for
        towers with rotations."""
        rotation = TowerOp(Code.ROTATE)
        if head_norms is not None:
            queries, keys = head_norms
            assert self.rotates and queries.eps == keys.eps
            rotation = TowerOp(
                Code.ROTATE, norm=self._floats(torch.cat((queries.weight, keys.weight))), eps=queries.eps
            )  # fmt: skip
        return [
            self.norm(norm),
            self.linear(qkv, Place.NORMED, Place.WIDE),
            *(rotation,) * self.rotates,
            TowerOp(Code.ATTENTION),
            self.linear(out, Place.NORMED, Place.STREAM, store=Store.ADD),
        ]

    def convolution(self, norm: AnyNorm, gates: Linear, weight_KD: Tensor, out: Linear) -> list[TowerOp]:
        """Gated convolution over the grid, added to the residual stream. `gates`: `[3 D, D]`, of the inner gate, the
        outer gate and the gated values; `weight_KD`: of each tap, row by row."""
        return [
            self.norm(norm),
            self.linear(gates, Place.NORMED, Place.WIDE),
            TowerOp(Code.CONVOLVE, norm=self._floats(weight_KD)),
            self.linear(out, Place.NORMED, Place.STREAM, store=Store.ADD),
        ]

    def linear(
        self, linear: Linear, source: Place, target: Place, *, of: Of = Of.ROWS, ld: int | None = None,
        store: Store | None = None, activation: Activation = Activation.NONE,
    ) -> TowerOp:  # fmt: skip
        """One linear layer. Rows are contiguous unless `ld` gives the source's row stride."""
        packed = linear.packed
        if packed is None:
            assert isinstance(linear.weight, Tensor)
            packed = Packed(linear.weight, linear.bias, compact=False)
        self._kept.append(packed)
        store = self._store if store is None else store
        return TowerOp(
            Code.LINEAR, of, packed.descriptor, source=source, ld_source=ld or packed.k, target=target,
            ld_target=packed.n, store=store, activation=activation,
        )  # fmt: skip

    def norm(self, norm: AnyNorm, code: Code = Code.NORM) -> TowerOp:
        """A norm of each row."""
        bias = None if isinstance(norm, RmsNorm) else self._floats(norm.bias)
        return TowerOp(code, norm=self._floats(norm.weight), bias=bias, eps=norm.eps)

    def mlp(self, up: Linear, down: Linear) -> list[TowerOp]:
        """The MLP, added to the residual stream."""
        if self.sizes.use_swiglu_ffn:
            both = up.out_features
            gate = TowerOp(Code.GATE, ld_source=both, activation=Activation.SILU)
            first = self.linear(up, Place.NORMED, Place.WIDE)
            return [first, gate, self.linear(down, Place.WIDE, Place.STREAM, ld=both, store=Store.ADD)]
        first = self.linear(up, Place.NORMED, Place.WIDE, activation=COMPILED[self.sizes.hidden_act])
        return [first, self.linear(down, Place.WIDE, Place.STREAM, store=Store.ADD)]

    def _floats(self, tensor: Tensor) -> int:
        kept = tensor.float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def _reserve(self, rows: int) -> None:
        """Allocates scratch memory; pages that no launch has written yet take no physical memory."""
        held = scratch_sizes(rows, self.sizes, self.dtype)
        self._normed, self._wide = (torch.empty(size, dtype=torch.uint8) for size in held)
        self._max_rows = rows


class LayeredTower(CompiledTower):
    """A tower that embeds patches, runs its layers one after the other, and projects the result. Constructors of
    subclasses set the operations of each."""

    embedding: Mapping[str, range]
    """By the kind of item."""
    layers: Sequence[range]
    projector: range

    def pieces(self, batch: PackedBatch, *, kind: str) -> Pieces[Tensor]:
        """The forward pass as a generator that yields after each layer and returns `[N, row_width]` rows in the tower's
        dtype. The residual stream and the result are new memory. Raises `ValueError` with the offsets if `cu_seqlens`
        does not cover all rows."""
        x_RD = torch.empty(batch.source_R.shape[0], self.sizes.hidden_size)
        out = torch.empty(batch.token_rows_NM.shape[0], self.sizes.row_width, dtype=self.dtype)
        batch = contiguous(batch)
        step = self.begin(batch, x_RD, batch.cu_seqlens, out)
        self.run(self.embedding[kind], step)
        for layer in self.layers:
            self.run(layer, step)
            yield
        self.project(step, len(out))
        return out

    def project(self, step: TowerStep, tokens: int) -> None:
        """Computes the rows of the image tokens from the residual stream."""
        self.run(self.projector, step)


class NativeViT(LayeredTower):
    """Runs a `ViT`."""

    def __init__(self, vit: ViT, max_rows: int) -> None:
        """`max_rows`: as for `CompiledTower`."""
        super().__init__(vit.sizes, vit.dtype, max_rows)
        self.embedding = {kind: self.embed(projection) for kind, projection in vit.projections.items()}
        self.layers = [self.block(block) for block in vit.blocks]
        token = TowerOp(Code.TOKEN, Of.TOKENS) if vit.final_norm is None else self.norm(vit.final_norm, Code.TOKEN)
        token.of = Of.TOKENS
        between = COMPILED[vit.projector_act]
        self._joined_norm = vit.joined_norm
        self._join = self.add(token)
        self.projector = self.add(
            self.linear(vit.linear_1, Place.NORMED, Place.WIDE, of=Of.TOKENS, activation=between),
            self.linear(vit.linear_2, Place.WIDE, Place.OUT, of=Of.TOKENS),
        )
        if vit.joined_norm is None:
            self.projector = range(self._join.start, self.projector.stop)
        self.build(vit.table_KD, vit.projector_norm)

    def project(self, step: TowerStep, tokens: int) -> None:
        if self._joined_norm is not None:
            self.run(self._join, step)
            # In torch, since there are few rows; its result for a row does not depend on others.
            joined_NE = self.operands(tokens, self.sizes.hidden_size * self.sizes.patches_per_token)
            self.set_operands(self._joined_norm.in_float32(joined_NE))
        super().project(step, tokens)


def contiguous(batch: PackedBatch) -> PackedBatch:
    """The batch with contiguous tensors."""
    return PackedBatch(
        patches_TP=batch.patches_TP.contiguous(),
        positions_TD=batch.positions_TD.contiguous(),
        source_R=batch.source_R.contiguous(),
        cu_seqlens=batch.cu_seqlens.contiguous(),
        token_rows_NM=batch.token_rows_NM.contiguous(),
        max_seqlen=batch.max_seqlen,
        rotations_TF=None if batch.rotations_TF is None else batch.rotations_TF.contiguous(),
        neighbours_RK=None if batch.neighbours_RK is None else batch.neighbours_RK.contiguous(),
    )
