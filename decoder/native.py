"""Runs a step on a CPU in a few calls of compiled code: the layers, then the final norm and the vocabulary projection.

If only some tokens' rows are read, as in prompts, the other tokens are not computed to the end: from the output
projection of the last layer with states or pages on, no token depends on another.

The same maths as `decoder.model` with `decoder.layers`, on the same weights, states and pages. Layers without a
compiled form, and branches of layers but for their attention, are called in between, on the same residual stream.
Torch operations are used instead for rows of drafts or prompts in a graph, and if there is no compiled code for the
machine.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from decoder.attention_operations import attended
from decoder.batch import Batch
from decoder.layers.build import BuiltLayer
from decoder.layers.experts import ExpertsMixer
from decoder.layers.shared_block import SharedBlockMixer
from decoder.operation_parts import MAX_ROUTED
from decoder.operations import Operations
from decoder.singles import Singles, SinglesRoom
from decoder.state_forms import slots_read, slots_written
from decoder.trunk import Trunk
from kernels.dispatch import implementation
from kernels.linear import Quantised
from kernels.native import NativeUnavailable
from kernels.native.structs import Code, Form, Kind, Op, Step, Target

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Layer:
    ops: range
    """Empty for a layer without a compiled form."""
    built: BuiltLayer
    attention: range = range(0)
    """The operations of the attention in a branch, which precede `ops`, for a layer that has both."""


_OVER_TOKENS = (Code.MAMBA, Code.DELTA, Code.SHORT_CONV, Code.ATTENTION)
"""Operations in which a token depends on other tokens."""

Plan = list[tuple[range, _Layer | None]]
"""Ranges of operations, each with the layer to run separately after it; `None`: no layer, at the end."""


def _plan(layers: Sequence[_Layer], apart: tuple[type, ...]) -> Plan:
    """As few ranges of operations as possible. Layers without operations or with a branch, and those of the kinds
    `apart`, are run separately between the ranges. The first operation is the embedding."""
    plan: Plan = []
    begin, end = 0, 1
    for layer in layers:
        if layer.ops and layer.built.branch is None and not isinstance(layer.built.mixers[0], apart):
            end = layer.ops.stop
            continue
        plan.append((range(begin, end), layer))
        begin = end = layer.ops.stop
    return [*plan, (range(begin, end), None)]


def _with_keep(layers: Sequence[list[Op]], branches: Sequence[bool]) -> list[list[Op]]:
    """The operations of each layer, with a `KEEP` before the output projection of the last layer with states or pages,
    from which on no token depends on another. Without a `KEEP` if this layer has a branch, or if a layer without
    operations follows, since both are called with all tokens. `branches`: whether each layer has one."""
    last = max((i for i, ops in enumerate(layers) if any(op.code in _OVER_TOKENS for op in ops)), default=None)
    if last is None or not all(layers[last:]) or any(branches[last:]):
        return [*layers]
    ops = layers[last]
    mixed = max(i for i, op in enumerate(ops) if op.code in _OVER_TOKENS)
    at = next(i for i in range(mixed, len(ops)) if ops[i].code == Code.LINEAR)
    assert not ops[at].width, "a product of other rows than the operand"
    kept = [*ops[:at], Op(Code.KEEP, ops[at].weight.operand), *ops[at:]]
    return [*layers[:last], kept, *layers[last + 1 :]]


def _before(plan: Plan, end: int) -> Plan:
    """A plan without the operations from `end` on, which is within a layer that is not run separately."""
    before = [entry for entry in plan if entry[0].stop <= end]
    return [*before, (range(plan[len(before)][0].start, end), None)]


@dataclass(frozen=True)
class _Rows:
    """A step's tensors that `Step` points to; they must outlive it."""

    starts: Tensor
    slots: Tensor
    initial: Tensor
    saves: Tensor
    rewound: tuple[Tensor, Tensor, Tensor] | None
    """(slot to start from, batch slot of the ring, number of its steps to replay first) of each row, if there are rows
    to be verified; -1 for rows without a ring."""


