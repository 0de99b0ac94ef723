"""A drafting head in compiled code: one pass, or all passes of a step in one call. `decoder.mtp_head` has the maths."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from decoder.head_weights import HeadWeights
from decoder.operation_parts import MAX_ROUTED
from decoder.operations import Operations
from decoder.trunk import Trunk
from kernels.linear import Linear
from kernels.native import NativeUnavailable
from kernels.native.structs import Code, Drafting, Kind, Op, Step, Target


class CompiledHead(Operations):
    """The operations of a head, and its vocabulary projection."""

    def __init__(self, head: HeadWeights, trunk: Trunk, vocabulary: Linear) -> None:
        """`vocabulary`: the projection to the ids that can be drafted. Raises NativeUnavailable with the reason."""
        config = trunk.config
        super().__init__(config, trunk.options, config.mtp)
        fuse, last, hidden = self.packed(head.fuse), self.packed(vocabulary), config.hidden_size
        pair = torch.cat((head.enorm, head.hnorm))
        ops = [Op(Code.NORM_PAIR, fuse.kind, fuse.k, norm=self.pointer(pair)), self.linear(fuse, Target.STREAM)]
        ops += self.mixer(head.norms[0], head.attention)
        attention = next(index for index, op in enumerate(ops) if op.code == Code.ATTENTION)
        ops[attention].first_key = 1
        self._enter = range(attention + 1)
        for norm, mixer in zip(head.norms[1:], head.rest, strict=True):
            layer = self.mixer(norm, mixer)
            if not layer:
                raise NativeUnavailable(f"a head with {type(mixer).__name__} has no compiled form")
            ops += layer
        ops += [self.norm(head.final, last), self.linear(last, Target.LOGITS)]
        # This leaves the hidden states of the next pass as float rows.
        ops.append(Op(Code.NORM, Kind.F32, hidden, norm=self.pointer(head.final)))
        self._all = range(len(ops))
        self.complete(ops, MAX_ROUTED)
        self._draft_vocab = last.n
        """Number of ids that have logits, which are the first ones."""
        self._embeddings, self._norm = trunk.embeddings, trunk.norm_f
        packed = trunk.embeddings.packed
        self._table = None if packed is None else ctypes.addressof(packed)
        self._starts, self._zeros = torch.arange(MAX_ROUTED + 1), torch.zeros(MAX_ROUTED, dtype=torch.int64)

    def enter(self, embedded_TD: Tensor, hidden_TD: Tensor, places_T: Tensor, positions_TA: Tensor | None) -> None:
        """Like `MtpHead.enter`, for at most `max_tokens` tokens."""
        tokens = self._take(embedded_TD, hidden_TD)
        lengths = self._zeros.data_ptr()  # the lengths are not used
        step = Step(
            tokens=tokens, rows=tokens, starts=self._starts.data_ptr(), lengths=lengths, places=places_T.data_ptr()
        )  # fmt: skip
        self.run(self._enter, _with(step, positions_TA))

    def predict(
        self, embedded_RD: Tensor, hidden_RD: Tensor, places_R: Tensor, tables_RW: Tensor, lengths_R: Tensor,
        positions_RA: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Like `MtpHead.predict`, for at most `max_tokens` tokens."""
        rows = self._take(embedded_RD, hidden_RD)
        logits = torch.empty(rows, self._draft_vocab)
        step = Step(
            tokens=rows, rows=rows, starts=self._starts.data_ptr(), lengths=lengths_R.data_ptr(),
            tables=tables_RW.data_ptr(), places=places_R.data_ptr(), table_stride=tables_RW.stride(0),
            logits=logits.data_ptr(),
        )  # fmt: skip
        self.run(self._all, _with(step, positions_RA))
        return self.operand[:rows, : self.config.hidden_size].clone(), logits

    def draft(
        self, given_ND: Tensor, due: Sequence[tuple[int, int]], rows: Sequence[tuple[int, int, int, int]],
        positions: Sequence[Sequence[tuple[int, ...]]], tables_RW: Tensor, draws: bytes,
    ) -> list[list[int]]:  # fmt: skip
        """Makes the entries of `due`, (token, place), then the drafts of `rows`, (last token, its place, number of its
        keys including itself, number of drafts); at most `max_tokens` of each, and at least one row.

        `given`: for each of these tokens, the trunk's row of the token before it, before the final norm. `draws`:
        `Draw` structs of the first drafts; later drafts differ only in position. `positions`: those of the entries of
        `due`, then those of each pass over `rows`; empty for a head that reads no positions. `tables`: page numbers,
        from the first page that each row attends to.
        """
        first, pages, keys, counts = zip(*rows, strict=True)
        count, passes = len(rows), max(counts)
        columns = (
            [*(token for token, _ in due), *first], [*(place for _, place in due), *pages], keys, counts,
            [number for of in positions for at in of for number in at],
        )  # fmt: skip
        table = torch.tensor([number for column in columns for number in column])
        assert given_ND.is_contiguous() and given_ND.dtype == self._embeddings.dtype and table.dtype == torch.int64
        ids, places, lengths, drafts, at = (part.data_ptr() for part in table.split([len(each) for each in columns]))
        out, logits = (ctypes.c_int64 * (passes * count))(), torch.empty(count, self._draft_vocab)
        drafting = Drafting(
            due=len(due), rows=count, passes=passes, enter=self._enter.stop, draft_vocab=self._draft_vocab,
            is_bf16=given_ND.dtype == torch.bfloat16, embeddings=self._embeddings.address, given=given_ND.data_ptr(),
            norm=self._norm.data_ptr(), ids=ids, places=places, lengths=lengths, counts=drafts, draws=draws,
            out=ctypes.addressof(out), positions=at if positions else None,
            axes=self.config.position_axes if positions else 0, table=self._table,
        )  # fmt: skip
        step = Step(
            starts=self._starts.data_ptr(), tables=tables_RW.data_ptr(), table_stride=tables_RW.stride(0),
            logits=logits.data_ptr(),
        )  # fmt: skip
        self.model.threads = torch.get_num_threads()
        self.library.saccade_draft(ctypes.byref(self.model), ctypes.byref(step), ctypes.byref(drafting))
        return [list(out[index : passes * count : count][: rows[index][3]]) for index in range(count)]

    def _take(self, embedded_TD: Tensor, hidden_TD: Tensor) -> int:
        tokens, hidden = embedded_TD.shape
        self.wide[:tokens, :hidden] = embedded_TD
        self.wide[:tokens, hidden : 2 * hidden] = hidden_TD
        return tokens


def _with(step: Step, positions_TA: Tensor | None) -> Step:
    if positions_TA is not None:
        step.positions, step.axes = positions_TA.data_ptr(), positions_TA.shape[1]
    return step
