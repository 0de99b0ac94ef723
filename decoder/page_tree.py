"""The tree of pages of the prefix cache: a node is one full page of tokens after its parent's."""

from __future__ import annotations

from decoder.blocks import SuperblockPool
from decoder.cached import Checkpoint, Node
from decoder.prefix_keys import key_at
from decoder.sequence import Sequence


class PageTree:
    """Nodes by their keys. A node holds one reference to its page for as long as it has children or checkpoints."""

    def __init__(self, pool: SuperblockPool, page: int) -> None:
        """`page`: tokens of a page."""
        self._pool, self._page = pool, page
        self._nodes: dict[bytes, Node] = {}

    def get(self, key: bytes) -> Node | None:
        return self._nodes.get(key)

    def deepest(self, sequence: Sequence, limit: int) -> tuple[Node | None, int]:
        """The last node of the sequence's first `limit` tokens, and the number of pages up to it; `None` if there is
        no node. Takes a logarithmic number of look-ups, because a node's parents exist as long as it does, and hashes
        at most twice as many pages as it finds."""

        def at(pages: int) -> Node | None:
            return self._nodes.get(key_at(sequence, pages * self._page, self._page))

        found, depth, beyond = at(0), 0, limit // self._page + 1
        step = 1
        while found is not None and depth + 1 < beyond:
            further = min(depth + step, beyond - 1)
            node = at(further)
            if node is None:
                beyond, step = further, max(1, (further - depth) // 2)
            else:
                found, depth, step = node, further, min(2 * step, max(1, (beyond - further) // 2))
        return found, depth

    def grow(self, sequence: Sequence, pages: int) -> Node:
        """The node after the sequence's first `pages` pages; missing nodes up to it are added."""
        parent = None
        for depth in range(pages + 1):
            key = key_at(sequence, depth * self._page, self._page)
            node = self._nodes.get(key)
            if node is None:
                page = sequence.held.pages[depth - 1] if depth and self._pool.pages_per_block else -1
                if page >= 0:
                    self._pool.retain_pages([page], ceded=True)
                node = self._nodes[key] = Node(key, parent, page)
                if parent is not None:
                    parent.children += 1
            parent = node
        assert parent is not None
        return parent

    def link(self, checkpoint: Checkpoint) -> None:
        """Adds a checkpoint to its node."""
        node, length = checkpoint.node, checkpoint.tokens % self._page
        node.checkpoints[checkpoint.key] = checkpoint
        node.tails[length] = node.tails.get(length, 0) + 1

    def unlink(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Removes a checkpoint from its node, and the nodes that then lead to no checkpoint. In a model without states
        it removes only one page, and returns a new checkpoint of the pages before it, which are then evicted by their
        own worth."""
        node, length = checkpoint.node, checkpoint.tokens % self._page
        del node.checkpoints[checkpoint.key]
        node.tails[length] -= 1
        if not node.tails[length]:
            del node.tails[length]
        at: Node | None = node
        while at is not None and not at.children and not at.checkpoints:
            del self._nodes[at.key]
            if at.page >= 0:
                self._pool.release_pages([at.page], ceded=True)
            at = parent = at.parent
            if parent is None:
                break
            parent.children -= 1
            if not self._pool.has_slots and parent.page >= 0 and not parent.children and not parent.checkpoints:
                tokens, gain = checkpoint.tokens - self._page, max(1, checkpoint.gain - self._page)
                shorter = Checkpoint(parent.key, parent, tokens, -1, -1, gain)
                self.link(shorter)
                return shorter
        return None

    @property
    def pages(self) -> list[int]:
        """The pages of all nodes: one entry for each reference."""
        return [node.page for node in self._nodes.values() if node.page >= 0]

    def check_integrity(self) -> list[Checkpoint]:
        """All checkpoints. `AssertionError` unless nodes and counts agree."""
        children = dict.fromkeys(self._nodes, 0)
        for node in self._nodes.values():
            if node.parent is not None:
                assert self._nodes[node.parent.key] is node.parent, "a node without its parent"
                children[node.parent.key] += 1
        for key, node in self._nodes.items():
            assert node.key == key and node.children == children[key]
            assert node.children or node.checkpoints, "a node that leads nowhere"
            assert sum(node.tails.values()) == len(node.checkpoints)
        return [checkpoint for node in self._nodes.values() for checkpoint in node.checkpoints.values()]
