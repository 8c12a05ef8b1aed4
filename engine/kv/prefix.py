"""PrefixIndex: a trie of token runs whose KV is kept after their sequences have ended.

RadixAttention (Zheng et al., SGLang, arXiv 2312.07104) without compressed edges: one node per block, so a
node is never split and a sequence's place in the trie is a cursor. The index holds a reference to each block
like any sequence does; a block that it alone holds is evictable.

Invariant: what lies above a node that has device blocks has some too. A sequence holds all blocks before one that it
holds and lets go from the tail, so what hangs below a node became idle before it, and the order of `idle` takes leaves
first. One behind whose window blocks were given back does not: a victim may then have nodes below it, idle or held by
such sequences alone, and they leave the index before it, the deepest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from engine.kv.events import EventLog
from engine.kv.pool import BlockPool
from engine.kv.tiers import Blocks, Node, Tiers

EMPTY_ROOTS = 1024  # roots, before those without nodes are dropped


class PrefixIndex:
    """Nodes by (salt, tokens from the start). A node covers `tokens_per_node` tokens in `blocks_per_node` blocks."""

    def __init__(self, pool: BlockPool, tiers: Tiers, block_size: int, blocks_per_node: int) -> None:
        self.pool = pool
        self.tiers = tiers
        self.blocks_per_node = blocks_per_node
        self.tokens_per_node = block_size * blocks_per_node
        self.owner: list[Node | None] = [None] * pool.size  # of each device block in the index
        self.idle: OrderedDict[Node, None] = OrderedDict()  # nodes that no sequence holds, next victim first
        self.roots: dict[str, Node] = {}
        self.held = 0  # references that sequences hold
        self.shared = 0  # blocks that more than one sequence holds
        self.events: EventLog | None = None

    # ---------------------------------------------------------------- references of sequences

    def take(self) -> int:
        """A free block for a sequence; the caller has checked `available`."""
        if self.pool.free == 0:
            self._evict()
        self.held += 1
        return self.pool.take()

    def hold(self, block: int) -> None:
        """One more sequence holds this block."""
        refs = self.pool.refs
        self.pool.hold(block)
        self.held += 1
        node = self.owner[block]
        if node is None:
            self.shared += refs[block] == 2
            return
        self.shared += refs[block] == 3
        if refs[block] == 2:
            if node.busy == 0:
                del self.idle[node]
            node.busy += 1

    def drop(self, block: int) -> None:
        """A sequence lets go of this block."""
        left = self.pool.drop(block)
        self.held -= 1
        node = self.owner[block]
        if node is None:
            self.shared -= left == 1
            return
        self.shared -= left == 2
        if left == 1:
            node.busy -= 1
            if node.busy == 0:
                self.idle[node] = None

    @property
    def available(self) -> int:
        """Blocks that are free or evictable."""
        return self.pool.free + len(self.idle) * self.blocks_per_node

    # ---------------------------------------------------------------- the trie

    def match(self, tokens: Sequence[int], salt: str, limit: int) -> list[Node]:
        """The nodes that hold the longest known prefix of tokens[:limit], in whatever tier."""
        path: list[Node] = []
        node: Node | None = self.root(salt)
        assert node is not None
        step = self.tokens_per_node
        for start in range(0, limit - step + 1, step):
            node = node.children.get(tuple(tokens[start : start + step]))
            if node is None:
                break
            path.append(node)
        return path

    def publish(self, parent: Node | None, salt: str, key: tuple[int, ...], blocks: Blocks) -> Node:
        """Offer the KV of a run of tokens that a sequence has computed; returns the node that stands for it.

        When another sequence published the same run before, its node keeps its blocks: adopt those.
        """
        if parent is None:
            parent = self.root(salt)
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(key, parent)
            self.tiers.name(node, salt)
        if not node.blocks:
            self.place(node, blocks)
        return node

    def root(self, salt: str) -> Node:
        """Where the prefixes of this salt begin."""
        root = self.roots.get(salt)
        if root is None:
            if len(self.roots) > EMPTY_ROOTS:  # a new salt with each request must not fill the memory
                self.roots = {other: known for other, known in self.roots.items() if known.children}
            root = self.roots[salt] = Node((), None)
            root.salt = salt
            self.tiers.name(root, salt)
        return root

    def place(self, node: Node, blocks: Blocks) -> None:
        """These device blocks, which a sequence holds, are the node's from now on."""
        node.blocks = blocks
        node.busy = len(blocks)
        for block in blocks:
            self.pool.hold(block)
            self.owner[block] = node
        if self.events is not None:
            self.events.stored(node)

    def _evict(self) -> None:
        """Free the blocks of the node that was idle for longest or of one below it; a lower tier may keep a copy."""
        freed = False
        while not freed:
            node = self._victim()
            freed = node in self.idle
            self.tiers.keep(node)
            self._unplace(node)
            if not node.kept:
                self.tiers.forget(node)

    def _victim(self) -> Node:
        """A node without device nodes below it: the one that was idle for longest, or below that one."""
        victim = next(iter(self.idle))
        while below := next((child for child in victim.children.values() if child.blocks), None):
            victim = below
            if victim in self.idle:
                self.idle.move_to_end(victim, last=False)  # those above it come next, without a search
        return victim

    def _unplace(self, node: Node) -> None:
        """The index lets go of the node's blocks."""
        if self.events is not None:
            self.events.removed(node)
        self.idle.pop(node, None)
        for block in node.blocks:
            self.owner[block] = None
            self.pool.drop(block)
        node.blocks = ()
        node.busy = 0

    def store(self) -> Iterator[Node]:
        """Give idle nodes a copy on disk, the most recently used first, each after those above it."""
        tiers = self.tiers
        if not (tiers.disk.size and tiers.costs.worth_storing()):
            return
        kept: dict[Node, None] = {}
        try:
            for node in [*reversed(self.idle), *tiers.on_host()]:
                path = _path(node)
                kept.update(dict.fromkeys(path))
                if all(tiers.store(step) for step in path):  # without those above it would never be found
                    yield node
        finally:
            tiers.unpin(list(kept))

    def reset(self) -> None:
        """Forget every prefix that no sequence, running or swapped out, relies on."""
        while self.idle:
            node = self._victim()
            self._unplace(node)
            self.tiers.forget_copies(node)
            if not node.kept:
                self.tiers.forget(node)
        for node in self.tiers.idle_nodes():
            self.tiers.forget_copies(node)
            if not node.kept and node.parent is not None and node.parent.children.get(node.key) is node:
                self.tiers.forget(node)
        self.tiers.forget_unclaimed()
        self.roots = {salt: root for salt, root in self.roots.items() if root.children}


def _path(node: Node) -> list[Node]:
    """From below the root down to the node."""
    path = [node]
    while (above := path[-1].parent) is not None and above.parent is not None:
        path.append(above)
    return path[::-1]
