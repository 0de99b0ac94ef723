"""From logits and one uniform number per row to a token; the maths is in README.md.

`R` rows, `V` tokens of the vocabulary. A row's result depends on that row only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.sample.philox import uniforms
from kernels.sample.rows import Masks, RowParams

BLOCK = 256
FIRST_CANDIDATES = 64
CACHED_ROWS = 8
"""Rows of which intermediate results stay in a CPU's cache."""


def greedy(logits_RV: Tensor) -> Tensor:
    """`[R]` int64: the id of the largest logit, the lowest among equals.

    A large vocabulary is searched in two levels, because `amax` is vectorised and `argmax` is not (in bfloat16 it is 10
    times slower).
    """
    rows, vocab = logits_RV.shape
    if vocab <= 8 * BLOCK:
        return logits_RV.argmax(-1)
    if vocab % BLOCK:
        logits_RV = torch.nn.functional.pad(logits_RV, (0, -vocab % BLOCK), value=float("-inf"))
    blocks = logits_RV.view(rows, -1, BLOCK)
    block = blocks.amax(-1).argmax(-1)
    inside = blocks.gather(1, block[:, None, None].expand(rows, 1, BLOCK))[:, 0]
    return block * BLOCK + inside.argmax(-1)


def penalise(
    logits_RV: Tensor,
    in_context_RV: Tensor,
    output_counts_RV: Tensor,
    repetition_R: Tensor,
    presence_R: Tensor,
    frequency_R: Tensor,
) -> None:
    """Applies repetition (prompt and output), frequency and presence penalties (output), in place on float32 logits."""
    factor = repetition_R[:, None].expand_as(logits_RV)
    scaled = torch.where(logits_RV > 0, logits_RV / factor, logits_RV * factor)
    logits_RV.copy_(torch.where(in_context_RV, scaled, logits_RV))
    logits_RV.sub_(output_counts_RV * frequency_R[:, None]).sub_((output_counts_RV > 0) * presence_R[:, None])


def keep_allowed(logits_RV: Tensor, masks: Masks) -> Tensor:
    """A copy of the logits that is -inf where a row's mask has no bit."""
    rows = (masks.index_R >= 0).nonzero()[:, 0]
    bits = torch.arange(32, dtype=torch.int32, device=logits_RV.device)
    words = masks.words_GW.index_select(0, masks.index_R[rows])
    forbidden = ((words[:, :, None] >> bits) & 1).flatten(1)[:, : logits_RV.shape[1]] == 0
    out = logits_RV.clone()
    out[rows] = logits_RV[rows].masked_fill(forbidden, float("-inf"))
    return out


