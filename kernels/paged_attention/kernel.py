"""Attention over pages in Triton: decode, extend, prefill and speculative rows by one kernel; see README.md.

`T` tokens, `R` rows, `Q` query heads, `K` key/value heads, `P` head size, `B` pages, `S` tokens of a page, `W` table
width, `G` query heads of a key/value head, `L` splits. A program's block is M = (tokens x G) queries of one key/value
head against N keys at a time.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.exponentials import LOG2_E
from kernels.launch import ARCHITECTURES, by_architecture, launch
from kernels.paged_attention.attend_kernel import attend, merge
from kernels.paged_attention.write_kernel import write_kv
from kernels.tiles import AttentionTile as Tile

__all__ = ["decode_attention", "decode_attention_after", "extend_attention", "write_kv"]

MAX_SPLITS = 32
SPLIT_KEYS = 512
"""With at most `SPLIT_TOKENS` query tokens, a row's keys are divided into splits of at least this many keys. A row's
splits depend only on its length."""
SPLIT_TOKENS = 256
"""With more query tokens, the blocks of queries keep a GPU busy without splits, whose partial sums would take memory.
"""


# By architecture, then by the queries of a row (tokens x G): at most 16, at most 64, more. Chosen so that nothing
# spills: TILES for head sizes up to 128, TILES_WIDE for larger ones (256).
TILES = {
    "sm_80": (Tile(16, 64, 4, 3), Tile(64, 32, 8, 3), Tile(64, 64, 8, 3)),
    "sm_86": (Tile(16, 64, 4, 3), Tile(64, 32, 8, 3), Tile(64, 64, 8, 3)),
    "sm_90": (Tile(16, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    "sm_100": (Tile(16, 64, 4, 3), Tile(64, 64, 8, 3), Tile(128, 64, 8, 3)),
    "gfx942": (Tile(16, 32, 4, 1), Tile(64, 32, 4, 1), Tile(128, 32, 8, 1)),
}
TILES_WIDE = {
    "sm_80": (Tile(16, 64, 4, 3), Tile(64, 32, 8, 2), Tile(64, 64, 8, 2)),
    "sm_86": (Tile(16, 32, 4, 3), Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    "sm_90": (Tile(16, 64, 4, 3), Tile(64, 32, 8, 3), Tile(128, 32, 8, 3)),
    "sm_100": (Tile(16, 64, 4, 3), Tile(64, 32, 8, 3), Tile(128, 32, 8, 3)),
    "gfx942": (Tile(16, 32, 4, 1), Tile(64, 32, 4, 1), Tile(128, 32, 8, 1)),
}
WIDE = 128
"""The widest head of `TILES`."""
WINDOW_KEYS = 32
"""Keys at a time for 16 queries of several tokens with a window; 64 spill on sm_90 and sm_100."""
DEEP: dict[str, set[str]] = {
    "sm_80": {"decode", "narrow"}, "sm_86": {"decode", "float32"}, "sm_90": {"narrow", "wide"}, "sm_100": {"narrow"},
    "gfx942": set(),
}  # fmt: skip
"""Programs whose loops over pages have more stages than other loops: those that decode, those of rows in float32, and
those of heads up to `WIDE` or wider. Triton divides the stages of these loops among loads of page numbers and of keys
and values; with as many as elsewhere, nothing is loaded ahead. Other programs would spill."""
TILES_FLOAT32 = dict.fromkeys(ARCHITECTURES, (Tile(16, 16, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))) | {
    "sm_86": (Tile(16, 16, 4, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
    "sm_90": (Tile(16, 16, 4, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
    "sm_100": (Tile(16, 16, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
}


def decode_attention(
    q_RQP: Tensor,
    pool_B2SKP: Tensor,
    tables_RW: Tensor,
    lengths_R: Tensor,
    scale: float,
    longest: int,
    fresh: tuple[Tensor, Tensor, Tensor] | None = None,
    window: int | None = None,
) -> Tensor:
    """Like the reference. No host sync; `longest`, an upper bound, only determines the grid of splits."""
    k, v, places = fresh or (q_RQP, q_RQP, None)
    given = (q_RQP, k, v, pool_B2SKP, tables_RW, lengths_R, None, places, scale, longest)
    return _launch(*given, decode=True, fresh=bool(fresh), window=window)


def decode_attention_after(
    q_RQP: Tensor, pool_B2SKP: Tensor, tables_RW: Tensor, lengths_R: Tensor, first: int, scale: float, longest: int,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Like the reference. No host sync."""
    given = (q_RQP, q_RQP, q_RQP, pool_B2SKP, tables_RW, lengths_R, None, None, scale, longest)
    return _launch(*given, decode=True, fresh=False, skip=first, window=window)


