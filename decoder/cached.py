"""Types of the prefix cache: tree nodes, checkpoints, and the cached prefix that a request finds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Node:
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
    key: bytes
    node: Node
    tokens: int
    slot: int
    """-1 in models without Mamba layers."""
    tail: int
    """Page that begins with the tail's tokens, or -1."""
    gain: int
    """Tokens saved compared with the next shorter checkpoint of its prefix."""
    uses: int = 1
    worth: float = 0.0
    ticket: int = 0


@dataclass(frozen=True)
class Hit:
    """The cached prefix of a sequence."""

    tokens: int = 0
    matched: int = 0
    """Tokens whose pages are cached: at least `tokens` less a tail."""
    pages: tuple[int, ...] = ()
    """Full pages of the first `tokens`."""
    checkpoint: Checkpoint | None = None

    @property
    def slot(self) -> int:
        return -1 if self.checkpoint is None else self.checkpoint.slot

    @property
    def tail(self) -> int:
        return -1 if self.checkpoint is None else self.checkpoint.tail


MISS = Hit()
