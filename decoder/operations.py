"""Operations of compiled code for layers of a decoder, on the weights, states and pages of its mixers.

Compiled code has one shape of Mamba-2 and of experts in each model, those of its first layers of these kinds; layers of
other kinds, shapes or activations are called between its operations. `decoder.attention_operations` has attention.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decoder.attention_operations import attention_operations
from decoder.config import DecoderConfig, DecoderOptions
from decoder.layers.attention import AttentionMixer
from decoder.layers.build import BuiltLayer, Mixer
from decoder.layers.descriptions import Experts, Mamba2
from decoder.layers.experts import ExpertsMixer
from decoder.layers.mamba2 import Mamba2Mixer
from decoder.layers.mlp import MlpMixer
from decoder.layers.spec import MixerSpec
from decoder.recurrences import MAX_TAPS, Recurrence, recurrence_operations
from kernels.linear import Linear, Packed
from kernels.native import NativeUnavailable, library, structs
from kernels.native.structs import Code, Kind, Model, Op, Step, Target, Weight

MAX_ROUTED = 512
"""Tokens whose experts run in compiled code: it keeps a row for each token and expert."""


class Operations:
    """A list of operations, and the buffers that they share. One thread at a time."""

    def __init__(self, config: DecoderConfig, options: DecoderOptions, mixers: Sequence[MixerSpec]) -> None:
        """`mixers`: of the layers that are to be compiled. Raises NativeUnavailable with the reason."""
        if options.device != "cpu":
            raise NativeUnavailable(f"the decoder is on {options.device}")
        if options.state_dtype != torch.float32:
            raise NativeUnavailable(f"states are {options.state_dtype}")
        if options.dtype not in (torch.bfloat16, torch.float32):
            raise NativeUnavailable(f"the dtype is {options.dtype}")
        self.library = library()
        self.config, self.options = config, options
        hidden = config.hidden_size
        self.mamba = next((spec for spec in mixers if isinstance(spec, Mamba2)), Mamba2(hidden))
        self.mixture = next((spec for spec in mixers if isinstance(spec, Experts)), Experts(hidden))
        """The shapes that there is compiled code for."""
        self.on_operation: Callable[[Op, float], None] | None = None
        """For measurements: operations then run one at a time, and this hears of each and its seconds."""
        self._kept: list[object] = []
        """What the operations point to."""

    def complete(self, ops: list[Op], max_tokens: int) -> None:
        """These operations, for steps of at most so many tokens, experts for `MAX_ROUTED`."""
        config, options = self.config, self.options
        self._ops = (Op * len(ops))(*ops)
        self.max_tokens = max_tokens
        body = [op for op in ops if op.target != Target.LOGITS]
        widest = max([config.hidden_size, *(max(op.weight.n, op.weight.k, op.width) for op in body)])
        widest = -(-widest // 16) * 16  # rows begin at the beginning of a cache line
        groups = -(-widest // 128)
        padded = 128 * groups + -(-4 * groups // 32) * 32  # what integers need behind a row
        picks = min(max_tokens, MAX_ROUTED) * self.mixture.num_experts_per_tok * any(op.experts for op in ops)
        # Memory that no step has used yet costs nothing.
        self.x, self._scales = torch.empty(max_tokens, config.hidden_size), torch.empty(max_tokens)
        self.wide, self._mid = torch.empty(max_tokens, widest), torch.empty(max_tokens, widest)
        self.operand = torch.empty(max_tokens, padded)
        self._picked = torch.empty(picks, padded), torch.empty(picks), torch.empty(picks, widest)
        self._picks = torch.empty(2, picks, dtype=torch.int64), torch.empty(picks)
        self._runs = torch.empty(1 + 3 * min(picks, self.mixture.n_routed_experts), dtype=torch.int64)
        mamba = self.mamba
        low, high = mamba.time_step_limit
        self.model = Model(
            count=len(ops), ops=ctypes.addressof(self._ops), threads=1, hidden=config.hidden_size,
            vocab=config.vocab_size, heads=mamba.mamba_num_heads, head=mamba.mamba_head_dim, groups=mamba.n_groups,
            state=mamba.ssm_state_size, taps=mamba.conv_kernel, conv_dim=mamba.conv_dim, inner=mamba.inner,
            page=options.page_size, positions=options.max_len, stored_bf16=int(options.dtype == torch.bfloat16),
            eps=config.norm_eps, dt_low=low, dt_high=high, x=self.x.data_ptr(),
            wide=self.wide.data_ptr(), mid=self._mid.data_ptr(), ld=widest, operand=self.operand.data_ptr(),
            operand_ld=padded, operand_scale=self._scales.data_ptr(), picks=self._picks[0][0].data_ptr(),
            places=self._picks[0][1].data_ptr(), shares=self._picks[1].data_ptr(), runs=self._runs.data_ptr(),
            picked=self._picked[0].data_ptr(), picked_scale=self._picked[1].data_ptr(),
            picked_wide=self._picked[2].data_ptr(),
        )  # fmt: skip

    def run(self, ops: range, step: Step) -> None:
        self.model.threads = torch.get_num_threads()
        if self.on_operation is None:
            self.library.saccade_step(ctypes.byref(self.model), ctypes.byref(step), ops.start, ops.stop)
            return
        for index in ops:
            started = time.perf_counter()
            self.library.saccade_step(ctypes.byref(self.model), ctypes.byref(step), index, index + 1)
            self.on_operation(self._ops[index], time.perf_counter() - started)

    def layer(self, layer: BuiltLayer) -> list[Op]:
        """Empty for a layer that has no compiled form."""
        if len(layer.mixers) != 1:
            return []
        [mixer] = layer.mixers
        if isinstance(mixer, Recurrence):
            return self._recurrent(layer.norm, mixer, layer.residual_scale)
        return self.mixer(layer.norm, mixer) if layer.residual_scale == 1.0 else []

    def mixer(self, norm: Tensor, mixer: Mixer) -> list[Op]:
        """The same for one mixer without a state."""
        match mixer:
            case ExpertsMixer() if mixer.plain and mixer.spec == self.mixture:
                return self._experts(norm, mixer)
            case AttentionMixer():
                return attention_operations(self, norm, mixer)
            case MlpMixer() if mixer.squared:
                return self._mlp(norm, mixer)
            case _:
                return []

    def _between(self, norm: Tensor, first: Packed, middle: list[Op], last: Packed) -> list[Op]:
        ends = self.norm(norm, first), self.linear(first, Target.WIDE), self.linear(last, Target.RESIDUAL)
        return [*ends[:2], *middle, ends[2]]

    def _mlp(self, norm: Tensor, mixer: MlpMixer) -> list[Op]:
        """Plain rows go from product to product; integers have to know a row's largest value first."""
        up, down = self.packed(mixer.up), self.packed(mixer.down)
        if down.kind not in (Kind.BF16, Kind.F32) or down.kpad != down.k:
            return self._between(norm, up, [Op(Code.RELU_SQUARED, down.kind, down.k)], down)
        inner = Op(Code.LINEAR, down.kind, down.k, up.descriptor, Target.INNER)
        return [self.norm(norm, up), inner, Op(Code.LINEAR, Kind.F32, down.k, down.descriptor, Target.RESIDUAL)]

    def _experts(self, norm: Tensor, mixer: ExpertsMixer) -> list[Op]:
        spec, experts = mixer.spec, [expert for expert in mixer.experts if isinstance(expert, MlpMixer)]
        if len(experts) < spec.n_routed_experts:  # stacked, for a kernel
            return []
        assert isinstance(mixer.shared, MlpMixer)
        gate, ups, downs = (
            Packed(mixer.gate_ED, None),
            *zip(*((self.packed(expert.up), self.packed(expert.down)) for expert in experts), strict=True),
        )
        tables = [(Weight * len(side))(*(packed.descriptor for packed in side)) for side in (ups, downs)]
        mixture = structs.Experts(
            spec.n_routed_experts, spec.num_experts_per_tok, spec.n_group, spec.topk_group,
            int(spec.norm_topk_prob), spec.routed_scaling_factor, self.pointer(mixer.correction_E),
            *(ctypes.addressof(table) for table in tables),
        )  # fmt: skip
        self._kept += [gate, *tables, mixture]

        def op(code: Code, packed: Packed, target: Target = Target.WIDE, weight: Weight | None = None) -> Op:
            of = ctypes.addressof(mixture)
            return Op(code, packed.kind, packed.k, weight or Weight(), target, experts=of)

        up, down, enter, leave = ups[0], downs[0], mixer.enter, mixer.leave
        ops = [self.norm(norm, gate), self.linear(gate, Target.WIDE), op(Code.ROUTE, gate), op(Code.GROUP_PICKS, gate)]
        if enter is None:
            ops.append(op(Code.GATHER, up, Target.OPERAND))
        else:
            packed = self.packed(enter)
            ops += [self.norm(norm, packed), self.linear(packed, Target.WIDE), op(Code.GATHER, up)]
        ops += [
            op(Code.EXPERTS, up, Target.WIDE, up.descriptor), op(Code.PICKED_RELU_SQUARED, down),
            op(Code.EXPERTS, down, Target.RESIDUAL, down.descriptor),
        ]  # fmt: skip
        ops += self._mlp(norm, mixer.shared)
        combine = op(Code.COMBINE, down, Target.RESIDUAL if leave is None else Target.MID)
        combine.width = down.n
        ops.append(combine)
        if leave is not None:
            packed = self.packed(leave)
            ops += [Op(Code.CONVERT, packed.kind, packed.k), self.linear(packed, Target.RESIDUAL)]
        return ops

    def packed(self, linear: Linear) -> Packed:
        packed = linear.packed
        if packed is None:
            assert isinstance(linear.weight, Tensor)
            packed = Packed(linear.weight, linear.bias)
        self.keep(packed)
        return packed

    def keep(self, what: object) -> None:
        """As long as there are operations that point to it."""
        self._kept.append(what)

    def pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def norm(self, weight: Tensor, before: Packed) -> Op:
        return Op(Code.NORM, before.kind, before.k, norm=self.pointer(weight))

    def linear(self, packed: Packed, target: Target) -> Op:
        return Op(Code.LINEAR, Kind.F32, 0, weight=packed.descriptor, target=target)

    def _recurrent(self, norm: Tensor, mixer: Recurrence, residual_scale: float) -> list[Op]:
        if mixer.spec.conv_kernel > MAX_TAPS or (residual_scale != 1.0 and mixer.out_proj.bias is not None):
            return []
        if isinstance(mixer, Mamba2Mixer) and (mixer.spec, mixer.spec.norm_eps) != (self.mamba, self.config.norm_eps):
            return []
        first, last = self.packed(mixer.in_proj), self.packed(mixer.out_proj)
        # What the layer adds is scaled where its rows are float32 anyway: in the gated norm before the projection.
        scaled = mixer.norm_weight if residual_scale == 1.0 else mixer.norm_weight * residual_scale
        middle, shape = recurrence_operations(mixer, scaled, last, self.pointer)
        self._kept.append(shape)
        return self._between(norm, first, middle, last)
