"""What finished and running sequences leave behind for later ones: KV pages and state checkpoints, by their content.

A tree of pages. A node is one full page of tokens after its parent's; its key hashes the parent's key, the tokens,
their positions where they do not count up, and the content keys of image rows, so equal keys mean equal prefixes; the
root's key is the salt's. A node carries the checkpoints whose prefix ends inside its next page: at its own end, or
after a tail of a few tokens.

Who owns what, and until when:

    node's page         one reference, from insertion until the node has neither children nor checkpoints
    checkpoint's slot   one reference, from insertion to eviction, or handed over to the sequence that continues it
    checkpoint's tail   one reference to the page that begins with the tail's tokens; the sequence that wrote it may
                        write on behind them, and one that continues the checkpoint copies the page first

Eviction is GreedyDual with frequency: a checkpoint is worth the tokens it saves over the next shorter one, times how
often it was of use, divided by the bytes it takes, plus the worth of what was evicted last when it was last used. The
least worthy goes first.
"""

from __future__ import annotations

import heapq
import struct
from array import array
from hashlib import blake2b

from decoder.blocks import SuperblockPool
from decoder.cached import MISS, Checkpoint, Hit, Node
from decoder.checkpoints import Placement
from decoder.sequence import Sequence

KEY_BYTES = 16
COUNTERS = ("hits", "misses", "hit_tokens", "lost_tokens", "inserted", "evicted")
"""Requests that found a prefix or none, tokens they need not compute, tokens whose pages were there without a state."""