def _rows(batch: Batch, single: _Rows) -> _Rows:
    """`single`: the constant part of the description of rows of one token, without their slots."""
    scan = batch.scan
    if batch.verify is None and scan is None:
        return _Rows(single.starts, batch.slots_U, single.initial, single.saves, None)
    if scan is not None and batch.queries == 0 and not scan.window_saves:
        return _Rows(scan.starts_R, scan.slots_R, scan.initial_R.to(torch.int64), single.saves, None)
    rows = _verified(batch, single) if batch.verify is not None else replace(single, slots=batch.slots_U)
    if scan is None:
        return rows
    before, behind, queries = rows.slots.shape[0], scan.slots_R.shape[0], batch.queries
    kept = [(row + before, end + queries, slot) for row, end, slot in scan.window_saves]
    rewound = None
    if rows.rewound is not None:
        origins, *rings = rows.rewound
        batch_slots, counts = (F.pad(column, (0, behind), value=-1) for column in rings)
        rewound = torch.cat((origins, scan.slots_R)), batch_slots, counts
    return _Rows(
        torch.cat((rows.starts[: before + 1], scan.starts_R[1:] + queries)),
        torch.cat((rows.slots, scan.slots_R)),
        torch.cat((single.initial[:before], scan.initial_R.to(torch.int64))),
        torch.cat((rows.saves, torch.tensor(kept, dtype=torch.int64).view(-1, 3))),
        rewound,
    )


def _verified(batch: Batch, single: _Rows) -> _Rows:
    """Rows of one token, then rows to be verified, described by what the host knows about them."""
    updates, verify = batch.updates, batch.verify
    assert verify is not None and verify.held is not None
    slots = batch.slots_U.tolist()
    starts, origins = list(range(updates + 1)), list(slots)
    batch_slots, counts = [-1] * updates, [-1] * updates
    saves: list[int] = []
    for batch_slot, of, accepted, count in verify.held:
        begin = starts[-1]
        if not verify.replayed:
            # A row works in the slot of its last token, and stores a state in the slot of each token before it.
            for token in range(count - 1):
                saves += (len(slots), begin + token + 1, of[token])
        starts.append(begin + count)
        slots.append(of[0 if verify.replayed else count - 1])
        origins.append(of[0 if verify.replayed else accepted - 1])
        batch_slots.append(batch_slot if verify.replayed else -1)
        counts.append(accepted if verify.replayed else -1)
    parts = (starts, slots, origins, batch_slots, counts, saves)
    table = torch.tensor([value for part in parts for value in part], dtype=torch.int64)
    begins, own, *rewound, kept = table.split([len(part) for part in parts])
    return _Rows(begins, own, single.initial, kept.view(-1, 3), (rewound[0], rewound[1], rewound[2]))


def _step(tokens: int, batch: Batch, rows: _Rows) -> Step:
    """The description of a batch for compiled code, without the source of its embeddings and the memory for logits."""
    tables, scan = batch.tables_QW, batch.scan
    step = Step(
        tokens=tokens, rows=rows.slots.shape[0], starts=rows.starts.data_ptr(), slots=rows.slots.data_ptr(),
        initial=rows.initial.data_ptr(), save_count=rows.saves.shape[0], saves=rows.saves.data_ptr(),
        lengths=batch.lengths_Q.data_ptr(), tables=tables.data_ptr(), places=batch.places_T.data_ptr(),
        table_stride=tables.stride(0) if tables.dim() == 2 else 0,
    )  # fmt: skip
    if rows.rewound is not None:
        step.origins, step.batch_slots, step.counts = (column.data_ptr() for column in rows.rewound)
    if scan is not None and scan.tables_RW.dim() == 2:
        step.scans, step.scan_computed = scan.computed_R.shape[0], scan.computed_R.data_ptr()
        step.scan_tables, step.scan_table_stride = scan.tables_RW.data_ptr(), scan.tables_RW.stride(0)
    if batch.positions_TA is not None:
        assert batch.positions_TA.is_contiguous()
        step.positions, step.axes = batch.positions_TA.data_ptr(), batch.positions_TA.shape[1]
    return step


