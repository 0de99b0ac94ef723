"""Faster replacements for three of `transformers`' reference functions, for training the demo model on a CPU.

Each computes the same sums; `install` activates them for the whole process. Letters in names: B sequences, L
tokens, D channels, W filter taps, H heads, P head width, G groups, N state, C chunks, Q tokens per chunk, K experts per
token.
"""

from typing import Any

import torch
import torch.nn.functional as F
import transformers.models.nemotron_h.modeling_nemotron_h as nemotron_h


def install() -> None:
    """Replaces `transformers`' functions with those below."""
    nemotron_h.mamba2_chunk_scan = chunk_scan
    nemotron_h.causal_conv1d_fn = causal_conv
    nemotron_h.NemotronHExperts.forward = experts  # type: ignore[method-assign]


def chunk_scan(
    x_BLHP: torch.Tensor,
    dt_BLH: torch.Tensor,
    A_H: torch.Tensor,
    B_BLGN: torch.Tensor,
    C_BLGN: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    **kwargs: Any,
) -> torch.Tensor:
    """`transformers`' `mamba2_chunk_scan` for whole sequences, several times as fast on a CPU. Returns `[B, L, H, P]`.

    The same sums (Mamba-2, arXiv 2405.21060, section 6) over short chunks, with scores shared by the heads of a group.
    """
    del chunk_size, kwargs
    Q = 32
    batch, length, heads, _ = x_BLHP.shape
    groups = B_BLGN.shape[2]
    chunks = -(-length // Q)

    def chunked(tensor: torch.Tensor) -> torch.Tensor:
        """`[B, L, K, X]` -> `[B, K, C, Q, X]`, padded with zeros."""
        padded = F.pad(tensor, (0, 0, 0, 0, 0, chunks * Q - length))
        return padded.view(batch, chunks, Q, *tensor.shape[2:]).permute(0, 3, 1, 2, 4)

    dt_BLH = F.softplus(dt_BLH.float() + dt_bias)
    u_BHCQP = chunked(x_BLHP * dt_BLH[..., None].to(x_BLHP.dtype))
    decay_BHCQ = chunked((dt_BLH * A_H)[..., None])[..., 0].cumsum(-1)
    k_BGCQN, q_BGCQN = chunked(B_BLGN), chunked(C_BLGN)
    causal = torch.ones(Q, Q, dtype=torch.bool).tril()
    difference = (decay_BHCQ[..., :, None] - decay_BHCQ[..., None, :]).masked_fill(~causal, -torch.inf)
    scores_BGCQQ = q_BGCQN @ k_BGCQN.transpose(-1, -2)

    def per_head(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat_interleave(heads // groups, dim=1)

    weights = per_head(scores_BGCQQ) * difference.exp().to(scores_BGCQQ.dtype)
    y_BHCQP = weights @ u_BHCQP
    if chunks > 1:
        to_end = (decay_BHCQ[..., -1:] - decay_BHCQ).exp()[..., None].to(u_BHCQP.dtype)
        states = (per_head(k_BGCQN).transpose(-1, -2) @ (u_BHCQP * to_end)).float()  # [B, H, C, N, P]
        through = decay_BHCQ[..., -1].exp()[..., None, None]
        state, starts = torch.zeros_like(states[:, :, 0]), []
        for chunk in range(chunks):
            starts.append(state)
            state = state * through[:, :, chunk] + states[:, :, chunk]
        carried = per_head(q_BGCQN) @ torch.stack(starts, dim=2).to(q_BGCQN.dtype)
        y_BHCQP = y_BHCQP + carried * decay_BHCQ.exp()[..., None].to(carried.dtype)
    y_BLHP = y_BHCQP.permute(0, 2, 3, 1, 4).reshape(batch, chunks * Q, heads, -1)[:, :length]
    return y_BLHP + x_BLHP * D[:, None].to(x_BLHP.dtype)


class _CausalConv(torch.autograd.Function):
    """A depthwise causal convolution over `[B, L, D]` with taps `[D, W]`, one multiply-add per tap and direction."""

    @staticmethod
    def forward(ctx: Any, x_BLD: torch.Tensor, taps_DW: torch.Tensor, bias_D: torch.Tensor) -> torch.Tensor:
        length, width = x_BLD.shape[1], taps_DW.shape[1]
        padded = F.pad(x_BLD, (0, 0, width - 1, 0))
        taps_DW = taps_DW.to(x_BLD.dtype)
        out = torch.addcmul(bias_D.to(x_BLD.dtype), padded[:, :length], taps_DW[:, 0])
        for tap in range(1, width):
            out.addcmul_(padded[:, tap : tap + length], taps_DW[:, tap])
        ctx.save_for_backward(padded, taps_DW)
        return out

    @staticmethod
    def backward(ctx: Any, grad_BLD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        padded, taps_DW = ctx.saved_tensors
        length, width = grad_BLD.shape[1], taps_DW.shape[1]
        grad_x = grad_BLD * taps_DW[:, -1]
        for tap in range(width - 1):
            shift = width - 1 - tap
            grad_x[:, : length - shift].addcmul_(grad_BLD[:, shift:], taps_DW[:, tap])
        windows = (padded[:, tap : tap + length] for tap in range(width))
        grad_taps = torch.stack([(window * grad_BLD).sum((0, 1), dtype=torch.float32) for window in windows], -1)
        return grad_x, grad_taps, grad_BLD.sum((0, 1), dtype=torch.float32)


def causal_conv(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str, **_: Any
) -> torch.Tensor:
    """`transformers`' `causal_conv1d_fn` with SiLU: `[B, D, L]` to `[B, D, L]`, fastest where D is contiguous."""
    assert activation == "silu"
    return F.silu(_CausalConv.apply(hidden_states.transpose(1, 2), weight, bias)).transpose(1, 2)


def experts(
    self: nemotron_h.NemotronHExperts,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """`NemotronHExperts.forward`: `[tokens, hidden]` sorted by expert; indices and weights are `[tokens, K]`."""
    choice = top_k_index.flatten()
    order = choice.argsort()
    token = order // top_k_index.shape[1]
    counts = torch.bincount(choice, minlength=self.num_experts).tolist()
    chunks = hidden_states[token].split(counts)
    outputs = [
        F.linear(self.act_fn(F.linear(chunk, up)), down)
        for chunk, up, down in zip(chunks, self.up_proj, self.down_proj, strict=True)
    ]
    rows = torch.cat(outputs) * top_k_weights.flatten()[order, None]
    return torch.zeros_like(hidden_states, dtype=rows.dtype).index_add_(0, token, rows).to(hidden_states.dtype)
