"""Mamba-2: input projection, causal convolution, state update or scan, gated norm, output projection.

Letters: `T` tokens, `U` update rows, `H` heads, `P` head size, `G` groups, `N` state size, `C` conv channels, `W` taps,
`S` slots, `X` inputs of the recurrence. The maths is in Dao and Gu, arXiv 2405.21060, and in
kernels/selective_state_update, kernels/chunk_scan and kernels/state_replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoder.batch import Batch, VerifyTensors
from decoder.config import DecoderOptions
from decoder.layers.linear import float_vector, named_linear
from decoder.layers.recurrent_descriptions import Mamba2
from decoder.layers.spec import Weights
from kernels.causal_conv1d import causal_conv1d, causal_conv1d_tokens, causal_conv1d_update
from kernels.chunk_scan import chunk_scan
from kernels.gated_norm import gated_norm
from kernels.selective_state_update import discretise, selective_state_update, selective_state_update_tokens
from kernels.state_replay import MambaTerms, replay_advance, replay_tokens


class Mamba2Mixer:
    """The layer: maps normalised rows `[T, d]` of a batch to what is added to the residual stream."""

    def __init__(
        self,
        spec: Mamba2,
        options: DecoderOptions,
        weights: Weights,
        windows_SWC: Tensor,
        states_SHPN: Tensor,
        ring_SLX: Tensor,
    ) -> None:
        self.spec, self.windows, self.states, self.ring = spec, windows_SWC, states_SHPN, ring_SLX
        self.in_proj = named_linear(weights, "in_proj", options)
        self.out_proj = named_linear(weights, "out_proj", options)
        bc = spec.n_groups * spec.ssm_state_size
        self.gate_scale, *scales = spec.scales
        # The convolution is linear, so the factors of its inputs are in its weights, which are float32.
        scale_C = torch.tensor(scales).repeat_interleave(torch.tensor([spec.inner, bc, bc])).to(options.device)
        self.conv_WC = (float_vector(weights, "conv1d.weight", options)[:, 0].t() * scale_C).contiguous()
        self.conv_bias_C = float_vector(weights, "conv1d.bias", options) if spec.use_conv_bias else None
        self.A_H = -torch.exp(float_vector(weights, "A_log", options))
        self.D_H = float_vector(weights, "D", options)
        self.dt_bias_H = float_vector(weights, "dt_bias", options)
        has_norm = spec.gated_norm != "gate_only"
        self.norm_weight = float_vector(weights, "norm.weight", options) if has_norm else None
        self.sizes = [spec.inner, spec.conv_dim, spec.mamba_num_heads]
        self.terms = MambaTerms(
            self.conv_WC, self.conv_bias_C, self.A_H, self.D_H, self.dt_bias_H, spec.n_groups, spec.ssm_state_size,
            spec.time_step_limit,
        )  # fmt: skip

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        projected = self.in_proj(x_TD)
        gate, conv_in, dt = projected.split(self.sizes, dim=-1)
        updates, queries = batch.updates, batch.queries
        parts = []
        if updates:
            parts.append(self.update(conv_in[:updates], dt[:updates], batch))
        if batch.verify is not None:
            parts.append(self.verify(projected[updates:queries, self.sizes[0] :], batch.verify.tensors))
        if batch.scan is not None:
            parts.append(self.scan(conv_in[queries:], dt[queries:], batch))
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        group = self.spec.inner // self.spec.n_groups
        normed = gated_norm(
            y, gate, self.norm_weight, group, self.spec.norm_eps, norm_first=self.spec.gated_norm == "norm_first",
            gate_scale=self.gate_scale,
        )  # fmt: skip
        return self.out_proj(normed)

    def _split(self, mixed_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec, tokens = self.spec, mixed_TC.shape[0]
        bc = spec.n_groups * spec.ssm_state_size
        x, b, c = mixed_TC.split([spec.inner, bc, bc], dim=-1)
        shape = (tokens, spec.n_groups, spec.ssm_state_size)
        return x.view(tokens, spec.mamba_num_heads, spec.mamba_head_dim), b.view(shape), c.view(shape)

    def update(self, conv_in_UC: Tensor, dt_UH: Tensor, batch: Batch) -> Tensor:
        """Rows of one token: updates the state in the row's slot."""
        mixed = causal_conv1d_update(
            conv_in_UC, self.conv_WC, self.conv_bias_C, self.windows, batch.slots_U, batch.slot_runs
        )
        x, b, c = self._split(mixed)
        y = selective_state_update(
            self.states,
            batch.slots_U,
            x,
            dt_UH,
            self.A_H,
            b,
            c,
            self.D_H,
            self.dt_bias_H,
            self.spec.time_step_limit,
            batch.slot_runs,
        )
        return y.reshape(x.shape[0], -1)

    def verify(self, inputs_NX: Tensor, rows: VerifyTensors) -> Tensor:
        """Rows of tokens that may be rejected: writes a state per token, or keeps the inputs in the ring."""
        if not self.ring.numel():
            return rows.pack(self._verify_in_slots(rows.spread(inputs_NX), rows))
        slots = rows.slots_VT[:, 0]
        y = replay_tokens(
            self.states, self.windows, self.ring, rows.batch_slots_V, slots, rows.accepted_V, rows.lengths_V,
            rows.spread(inputs_NX), self.terms, rows.span, rows.slot_runs,
        )  # fmt: skip
        return rows.pack(y.flatten(2))

    def _verify_in_slots(self, inputs_VTX: Tensor, rows: VerifyTensors) -> Tensor:
        count, tokens = inputs_VTX.shape[:2]
        conv_in, dt = inputs_VTX.split(self.sizes[1:], dim=-1)
        given = (rows.slots_VT, rows.accepted_V, rows.lengths_V)
        mixed = causal_conv1d_tokens(conv_in, self.conv_WC, self.conv_bias_C, self.windows, *given)
        x, b, c = (part.unflatten(0, (count, tokens)) for part in self._split(mixed.flatten(0, 1)))
        y = selective_state_update_tokens(
            self.states, *given, x, dt, self.A_H, b, c, self.D_H, self.dt_bias_H, self.spec.time_step_limit
        )
        return y.flatten(2)

    def scan(self, conv_in_TC: Tensor, dt_TH: Tensor, batch: Batch) -> Tensor:
        """Rows of several tokens, from the state in their slot or from zero; saves the requested checkpoints."""
        scan = batch.scan
        assert scan is not None
        rows = (scan.slots_R, scan.initial_R, scan.starts_R)
        kept = (scan.window_saves, scan.tables)
        mixed = causal_conv1d(conv_in_TC, self.conv_WC, self.conv_bias_C, self.windows, *rows, *kept)
        x, b, c = self._split(mixed)
        dt = discretise(dt_TH, self.dt_bias_H, self.spec.time_step_limit)
        given = (x, dt, self.A_H, b, c, self.D_H)
        y = chunk_scan(self.states, scan.slots_R, scan.initial_R, *given, scan.chunks, scan.state_saves, scan.tables)
        return y.reshape(x.shape[0], -1)

    def advance(self, batch_slots_R: Tensor, slots_R: Tensor, targets_R: Tensor, counts_R: Tensor, span: int) -> None:
        """Writes the state after the first `counts` inputs of each batch slot's ring to its target slot."""
        replay_advance(
            self.states, self.windows, self.ring, batch_slots_R, slots_R, targets_R, counts_R, self.terms, span
        )
