"""A step on a CPU in a few calls of compiled code: the layers; the final norm and the vocabulary projection.

The same maths as `decoder.model` with `decoder.mixers`, on the same weights, states and pages. Layers that have no
compiled form (mixtures of experts, other activations, attention of prompts) are called in between, on the same residual
stream; a graph's rows of drafts or prompts, states that are not float32, and machines without a compiler or AVX-512 go
the other way.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from decoder.mixers import AttentionMixer, MambaMixer, Mixer, MlpMixer
from kernels.linear import Linear, Packed, Quantised
from kernels.native import NativeUnavailable, library
from kernels.native.structs import Code, Kind, Model, Op, Step, Target, Weight
from kernels.rms_norm import rms_norm

if TYPE_CHECKING:
    from decoder.batch import Batch
    from decoder.model import HybridModel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Layer:
    ops: range
    """Empty where it has no compiled form."""
    norm: Tensor
    mixer: Mixer


Plan = list[tuple[range, _Layer | None]]
"""Operations, and the layer that is called after them."""


def _plan(layers: Sequence[_Layer], called: tuple[type, ...]) -> Plan:
    """As few stretches of operations as there can be with layers of the `called` kinds between them."""
    plan: Plan = []
    begin = end = 0
    for layer in layers:
        if layer.ops and not isinstance(layer.mixer, called):
            end = layer.ops.stop
            continue
        plan.append((range(begin, end), layer))
        begin = end = layer.ops.stop
    return [*plan, (range(begin, end), None)]


@dataclass(frozen=True)
class _Rows:
    """A step's rows as `Step` points to them; they have to outlive it."""

    starts: Tensor
    slots: Tensor
    initial: Tensor
    saves: Tensor
    rewound: tuple[Tensor, Tensor, Tensor] | None
    """Where rows to be verified begin: from which slot, or on top of which ring's first steps."""


def _rows(batch: Batch) -> _Rows:
    updates, queries, verify, scan = batch.updates, batch.queries, batch.verify, batch.scan
    starts, slots, saves = torch.arange(updates + 1), batch.slots_U, torch.empty(0, 3, dtype=torch.int64)
    rewound = None
    if verify is not None:
        lengths = verify.lengths_V
        begins = F.pad(lengths.cumsum(0), (1, 0)) + updates
        starts = torch.cat((starts, begins[1:]))
        if verify.span:
            own = origin = verify.slots_VT[:, 0]
            seats, counts = verify.seats_V, verify.accepted_V
        else:  # a row works in the slot of its last token, and leaves a state in that of each before it
            own, origin = (verify.slots_VT.gather(1, at[:, None] - 1)[:, 0] for at in (lengths, verify.accepted_V))
            seats = counts = torch.full_like(lengths, -1)
            row, token = (torch.arange(verify.slots_VT.shape[1]) < lengths[:, None] - 1).nonzero(as_tuple=True)
            saves = torch.stack((row + updates, begins[row] + token + 1, verify.slots_VT[row, token]), 1)
        slots = torch.cat((slots, own))
        none = torch.full((updates,), -1, dtype=torch.int64)
        behind = scan.slots_R.shape[0] if scan is not None else 0
        columns = ((batch.slots_U, origin), (none, seats), (none, counts))
        rewound = [F.pad(torch.cat(column), (0, behind), value=-1) for column in columns]
        if scan is not None:
            rewound[0][slots.shape[0] :] = scan.slots_R
    before = slots.shape[0]
    initial = torch.ones(before, dtype=torch.int64)
    if scan is not None:
        starts = torch.cat((starts, scan.starts_R[1:] + queries))
        slots = torch.cat((slots, scan.slots_R))
        initial = torch.cat((initial, scan.initial_R.to(torch.int64)))
        kept = [(row + before, end + queries, slot) for row, end, slot in scan.window_saves]
        saves = torch.cat((saves, torch.tensor(kept, dtype=torch.int64).view(-1, 3)))
    return _Rows(starts, slots, initial, saves, None if rewound is None else (rewound[0], rewound[1], rewound[2]))


