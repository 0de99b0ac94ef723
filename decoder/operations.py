"""Operations of compiled code for layers of a decoder, on the weights, states and pages of its mixers.

Compiled code supports one shape of Mamba-2 per model, that of the first such layer; Mamba-2 layers of other shapes are
called between its operations. The operations of layers with a state are in `recurrence_operations`, those of attention
in `attention_operations`, and those of MLPs and experts in `feed_forward_operations`.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decoder.attention_operations import attention_operations, projected_attention
from decoder.config import DecoderConfig, DecoderOptions
from decoder.feed_forward_operations import experts_operations, mlp_operations
from decoder.layers.attention import AttentionMixer
from decoder.layers.build import BuiltLayer, Mixer
from decoder.layers.experts import ExpertsMixer
from decoder.layers.mamba2 import Mamba2Mixer
from decoder.layers.mlp import GatedMlpMixer, MlpMixer
from decoder.layers.recurrent_descriptions import Mamba2
from decoder.layers.short_conv import ShortConvMixer
from decoder.layers.spec import MixerSpec
from decoder.operation_parts import MAX_ROUTED, OperationParts
from decoder.recurrence_operations import MAX_SHORT_TAPS, MAX_TAPS, Recurrence, recurrence_operations
from kernels.host_memory import buffer_memory
from kernels.linear.packed import operand_elements
from kernels.native import NativeUnavailable, library
from kernels.native.state_blocks import StateShape
from kernels.native.structs import Code, Form, Kind, Model, Op, Step, Target, Weight

log = logging.getLogger(__name__)


class Operations(OperationParts):
    """A list of operations, and the buffers that they share. For one thread at a time."""

    def __init__(self, config: DecoderConfig, options: DecoderOptions, mixers: Sequence[MixerSpec]) -> None:
        """`mixers`: of the layers to compile. Raises NativeUnavailable with the reason."""
        if options.device != "cpu":
            raise NativeUnavailable(f"the decoder is on {options.device}")
        if options.dtype not in (torch.bfloat16, torch.float32):
            raise NativeUnavailable(f"the dtype is {options.dtype}")
        self.library = library()
        self.config, self.options = config, options
        hidden = config.hidden_size
        self.mamba = next((spec for spec in mixers if isinstance(spec, Mamba2)), Mamba2(hidden))
        """The shape of Mamba-2 in compiled code."""
        super().__init__(options.dtype)
        self._state_shapes: dict[int | None, StateShape] = {}
        """Shapes of the states of layers, by the address of the states."""
        self.on_operation: Callable[[Op, int, float], None] | None = None
        """For measurements: if set, operations run one at a time, and this is called with each operation, its number of
        tokens and its seconds."""

    def complete(self, ops: list[Op], max_tokens: int, wide: int = 0, mid: int = 0) -> None:
        """Sets the operations and allocates their buffers, for steps of at most `max_tokens` tokens, and for experts of
        at most `MAX_ROUTED` tokens. `wide`, `mid`: columns of these buffers that are needed besides those of products
        and norms."""
        config, options = self.config, self.options
        self._ops = (Op * len(ops))(*ops)
        self.max_tokens = max_tokens
        body = [op for op in ops if op.target != Target.LOGITS and op.code != Code.EMBED]
        inputs = max(config.hidden_size, *(max(op.weight.k, op.width) for op in body))
        widest = max(inputs, wide, *(op.column + _outputs(op.weight) for op in body))
        widest = -(-widest // 16) * 16  # rows are aligned to cache lines
        products = [op.weight for op in ops if op.code in (Code.LINEAR, Code.EXPERTS)]
        elements = max([config.hidden_size, *(operand_elements(each.operand, each.kpad) for each in products)])
        padded = (-(-elements // 32) | 1) * 32  # an odd number of cache lines: neighbouring rows are in different sets
        picks = min(max_tokens, MAX_ROUTED) * self._picked_by_token
        self.x, self._scales = _floats(max_tokens, config.hidden_size), torch.empty(max_tokens)
        middle = max(mid, *(op.width for op in body if op.code in (Code.CONVERT, Code.GATE, Code.ADD_NORM)), 0)
        middle = -(-middle // 16) * 16
        self.wide, self._mid = _floats(max_tokens, widest), _floats(max_tokens, middle)
        self.operand = _floats(max_tokens, padded)
        self._picked = _floats(picks, padded), torch.empty(picks), _floats(picks, widest)
        self._picks = torch.empty(2, picks, dtype=torch.int64), torch.empty(picks)
        self._runs = torch.empty(1 + 3 * min(picks, self._most_experts), dtype=torch.int64)
        mamba = self.mamba
        low, high = mamba.time_step_limit
        self.model = Model(
            count=len(ops), ops=ctypes.addressof(self._ops), threads=1, hidden=config.hidden_size,
            vocab=config.vocab_size, heads=mamba.mamba_num_heads, head=mamba.mamba_head_dim, groups=mamba.n_groups,
            state=mamba.ssm_state_size, taps=mamba.conv_kernel, conv_dim=mamba.conv_dim, inner=mamba.inner,
            page=options.page_size, positions=options.max_len, stored_bf16=int(options.dtype == torch.bfloat16),
            states_bf16=int(options.state_dtype == torch.bfloat16), eps=config.norm_eps, dt_low=low, dt_high=high,
            x=self.x.data_ptr(), wide=self.wide.data_ptr(), mid=self._mid.data_ptr(), ld=widest, mid_ld=middle,
            operand=self.operand.data_ptr(), operand_ld=padded, operand_scale=self._scales.data_ptr(),
            picks=self._picks[0][0].data_ptr(), places=self._picks[0][1].data_ptr(), shares=self._picks[1].data_ptr(),
            runs=self._runs.data_ptr(), picked=self._picked[0].data_ptr(), picked_scale=self._picked[1].data_ptr(),
            picked_wide=self._picked[2].data_ptr(),
        )  # fmt: skip
        for index, op in enumerate(ops):
            if op.code not in (Code.MAMBA, Code.DELTA):
                continue
            ours = self._state_shapes[op.states].block_bytes(options.dtype.itemsize, options.state_dtype.itemsize)
            theirs = self.library.saccade_state_bytes(ctypes.byref(self.model), index)
            assert ours == theirs, f"the state of operation {index} takes {theirs} bytes in compiled code, not {ours}"

    def run(self, ops: range, step: Step) -> None:
        self.model.threads = torch.get_num_threads()
        if self.on_operation is None:
            self.library.saccade_step(ctypes.byref(self.model), ctypes.byref(step), ops.start, ops.stop)
            return
        for index in ops:
            started = time.perf_counter()
            self.library.saccade_step(ctypes.byref(self.model), ctypes.byref(step), index, index + 1)
            self.on_operation(self._ops[index], step.tokens, time.perf_counter() - started)
            if step.keeps and self._ops[index].code == Code.KEEP:
                step = Step(tokens=step.kept_count, logits=step.logits, largest=step.largest)

    def convert_states(self, form: Form, slots: Tensor) -> None:
        """Converts the states in these state slots (int64) to a form, in all compiled layers."""
        self.model.threads = torch.get_num_threads()
        slots = slots.contiguous()
        pointer = ctypes.c_void_p(slots.data_ptr())
        self.library.saccade_convert_states(ctypes.byref(self.model), form, slots.numel(), pointer)

    def layer(self, layer: BuiltLayer) -> list[Op]:
        """The operations of a layer; empty for one without a compiled form."""
        try:
            return self._layer(layer)
        except NativeUnavailable as reason:
            log.info("a layer is called between compiled ones: %s", reason)
            return []

    def _layer(self, layer: BuiltLayer) -> list[Op]:
        norm, scales = layer.norm, [layer.residual_scale * scale for scale in layer.scales]
        if layer.post_norm is not None:
            return self._normed_after(layer, layer.post_norm)
        match layer.mixers:
            case [mixer] if isinstance(mixer, Recurrence):
                return self._recurrent(norm, mixer, scales[0])
            case [mixer]:
                return self.mixer(norm, mixer, scales[0])
            case [mixer, AttentionMixer() as beside] if isinstance(mixer, Recurrence):
                return self._recurrent(norm, mixer, scales[0], (beside, scales[1]))
            case [ExpertsMixer(shared=None) as mixer, MlpMixer() | GatedMlpMixer() as beside] if scales[0] == scales[1]:
                assert norm is not None, "a layer without a norm"
                return experts_operations(self, norm, mixer, beside, scales[0])
            case _:
                return []

    def _normed_after(self, layer: BuiltLayer, post_norm: Tensor) -> list[Op]:
        """The operations of a layer with a norm of its output; empty for experts and several mixers."""
        match layer.mixers:
            case [mixer] if isinstance(mixer, Recurrence):
                ops = self._recurrent(layer.norm, mixer, 1.0)
            case [AttentionMixer() | MlpMixer() | GatedMlpMixer() as mixer]:
                ops = self.mixer(layer.norm, mixer)
            case _:
                ops = []
        if not ops or layer.scales != (1.0,):
            return []
        last = ops[-1]
        assert last.code == Code.LINEAR and last.target == Target.RESIDUAL
        last.target = Target.MID
        width, norm = self.config.hidden_size, self.pointer(post_norm)
        return [*ops, Op(Code.ADD_NORM, Kind.F32, width, norm=norm, scale=layer.residual_scale)]

    def mixer(self, norm: Tensor | None, mixer: Mixer, scale: float = 1.0) -> list[Op]:
        """The operations of a mixer without a state, which add `scale` times its output."""
        match mixer:
            case ExpertsMixer() if norm is not None:
                return experts_operations(self, norm, mixer, None, scale)
            case AttentionMixer():
                return attention_operations(self, norm, mixer, scale)
            case MlpMixer() | GatedMlpMixer():
                return mlp_operations(self, norm, mixer, scale)
            case _:
                return []

    def _recurrent(
        self, norm: Tensor | None, mixer: Recurrence, scale: float, beside: tuple[AttentionMixer, float] | None = None
    ) -> list[Op]:
        """The operations of a recurrent mixer, and of attention `beside` it with its scale. The inputs of both are
        projected first, because adding an output changes the residual stream that they are made from."""
        if mixer.spec.conv_kernel > (MAX_SHORT_TAPS if isinstance(mixer, ShortConvMixer) else MAX_TAPS):
            return []
        if isinstance(mixer, Mamba2Mixer) and (mixer.spec, mixer.spec.norm_eps) != (self.mamba, self.config.norm_eps):
            return []
        last = self.packed(mixer.out_proj)
        middle, shape = recurrence_operations(mixer, last, self.has_bf16_rows(last), self.pointer)
        self.keep(shape)
        if (blocks := mixer.spec.memory.blocks) is not None:
            self._state_shapes[middle[0].states] = blocks
        ops = [*middle, self.residual(last, scale)]
        if beside is None:
            return [*self.projections(norm, mixer.in_proj), *ops]
        attention, attention_scale = beside
        inputs = self.projections(norm, mixer.in_proj, attention.qkv)
        column = inputs[-1].column + inputs[-1].weight.n - attention.spec.projected
        return [*inputs, *ops, *projected_attention(self, attention, attention_scale, column)]


def _floats(*shape: int) -> Tensor:
    return buffer_memory(shape, torch.float32)


def _outputs(weight: Weight) -> int:
    """Number of outputs per row."""
    return weight.n // 2 if weight.gated else weight.n