def extend_attention(
    q_TQP: Tensor,
    k_TKP: Tensor,
    v_TKP: Tensor,
    pool_B2SKP: Tensor,
    tables_RW: Tensor,
    computed_R: Tensor,
    starts_R: Tensor,
    scale: float,
    places_T: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Like the reference. No host sync: the rows' lengths are read on the device. New keys are read from `k` and `v`,
    never from the pages, which the same launch may be writing."""
    longest = tables_RW.shape[1] * pool_B2SKP.shape[2] + k_TKP.shape[0]
    given = (q_TQP, k_TKP, v_TKP, pool_B2SKP, tables_RW, computed_R, starts_R, places_T, scale, longest)
    return _launch(*given, decode=False, window=window)


def tile(dtype: torch.dtype, device: torch.device, queries: int, width: int) -> Tile:
    """The configuration for rows of about `queries` queries (tokens x G) with heads of this width."""
    table = TILES_FLOAT32 if dtype == torch.float32 else TILES if width <= WIDE else TILES_WIDE
    few, some, many = by_architecture(table, device)
    return few if queries <= 16 else some if queries <= 64 else many


def paged_stages(chosen: Tile, q_TQP: Tensor, decode: bool) -> int:
    """Stages of the loops over pages."""
    kinds = {"narrow" if q_TQP.shape[2] <= WIDE else "wide", str(q_TQP.dtype).removeprefix("torch.")}
    kinds |= {"decode"} if decode else set()
    return 2 * chosen.stages - 1 if kinds & by_architecture(DEEP, q_TQP.device) else chosen.stages


def splits(tokens: int, longest: int) -> int:
    """Largest number of splits of a row's keys: a power of two up to `MAX_SPLITS`."""
    if tokens > SPLIT_TOKENS:
        return 1
    return min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(max(longest, 1), SPLIT_KEYS)))


