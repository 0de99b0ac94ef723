"""Which sizes get a captured graph. Pure policy: ints in, ints out.

Two separate lists: *mixed* sizes count tokens, *decode* sizes count requests. Neither is ever shortened silently: an
impossible size is a `ValueError`, and the largest size asked for is always included, whether or not a stride reaches
it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

MODES = ("balanced", "interactivity")
FINE_LIMIT = 256
FINE_STEP, COARSE_STEP = 8, 16
DENSE_LIMIT = 32


def _strides(cap: int, mode: str) -> list[int]:
    dense = range(1, min(cap, DENSE_LIMIT) + 1) if mode == "interactivity" else (1, 2, 4)
    sizes = {size for size in dense if size <= cap}
    sizes.update(range(FINE_STEP, min(cap + 1, FINE_LIMIT), FINE_STEP))
    sizes.update(range(FINE_LIMIT, cap + 1, COARSE_STEP))
    sizes.add(cap)
    return sorted(sizes)


def capture_sizes(
    max_batched_tokens: int, max_capture: int, *, mode: str = "balanced", sizes: Iterable[int] | None = None
) -> list[int]:
    """Sizes in tokens for graphs of mixed batches, ascending.

    Without `sizes`: 1, 2, 4 (`interactivity`: every size to 32), then steps of 8 below 256 and of 16 above, up to
    cap = min(max_capture, max_batched_tokens), and cap itself. With `sizes`: exactly those, sorted, without repeats;
    `max_capture` has no effect, and a size below 1 or above `max_batched_tokens` is a `ValueError`.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is not one of {', '.join(MODES)}")
    if max_batched_tokens < 1:
        raise ValueError(f"max_batched_tokens must be at least 1, not {max_batched_tokens}")
    if sizes is not None:
        given = sorted(set(sizes))
        for size in given:
            if not 1 <= size <= max_batched_tokens:
                raise ValueError(f"capture size {size} is not between 1 and max_batched_tokens {max_batched_tokens}")
        return given
    if max_capture < 1:
        raise ValueError(f"max_capture must be at least 1, not {max_capture}")
    return _strides(min(max_capture, max_batched_tokens), mode)


def decode_sizes(max_seqs: int, max_capture: int) -> list[int]:
    """Sizes in requests for graphs of decode batches, ascending; the last is min(max_seqs, max_capture)."""
    if max_seqs < 1 or max_capture < 1:
        raise ValueError(f"max_seqs {max_seqs} and max_capture {max_capture} must be at least 1")
    return _strides(min(max_seqs, max_capture), "balanced")


def padded_size(n: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending `sizes` that is at least `n`, or `None` if there is none: no graph."""
    place = bisect_left(sizes, n)
    return sizes[place] if place < len(sizes) else None


@dataclass(frozen=True)
class Bucket:
    """One captured size: `decode` and `verify` count requests, `mixed` counts tokens."""

    kind: Literal["decode", "verify", "mixed"]
    size: int

    def __str__(self) -> str:
        return f"{self.kind}_{self.size}"


@dataclass(frozen=True)
class CapturePlan:
    """The two lists of one runner, each ascending."""

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    drafts: int = 0
    """Drafts of a request in one step; with any, the decode sizes are captured again for steps that verify drafts."""

    def tokens(self, bucket: Bucket) -> int:
        """Rows of a bucket: one for each token, real or padding. A verify bucket holds `size` requests with drafts and
        as many without.
        """
        return bucket.size * (2 + self.drafts) if bucket.kind == "verify" else bucket.size

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, the largest first: the order of capture."""
        found = [Bucket("mixed", size) for size in self.mixed]
        found += [Bucket("decode", size) for size in self.decode]
        found += [Bucket("verify", size) for size in self.decode if self.drafts]
        return sorted(found, key=self.tokens, reverse=True)

    def choose(self, requests: int, tokens: int, prefills: int, verified: int = 0) -> Bucket | None:
        """The smallest bucket for a step of `requests` rows and `tokens` tokens, of which `prefills` rows have more
        than one token on top of a state, or `verified` rows have drafts (never both). `None`: larger than every
        captured size.
        """
        if verified:
            size = padded_size(max(verified, requests - verified), self.decode)
            return None if size is None else Bucket("verify", size)
        if prefills == 0 and (size := padded_size(requests, self.decode)) is not None:
            return Bucket("decode", size)
        size = padded_size(tokens, self.mixed)
        return None if size is None else Bucket("mixed", size)


def check_state_slots(
    max_seqs: int,
    slots: int,
    *,
    slots_per_seq: int = 1,
    concurrent: int | None = None,
    has_mamba: bool = True,
    full_graphs: bool = True,
    profiling: bool = False,
) -> None:
    """Raises `ValueError` if full graphs of `max_seqs` rows would need more state slots than the arena can hold.

    `slots`: the number of slots if all superblocks were slots. `concurrent`: how many requests the arena can really
    hold at once, with their pages; the message names it if it is given.
    """
    if not has_mamba or not full_graphs or profiling or max_seqs * slots_per_seq <= slots:
        return
    message = (
        f"max_seqs {max_seqs} needs {max_seqs * slots_per_seq} state slots ({slots_per_seq} for each request), but the "
        f"arena holds {slots}: lower max_seqs to at most {slots // slots_per_seq}, or give the arena more memory"
    )
    if concurrent is not None:
        message += f"; with their KV pages, {concurrent} requests run at once"
    raise ValueError(message)
