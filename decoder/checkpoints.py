"""Where checkpoints of a sequence's state are kept, and their sizes. Pure policy: ints in, ints out.

A checkpoint at `p` has the conv windows and states of all recurrent layers after the first `p` tokens. `none` keeps no
checkpoints; `align` keeps one at the last boundary of `state_block` below the prompt's end, and one that moves along
with the output; `all` keeps one at every boundary; `auto` at the positions where a later prompt is likely to differ
from this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from decoder.metadata import STATE_MODES

NEVER = 1 << 62
COARSE = 4
"""`auto` also keeps the state at the last multiple of this many chunks, which is evicted later than the one at the last
chunk."""


@dataclass(frozen=True)
class Placement:
    """The policy of one configuration, in tokens."""

    mode: str
    block: int
    """`state_block`: the grid of `align` and `all`."""
    chunk: int
    """Chunk of the scan: a scan that continues from a state at a multiple of it is bitwise equal to an uninterrupted
    one."""
    page: int
    has_states: bool = True
    """False for a model without recurrent layers: only whole pages are kept."""

    def prompt_marks(
        self, prompt: int, *, images: Iterable[int] = (), wanted: Iterable[int] = (), junction: int = 0
    ) -> tuple[int, ...]:
        """Positions in a prompt of `prompt` tokens, ascending, each at least 1 and below the prompt's end.

        `images`: ends of image spans. `wanted`: positions that the caller asked for. `junction`: where the prompt
        departs from a cached one that has no checkpoint there; 0 for nowhere.
        """
        last = prompt - 1
        if self.mode == "none":
            return ()
        if not self.has_states:
            marks = {last // self.page * self.page}
        elif self.mode == "auto":
            coarse = self.chunk * COARSE
            marks = {*images, *wanted, junction, last // self.chunk * self.chunk, last // coarse * coarse}
        else:
            marks = {min(junction, last) // self.block * self.block}
            marks |= {last // self.block * self.block} if self.mode == "align" else set(range(0, last + 1, self.block))
        return tuple(sorted(mark for mark in marks if 0 < mark <= last))

    @property
    def grid(self) -> int:
        """Chunks of a prompt end on multiples of this if possible."""
        return self.block if self.has_states and self.mode in ("align", "all") else self.chunk

    @property
    def on_the_way(self) -> bool:
        """Whether states are also kept while output is generated."""
        return self.has_states and self.mode in ("align", "all")

    def marks_between(self, marks: tuple[int, ...], prompt: int, start: int, end: int) -> list[int]:
        """Positions to keep in a row of tokens `[start, end)`: those in (start, end]."""
        found = [mark for mark in marks if start < mark <= end]
        if self.on_the_way:
            first = max(start, prompt - 1) // self.block * self.block + self.block
            grid = range(first, end + 1, self.block)
            found += grid if self.mode == "all" else grid[-1:]
        return found

    def next_mark(self, marks: tuple[int, ...], prompt: int, position: int) -> int:
        """The first position above `position` that is to be kept; `NEVER` for none."""
        for mark in marks:
            if mark > position:
                return mark
        if self.on_the_way:
            return max(position, prompt - 1) // self.block * self.block + self.block
        return NEVER


def resolve_state_block(state_block: int | None, page: int, chunk: int) -> int:
    """`state_block` in tokens; by default the least common multiple of page and chunk."""
    return math.lcm(page, chunk) if state_block is None else state_block


def most_checkpoints(budget: int | None, slot_bytes: int) -> int | None:
    """Number of state checkpoints that fit this many bytes; None: as many as fit the arena. Models without states,
    whose slots take 0 bytes, have no limit."""
    return None if budget is None or not slot_bytes else budget // slot_bytes


def state_slots(mode: str, max_len: int, state_block: int, num_speculative: int = 0, checkpoints: int = 0) -> int:
    """State slots that one request of `max_len` tokens can hold, including its running state.

    `num_speculative`: draft tokens with a slot of their own (0 if inputs are replayed). `checkpoints`: those of the
    request under `auto`. Raises `ValueError` for an unknown mode or sizes below 1.
    """
    if mode not in STATE_MODES:
        raise ValueError(f"mode {mode!r} is not one of {', '.join(STATE_MODES)}")
    if max_len < 1 or state_block < 1 or num_speculative < 0 or checkpoints < 0:
        raise ValueError(
            f"max_len {max_len} and state_block {state_block} must be at least 1, num_speculative {num_speculative} "
            f"and checkpoints {checkpoints} at least 0"
        )
    counts = {"none": 1, "align": 2, "all": -(-max_len // state_block), "auto": 1 + checkpoints}
    return counts[mode] + num_speculative


def state_bytes(
    slot_bytes: int, max_len: int, state_block: int, num_speculative: int = 0, checkpoints: int = 0
) -> dict[str, int]:
    """Bytes of the states of one request of `max_len` tokens, for each mode. Only the first slot (and those of drafts)
    is reserved; checkpoints are evicted whenever a running request needs their memory.
    """
    return {
        mode: slot_bytes * state_slots(mode, max_len, state_block, num_speculative, checkpoints) for mode in STATE_MODES
    }
