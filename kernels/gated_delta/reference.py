"""The gated delta rule on a pool of states: one or several tokens per row, prompts, and replayed inputs; the maths is
in README.md.

`R` rows, `T` tokens of a row, `L` tokens of a chunk or steps of a ring, `J` key heads, `H` value heads (a multiple of
J: value head h uses key head h // (H / J)), `K` width of a key head, `V` width of a value head, `C` = 2 J K + H V conv
channels, `S` slots, `W` taps, `Q` batch slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.causal_conv1d.reference import convolve_rows
from kernels.chunk_scan.plan import Chunk, listed_chunks
from kernels.exponentials import LOG2_E
from kernels.slots import SlotRun, round_states

if TYPE_CHECKING:
    from kernels.scan_tables import ScanTables

NORM_EPS = 1e-6
"""Added to the sum of squares of a query or a key under the root."""


@dataclass(frozen=True)
class DeltaTerms:
    """A layer's parameters of the recurrence, all float32."""

    conv_WC: Tensor
    A_H: Tensor
    dt_bias_H: Tensor
    key_heads: int
    key_dim: int
    beta_scale: float = 1.0

    def split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[..., C]` after the convolution -> queries, keys `[..., J, K]` and values `[..., H, V]`, views."""
        size, heads = self.key_heads * self.key_dim, self.A_H.shape[0]
        q, k, v = mixed.split([size, size, mixed.shape[-1] - 2 * size], -1)
        by_key_head = (self.key_heads, self.key_dim)
        return q.unflatten(-1, by_key_head), k.unflatten(-1, by_key_head), v.unflatten(-1, (heads, -1))


def delta_gates(b: Tensor, a: Tensor, A_H: Tensor, dt_bias_H: Tensor, beta_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(log decay, beta), `[..., H]` float32: `A softplus(a + dt_bias)` with A negative, and `beta_scale sigmoid(b)`."""
    return A_H * F.softplus(a.float() + dt_bias_H), torch.sigmoid(b.float()) * beta_scale


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _normed(q: Tensor, k: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Queries and keys `[..., J, K]` -> `[..., H, K]` of length 1; queries are then multiplied by `K ** -0.5`."""
    each = heads // q.shape[-2]
    q, k = _unit(q.float()) * q.shape[-1] ** -0.5, _unit(k.float())
    return (q, k) if each == 1 else (q.repeat_interleave(each, -2), k.repeat_interleave(each, -2))


def _step(h: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """One token: updates h `[..., H, K, V]` float32 in place; q, k `[..., H, K]` normalised. Returns `[..., H, V]`."""
    read = torch.matmul(torch.stack((k, q), -2), h)
    decay, beta = decay[..., None], beta[..., None]
    change = beta * (v - decay * read[..., 0, :])
    h.mul_(decay[..., None]).addcmul_(k[..., None], change[..., None, :])
    return decay * read[..., 1, :] + (k * q).sum(-1, keepdim=True) * change


def gated_delta_update(
    pool_SHKV: Tensor,
    slots_R: Tensor,
    q_RJK: Tensor,
    k_RJK: Tensor,
    v_RHV: Tensor,
    b_RH: Tensor,
    a_RH: Tensor,
    A_H: Tensor,
    dt_bias_H: Tensor,
    runs: Sequence[SlotRun] | None = None,
    beta_scale: float = 1.0,
) -> Tensor:
    """Advances the state of each row by one token and returns `[R, H, V]` float32.

    pool: `[S, H, K, V]`, any stride between slots, float32 or the dtype that states are rounded to. q, k, v: as the
    convolution outputs them (queries and keys are normalised here); b, a: raw, before sigmoid, bias and softplus;
    A (negative) and dt_bias: `[H]` float32; `beta_scale`: see `delta_gates`. `runs`: `SlotRun.of(slots)`, if the host
    knows it already. Rows with slot -1 access no slot; their output is that of a zero state. No slot may appear
    twice."""
    out = torch.empty(v_RHV.shape, dtype=torch.float32, device=v_RHV.device)
    q, k = _normed(q_RJK, k_RJK, v_RHV.shape[1])
    log_decay, beta = delta_gates(b_RH, a_RH, A_H, dt_bias_H, beta_scale)
    given = (q, k, v_RHV.float(), log_decay.exp(), beta)
    for run in runs if runs is not None else SlotRun.of(slots_R.tolist()):
        part = slice(run.begin, run.end)
        if run.slot < 0:
            h = torch.zeros(run.end - run.begin, *pool_SHKV.shape[1:], device=out.device)
        else:
            h = pool_SHKV[run.slots]
        new = h if h.dtype == torch.float32 else h.float()
        out[part] = _step(new, *(tensor[part] for tensor in given))
        if run.slot >= 0 and new is not h:
            h.copy_(new)
    return out


def gated_delta_tokens(
    pool_SHKV: Tensor,
    slots_RK: Tensor,
    accepted_R: Tensor,
    lengths_R: Tensor,
    q_RTJK: Tensor,
    k_RTJK: Tensor,
    v_RTHV: Tensor,
    b_RTH: Tensor,
    a_RTH: Tensor,
    A_H: Tensor,
    dt_bias_H: Tensor,
    beta_scale: float = 1.0,
) -> Tensor:
    """Advances each row by several tokens and stores a state after each; returns `[R, T, H, V]` float32.

    slots: `[R, N]`, N >= T. Row r starts from the state in `slots[r, accepted[r] - 1]`, which is read before anything
    is written, and stores the state after its token t in `slots[r, t]`, for t < `lengths[r]`. Tokens after a row's
    length, and rows of slot -1, write nothing; their output is finite. Other arguments as in `gated_delta_update`. No
    slot may appear twice.
    """
    tokens = v_RTHV.shape[1]
    read = slots_RK.gather(1, (accepted_R - 1)[:, None])[:, 0]
    h = torch.where((read >= 0)[:, None, None, None], pool_SHKV[read.clamp(min=0)].float(), 0.0)
    q, k = _normed(q_RTJK, k_RTJK, v_RTHV.shape[2])
    log_decay, beta = delta_gates(b_RTH, a_RTH, A_H, dt_bias_H, beta_scale)
    given = (q, k, v_RTHV.float(), log_decay.exp(), beta)
    out = torch.empty(v_RTHV.shape, dtype=torch.float32, device=v_RTHV.device)
    slots_RT = slots_RK[:, :tokens]
    kept_RT = (slots_RT >= 0) & (torch.arange(tokens, device=slots_RT.device) < lengths_R[:, None])
    for token in range(tokens):
        out[:, token] = _step(h, *(tensor[:, token] for tensor in given))
        round_states(h, pool_SHKV.dtype)
        kept = kept_RT[:, token]
        pool_SHKV[slots_RT[kept, token]] = h[kept].to(pool_SHKV.dtype)
    return out


def _advance(
    h: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Like `_chunk` for states stored in float32. For any other `dtype`, computes token by token and rounds the state
    to it after each. May overwrite h."""
    if dtype == torch.float32:
        return _chunk(h, q, k, v, log_decay, beta)
    out, decay = torch.empty(v.shape, device=v.device), log_decay.exp()
    for token in range(v.shape[-3]):
        given = q[..., token, :, :], k[..., token, :, :], v[..., token, :, :]
        out[..., token, :, :] = _step(h, *given, decay[..., token, :], beta[..., token, :])
        round_states(h, dtype)
    return out, h


def _chunk(h: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """A chunk of tokens: h `[..., H, K, V]`, q and k `[..., L, H, K]` normalised, v `[..., L, H, V]`, log decays and
    betas `[..., L, H]`. Returns (outputs `[..., L, H, V]`, the state after the chunk).
    """
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    sums, beta = (log_decay * LOG2_E).cumsum(-2).transpose(-1, -2), beta.transpose(-1, -2)[..., None]
    later = torch.ones(k.shape[-2], k.shape[-2], dtype=torch.bool, device=k.device).triu(1)
    # Masked before the power, which could overflow above the diagonal.
    ratio = (sums[..., :, None] - sums[..., None, :]).masked_fill_(later, float("-inf")).exp2_()
    into = sums.exp2()[..., None]
    system = torch.matmul(k * beta, k.transpose(-1, -2)).mul_(ratio)
    wanted = beta * (v - into * torch.matmul(k, h))
    change = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = torch.matmul(q * into, h) + torch.matmul(torch.matmul(q, k.transpose(-1, -2)).mul_(ratio), change)
    rest = (sums[..., -1:] - sums).exp2()[..., None]
    new = h * into[..., -1:, :] + torch.matmul((k * rest).transpose(-1, -2), change)
    return out.transpose(-2, -3), new


def gated_delta_scan(
    pool_SHKV: Tensor,
    slots_R: Tensor,
    has_initial_R: Tensor,
    q_TJK: Tensor,
    k_TJK: Tensor,
    v_THV: Tensor,
    log_decay_TH: Tensor,
    beta_TH: Tensor,
    chunks: Sequence[Chunk] | Tensor,
    saves: Sequence[tuple[int, int]] | Tensor = (),
    tables: ScanTables | None = None,
) -> Tensor:
    """Runs every row from its slot's state (or zeros) to its end and writes the final state to the slot.

    pool: `[S, H, K, V]`, float32 or the dtype that states are rounded to after every token; such tokens are computed
    one by one, not in chunks. q, k, v: as the convolution outputs them; log_decay, beta: from `delta_gates`. A row
    whose `has_initial` is False, or whose slot is -1, starts from zeros; with slot -1 the final state is not stored.
    `chunks`: those of all rows, in row order. `saves`: for each (index of a chunk, slot), the state after that chunk is
    also stored in that slot. Both may be buffers, `[chunks, 4]` as written by `chunk_table` and `[saves, 2]`, with -1
    in the first column for padding. `tables` has the same content for kernels and is not needed here. Returns
    `[T, H, V]` float32; zeros for tokens of no chunk (padding of a static batch).
    """
    if isinstance(chunks, Tensor):
        chunks = listed_chunks(chunks)
    if isinstance(saves, Tensor):
        saves = [(index, slot) for index, slot in saves.tolist() if index >= 0]
    slots, initial = slots_R.tolist(), has_initial_R.tolist()
    out = torch.zeros(v_THV.shape, dtype=torch.float32, device=v_THV.device)
    h = torch.zeros(pool_SHKV.shape[1:], device=v_THV.device)
    for index, chunk in enumerate(chunks):
        part, slot = slice(chunk.first, chunk.last), slots[chunk.row]
        if chunk.opens:
            h = pool_SHKV[slot].float() if initial[chunk.row] and slot >= 0 else torch.zeros_like(h)
        q, k = _normed(q_TJK[part], k_TJK[part], v_THV.shape[1])
        given = (q, k, v_THV[part].float(), log_decay_TH[part], beta_TH[part])
        out[part], h = _advance(h, *given, pool_SHKV.dtype)
        if slot >= 0 and (index + 1 == len(chunks) or chunks[index + 1].opens):
            pool_SHKV[slot] = h
        for _, target in (save for save in saves if save[0] == index):
            pool_SHKV[target] = h
    return out


def gated_delta_replay(
    states_SHKV: Tensor,
    windows_SWC: Tensor,
    rings_QLX: Tensor,
    batch_slots_R: Tensor,
    slots_R: Tensor,
    counts_R: Tensor,
    lengths_R: Tensor,
    inputs_RTX: Tensor,
    terms: DeltaTerms,
    span: int,
    runs: Sequence[SlotRun] | None = None,
) -> Tensor:
    """Output of each row's new tokens, `[R, T, H, V]` float32; states and windows are only read.

    rings: `[Q, L, X]`, X = C + 2 H: conv inputs, raw b and raw a of each step since the slot's state, by batch slot.
    The first `counts[r]` steps of batch slot `batch_slots[r]` are valid; the row's `lengths[r]` new inputs are written
    after them, and the caller sets the new count when it knows how many of them are accepted. `span`: at least the
    largest of counts + lengths, at most L. Outputs after a row's length, and those of rows with slot -1, are finite but
    meaningless; rows with slot -1 write nothing. `runs` is not needed here.
    """
    tokens = inputs_RTX.shape[1]
    steps = torch.arange(span, device=rings_QLX.device)
    ends_R, owners = counts_R + lengths_R, batch_slots_R.clamp(min=0)
    ring = rings_QLX[owners, :span]
    offset_RL = steps - counts_R[:, None]
    new_RL = (offset_RL >= 0) & (steps < ends_R[:, None]) & (slots_R >= 0)[:, None]
    taken = inputs_RTX.gather(1, offset_RL.clamp(0, tokens - 1)[:, :, None].expand(-1, -1, inputs_RTX.shape[2]))
    ring = torch.where(new_RL[:, :, None], taken.to(ring.dtype), ring)
    row_of, step_of = new_RL.nonzero(as_tuple=True)
    rings_QLX[owners[row_of], step_of] = ring[row_of, step_of]
    out, _ = _replayed(states_SHKV, windows_SWC, slots_R, ring, ends_R, terms)
    queries_RT = (counts_R[:, None] + torch.arange(tokens, device=steps.device)).clamp(max=span - 1)
    return out.gather(1, queries_RT[:, :, None, None].expand(-1, -1, *out.shape[2:]))


def gated_delta_advance(
    states_SHKV: Tensor,
    windows_SWC: Tensor,
    rings_QLX: Tensor,
    batch_slots_R: Tensor,
    slots_R: Tensor,
    targets_R: Tensor,
    counts_R: Tensor,
    terms: DeltaTerms,
    span: int,
) -> None:
    """Stores the state and the window after the first `counts[r]` steps of each row's ring in slot `targets[r]`.

    The target may be the slot itself. Rows with slot -1 write nothing. `span`: see `gated_delta_replay`.
    """
    keep, channels = windows_SWC.shape[1:]
    ring = rings_QLX[batch_slots_R.clamp(min=0), :span]
    _, state = _replayed(states_SHKV, windows_SWC, slots_R, ring, counts_R, terms)
    full = torch.cat((windows_SWC[slots_R.clamp(min=0)], ring[..., :channels].to(windows_SWC.dtype)), 1)
    last = counts_R[:, None] + torch.arange(keep, device=ring.device)
    moved = full.gather(1, last[:, :, None].expand(-1, -1, channels))
    kept = slots_R >= 0
    states_SHKV[targets_R[kept]] = state[kept].to(states_SHKV.dtype)
    windows_SWC[targets_R[kept]] = moved[kept]


def _replayed(
    states_SHKV: Tensor, windows_SWC: Tensor, slots_R: Tensor, ring_RLX: Tensor, ends_R: Tensor, terms: DeltaTerms
) -> tuple[Tensor, Tensor]:
    """Outputs `[R, L, H, V]` of a ring's first `ends[r]` steps, starting from each row's slot, and the states after
    them."""
    heads, known_R = terms.A_H.shape[0], (slots_R >= 0)[:, None, None]
    valid_RL1 = (torch.arange(ring_RLX.shape[1], device=ring_RLX.device) < ends_R[:, None])[:, :, None] & known_R
    ring_RLX = torch.where(valid_RL1, ring_RLX, ring_RLX.new_zeros(()))  # invalid steps may be NaN
    conv_in, b, a = ring_RLX.split([ring_RLX.shape[2] - 2 * heads, heads, heads], -1)
    window = torch.where(known_R, windows_SWC[slots_R.clamp(min=0)], windows_SWC.new_zeros(()))
    mixed = convolve_rows(torch.cat((window, conv_in.to(window.dtype)), 1), terms.conv_WC, None)
    q, k, v = terms.split(mixed)
    log_decay, beta = delta_gates(b, a, terms.A_H, terms.dt_bias_H, terms.beta_scale)
    state = torch.where(known_R[..., None], states_SHKV[slots_R.clamp(min=0)].float(), 0.0)
    # A step without decay and without change leaves the state unchanged.
    given = (*_normed(q, k, heads), v, log_decay * valid_RL1, beta * valid_RL1)
    return _advance(state, *given, states_SHKV.dtype)
