"""A drafting head's pass in one call of compiled code: the maths, weights and pages of `decoder.mtp`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decoder.config import DecoderConfig, DecoderOptions
from decoder.operations import MAX_ROUTED, Operations
from kernels.linear import Linear
from kernels.native import NativeUnavailable
from kernels.native.structs import Code, Kind, Op, Step, Target

if TYPE_CHECKING:
    from decoder.mtp import MtpHead


class CompiledHead(Operations):
    """The operations of a head, and its vocabulary projection."""

    def __init__(self, config: DecoderConfig, options: DecoderOptions, head: MtpHead, vocabulary: Linear) -> None:
        """Raises NativeUnavailable with the reason."""
        super().__init__(config, options)
        fuse, last, hidden = self.packed(head.fuse), self.packed(vocabulary), config.hidden_size
        pair = torch.cat((head.enorm, head.hnorm))
        ops = [Op(Code.NORM_PAIR, fuse.kind, fuse.k, norm=self.pointer(pair)), self.linear(fuse, Target.STREAM)]
        ops += self.layer(head.norms[0], head.attention)
        attention = next(index for index, op in enumerate(ops) if op.code == Code.ATTENTION)
        ops[attention].first_key = 1
        self._enter = range(attention + 1)
        for norm, mixer in zip(head.norms[1:], head.experts, strict=True):
            layer = self.layer(norm, mixer)
            if not layer:
                raise NativeUnavailable(f"experts with {config.mlp_hidden_act} have no compiled form")
            ops += layer
        ops += [self.norm(head.final, last), self.linear(last, Target.LOGITS)]
        # The float rows that this leaves stand for the hidden states of the next pass.
        ops.append(Op(Code.NORM, Kind.F32, hidden, norm=self.pointer(head.final)))
        self._all = range(len(ops))
        self.complete(ops, MAX_ROUTED)
        self._starts, self._zeros = torch.arange(MAX_ROUTED + 1), torch.zeros(MAX_ROUTED, dtype=torch.int64)

    def enter(self, embedded_TD: Tensor, hidden_TD: Tensor, places_T: Tensor) -> None:
        """As `MtpHead.enter`, for at most `max_tokens`."""
        tokens = self._take(embedded_TD, hidden_TD)
        lengths = self._zeros.data_ptr()  # nothing is looked at
        self.run(
            self._enter,
            Step(tokens, tokens, self._starts.data_ptr(), lengths=lengths, places=places_T.data_ptr()),
        )

    def predict(
        self, embedded_RD: Tensor, hidden_RD: Tensor, places_R: Tensor, tables_RW: Tensor, lengths_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `MtpHead.predict`, for at most `max_tokens`."""
        rows = self._take(embedded_RD, hidden_RD)
        logits = torch.empty(rows, self.config.vocab_size)
        step = Step(
            rows, rows, self._starts.data_ptr(), lengths=lengths_R.data_ptr(), tables=tables_RW.data_ptr(),
            places=places_R.data_ptr(), table_stride=tables_RW.stride(0), logits=logits.data_ptr(),
        )  # fmt: skip
        self.run(self._all, step)
        return self.operand[:rows, : self.config.hidden_size].clone(), logits

    def _take(self, embedded_TD: Tensor, hidden_TD: Tensor) -> int:
        tokens, hidden = embedded_TD.shape
        self.wide[:tokens, :hidden] = embedded_TD
        self.wide[:tokens, hidden : 2 * hidden] = hidden_TD
        return tokens