def draw(logits_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Draws by inverting the cumulative softmax over ids in order: `[R]` int64. logits: float32; uniform: float64 in
    (0, 1)."""
    rows, vocab = logits_RV.shape
    weights = torch.exp(logits_RV - logits_RV.amax(-1, keepdim=True))
    blocks = -(-vocab // BLOCK)
    padded = torch.nn.functional.pad(weights, (0, blocks * BLOCK - vocab)).view(rows, blocks, BLOCK)
    ends = padded.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniform_R[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=blocks - 1)
    begin = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), torch.zeros((), dtype=ends.dtype))
    inside = padded.gather(1, block[:, :, None].expand(rows, 1, BLOCK))[:, 0].double()
    token = torch.searchsorted(inside.cumsum(-1) + begin, target, right=True).clamp_(max=BLOCK - 1)
    return _last_possible(inside, token)[:, 0] + block[:, 0] * BLOCK


def _last_possible(weights_RN: Tensor, place_R1: Tensor) -> Tensor:
    """`place`, or if rounding has selected a token of probability 0, the nearest possible one before it."""
    if bool((weights_RN.gather(1, place_R1) > 0).all()):
        return place_R1
    places = torch.arange(weights_RN.shape[1], device=weights_RN.device).expand_as(weights_RN)
    before = (weights_RN > 0) & (places <= place_R1)
    return torch.where(before, places, torch.full_like(places, -1)).amax(-1, keepdim=True).clamp_(min=0)


def draw_filtered(logits_RV: Tensor, uniform_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Draws a token after filtering, `[R]` int64.

    Tokens are ordered by falling logit, equal ones by rising id. Each filter keeps a prefix of that order, so together
    they keep the shortest of these prefixes. `top_k` (0 = off) comes first; `top_p` (1 = off) is a share of the mass
    that `top_k` keeps, `min_p` (0 = off) a share of the likeliest token's probability. The draw inverts the cumulative
    probability in that order.
    """
    rows, vocab = logits_RV.shape
    total = torch.exp(logits_RV - logits_RV.amax(-1, keepdim=True)).sum(-1, dtype=torch.float64)
    out = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    todo = torch.arange(rows, device=logits_RV.device)
    width = min(vocab, FIRST_CANDIDATES)
    while True:
        part = logits_RV[todo]
        values, ids = _ordered(part, width)
        weights = torch.exp((values - values[:, :1]).double())
        kept, certain = _kept(weights, total[todo], top_k_R[todo], top_p_R[todo], min_p_R[todo], vocab)
        sums = weights.cumsum(-1)
        target = uniform_R[todo, None] * sums.gather(1, kept[:, None] - 1)
        place = torch.searchsorted(sums, target, right=True)[:, 0].minimum(kept - 1)
        out[todo] = ids.gather(1, place[:, None])[:, 0]
        if width == vocab:  # all tokens; also if rounding keeps the sums below top_p
            return out
        # If several tokens are equal to the last candidate, topk may have omitted those with lower ids.
        certain &= (kept < width) & (values.gather(1, kept[:, None] - 1)[:, 0] > values[:, -1])
        if bool(certain.all()):
            return out
        todo, width = todo[~certain], min(vocab, width * 16)


def _ordered(logits_RV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Values and ids of the `width` largest logits of each row, by falling value, equal ones by rising id."""
    if width == logits_RV.shape[1]:
        values, ids = logits_RV.sort(dim=-1, descending=True, stable=True)
        return values, ids
    return _by_value(logits_RV, logits_RV.topk(width, dim=-1)[1])


def _by_value(logits_RV: Tensor, ids_RN: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and ids of these tokens of each row, by falling value, equal ones by rising id."""
    ids_RN = ids_RN.sort(-1)[0]
    values, order = logits_RV.gather(1, ids_RN).sort(dim=-1, descending=True, stable=True)
    return values, ids_RN.gather(1, order)


def _kept(
    weights_RN: Tensor, total_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, vocab: int
) -> tuple[Tensor, Tensor]:
    """Number of the ordered tokens that each row keeps (at least 1), and whether the candidates determine it."""
    width = weights_RN.shape[1]
    sums = weights_RN.cumsum(-1)
    top_k = torch.where(top_k_R == 0, vocab, top_k_R).clamp(max=vocab)
    inside = top_k <= width
    within = sums.gather(1, top_k.clamp(max=width)[:, None] - 1)[:, 0]
    mass = torch.where(top_k >= vocab, total_R, within)
    reached = (sums < (top_p_R * mass)[:, None]).sum(-1) + 1
    by_p = torch.where(top_p_R < 1.0, reached, vocab)
    by_min = torch.where(min_p_R > 0.0, (weights_RN >= min_p_R[:, None]).sum(-1), vocab)
    # If top-k keeps more tokens than there are candidates, the mass that top-p is a share of is unknown.
    known_p = (top_p_R < 1.0) & (reached <= width) & (inside | (top_k >= vocab))
    known_min = (min_p_R > 0.0) & (by_min < width)
    known = torch.where(top_p_R < 1.0, known_p, inside | known_min)
    kept = torch.minimum(torch.minimum(top_k, by_p), by_min).clamp(1, width)
    return kept, known


def logprobs(logits_RV: Tensor, tokens_R: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probabilities of `tokens` `[R]`, ids of the `count` likeliest tokens `[R, count]`, their log-probabilities),
    from the softmax of float32 logits. The lowest ids are taken among equals. `count` is limited to the vocabulary."""
    norm = _log_sum_exp(logits_RV)
    chosen = (logits_RV.gather(1, tokens_R[:, None]) - norm)[:, 0]
    if count == 0:
        empty = logits_RV.new_zeros(logits_RV.shape[0], 0)
        return chosen, empty.long(), empty
    values, ids = _likeliest(logits_RV, min(count, logits_RV.shape[1]))
    return chosen, ids, values - norm


def _log_sum_exp(logits_RV: Tensor) -> Tensor:
    """`[R, 1]`. On a CPU a few rows at a time: 64 rows of 150,000 numbers together take more than twice as long."""
    if logits_RV.device.type != "cpu" or logits_RV.shape[0] <= CACHED_ROWS:
        return torch.logsumexp(logits_RV, -1, keepdim=True)
    parts = logits_RV.tensor_split(-(-logits_RV.shape[0] // CACHED_ROWS))
    return torch.cat([torch.logsumexp(part, -1, keepdim=True) for part in parts])


def _likeliest(logits_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Like `_ordered`, also if logits outside are equal to the last one, of which `topk` may select any. Does not wait
    for a device."""
    ends = logits_RV.topk(min(count + 1, logits_RV.shape[1]), dim=-1)[0][:, count - 1 :]
    last = ends[:, :1]
    if logits_RV.device.type == "cpu" and not bool((ends[:, 1:] == last).any()):  # half of the time of what follows
        return _ordered(logits_RV, count)
    above, equal = logits_RV > last, logits_RV == last
    kept = above | equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True))
    return _by_value(logits_RV, kept.byte().topk(count, dim=-1)[1])


def sample(logits_RV: Tensor, params: RowParams) -> Tensor:
    """Draws a token per row, `[R]` int64: applies the row's mask, temperature and filters, then draws.

    A row's result depends on its own logits and parameters only.
    """
    logits = logits_RV.float()
    if params.masks is not None:
        logits = keep_allowed(logits, params.masks)
    out = greedy(logits)
    drawn = params.temperature_R > 0
    filtered = drawn & ((params.top_k_R > 0) | (params.top_p_R < 1) | (params.min_p_R > 0))
    for kind in (drawn & ~filtered, filtered):
        rows = kind.nonzero()[:, 0]
        if not rows.numel():
            continue
        scaled = logits[rows] / params.temperature_R[rows, None]
        random = uniforms(params.seeds_R[rows], params.samples_R[rows], params.positions_R[rows])
        if kind is filtered:
            filters = (params.top_k_R[rows], params.top_p_R[rows], params.min_p_R[rows])
            out[rows] = draw_filtered(scaled, random, *filters)
        else:
            out[rows] = draw(scaled, random)
    return out


def accept_drafts(tokens_RT: Tensor, drafts_RK: Tensor, counts_R: Tensor) -> Tensor:
    """Number of accepted drafts per row, `[R]` int64: those before the first that differs from the token drawn there.

    tokens: `[R, K + 1]`, drawn at each position; drafts: `[R, K]`, of which row r has `counts[r]`.
    """
    places = torch.arange(drafts_RK.shape[1], device=drafts_RK.device)
    same = (tokens_RT[:, : drafts_RK.shape[1]] == drafts_RK) & (places < counts_R[:, None])
    return same.long().cumprod(-1).sum(-1)