class NativeStep:
    """The operations of one model, and the buffers that they share. One thread at a time."""

    def __init__(self, model: HybridModel) -> None:
        """Raises NativeUnavailable with the reason."""
        config, options = model.config, model.options
        if options.device != "cpu":
            raise NativeUnavailable(f"the decoder is on {options.device}")
        if options.state_dtype != torch.float32:
            raise NativeUnavailable(f"states are {options.state_dtype}")
        if options.dtype not in (torch.bfloat16, torch.float32):
            raise NativeUnavailable(f"the dtype is {options.dtype}")
        self._library = library()
        self._eps, self._dtype = config.layer_norm_epsilon, options.dtype
        self.on_operation: Callable[[Op, float], None] | None = None
        """For measurements: operations then run one at a time, and this hears of each and its seconds."""
        self._kept: list[object] = []
        """What the operations point to."""
        ops: list[Op] = []
        layers: list[_Layer] = []
        for norm, mixer in zip(model.norms, model.mixers, strict=True):
            begin = len(ops)
            ops += self._layer(norm, mixer)
            layers.append(_Layer(range(begin, len(ops)), norm, mixer))
        self._decode = _plan(layers, called=())
        self._mixed = _plan(layers, called=(AttentionMixer,))
        body = len(ops)
        head = self._packed(model.head)
        ops += [self._norm(model.norm_f, head), self._linear(head, Target.LOGITS)]
        self._head = range(body, len(ops))
        self._ops = (Op * len(ops))(*ops)
        self.max_tokens = max(options.max_seqs, options.max_batched_tokens)
        tokens = self.max_tokens
        widest = max([config.hidden_size, *(max(op.weight.n, op.weight.k, op.width) for op in ops[:body])])
        padded = -(-widest // 128) * 128
        # Memory that no step has used yet costs nothing.
        self._x, self._scales = torch.empty(tokens, config.hidden_size), torch.empty(tokens)
        self._wide, self._mid = torch.empty(tokens, widest), torch.empty(tokens, widest)
        self._operand = torch.empty(tokens, padded)
        low, high = config.time_step_limit
        attention = config.attention_layers > 0
        self._model = Model(
            count=len(ops), ops=ctypes.addressof(self._ops), threads=1, hidden=config.hidden_size,
            vocab=config.vocab_size, heads=config.mamba_num_heads, head=config.mamba_head_dim, groups=config.n_groups,
            state=config.ssm_state_size, taps=config.conv_kernel, conv_dim=config.conv_dim, inner=config.mamba_inner,
            q_heads=config.num_attention_heads, kv_heads=config.kv_heads, width=config.head_dim,
            page=options.page_size, stored_bf16=int(options.dtype == torch.bfloat16), eps=config.layer_norm_epsilon,
            dt_low=low, dt_high=high, scale=config.head_dim**-0.5 if attention else 0.0, x=self._x.data_ptr(),
            wide=self._wide.data_ptr(), mid=self._mid.data_ptr(), ld=widest, operand=self._operand.data_ptr(),
            operand_ld=padded, operand_scale=self._scales.data_ptr(),
        )  # fmt: skip

    def takes(self, tokens: int, batch: Batch) -> bool:
        """Whether a step has few enough tokens, row behind row. Rows of drafts or prompts in a graph are not: what the
        host knows of them changes from replay to replay.
        """
        if not 0 < tokens <= self.max_tokens or (batch.verify is not None and batch.slot_runs is None):
            return False
        scan = batch.scan
        return tokens == batch.queries if scan is None else isinstance(scan.window_saves, tuple)

    def layers(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """`[T, d]` float32, before the final norm. Updates states, windows and pages in place.

        Attention of scanned rows is called, not compiled: torch's is made for many queries at once.
        """
        tokens, tables, scan = x_TD.shape[0], batch.tables_QW, batch.scan
        x = self._x[:tokens].copy_(x_TD)
        rows = _rows(batch)
        step = Step(
            tokens, rows.slots.shape[0], rows.starts.data_ptr(), rows.slots.data_ptr(), rows.initial.data_ptr(),
            rows.saves.shape[0], rows.saves.data_ptr(), batch.lengths_Q.data_ptr(), tables.data_ptr(),
            batch.places_T.data_ptr(), tables.stride(0) if tables.dim() == 2 else 0, None,
        )  # fmt: skip
        if rows.rewound is not None:
            step.origins, step.seats, step.counts = (column.data_ptr() for column in rows.rewound)
        for ops, layer in self._decode if scan is None else self._mixed:
            if ops:
                self._run(ops, step)
            if layer is not None:
                x += layer.mixer(rms_norm(x, layer.norm, self._eps, self._dtype), batch)
        return x.clone()

    def advance(self, rows_R4: Tensor) -> None:
        """Rows of (seat, slot, target, count): in all Mamba layers the state in the slot, after the first `count`
        inputs of the seat's ring, goes to the target.
        """
        self._model.threads = torch.get_num_threads()
        rows = ctypes.c_void_p(rows_R4.data_ptr())
        self._library.saccade_advance(ctypes.byref(self._model), ctypes.c_int64(rows_R4.shape[0]), rows)

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """`[L, vocab]` float32 of at most `max_tokens` rows before the final norm."""
        rows = hidden_LD.shape[0]
        self._x[:rows].copy_(hidden_LD)
        out = torch.empty(rows, self._model.vocab)
        self._run(self._head, Step(tokens=rows, logits=out.data_ptr()))
        return out

    def _run(self, ops: range, step: Step) -> None:
        self._model.threads = torch.get_num_threads()
        if self.on_operation is None:
            self._library.saccade_step(ctypes.byref(self._model), ctypes.byref(step), ops.start, ops.stop)
            return
        for index in ops:
            started = time.perf_counter()
            self._library.saccade_step(ctypes.byref(self._model), ctypes.byref(step), index, index + 1)
            self.on_operation(self._ops[index], time.perf_counter() - started)

    # -- operations ----------------------------------------------------------------------------------------------------

    def _layer(self, norm: Tensor, mixer: Mixer) -> list[Op]:
        """Empty for a layer that has no compiled form."""
        match mixer:
            case MambaMixer():
                first, last = self._packed(mixer.in_proj), self._packed(mixer.out_proj)
                middle = [self._mamba(mixer), Op(Code.CONVERT, last.kind, last.k)]
            case AttentionMixer():
                first, last = self._packed(mixer.qkv), self._packed(mixer.o_proj)
                kv = mixer.kv
                middle = [Op(Code.ATTENTION, kv=kv.data_ptr(), kv_stride=kv.stride(0))]
                middle.append(Op(Code.CONVERT, last.kind, last.k))
            case MlpMixer() if mixer.squared:
                first, last = self._packed(mixer.up), self._packed(mixer.down)
                middle = [Op(Code.RELU_SQUARED, last.kind, last.k)]
            case _:
                return []
        return [
            self._norm(norm, first), self._linear(first, Target.WIDE), *middle, self._linear(last, Target.RESIDUAL)
        ]  # fmt: skip

    def _packed(self, linear: Linear) -> Packed:
        packed = linear.packed
        if packed is None:
            assert isinstance(linear.weight, Tensor)
            packed = Packed(linear.weight, linear.bias)
        self._kept.append(packed)
        return packed

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _norm(self, weight: Tensor, before: Packed) -> Op:
        return Op(Code.NORM, before.kind, before.k, norm=self._pointer(weight))

    def _linear(self, packed: Packed, target: Target) -> Op:
        return Op(Code.LINEAR, Kind.F32, 0, weight=packed.descriptor, target=target)

    def _mamba(self, mixer: MambaMixer) -> Op:
        return Op(
            Code.MAMBA, Kind.F32, 0, Weight(), Target.WIDE, self._pointer(mixer.norm_weight),
            mixer.windows.data_ptr(), mixer.windows.stride(0), mixer.states.data_ptr(), mixer.states.stride(0),
            self._pointer(mixer.conv_WC), self._pointer(mixer.conv_bias_C), self._pointer(mixer.A_H),
            self._pointer(mixer.D_H), self._pointer(mixer.dt_bias_H), None, 0,
            mixer.ring.data_ptr() if mixer.ring.numel() else None, mixer.ring.stride(0),
        )  # fmt: skip


def native_step(model: HybridModel) -> NativeStep | None:
    """The compiled step of a model; None, with a line in the log, where it has none. `ValueError` where it has to."""
    if model.options.native == "off":
        return None
    try:
        return NativeStep(model)
    except NativeUnavailable as reason:
        if model.options.native == "on":
            raise ValueError(f"native: 'on' cannot be had: {reason}; 'auto' would work") from None
        log.info("the decoder steps operation by operation: %s", reason)
        if isinstance(model.head.weight, Quantised):
            log.warning("quantised weights are expanded for each product: slower than plain ones, and only smaller")
        return None
