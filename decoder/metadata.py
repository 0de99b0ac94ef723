"""Rules for the padded rows of a step. Pure policy.

Rows beyond the requests of a step are padding: state index -1, accepted 1, length 0, never a prefill. They are counted
in requests, never in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

STATE_MODES = ("none", "align", "all", "auto")


def prefilling_rows(computed: Sequence[int], prompt: Sequence[int], num_reqs: int) -> list[bool]:
    """Which of the padded rows are still prefilling. Rows from `num_reqs` on, which may have values of an earlier step,
    are False. Raises `ValueError` for lists of different lengths, or more requests than rows."""
    if len(computed) != len(prompt):
        raise ValueError(f"computed has {len(computed)} rows, prompt has {len(prompt)}")
    if not 0 <= num_reqs <= len(computed):
        raise ValueError(f"num_reqs {num_reqs} is not between 0 and the {len(computed)} rows")
    return [row < num_reqs and done < total for row, (done, total) in enumerate(zip(computed, prompt, strict=True))]


def split_rows(prefilling: Sequence[bool], computed: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """(decodes, prefills) of padded rows in the scheduler's order, decodes first; padded rows have length 0.

    A prompt's last token after a state is a decode: the maths is the same. A first chunk of one token is not: as a
    decode it would continue from the slot's previous content.
    """
    if not len(prefilling) == len(computed) == len(lengths):
        raise ValueError(f"{len(prefilling)} flags, {len(computed)} positions and {len(lengths)} lengths differ")
    decodes = 0
    for prefills, done, length in zip(prefilling, computed, lengths, strict=True):
        if length > 1 or (prefills and (length == 0 or done == 0)):
            break
        decodes += 1
    return decodes, len(lengths) - decodes


def chunk_end(start: int, total: int, budget: int, ready: int, align: int = 1) -> int:
    """End of a row that begins at `start`; `start` for a row that cannot advance.

    Alignment comes first: a chunk that does not reach `total` ends on a multiple of `align`, unless it would then be
    empty. After that it is cut at `ready`, the first row without an embedding. In the other order, a chunk that is cut
    before an image and then aligned could be empty forever, while the sequence holds memory that the image waits for.
    """
    end = min(total, start + budget)
    if end < total and end // align * align > start:
        end = end // align * align
    return max(start, min(end, ready))


def state_table_width(max_len: int, state_block: int, num_speculative: int, mode: str) -> int:
    """Columns of the table of state indices, one row for each request.

    `all` keeps one state for each block of the longest sequence; the last scheduled token of `max_len` is in block
    (max_len - 1) // state_block, and a window anchored there reaches `num_speculative` columns on.
    """
    if mode not in STATE_MODES:
        raise ValueError(f"mode {mode!r} is not one of {', '.join(STATE_MODES)}")
    if max_len < 1 or state_block < 1 or num_speculative < 0:
        raise ValueError(
            f"max_len {max_len} and state_block {state_block} must be at least 1, "
            f"num_speculative {num_speculative} at least 0"
        )
    if mode == "all":
        return -(-max_len // state_block) + num_speculative
    return 1 + num_speculative


def pad_rows(values: Sequence[T], num_rows: int, fill: T) -> list[T]:
    """`values`, one for each request, and `fill` for the rows after them. Raises `ValueError` for more values than
    rows."""
    if len(values) > num_rows:
        raise ValueError(f"{len(values)} requests do not fit {num_rows} rows")
    return [*values, *[fill] * (num_rows - len(values))]