class PrefixCache:
    """The index, its eviction and its counters. Memory is the pool's; references are counted there."""

    def __init__(self, pool: SuperblockPool, placement: Placement, *, page_bytes: int, slot_bytes: int) -> None:
        """A model with neither states nor pages has nothing to cache: do not make one for it."""
        assert pool.has_slots or pool.pages_per_block
        self.pool, self.placement = pool, placement
        self.page_bytes, self.slot_bytes = page_bytes, slot_bytes
        self.version = 0
        """Changes whenever the answer of `lookup` may have."""
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._nodes: dict[bytes, Node] = {}
        self._heap: list[tuple[float, int, Checkpoint]] = []
        self._live: dict[int, Checkpoint] = {}
        self._tickets = 0
        self._clock = 0.0

    # -- keys ----------------------------------------------------------------------------------------------------------

    def key_at(self, sequence: Sequence, tokens: int) -> bytes:
        """Key of the first `tokens` tokens, which are known."""
        assert tokens <= sequence.known, f"{tokens} tokens are to be looked up, and {sequence.known} are known"
        size, chain = self.placement.page, sequence.lookup.chain
        if not chain:
            chain.append(blake2b(sequence.request.salt, digest_size=KEY_BYTES).digest())
        while len(chain) <= tokens // size:
            begin = (len(chain) - 1) * size
            chain.append(_digest(chain[-1], sequence, begin, begin + size))
        whole = tokens // size * size
        return chain[tokens // size] if whole == tokens else _digest(chain[tokens // size], sequence, whole, tokens)

    # -- looking up ----------------------------------------------------------------------------------------------------

    def lookup(self, sequence: Sequence) -> Hit:
        """The longest prefix, at least one token short of the whole, that needs not be computed. Changes nothing."""
        if sequence.lookup.version != self.version:
            sequence.lookup.hit, sequence.lookup.version = self._find(sequence, len(sequence.tokens) - 1), self.version
        assert sequence.lookup.hit is not None
        return sequence.lookup.hit

    def _find(self, sequence: Sequence, limit: int) -> Hit:
        size, path = self.placement.page, []
        node = self._nodes.get(self.key_at(sequence, 0))
        while node is not None:
            path.append(node)
            depth = len(path)
            node = self._nodes.get(self.key_at(sequence, depth * size)) if depth * size <= limit else None
        if not path:
            return MISS
        matched = (len(path) - 1) * size
        pages = tuple(node.page for node in path[1:]) if self.pool.pages_per_block else ()
        if not self.pool.has_slots:
            return Hit(matched, matched, pages)
        for depth in range(len(path) - 1, -1, -1):
            for tail in sorted(path[depth].tails, reverse=True):
                tokens = depth * size + tail
                if tokens > limit:
                    continue
                found = path[depth].checkpoints.get(self.key_at(sequence, tokens))
                if found is not None and tokens > 0:
                    return Hit(tokens, matched, pages[:depth], found)
        return Hit(0, matched)

    def overlook(self, sequence: Sequence) -> None:
        """Until the cache changes, a sequence finds nothing: there is no room to start from what it has found."""
        sequence.lookup.hit = MISS

    def same_prompt(self, leader: Sequence, follower: Sequence) -> None:
        """Their keys are the same so far."""
        follower.lookup.chain = list(leader.lookup.chain)

    def use(self, sequence: Sequence, hit: Hit) -> None:
        """Counts what a sequence that starts now has got, and keeps it longer."""
        self.counters["hits" if hit.tokens else "misses"] += 1
        self.counters["hit_tokens"] += hit.tokens
        self.counters["lost_tokens"] += max(0, hit.matched - hit.tokens)
        if hit.checkpoint is not None and hit.checkpoint.ticket in self._live:
            hit.checkpoint.uses += 1
            self._touch(hit.checkpoint)
        elif not self.pool.has_slots and hit.tokens:
            node = self._nodes.get(self.key_at(sequence, hit.tokens))
            for checkpoint in () if node is None else node.checkpoints.values():
                self._touch(checkpoint)

    # -- coming in -----------------------------------------------------------------------------------------------------

    def worth(self, gain: int, uses: int = 1) -> float:
        """Of a checkpoint that saves `gain` tokens, was of use so often and was used just now."""
        size = self.slot_bytes + -(-gain // self.placement.page) * self.page_bytes
        return self._clock + uses * gain * (self.slot_bytes + self.page_bytes) / size

    def holds(self, sequence: Sequence, tokens: int) -> bool:
        """Is there a checkpoint of the first `tokens` tokens? It is then used."""
        node = self._nodes.get(self.key_at(sequence, tokens // self.placement.page * self.placement.page))
        found = node.checkpoints.get(self.key_at(sequence, tokens)) if node is not None else None
        if found is not None:
            self._touch(found)
        return found is not None

    def take_slot(self, gain: int) -> int | None:
        """A slot for a checkpoint, of free memory or in place of less worthy ones; `None` when there is none."""
        while True:
            slot = self.pool.take_slot(high=True)
            if slot is not None or not self.evict(self.worth(gain)):
                return slot

    def insert(self, sequence: Sequence, tokens: int, slot: int, gain: int) -> Checkpoint | None:
        """The sequence's first `tokens` tokens are computed and `slot` holds the state after them: its reference
        passes to the cache. `None` when an equal checkpoint was there already; the slot is then free again.
        """
        size = self.placement.page
        node = self._node(sequence, 0, None)
        for depth in range(1, tokens // size + 1):
            node = self._node(sequence, depth, node)
        key = self.key_at(sequence, tokens)
        if key in node.checkpoints:
            self._touch(node.checkpoints[key])
            self.pool.release_slot(slot)
            return None
        length = tokens % size
        tail = sequence.held.pages[tokens // size] if length and self.pool.pages_per_block else -1
        tails = [tail] if tail >= 0 else []
        self.pool.retain_pages(tails, ceded=True)
        self.pool.cede([slot])
        checkpoint = node.checkpoints[key] = Checkpoint(key, node, tokens, slot, tail, gain)
        node.tails[length] = node.tails.get(length, 0) + 1
        self.counters["inserted"] += 1
        self.version += 1
        self._touch(checkpoint)
        return checkpoint

    def _node(self, sequence: Sequence, depth: int, parent: Node | None) -> Node:
        key = self.key_at(sequence, depth * self.placement.page)
        node = self._nodes.get(key)
        if node is None:
            page = sequence.held.pages[depth - 1] if depth and self.pool.pages_per_block else -1
            if page >= 0:
                self.pool.retain_pages([page], ceded=True)
            node = self._nodes[key] = Node(key, parent, page)
            if parent is not None:
                parent.children += 1
        return node

    def _touch(self, checkpoint: Checkpoint) -> None:
        self._live.pop(checkpoint.ticket, None)
        self._tickets += 1
        checkpoint.ticket, checkpoint.worth = self._tickets, self.worth(checkpoint.gain, checkpoint.uses)
        self._live[checkpoint.ticket] = checkpoint
        heapq.heappush(self._heap, (checkpoint.worth, checkpoint.ticket, checkpoint))
        if len(self._heap) > 64 + 4 * len(self._live):
            self._heap = [(c.worth, c.ticket, c) for c in self._live.values()]
            heapq.heapify(self._heap)

    # -- going out -----------------------------------------------------------------------------------------------------

    def evict(self, below: float | None = None) -> bool:
        """Gives up the checkpoint of least worth, if that is under `below`. Those that are being copied from stay."""
        kept, done = [], False
        while self._heap and not done:
            worth, ticket, checkpoint = self._heap[0]
            if ticket not in self._live:
                heapq.heappop(self._heap)
                continue
            if below is not None and worth >= below:
                break
            heapq.heappop(self._heap)
            if checkpoint.slot >= 0 and self.pool.slot_owners(checkpoint.slot) > 1:
                kept.append((worth, ticket, checkpoint))
                continue
            self._clock = max(self._clock, worth)
            self.counters["evicted"] += 1
            self.drop(checkpoint)
            done = True
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return done

    def drop(self, checkpoint: Checkpoint) -> None:
        """Takes a checkpoint out, if it is still in, and frees what only it needed."""
        if self._live.get(checkpoint.ticket) is not checkpoint:
            return
        self.pool.release_slot(checkpoint.slot, ceded=True)
        if checkpoint.tail >= 0:
            self.pool.release_pages([checkpoint.tail], ceded=True)
        self._unlink(checkpoint)

    def hand_over(self, checkpoint: Checkpoint) -> None:
        """Takes a checkpoint out; its references to slot and tail are now the caller's."""
        assert self._live.get(checkpoint.ticket) is checkpoint
        self.pool.claim([checkpoint.slot], [checkpoint.tail] if checkpoint.tail >= 0 else [])
        self._unlink(checkpoint)

    def _unlink(self, checkpoint: Checkpoint) -> None:
        node, length = checkpoint.node, checkpoint.tokens % self.placement.page
        del node.checkpoints[checkpoint.key], self._live[checkpoint.ticket]
        node.tails[length] -= 1
        if not node.tails[length]:
            del node.tails[length]
        self.version += 1
        self._prune(node, checkpoint)

    def _prune(self, node: Node, checkpoint: Checkpoint) -> None:
        """Nodes that lead nowhere any more go; without states, page by page, each on its own merit."""
        at: Node | None = node
        while at is not None and not at.children and not at.checkpoints:
            del self._nodes[at.key]
            if at.page >= 0:
                self.pool.release_pages([at.page], ceded=True)
            at = parent = at.parent
            if parent is None:
                return
            parent.children -= 1
            if not self.pool.has_slots and parent.page >= 0 and not parent.children and not parent.checkpoints:
                tokens = checkpoint.tokens - self.placement.page
                shorter = Checkpoint(parent.key, parent, tokens, -1, -1, max(1, checkpoint.gain - self.placement.page))
                parent.checkpoints[parent.key], parent.tails[0] = shorter, 1
                self._touch(shorter)
                return

    def clear(self) -> None:
        """Everything goes."""
        while self._live:
            self.drop(next(iter(self._live.values())))
        self._heap.clear()

    # -- looking in ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Checkpoints that are held."""
        return len(self._live)

    @property
    def slots(self) -> list[int]:
        """One entry for each reference held."""
        return [checkpoint.slot for checkpoint in self._live.values()]

    @property
    def pages(self) -> list[int]:
        """One entry for each reference held."""
        tails = [checkpoint.tail for checkpoint in self._live.values() if checkpoint.tail >= 0]
        return tails + [node.page for node in self._nodes.values() if node.page >= 0]

    def lengths(self) -> list[int]:
        """Prefix lengths that hold a checkpoint, rising; one entry for each."""
        return sorted(checkpoint.tokens for checkpoint in self._live.values())

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is held now."""
        pages = len(set(self.pages))
        slots = sum(slot >= 0 for slot in self.slots)
        return {
            **{f"cache_{name}": value for name, value in self.counters.items()},
            "cache_checkpoints": len(self._live),
            "cache_pages": pages,
            "cache_bytes": slots * self.slot_bytes + pages * self.page_bytes,
        }

    def check_integrity(self) -> None:
        """`AssertionError` unless nodes, checkpoints and counts agree."""
        children = dict.fromkeys(self._nodes, 0)
        for node in self._nodes.values():
            if node.parent is not None:
                assert self._nodes[node.parent.key] is node.parent, "a node without its parent"
                children[node.parent.key] += 1
        for key, node in self._nodes.items():
            assert node.key == key and node.children == children[key]
            assert node.children or node.checkpoints, "a node that leads nowhere"
            assert sum(node.tails.values()) == len(node.checkpoints)
        held = [checkpoint for node in self._nodes.values() for checkpoint in node.checkpoints.values()]
        assert {id(c) for c in held} == {id(c) for c in self._live.values()}
        assert {entry[1] for entry in self._heap} >= set(self._live), "a checkpoint that can never be evicted"


def _digest(parent: bytes, sequence: Sequence, begin: int, end: int) -> bytes:
    """Hash of tokens `[begin, end)` after the prefix of key `parent`; rows of an image by its content, whose positions
    depend on its rows and columns.
    """
    state, positions = blake2b(parent, digest_size=KEY_BYTES), sequence.request.positions
    state.update(struct.pack("<q", end - begin))
    state.update(array("q", sequence.tokens[begin:end]).tobytes())
    if positions is not None and (numbers := positions.uncounted(begin, end)):
        state.update(array("q", [-1, len(numbers), *numbers]).tobytes())  # what follows never begins with -1
    for span in sequence.request.spans:
        first, last = max(begin, span.start), min(end, span.end)
        if first < last:
            state.update(struct.pack("<qqqq", first - begin, first - span.start, last - span.start, len(span.key)))
            state.update(span.key)
    return state.digest()
