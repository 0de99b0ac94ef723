"""Gated delta rule: projections, causal convolution, state update or scan, gated norm per head, output projection.

Letters: `T` tokens, `U` update rows, `H` value heads, `K` width of a key head, `V` width of a value head, `C` conv
channels, `W` taps, `S` slots, `L` steps of a ring, `X` inputs of the recurrence. The maths is in kernels/gated_delta.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoder.batch import Batch, VerifyTensors
from decoder.config import DecoderOptions
from decoder.layers.linear import float_vector, fused_linear, named_linear
from decoder.layers.recurrent_descriptions import GatedDelta
from decoder.layers.spec import Weights
from kernels.causal_conv1d import causal_conv1d, causal_conv1d_tokens, causal_conv1d_update
from kernels.gated_delta import (
    DeltaTerms,
    delta_gates,
    gated_delta_advance,
    gated_delta_replay,
    gated_delta_scan,
    gated_delta_tokens,
    gated_delta_update,
)
from kernels.gated_norm import gated_norm


class GatedDeltaMixer:
    """The layer: maps normalised rows `[T, d]` of a batch to what is added to the residual stream."""

    def __init__(
        self,
        spec: GatedDelta,
        options: DecoderOptions,
        weights: Weights,
        windows_SWC: Tensor,
        states_SHKV: Tensor,
        ring_SLX: Tensor,
    ) -> None:
        self.spec, self.windows, self.states, self.ring = spec, windows_SWC, states_SHKV, ring_SLX
        parts = [weights[f"in_proj_{name}.weight"] for name in ("z", *spec.inputs, "b", "a")]
        self.in_proj = fused_linear(parts, None, options, kept=2)  # b and a stay plain
        self.out_proj = named_linear(weights, "out_proj", options)
        heads = spec.num_value_heads
        self.sizes = [spec.values, spec.conv_dim, heads, heads]
        self.terms = DeltaTerms(
            float_vector(weights, "conv1d.weight", options)[:, 0].t().contiguous(),
            -torch.exp(float_vector(weights, "A_log", options)),
            float_vector(weights, "dt_bias", options),
            spec.num_key_heads,
            spec.key_head_dim,
            spec.beta_scale,
        )
        self.norm_weight = float_vector(weights, "norm.weight", options).repeat(heads)
        """`[H * V]`: one weight vector, repeated for each head."""

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        projected, gates = self.in_proj(x_TD), self.sizes[0]
        updates, queries = batch.updates, batch.queries
        parts = []
        if updates:
            parts.append(self.update(projected[:updates, gates:], batch))
        if batch.verify is not None:
            parts.append(self.verify(projected[updates:queries, gates:], batch.verify.tensors))
        if batch.scan is not None:
            parts.append(self.scan(projected[queries:, gates:], batch))
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        gate, spec = projected[:, :gates], self.spec
        normed = gated_norm(y, gate, self.norm_weight, spec.value_head_dim, spec.norm_eps, norm_first=True)
        return self.out_proj(normed)

    def update(self, inputs_UX: Tensor, batch: Batch) -> Tensor:
        """Rows of one token: updates the state in the row's slot."""
        conv_in, b, a = inputs_UX.split(self.sizes[1:], -1)
        terms, runs = self.terms, batch.slot_runs
        mixed = causal_conv1d_update(conv_in, terms.conv_WC, None, self.windows, batch.slots_U, runs)
        given = (*terms.split(mixed), b, a, terms.A_H, terms.dt_bias_H)
        return gated_delta_update(self.states, batch.slots_U, *given, runs, terms.beta_scale).flatten(1)

    def verify(self, inputs_NX: Tensor, rows: VerifyTensors) -> Tensor:
        """Rows of tokens that may be rejected: writes a state per token, or keeps the inputs in the ring."""
        inputs = rows.spread(inputs_NX)
        if not self.ring.numel():
            return rows.pack(self._verify_in_slots(inputs, rows))
        slots = rows.slots_VT[:, 0]
        y = gated_delta_replay(
            self.states, self.windows, self.ring, rows.batch_slots_V, slots, rows.accepted_V, rows.lengths_V,
            inputs, self.terms, rows.span, rows.slot_runs,
        )  # fmt: skip
        return rows.pack(y.flatten(2))

    def _verify_in_slots(self, inputs_VTX: Tensor, rows: VerifyTensors) -> Tensor:
        conv_in, b, a = inputs_VTX.split(self.sizes[1:], -1)
        terms, where = self.terms, (rows.slots_VT, rows.accepted_V, rows.lengths_V)
        mixed = causal_conv1d_tokens(conv_in, terms.conv_WC, None, self.windows, *where)
        given = (*terms.split(mixed), b, a, terms.A_H, terms.dt_bias_H)
        return gated_delta_tokens(self.states, *where, *given, terms.beta_scale).flatten(2)

    def scan(self, inputs_TX: Tensor, batch: Batch) -> Tensor:
        """Rows of several tokens, from the state in their slot or from zero; saves the requested checkpoints."""
        scan = batch.scan
        assert scan is not None
        conv_in, b, a = inputs_TX.split(self.sizes[1:], -1)
        terms, rows, kept = self.terms, (scan.slots_R, scan.initial_R), (scan.window_saves, scan.tables)
        mixed = causal_conv1d(conv_in, terms.conv_WC, None, self.windows, *rows, scan.starts_R, *kept)
        given = (*terms.split(mixed), *delta_gates(b, a, terms.A_H, terms.dt_bias_H, terms.beta_scale))
        y = gated_delta_scan(self.states, *rows, *given, scan.chunks, scan.state_saves, scan.tables)
        return y.flatten(1)

    def advance(self, batch_slots_R: Tensor, slots_R: Tensor, targets_R: Tensor, counts_R: Tensor, span: int) -> None:
        """Writes the state after the first `counts` inputs of each batch slot's ring to its target slot."""
        where = (batch_slots_R, slots_R, targets_R, counts_R)
        gated_delta_advance(self.states, self.windows, self.ring, *where, self.terms, span)
