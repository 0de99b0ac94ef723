"""The four kinds of layers of `nemotron_h`. Each maps normalised rows `[T, d]` to what is added to the residual stream.

Letters: `T` tokens, `U` update rows, `D` hidden size, `H` Mamba heads, `P` head size, `G` groups, `N` state size, `C`
conv channels, `W` taps. Weights come by the names of the checkpoint, without the layer's prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from decoder.batch import Batch, VerifyTensors
from decoder.config import DecoderConfig, DecoderOptions
from kernels.causal_conv1d import causal_conv1d, causal_conv1d_tokens, causal_conv1d_update
from kernels.chunk_scan import chunk_scan
from kernels.dispatch import implementation
from kernels.gated_norm import gated_norm
from kernels.linear import Linear, Quantised, concatenate, quantise
from kernels.moe import Experts, route, run_experts
from kernels.paged_attention import decode_attention, extend_attention, write_kv
from kernels.selective_state_update import discretise, selective_state_update, selective_state_update_tokens
from kernels.state_replay import MambaTerms, replay_advance, replay_tokens

Weights = Mapping[str, Any]
"""Tensors by name; those of linear layers may be `Quantised`."""
Mixer = Callable[[Tensor, Batch], Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda x: F.relu(x).square(),
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def stored_linear(
    weight: Tensor | Quantised, bias: Tensor | None, options: DecoderOptions, *, owned: bool = False
) -> Linear:
    """A linear layer with its weights as the options, or the checkpoint, want them. `ValueError` where they differ.

    `owned`: the weight may be kept instead of copied.
    """
    if isinstance(weight, Quantised):
        if options.weights not in (None, weight.kind):
            raise ValueError(f"weights {options.weights} was asked for and the checkpoint holds {weight.kind}")
        weight = weight.to(options.device)
    elif options.weights is not None:
        weight = quantise(weight, options.weights).to(options.device)
    else:
        weight = weight.to(options.device, options.dtype)
    return Linear(weight, None if bias is None else bias.to(options.device, options.dtype), owned=owned)


def _linear(weights: Weights, name: str, options: DecoderOptions) -> Linear:
    return stored_linear(weights[f"{name}.weight"], weights.get(f"{name}.bias"), options)


def _float(weights: Weights, name: str, options: DecoderOptions) -> Tensor:
    return weights[name].to(device=options.device, dtype=torch.float32, copy=True)


class MambaMixer:
    """Mamba-2: projection, causal convolution, state update or scan, gated norm, projection."""

    def __init__(
        self,
        config: DecoderConfig,
        options: DecoderOptions,
        weights: Weights,
        windows_SWC: Tensor,
        states_SHPN: Tensor,
        ring_SLX: Tensor,
    ) -> None:
        self.config, self.windows, self.states, self.ring = config, windows_SWC, states_SHPN, ring_SLX
        self.in_proj = _linear(weights, "in_proj", options)
        self.out_proj = _linear(weights, "out_proj", options)
        self.conv_WC = _float(weights, "conv1d.weight", options)[:, 0].t().contiguous()
        self.conv_bias_C = _float(weights, "conv1d.bias", options) if config.use_conv_bias else None
        self.A_H = -torch.exp(_float(weights, "A_log", options))
        self.D_H = _float(weights, "D", options)
        self.dt_bias_H = _float(weights, "dt_bias", options)
        self.norm_weight = _float(weights, "norm.weight", options)
        self.sizes = [config.mamba_inner, config.conv_dim, config.mamba_num_heads]
        self.terms = MambaTerms(
            self.conv_WC, self.conv_bias_C, self.A_H, self.D_H, self.dt_bias_H, config.n_groups, config.ssm_state_size,
            config.time_step_limit,
        )  # fmt: skip

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        projected = self.in_proj(x_TD)
        gate, conv_in, dt = projected.split(self.sizes, dim=-1)
        updates, queries = batch.updates, batch.queries
        parts = []
        if updates:
            parts.append(self._update(conv_in[:updates], dt[:updates], batch))
        if batch.verify is not None:
            parts.append(self._verify(projected[updates:queries, self.sizes[0] :], batch.verify.tensors))
        if batch.scan is not None:
            parts.append(self._scan(conv_in[queries:], dt[queries:], batch))
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        config = self.config
        group = config.mamba_inner // config.n_groups
        return self.out_proj(gated_norm(y, gate, self.norm_weight, group, config.layer_norm_epsilon))

    def _split(self, mixed_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config, tokens = self.config, mixed_TC.shape[0]
        bc = config.n_groups * config.ssm_state_size
        x, b, c = mixed_TC.split([config.mamba_inner, bc, bc], dim=-1)
        shape = (tokens, config.n_groups, config.ssm_state_size)
        return x.view(tokens, config.mamba_num_heads, config.mamba_head_dim), b.view(shape), c.view(shape)

    def _update(self, conv_in_UC: Tensor, dt_UH: Tensor, batch: Batch) -> Tensor:
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
            self.config.time_step_limit,
            batch.slot_runs,
        )
        return y.reshape(x.shape[0], -1)

    def _verify(self, inputs_NX: Tensor, rows: VerifyTensors) -> Tensor:
        """Tokens that may be taken back: states are written for each of them, or inputs kept instead of states."""
        if not self.ring.numel():
            return rows.pack(self._verify_in_slots(rows.spread(inputs_NX), rows))
        slots = rows.slots_VT[:, 0]
        y = replay_tokens(
            self.states, self.windows, self.ring, rows.seats_V, slots, rows.accepted_V, rows.lengths_V,
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
            self.states, *given, x, dt, self.A_H, b, c, self.D_H, self.dt_bias_H, self.config.time_step_limit
        )
        return y.flatten(2)

    def advance(self, seats_R: Tensor, slots_R: Tensor, targets_R: Tensor, counts_R: Tensor, span: int) -> None:
        """Puts the states behind the first `counts` inputs of the seats' rings into the target slots."""
        replay_advance(self.states, self.windows, self.ring, seats_R, slots_R, targets_R, counts_R, self.terms, span)

    def _scan(self, conv_in_TC: Tensor, dt_TH: Tensor, batch: Batch) -> Tensor:
        scan = batch.scan
        assert scan is not None
        rows = (scan.slots_R, scan.initial_R, scan.starts_R)
        kept = (scan.window_saves, scan.tables)
        mixed = causal_conv1d(conv_in_TC, self.conv_WC, self.conv_bias_C, self.windows, *rows, *kept)
        x, b, c = self._split(mixed)
        dt = discretise(dt_TH, self.dt_bias_H, self.config.time_step_limit)
        given = (x, dt, self.A_H, b, c, self.D_H)
        y = chunk_scan(self.states, scan.slots_R, scan.initial_R, *given, scan.chunks, scan.state_saves, scan.tables)
        return y.reshape(x.shape[0], -1)


