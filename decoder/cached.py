"""Types of the prefix cache: tree nodes, checkpoints, and the cached prefix that a request finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property


@dataclass(eq=False)
class Node:
    """One full page of a cached prefix, after the pages of its parents; a root has no page (`decoder.page_tree`)."""

    key: bytes
    parent: Node | None
    page: int
    """-1 for a root, and in models without attention."""
    children: int = 0
    checkpoints: dict[bytes, Checkpoint] = field(default_factory=dict)
    tails: dict[int, int] = field(default_factory=dict)
    """Tail length -> checkpoints with that length."""


@dataclass(eq=False)
class Checkpoint:
    """A cached prefix of `tokens` tokens with the state after it."""

    key: bytes
    node: Node
    tokens: int
    slot: int
    """State slot; -1 in models without recurrent layers."""
    tail: int
    """Page that begins with the tail's tokens, or -1."""
    gain: int
    """Tokens saved compared with the next shorter checkpoint of its prefix."""
    uses: int = 1
    worth: float = 0.0
    ticket: int = 0

    @property
    def tail_pages(self) -> list[int]:
        """The page of the tail, if there is one."""
        return [self.tail] if self.tail >= 0 else []


@dataclass(frozen=True)
class Hit:
    """The cached prefix of a sequence."""

    tokens: int = 0
    matched: int = 0
    """Number of tokens whose full pages are cached: at least `tokens` without a tail."""
    node: Node | None = None
    """The last of the full pages of the first `tokens`."""
    checkpoint: Checkpoint | None = None

    @cached_property
    def pages(self) -> tuple[int, ...]:
        """Full pages of the first `tokens`; empty in models without attention. Made when a sequence starts from the
        hit: there may be thousands, and waiting sequences look up their prefixes whenever the cache changes."""
        pages, node = [], self.node
        while node is not None and node.page >= 0:
            pages.append(node.page)
            node = node.parent
        return tuple(reversed(pages))

    @property
    def slot(self) -> int:
        return -1 if self.checkpoint is None else self.checkpoint.slot

    @property
    def tail(self) -> int:
        return -1 if self.checkpoint is None else self.checkpoint.tail

    @property
    def tail_pages(self) -> list[int]:
        return [] if self.checkpoint is None else self.checkpoint.tail_pages


MISS = Hit()