def _launch(
    q_TQP: Tensor,
    k_TKP: Tensor,
    v_TKP: Tensor,
    pool_B2SKP: Tensor,
    tables_RW: Tensor,
    lengths_R: Tensor,
    starts_R: Tensor | None,
    places_T: Tensor | None,
    scale: float,
    longest: int,
    *,
    decode: bool,
    fresh: bool = True,
    skip: int = 0,
    window: int | None = None,
) -> Tensor:
    """Launches `attend`, and `merge` if there are splits. Returns `[T, Q, P]` in the dtype of `q`."""
    tokens, heads, width = q_TQP.shape
    out_TQP = torch.empty(tokens, heads, width, dtype=q_TQP.dtype, device=q_TQP.device)
    rows = lengths_R.shape[0]
    assert q_TQP.stride(-1) == k_TKP.stride(-1) == v_TKP.stride(-1) == pool_B2SKP.stride(-1) == 1
    kv_heads = pool_B2SKP.shape[3]
    group = heads // kv_heads
    per_row = 1 if decode else triton.cdiv(tokens, max(rows, 1))
    chosen = tile(q_TQP.dtype, q_TQP.device, group * per_row, width)
    block_m = max(chosen.queries, triton.next_power_of_2(group))
    per_block = block_m // group
    if window is not None and not decode and chosen.queries == 16:
        chosen = chosen._replace(keys=min(chosen.keys, WINDOW_KEYS))
    if window is not None:  # the keys of a program: those of its tokens' windows, and the rest of two blocks
        longest = min(longest, window + per_block + 2 * chosen.keys)
    parts = splits(tokens, longest)
    part = lse = out_TQP
    if parts > 1:
        part = torch.empty(parts, tokens, heads, width, dtype=torch.float32, device=q_TQP.device)
        lse = torch.empty(parts, tokens, heads, dtype=torch.float32, device=q_TQP.device)
    blocks = tokens if decode else tokens // per_block + rows + 1
    launch(
        attend,
        (blocks, kv_heads, parts),
        p_q=q_TQP,
        p_k=k_TKP,
        p_v=v_TKP,
        p_pool=pool_B2SKP,
        p_tables=tables_RW,
        p_lengths=lengths_R,
        p_starts=lengths_R if starts_R is None else starts_R,
        p_places=lengths_R if places_T is None else places_T,
        p_out=out_TQP,
        p_part=part,
        p_lse=lse,
        rows=rows,
        tokens=tokens,
        skip=skip,
        scale=scale * LOG2_E,  # the softmax is one of powers of 2
        **_strides(q_TQP, k_TKP, v_TKP, pool_B2SKP, tables_RW, out_TQP),
        HEADS=heads,
        SIZE=pool_B2SKP.shape[2],
        P=width,
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_N=chosen.keys,
        BLOCK_P=_block_p(width),
        BLOCK_W=triton.next_power_of_2(per_block),
        SPLITS=parts,
        SPLIT=SPLIT_KEYS,
        DECODE=decode,
        FRESH=fresh,
        WRITE=places_T is not None,
        SKIPS=skip > 0,
        PAGED_STAGES=paged_stages(chosen, q_TQP, decode),
        WINDOW=window or 0,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )
    if parts > 1:
        _merge(part, lse, out_TQP)
    return out_TQP


def _strides(
    q_TQP: Tensor, k_TKP: Tensor, v_TKP: Tensor, pool_B2SKP: Tensor, tables_RW: Tensor, out_TQP: Tensor
) -> dict[str, int]:
    """Arguments of `attend`, in elements."""
    return {
        "q_token": q_TQP.stride(0),
        "q_head": q_TQP.stride(1),
        "k_token": k_TKP.stride(0),
        "k_head": k_TKP.stride(1),
        "v_token": v_TKP.stride(0),
        "v_head": v_TKP.stride(1),
        "pool_page": pool_B2SKP.stride(0),
        "pool_side": pool_B2SKP.stride(1),
        "pool_place": pool_B2SKP.stride(2),
        "pool_head": pool_B2SKP.stride(3),
        "table_row": tables_RW.stride(0),
        "out_token": out_TQP.stride(0),
        "out_head": out_TQP.stride(1),
    }


def _merge(part_LTQP: Tensor, lse_LTQ: Tensor, out_TQP: Tensor) -> None:
    """Writes the splits' attention, weighted with their totals (base 2), to `out`."""
    parts, tokens, heads, width = part_LTQP.shape
    launch(
        merge,
        (tokens, heads),
        p_part=part_LTQP,
        p_lse=lse_LTQ,
        p_out=out_TQP,
        tokens=tokens,
        out_token=out_TQP.stride(0),
        out_head=out_TQP.stride(1),
        HEADS=heads,
        P=width,
        BLOCK_P=_block_p(width),
        SPLITS=parts,
        BLOCK_L=parts,
        num_warps=4,
    )


def _block_p(width: int) -> int:
    """The numbers of a head that a program reads."""
    return max(triton.next_power_of_2(width), 16)