class AttentionMixer:
    """Grouped-query attention without positions over paged keys and values. q, k and v are one product."""

    def __init__(self, config: DecoderConfig, options: DecoderOptions, weights: Weights, kv_B2SKP: Tensor) -> None:
        self.heads, self.kv_heads, self.width = config.num_attention_heads, config.kv_heads, config.head_dim
        self.kv, self.scale = kv_B2SKP, config.head_dim**-0.5
        names = ("q_proj", "k_proj", "v_proj")
        bias = None
        if any(f"{name}.bias" in weights for name in names):
            zeros = {name: torch.zeros(weights[f"{name}.weight"].shape[0]) for name in names}
            bias = torch.cat([weights.get(f"{name}.bias", zeros[name]) for name in names])
        self.qkv = stored_linear(concatenate([weights[f"{name}.weight"] for name in names]), bias, options)
        self.o_proj = _linear(weights, "o_proj", options)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        tokens, queries, width = x_TD.shape[0], batch.queries, self.width
        qkv = self.qkv(x_TD).view(tokens, -1, width)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        outs, scan, places = [], batch.scan, batch.places_T
        # A verified row's tokens attend one by one, so that each finds the keys of those before it in the pages.
        together = batch.verify is not None
        if together:
            write_kv(self.kv, k, v, places)
        if queries:
            fresh = None if together else (k[:queries], v[:queries], places[:queries])
            rows = (batch.tables_QW, batch.lengths_Q)
            outs.append(decode_attention(q[:queries], self.kv, *rows, self.scale, batch.longest, fresh))
        if scan is not None:
            new = (q[queries:], k[queries:], v[queries:])
            known = (self.kv, scan.tables_RW, scan.computed_R, scan.starts_R)
            outs.append(extend_attention(*new, *known, self.scale, None if together else places[queries:]))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return self.o_proj(out.reshape(tokens, -1))


