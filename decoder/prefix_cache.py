"""KV pages and state checkpoints of finished and running sequences for later ones, keyed by their content.

Pages form a tree (`decoder.page_tree`) whose keys are hashes of prefixes (`decoder.prefix_keys`). A node has the
checkpoints whose prefix ends inside its next page: at its own end, or after a tail of a few tokens. `decoder.eviction`
decides the order of eviction.

Owners, and until when:

    node's page         one reference, from insertion until the node has neither children nor checkpoints
    checkpoint's slot   one reference, from insertion to eviction, or handed over to the sequence that continues it
    checkpoint's tail   one reference to the page that begins with the tail's tokens; the sequence that wrote it may
                        append to that page, and one that continues the checkpoint copies the page first
"""

from __future__ import annotations

from decoder.blocks import SuperblockPool
from decoder.cached import MISS, Checkpoint, Hit
from decoder.checkpoints import Placement
from decoder.eviction import EvictionOrder
from decoder.page_tree import PageTree
from decoder.prefix_keys import key_at
from decoder.sequence import Sequence

COUNTERS = ("hits", "misses", "hit_tokens", "lost_tokens", "inserted", "evicted")
"""Requests that found a prefix or none, tokens that were not computed again, tokens whose pages were cached without a
state."""


class PrefixCache:
    """Finds, inserts and evicts checkpoints. The pool owns the memory and counts the references."""

    def __init__(self, pool: SuperblockPool, placement: Placement, *, page_bytes: int, slot_bytes: int) -> None:
        """A model with neither states nor pages has nothing to cache and must not have a cache (asserted)."""
        assert pool.has_slots or pool.pages_per_block
        self.pool, self.placement = pool, placement
        self.page_bytes, self.slot_bytes = page_bytes, slot_bytes
        self.version = 0
        """Changes whenever the result of `lookup` may have changed."""
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.order = EvictionOrder(placement.page, page_bytes=page_bytes, slot_bytes=slot_bytes)
        self._tree = PageTree(pool, placement.page)

    # -- looking up ----------------------------------------------------------------------------------------------------

    def lookup(self, sequence: Sequence) -> Hit:
        """The longest cached prefix, at least one token shorter than the sequence. Changes nothing."""
        if sequence.lookup.version != self.version:
            sequence.lookup.hit, sequence.lookup.version = self._find(sequence, len(sequence.tokens) - 1), self.version
        assert sequence.lookup.hit is not None
        return sequence.lookup.hit

    def _find(self, sequence: Sequence, limit: int) -> Hit:
        size, (node, depth) = self.placement.page, self._tree.deepest(sequence, limit)
        matched = depth * size
        if not self.pool.has_slots:
            return MISS if node is None else Hit(matched, matched, node)
        while node is not None:
            for tail in sorted(node.tails, reverse=True) if node.tails else ():
                tokens = depth * size + tail
                if tokens > limit:
                    continue
                found = node.checkpoints.get(key_at(sequence, tokens, size))
                if found is not None and tokens > 0:
                    return Hit(tokens, matched, node, found)
            node, depth = node.parent, depth - 1
        return Hit(0, matched) if matched else MISS

    def overlook(self, sequence: Sequence) -> None:
        """Makes `lookup` return nothing for the sequence until the cache changes, because there is no memory to start
        from its hit."""
        sequence.lookup.hit = MISS

    def use(self, sequence: Sequence, hit: Hit) -> None:
        """Counts the hit of a sequence that starts now, and raises the worth of its checkpoint."""
        self.counters["hits" if hit.tokens else "misses"] += 1
        self.counters["hit_tokens"] += hit.tokens
        self.counters["lost_tokens"] += max(0, hit.matched - hit.tokens)
        if hit.checkpoint is not None and hit.checkpoint in self.order:
            hit.checkpoint.uses += 1
            self.order.touch(hit.checkpoint)
        elif not self.pool.has_slots and hit.tokens:
            node = self._tree.get(key_at(sequence, hit.tokens, self.placement.page))
            for checkpoint in () if node is None else node.checkpoints.values():
                self.order.touch(checkpoint)

    # -- inserting -----------------------------------------------------------------------------------------------------

    def holds(self, sequence: Sequence, tokens: int) -> bool:
        """Whether there is a checkpoint of the first `tokens` tokens; if so, its worth is renewed."""
        size = self.placement.page
        node = self._tree.get(key_at(sequence, tokens // size * size, size))
        found = node.checkpoints.get(key_at(sequence, tokens, size)) if node is not None else None
        if found is not None:
            self.order.touch(found)
        return found is not None

    def take_slot(self, gain: int) -> int | None:
        """A slot for a checkpoint that saves `gain` tokens, from free memory or by evicting less worthy checkpoints;
        None if there is none."""
        while True:
            slot = self.pool.take_slot(high=True)
            if slot is not None or not self.evict(self.order.worth(gain)):
                return slot

    def insert(self, sequence: Sequence, tokens: int, slot: int, gain: int) -> Checkpoint | None:
        """Inserts a checkpoint of the sequence's first `tokens` tokens, which are computed, with the state after them
        in `slot`, whose reference passes to the cache. None if an equal checkpoint exists; the slot is then released.
        """
        size = self.placement.page
        node = self._tree.grow(sequence, tokens // size)
        key = key_at(sequence, tokens, size)
        if key in node.checkpoints:
            self.order.touch(node.checkpoints[key])
            self.pool.release_slot(slot)
            return None
        tail = sequence.held.pages[tokens // size] if tokens % size and self.pool.pages_per_block else -1
        checkpoint = Checkpoint(key, node, tokens, slot, tail, gain)
        self.pool.retain_pages(checkpoint.tail_pages, ceded=True)
        self.pool.cede([slot])
        self._tree.link(checkpoint)
        self.counters["inserted"] += 1
        self.version += 1
        self.order.touch(checkpoint)
        return checkpoint

    # -- removing ------------------------------------------------------------------------------------------------------

    def evict(self, below: float | None = None) -> bool:
        """Drops the checkpoint of least worth, if its worth is less than `below`, and returns whether it did.
        Checkpoints that are being copied from are not dropped."""

        def copied(checkpoint: Checkpoint) -> bool:
            return checkpoint.slot >= 0 and self.pool.slot_owners(checkpoint.slot) > 1

        checkpoint = self.order.least(below, copied)
        if checkpoint is not None:
            self.counters["evicted"] += 1
            self.drop(checkpoint)
        return checkpoint is not None

    def drop(self, checkpoint: Checkpoint) -> None:
        """Removes a checkpoint, if it is still in the cache, and frees memory that only it needed."""
        if checkpoint not in self.order:
            return
        self.pool.release_slot(checkpoint.slot, ceded=True)
        self.pool.release_pages(checkpoint.tail_pages, ceded=True)
        self._unlink(checkpoint)

    def hand_over(self, checkpoint: Checkpoint) -> None:
        """Removes a checkpoint; its references to slot and tail pass to the caller."""
        assert checkpoint in self.order
        self.pool.claim([checkpoint.slot], checkpoint.tail_pages)
        self._unlink(checkpoint)

    def _unlink(self, checkpoint: Checkpoint) -> None:
        self.order.remove(checkpoint)
        self.version += 1
        shorter = self._tree.unlink(checkpoint)
        if shorter is not None:
            self.order.touch(shorter)

    def clear(self) -> None:
        """Drops everything."""
        while len(self.order):
            self.drop(next(iter(self.order)))

    # -- what it holds -------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> list[int]:
        """The slots of all checkpoints: one entry for each reference."""
        return [checkpoint.slot for checkpoint in self.order]

    @property
    def pages(self) -> list[int]:
        """The pages of nodes and tails: one entry for each reference."""
        return [page for checkpoint in self.order for page in checkpoint.tail_pages] + self._tree.pages

    def lengths(self) -> list[int]:
        """Prefix lengths of all checkpoints, ascending; one entry for each."""
        return sorted(checkpoint.tokens for checkpoint in self.order)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is held now."""
        pages = len(set(self.pages))
        slots = sum(slot >= 0 for slot in self.slots)
        return {
            **{f"cache_{name}": value for name, value in self.counters.items()},
            "cache_checkpoints": len(self.order),
            "cache_pages": pages,
            "cache_bytes": slots * self.slot_bytes + pages * self.page_bytes,
        }

    def check_integrity(self) -> None:
        """`AssertionError` unless nodes, checkpoints and counts agree."""
        assert {id(c) for c in self._tree.check_integrity()} == {id(c) for c in self.order}
        self.order.check_integrity()
