"""Gated short convolution: input projection, gate, causal convolution of a few taps, gate, output projection.

    B, C, x = in_proj(h);  y = out_proj(C * conv(B * x))

The only memory is the window of the last inputs B * x, in the compute dtype. The maths is that of transformers,
models/lfm2/modeling_lfm2.py.

Letters: `T` tokens, `U` update rows, `D` channels, `W` taps, `S` slots, `L` steps of a ring.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoder.batch import Batch, VerifyTensors
from decoder.config import DecoderOptions
from decoder.layers.linear import float_vector, named_linear
from decoder.layers.recurrent_descriptions import ShortConv
from decoder.layers.spec import Weights
from kernels.causal_conv1d import causal_conv1d, causal_conv1d_tokens, causal_conv1d_update
from kernels.conv_replay import conv_advance, conv_replay


class ShortConvMixer:
    """The layer: maps normalised rows `[T, d]` of a batch to what is added to the residual stream."""

    def __init__(
        self,
        spec: ShortConv,
        options: DecoderOptions,
        weights: Weights,
        windows_SWD: Tensor,
        states_S0: Tensor,
        ring_SLD: Tensor,
    ) -> None:
        """`states_S0` is empty."""
        assert not states_S0.numel()
        self.spec, self.windows, self.states, self.ring = spec, windows_SWD, states_S0, ring_SLD
        self.in_proj = named_linear(weights, "in_proj", options)
        self.out_proj = named_linear(weights, "out_proj", options)
        self.conv_WD = float_vector(weights, "conv1d.weight", options)[:, 0].t().contiguous()
        self.conv_bias_D = float_vector(weights, "conv1d.bias", options) if spec.conv_bias else None

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        before, after, x = self.in_proj(x_TD).chunk(3, dim=-1)
        inputs = before * x
        updates, queries = batch.updates, batch.queries
        parts = []
        if updates:
            parts.append(self.update(inputs[:updates], batch))
        if batch.verify is not None:
            parts.append(self.verify(inputs[updates:queries], batch.verify.tensors))
        if batch.scan is not None:
            parts.append(self.scan(inputs[queries:], batch))
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.out_proj((after * y).to(x.dtype))

    def update(self, inputs_UD: Tensor, batch: Batch) -> Tensor:
        """Rows of one token: updates the window in the row's slot."""
        given = (inputs_UD, self.conv_WD, self.conv_bias_D, self.windows)
        return causal_conv1d_update(*given, batch.slots_U, batch.slot_runs, silu=False)

    def verify(self, inputs_ND: Tensor, rows: VerifyTensors) -> Tensor:
        """Rows of tokens that may be rejected: writes a window per token, or keeps the inputs in the ring."""
        inputs, weights = rows.spread(inputs_ND), (self.conv_WD, self.conv_bias_D)
        if not self.ring.numel():
            where = (rows.slots_VT, rows.accepted_V, rows.lengths_V)
            return rows.pack(causal_conv1d_tokens(inputs, *weights, self.windows, *where, silu=False))
        ring = (self.windows, self.ring, rows.batch_slots_V, rows.slots_VT[:, 0], rows.accepted_V)
        return rows.pack(conv_replay(*ring, rows.lengths_V, inputs, *weights, rows.span))

    def scan(self, inputs_TD: Tensor, batch: Batch) -> Tensor:
        """Rows of several tokens, from the window in their slot or from zeros; saves the requested checkpoints."""
        scan = batch.scan
        assert scan is not None
        rows, kept = (scan.slots_R, scan.initial_R, scan.starts_R), (scan.window_saves, scan.tables)
        given = (inputs_TD, self.conv_WD, self.conv_bias_D, self.windows)
        return causal_conv1d(*given, *rows, *kept, silu=False)

    def advance(self, batch_slots_R: Tensor, slots_R: Tensor, targets_R: Tensor, counts_R: Tensor, span: int) -> None:
        """Writes the window after the first `counts` inputs of each batch slot's ring to its target slot."""
        where = (batch_slots_R, slots_R, targets_R, counts_R)
        conv_advance(self.windows, self.ring, *where, self.conv_WD, span)