class MlpMixer:
    """Ungated MLP: `down(act(up(x)))`."""

    def __init__(self, config: DecoderConfig, options: DecoderOptions, weights: Weights) -> None:
        self.up, self.down = _linear(weights, "up_proj", options), _linear(weights, "down_proj", options)
        self.squared = config.mlp_hidden_act == "relu2"
        self.act = ACTIVATIONS[config.mlp_hidden_act]

    def __call__(self, x_TD: Tensor, batch: Batch | None = None) -> Tensor:
        return self.down(self.up.relu_squared(x_TD) if self.squared else self.act(self.up(x_TD)))


def _experts(
    config: DecoderConfig, options: DecoderOptions, weights: Weights
) -> SequenceOf[Callable[[Tensor], Tensor]]:
    """The experts as the implementation that will run wants them: each by itself, or stacked. `ValueError` for what the
    kernel does not have.
    """
    ups, downs = weights["experts.up_proj"], weights["experts.down_proj"]
    device = torch.device(options.device)
    if implementation(device.type)[0] == "reference":
        return [
            MlpMixer(config, options, {"up_proj.weight": ups[e], "down_proj.weight": downs[e]})
            for e in range(config.n_routed_experts)
        ]
    if config.mlp_hidden_act != "relu2":
        raise ValueError(f"experts run with relu2 alone on {device.type}, and the model has {config.mlp_hidden_act}")
    if options.weights is not None or isinstance(ups, Quantised) or isinstance(downs, Quantised):
        raise ValueError(
            f"quantised experts run on a CPU alone, and the device is {device.type}: leave `weights` unset"
        )
    return Experts(ups.to(device, options.dtype), downs.to(device, options.dtype))


class ExpertsMixer:
    """Mixture of ungated MLPs, in a latent space where the model has one, and one expert that every token takes."""

    def __init__(self, config: DecoderConfig, options: DecoderOptions, weights: Weights) -> None:
        self.config = config
        self.gate_ED = _float(weights, "gate.weight", options)
        self.correction_E = _float(weights, "gate.e_score_correction_bias", options)
        self.experts = _experts(config, options, weights)
        prefix = "shared_experts."
        shared = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        self.shared = MlpMixer(config, options, shared)
        latent = config.moe_latent_size is not None
        self.enter = _linear(weights, "fc1_latent_proj", options) if latent else None
        self.leave = _linear(weights, "fc2_latent_proj", options) if latent else None

    def __call__(self, x_TD: Tensor, batch: Batch | None = None) -> Tensor:
        config = self.config
        experts, weights = route(
            x_TD,
            self.gate_ED,
            self.correction_E,
            config.num_experts_per_tok,
            config.n_group,
            config.topk_group,
            config.norm_topk_prob,
            config.routed_scaling_factor,
        )
        inner = x_TD if self.enter is None else self.enter(x_TD)
        routed = run_experts(inner, experts, weights, self.experts)
        if self.leave is not None:
            routed = self.leave(routed)
        return routed + self.shared(x_TD)
