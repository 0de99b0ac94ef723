"""Operations of compiled code for MLPs and mixtures of experts; `decoder.operations` has the others."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from decoder.layers.experts import ExpertsMixer
from decoder.layers.mlp import GatedMlpMixer, MlpMixer
from decoder.operation_parts import OperationParts
from kernels.linear import Packed
from kernels.native import Activation, structs
from kernels.native.structs import Code, Kind, Op, Target, Weight

AnyMlp = MlpMixer | GatedMlpMixer


def _first(operations: OperationParts, mlp: AnyMlp) -> tuple[Packed, Activation, bool]:
    """(the first product, its activation, whether gate and up are separate in the product's output)."""
    if isinstance(mlp, MlpMixer):
        return operations.packed(mlp.up), mlp.activation, False
    both = mlp.gate_up
    if both.packed is not None:
        return operations.keep(both.packed), both.activation, False
    assert both.plain is not None
    return operations.packed(both.plain), both.activation, True


def mlp_operations(
    operations: OperationParts, norm: Tensor | None, mlp: AnyMlp, scale: float, row_scale: int | None = None
) -> list[Op]:
    """Adds the MLP of the normalised rows to the residual stream, multiplied by `scale` and, if given, by each row's
    factor at the address `row_scale`.

    Plain rows go directly from product to product. Integer rows need a row's largest value first, so an operation
    between the products converts the rows.
    """
    (up, activation, apart), down = _first(operations, mlp), operations.packed(mlp.down)
    last = operations.residual(down, scale)
    last.row_scale = row_scale
    direct = down.kind in (Kind.BF16, Kind.F32) and down.kpad == down.k
    if not apart and (direct or operations.has_bf16_rows(down)):
        inner = Op(Code.LINEAR, down.kind, down.k, up.descriptor, Target.INNER, activation=activation)
        if direct:
            last.width = down.k
            return [operations.norm(norm, up), inner, last]
        inner.bf16_rows = 1
        return [operations.norm(norm, up), inner, Op(Code.ACTIVATE, down.kind, down.k, bf16_rows=1), last]
    wide, inner = operations.linear(up, Target.WIDE), Op(Code.ACTIVATE, down.kind, down.k, gated=apart)
    (inner if apart else wide).activation = activation
    return [operations.norm(norm, up), wide, inner, last]


def _divided_like(experts: Sequence[Packed]) -> Weight:
    """The weight by which the panels of all experts are divided among threads: a compact one if there is any, because
    plain panels can be divided further than compact ones, and a layer may have both."""
    return next((each for each in experts if each.stored is Kind.COMPACT_BF16), experts[0]).descriptor


def experts_operations(
    operations: OperationParts, norm: Tensor, mixer: ExpertsMixer, beside: AnyMlp | None, scale: float
) -> list[Op]:
    """Adds the experts of the normalised rows, and of an MLP `beside` them, to the residual stream, multiplied by
    `scale`. Empty if the experts' weights are stacked for a kernel."""
    spec, experts = mixer.spec, [expert for expert in mixer.experts if isinstance(expert, AnyMlp)]
    if len(experts) < spec.n_routed_experts:
        return []
    shared = beside if mixer.shared is None else mixer.shared
    rows = [mixer.gate_ED] if mixer.shared_gate_1D is None else [mixer.gate_ED, mixer.shared_gate_1D]
    gate = operations.keep(Packed(torch.cat(rows), None))
    row_scale = None if mixer.shared_gate_1D is None else operations.shared_gates.data_ptr()
    firsts, downs = zip(
        *((_first(operations, expert), operations.packed(expert.down)) for expert in experts), strict=True
    )
    (up, activation, apart), down = firsts[0], downs[0]
    tables = [(Weight * len(experts))(*(packed.descriptor for packed in side)) for side in (
        [first[0] for first in firsts], downs
    )]  # fmt: skip
    correction = None if mixer.correction_E is None else operations.pointer(mixer.correction_E)
    mixture = structs.Experts(
        count=spec.n_routed_experts, chosen=spec.num_experts_per_tok, groups=spec.n_group, kept=spec.topk_group,
        normalise=spec.norm_topk_prob, scaling=spec.routed_scaling_factor, epsilon=spec.weight_epsilon,
        correction=correction, up=ctypes.addressof(tables[0]), down=ctypes.addressof(tables[1]), shared=row_scale,
    )  # fmt: skip
    operations.route(spec, tables, mixture)

    def op(code: Code, packed: Packed, target: Target = Target.WIDE, weight: Weight | None = None) -> Op:
        of = ctypes.addressof(mixture)
        return Op(code, packed.kind, packed.k, weight or Weight(), target, experts=of, scale=scale)

    enter, leave = mixer.enter, mixer.leave
    ops = [operations.norm(norm, gate), operations.linear(gate, Target.WIDE), op(Code.ROUTE, gate)]
    ops.append(op(Code.GROUP_PICKS, gate))
    if enter is None:
        ops.append(op(Code.GATHER, up, Target.OPERAND))
    else:
        packed = operations.packed(enter)
        ops += [operations.norm(norm, packed), operations.linear(packed, Target.WIDE), op(Code.GATHER, up)]
    first = op(Code.EXPERTS, up, Target.WIDE, _divided_like([each[0] for each in firsts]))
    inner = op(Code.PICKED_ACTIVATE, down)
    inner.gated = apart
    (inner if apart else first).activation = activation
    ops += [first, inner, op(Code.EXPERTS, down, Target.RESIDUAL, _divided_like(downs))]
    if shared is not None:
        ops += mlp_operations(operations, norm, shared, scale, row_scale)
    combine = op(Code.COMBINE, down, Target.RESIDUAL if leave is None else Target.MID)
    combine.width = down.n
    ops.append(combine)
    if leave is not None:
        packed = operations.packed(leave)
        ops += [Op(Code.CONVERT, packed.kind, packed.k), operations.residual(packed, scale)]
    return ops