class NativeStep(Operations):
    """The compiled operations of one model."""

    def __init__(self, trunk: Trunk) -> None:
        """Raises NativeUnavailable with the reason."""
        super().__init__(trunk.config, trunk.options, trunk.config.mixers)
        scale = self.config.embedding_scale
        table = trunk.embeddings
        embed = Op(Code.EMBED, table.kind, self.config.hidden_size, kv=table.address, scale=scale)
        if table.packed is not None:
            embed.weight = table.packed
        ops = [embed]
        layers: list[_Layer] = []
        branches = [built.branch is not None for built in trunk.layers]
        compiled = _with_keep([self.layer(built) for built in trunk.layers], branches)
        wide = mid = 0
        for built, own in zip(trunk.layers, compiled, strict=True):
            begin = len(ops)
            if built.branch is not None and own:
                attention = built.branch.attention
                ops += attended(self, attention)
                wide, mid = max(wide, attention.spec.projected), max(mid, attention.heads * attention.width)
            before = range(begin, len(ops))
            ops += own
            layers.append(_Layer(range(before.stop, len(ops)), built, before))
        keep = next((index for index, op in enumerate(ops) if op.code == Code.KEEP), None)
        self._called = [mixer for layer in layers if not layer.ops for mixer in layer.built.mixers]
        self._plans = {many: _plan(layers, apart=(ExpertsMixer,) * many) for many in (False, True)}
        head, body = self.packed(trunk.head), len(ops)
        scaled = trunk.norm_f if self.config.logits_scale == 1.0 else trunk.norm_f * self.config.logits_scale
        ops += [self.norm(scaled, head), self.linear(head, Target.LOGITS), Op(Code.LARGEST)]
        self._head = range(body, len(ops))
        self._kept_plans = {} if keep is None else {many: _before(plan, keep) for many, plan in self._plans.items()}
        """The plans up to `KEEP`."""
        ops.append(Op(Code.NORM, Kind.F32, self.config.hidden_size, norm=self.pointer(trunk.norm_f)))
        self._final = range(len(ops) - 1, len(ops))
        self.complete(ops, max(trunk.options.max_seqs, trunk.options.max_batched_tokens), wide, mid)
        starts, none = torch.arange(self.max_tokens + 1), torch.empty(0, 3, dtype=torch.int64)
        self._single = _Rows(starts, none, torch.ones_like(starts), none, None)
        self._scored = self.x[:0], torch.empty(0)
        """(rows whose logits were computed last, these logits)."""
        self._left = False
        """Whether torch operations have computed a step, so that states may be in their form."""
        options = trunk.options
        self.max_singles = MAX_ROUTED if all(layer.ops for layer in layers) and not any(branches) else 0
        """Largest number of rows for `single`; 0 if a layer or its branch has no compiled form."""
        self._room = SinglesRoom(options, self.config, self.x)
        self._largest: tuple[Tensor, list[int] | None] = self._scored[1], None

    def takes(self, tokens: int, batch: Batch) -> bool:
        """Whether a step can run in compiled code: it must have at most `max_tokens` tokens. Rows of drafts or prompts
        in a graph cannot, since the host does not know their layout, which changes from replay to replay."""
        if not 0 < tokens <= self.max_tokens or (batch.verify is not None and batch.known_slots is None):
            return False
        scan = batch.scan
        return tokens == batch.queries if scan is None else isinstance(scan.window_saves, tuple)

    def leave(self, batch: Batch) -> None:
        """Prepares a step that torch operations compute: converts the states that it reads to their form."""
        self._left = True
        self.convert_states(Form.PLAIN, slots_read(batch))
        self.convert_states(Form.WRITTEN, slots_written(batch))

    def _enter(self, *parts: Tensor) -> None:
        """Converts the states in these slots back to the form of compiled code, if torch operations have run."""
        if self._left:
            slots = torch.cat(parts)
            self.convert_states(Form.BLOCKS, slots[slots >= 0].unique())

    def embed(self, ids_T: Tensor) -> Tensor:
        """`[T, d]` float32: scaled rows of the embedding table, in the memory that `layers` works in."""
        ids_T = ids_T.contiguous()
        self.run(range(1), Step(tokens=ids_T.shape[0], ids=ids_T.data_ptr()))
        return self.x[: ids_T.shape[0]]

    def layers(self, x_TD: Tensor | None, batch: Batch, wanted_L: Tensor | None = None) -> Tensor:
        """`[T, d]` float32 before the final norm, or `[L, d]` of the tokens `wanted_L`, in memory that the next call
        overwrites. Updates states, windows and pages in place. If all of these rows draw, their logits are computed in
        the same call, and `logits` returns them.

        `x_TD`: embedded rows, which layers with branches need; None: rows of the embedding table for the batch's ids.
        Experts process more than
        `MAX_ROUTED` tokens in blocks.
        """
        given = batch.ids_T.contiguous() if x_TD is None else x_TD
        tokens, many = given.shape[0], given.shape[0] > MAX_ROUTED
        x = self.x[:tokens]
        if x_TD is not None and x_TD.data_ptr() != x.data_ptr():
            x.copy_(x_TD)
        rows = _rows(batch, self._single)
        self._enter(rows.slots, *(() if rows.rewound is None else rows.rewound[:1]))
        step = _step(tokens, batch, rows)
        if x_TD is None:
            step.ids = given.data_ptr()
        # A graph does not know yet which rows draw.
        scored = wanted_L is None and batch.samples is None and batch.known_slots is not None
        plan, hidden = self._plans[many], x
        if wanted_L is not None and self._kept_plans and wanted_L.shape[0] <= MAX_ROUTED:
            plan, hidden, scored = self._kept_plans[many], self.x[: wanted_L.shape[0]], wanted_L.shape[0] > 0
            step.keeps, step.kept, step.kept_count = 1, wanted_L.data_ptr(), wanted_L.shape[0]
        if scored:
            logits = self._logits_of(hidden)
            step.logits, step.largest = logits.data_ptr(), self._room.largest_address(hidden.shape[0])
        self._follow(plan, step, batch, scored=scored)
        if scored and step.largest:
            self._largest = logits, self._room.largest(hidden.shape[0])
        return hidden if wanted_L is None or step.keeps else x.index_select(0, wanted_L)

    def _follow(self, plan: Plan, step: Step, batch: Batch, *, scored: bool) -> None:
        """Runs a plan, and after it, if the step is `scored`, the operations that compute logits."""
        x, dtype = self.x[: step.tokens], self.options.dtype
        embedded = x.clone() if self.config.has_branches else None
        for ops, layer in plan:
            if layer is None and scored:
                ops = range(ops.start, self._head.stop)
            if ops:
                self.run(ops, step)
            if layer is not None and layer.ops and layer.built.branch is not None:
                assert embedded is not None
                mixed = next(index for index in layer.ops if self._ops[index].code in _OVER_TOKENS)
                given = x + self._branch(layer, layer.built.branch, embedded, step)
                self._run_on(given, range(layer.ops.start, mixed), step)
                self.run(range(mixed, layer.ops.stop), step)
            elif layer is not None and layer.ops:
                for block in x.split(MAX_ROUTED):
                    self._run_on(block, layer.ops, Step(tokens=block.shape[0]))
            elif layer is not None:
                x += layer.built(layer.built.rows(x, None, dtype, batch, embedded), batch)

    def _branch(self, layer: _Layer, branch: SharedBlockMixer, embedded_TD: Tensor, step: Step) -> Tensor:
        """The branch of a layer for the rows of the residual stream, `[T, d]`; its attention is compiled."""
        attention, tokens = branch.attention, step.tokens
        self.wide[:tokens, : attention.spec.projected] = attention.inputs(branch.rows(self.x[:tokens], embedded_TD))
        self.run(layer.attention, step)
        attended_TQ = self._mid[:tokens, : attention.heads * attention.width].to(self.options.dtype)
        return branch.output(attention.o_proj(attended_TQ.contiguous()))

    def single(self, rows: Singles, table_SW: Tensor | None) -> Tensor:
        """`layers` and `logits` for at most `max_singles` rows of one token, including the embedding, in one call.

        `table_SW`: page numbers of all batch slots.
        """
        room, count = self._room, len(rows.ids)
        if self._left:
            self._enter(torch.tensor(rows.slots))
        room.fill(rows, table_SW)
        self.run(range(self._head.stop), room.step)
        self._scored = hidden, logits = room.results(count)
        self._largest = logits, room.largest(count) if rows.greedy else None
        return hidden

    def largest(self, logits: Tensor) -> list[int] | None:
        """The id of the largest logit of each row, if the last call computed these logits and found the ids."""
        return self._largest[1] if logits is self._largest[0] else None

    def advance(self, rows_R4: Tensor) -> None:
        """For each row (batch slot, slot, target, count): in all compiled layers, advances the state in the slot by the
        first `count` inputs of the batch slot's ring, and writes it to the target slot."""
        self._enter(rows_R4[:, 1])
        self.model.threads = torch.get_num_threads()
        rows = ctypes.c_void_p(rows_R4.data_ptr())
        self.library.saccade_advance(ctypes.byref(self.model), ctypes.c_int64(rows_R4.shape[0]), rows)

    def calls(self, mixer: object) -> bool:
        """Whether this mixer has no compiled form."""
        return any(mixer is called for called in self._called)

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """`[L, vocab]` float32 of at most `max_tokens` rows before the final norm."""
        if hidden_LD is self._scored[0]:
            return self._scored[1]
        out = self._logits_of(hidden_LD)
        self._run_on(hidden_LD, self._head, Step(tokens=hidden_LD.shape[0], logits=out.data_ptr()))
        return out

    def _logits_of(self, hidden_LD: Tensor) -> Tensor:
        """Memory for the logits of these rows, which the caller computes. The logits of the next step may use the same
        memory."""
        logits = self._room.logits(hidden_LD.shape[0])
        self._scored, self._largest = (hidden_LD, logits), (logits, None)
        return logits

    def final_norm(self, hidden_TD: Tensor) -> Tensor:
        """`[T, d]` in the compute dtype, of at most `max_tokens` rows before the final norm."""
        rows = hidden_TD.shape[0]
        self._run_on(hidden_TD, self._final, Step(tokens=rows))
        return self.operand[:rows, : self.config.hidden_size].to(self.options.dtype, copy=True)

    def _run_on(self, x_ND: Tensor, ops: range, step: Step) -> None:
        """Runs operations on float32 rows of a residual stream in place."""
        x = x_ND.to(torch.float32).contiguous()
        self.model.x = x.data_ptr()
        self.run(ops, step)
        self.model.x = self.x.data_ptr()


def native_step(trunk: Trunk) -> NativeStep | None:
    """The compiled step of a model; None, with the reason logged, if it has none. With native "on" that is a
    `ValueError`."""
    if trunk.options.native == "off":
        return None
    try:
        if trunk.options.not_compiled:
            raise NativeUnavailable(trunk.options.not_compiled)
        return NativeStep(trunk)
    except NativeUnavailable as reason:
        if trunk.options.native == "on":
            raise ValueError(f"native: 'on' is not possible: {reason}; 'auto' would work") from None
        log.info("the decoder runs operation by operation: %s", reason)
        on_kernels = implementation(torch.device(trunk.options.device).type)[0] == "triton"
        if isinstance(trunk.head.weight, Quantised) and not on_kernels:
            log.warning(
                "quantised weights are expanded for each product: they take less memory, but are slower than plain ones"
            )
        return None
