"""Tiers below the device: ids of host and disk blocks, what is demoted to them and what is forgotten.

    device ──out──▶ host ──disk_out──▶ disk        a node may have copies in several tiers at once;
           ◀──in───      ◀──disk_in───             a node without any copy is forgotten, with all below it

Nothing here is touched unless a block is evicted, a sequence is swapped, or a hit lies in a lower tier.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.core.plan import KVOp
from engine.kv.costs import Costs
from engine.kv.pool import BlockPool

Blocks = tuple[int, ...]
NAME = 16  # bytes of a node's name


class Node:
    """A run of tokens in the prefix trie and where its KV is. () = not in that tier."""

    __slots__ = ("blocks", "busy", "children", "disk", "host", "key", "name", "parent", "salt")

    def __init__(self, key: tuple[int, ...], parent: Node | None) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.blocks: Blocks = ()
        self.host: Blocks = ()
        self.disk: Blocks = ()
        self.salt: str = parent.salt if parent else ""  # of the root
        self.busy = 0  # device blocks of it that a sequence holds
        self.name = b""  # a hash of salt and all tokens from the start; only where `Tiers.named`

    @property
    def kept(self) -> bool:
        return bool(self.blocks or self.host or self.disk)


class Tiers:
    """Host and disk pools. Holders of a host block: the index (its node's copy) and swapped-out sequences."""

    def __init__(self, host_blocks: int, disk_blocks: int, costs: Costs, blocks_per_node: int) -> None:
        self._blocks_per_node = blocks_per_node
        self.host = BlockPool(host_blocks)
        self.disk = BlockPool(disk_blocks)
        self.named = disk_blocks > 0  # nodes have names: what is on disk is found by them
        self.costs = costs
        self.ops: list[KVOp] = []  # of all tiers, in the order in which they must run
        self.outs = 0
        self.ins = 0
        # Nodes whose host copy only the index holds, next victim first. What hangs below a node comes before it,
        # because sequences let go of their blocks from the tail.
        self._host_idle: OrderedDict[Node, None] = OrderedDict()
        self._disk_idle: OrderedDict[Node, None] = OrderedDict()
        self._disk_keys: list[tuple[int, bytes]] = []
        # Of an earlier run, not yet asked for: tokens and disk blocks of the nodes below the node of that name.
        self._unclaimed: dict[bytes, list[tuple[tuple[int, ...], Blocks]]] = {}

    def drain(self) -> tuple[tuple[KVOp, ...], tuple[tuple[int, bytes], ...]]:
        """Operations since the last call, and the keys of the disk blocks that they write."""
        if not self.ops:
            return (), ()
        ops, keys = tuple(self.ops), tuple(self._disk_keys)
        self.ops.clear()
        self._disk_keys.clear()
        return ops, keys

    # ---------------------------------------------------------------- down

    def keep(self, node: Node) -> bool:
        """Give a device node that is about to be evicted a copy below, if that is worth it and there is room."""
        if node.host or node.disk:
            return True
        if not self.host.size:
            return False
        if not self.costs.worth_keeping():
            self.costs.doubt(len(node.blocks), "out", "in")
            return False
        if not self.room(len(node.blocks)):
            return False
        node.host = self.copy_out(node.blocks)
        self._host_idle[node] = None
        return True

    def room(self, n: int) -> bool:
        """Make n host blocks free by evicting what only the index holds; False when that isn't enough."""
        while self.host.free < n:
            if not self._host_idle:
                return False
            self._evict_host()
        return True

    def copy_out(self, blocks: Sequence[int]) -> Blocks:
        """Copy device blocks to free host blocks (`room` was made); each is then held once."""
        copies = tuple(self.host.take() for _ in blocks)
        self.ops.extend(KVOp("out", block, copy) for block, copy in zip(blocks, copies, strict=True))
        self.outs += len(copies)
        return copies

    def _evict_host(self) -> None:
        node, _ = self._host_idle.popitem(last=False)
        if not node.blocks and not node.disk and self._worth_storing(node) and node.host:
            self._write(node, node.host)
            self._disk_idle[node] = None
        self._free_host(node)
        if not node.kept:
            self.forget(node)

    def _write(self, node: Node, copies: Blocks) -> None:
        """Copy a node to disk, for which there is room, from these host blocks."""
        node.disk = tuple(self.disk.take() for _ in copies)
        self.ops.extend(KVOp("disk_out", src, dst) for src, dst in zip(copies, node.disk, strict=True))
        self._disk_keys.extend(zip(node.disk, _keys(node), strict=True))

    def _worth_storing(self, node: Node) -> bool:
        """Should this host node have a copy on disk? If so, there is room for it."""
        if not self.disk.size:
            return False
        if not self.costs.worth_storing():
            self.costs.doubt(len(node.host), "disk_out", "disk_in")
            return False
        return self._disk_room(len(node.host))

    def store(self, node: Node) -> bool:
        """Give a node a copy on disk that isn't a victim until `unpin`; False when there is no room for it.

        What lies on the device alone goes by host blocks, for which the oldest copies there are dropped.
        """
        if not node.disk:
            n = len(node.blocks or node.host)
            if not (n and self._disk_room(n) and (node.host or self._stage(n))):
                return False
            if node.host:
                self._write(node, node.host)
            else:
                staged = self.copy_out(node.blocks)
                self._write(node, staged)
                for copy in staged:  # operations run in order: it has been read before anything else is written there
                    self.host.drop(copy)
        self._disk_idle.pop(node, None)
        return True

    def _stage(self, n: int) -> bool:
        while self.host.free < n:
            if not self._host_idle:
                return False
            node, _ = self._host_idle.popitem(last=False)
            self._free_host(node)
            if not node.kept:
                self.forget(node)
        return True

    def _disk_room(self, n: int) -> bool:
        while self.disk.free < n:
            if self._unclaimed:
                self._forget_entry(*self._unclaimed.popitem())
                continue
            if not self._disk_idle:
                return False
            node, _ = self._disk_idle.popitem(last=False)
            self._free_disk(node)
            if not node.kept:
                self.forget(node)
        return True

    # ---------------------------------------------------------------- up

    def pin(self, nodes: Iterable[Node]) -> None:
        """Their copies are not victims until `unpin`."""
        for node in nodes:
            self._host_idle.pop(node, None)
            self._disk_idle.pop(node, None)

    def unpin(self, nodes: Sequence[Node]) -> None:
        """`nodes` from the root down; they become the last victims, the deepest first."""
        for node in reversed(nodes):
            if node.host and self.host.refs[node.host[0]] == 1:
                self._host_idle[node] = None
            if node.disk:
                self._disk_idle[node] = None

    def bring(self, node: Node, blocks: Sequence[int]) -> bool:
        """Copy a pinned node to these device blocks; False when the way up from disk finds no host room."""
        if not node.host:
            if not self.room(len(node.disk)):
                return False
            node.host = tuple(self.host.take() for _ in node.disk)
            self.ops.extend(KVOp("disk_in", src, dst) for src, dst in zip(node.disk, node.host, strict=True))
        self.copy_in(node.host, blocks)
        return True

    def copy_in(self, copies: Sequence[int], blocks: Sequence[int]) -> None:
        self.ops.extend(KVOp("in", copy, block) for copy, block in zip(copies, blocks, strict=True))
        self.ins += len(copies)

    # ---------------------------------------------------------------- swapped sequences

    def hold(self, node: Node) -> None:
        """A swapped-out sequence relies on this node's host copy."""
        for copy in node.host:
            self.host.hold(copy)
        self._host_idle.pop(node, None)

    def let_go(self, nodes: Sequence[Node]) -> None:
        """The reverse, for a whole path from the root down."""
        for node in reversed(nodes):
            for copy in node.host:
                self.host.drop(copy)
            if self.host.refs[node.host[0]] == 1:
                self._host_idle[node] = None

    # ---------------------------------------------------------------- what an earlier run left on disk

    def name(self, node: Node, salt: str) -> None:
        """A new node gets its name, and below it what an earlier run left of its continuations."""
        if not self.named:
            return
        pending = [node]
        while pending:
            named = pending.pop()
            above = salt.encode() if named.parent is None else named.parent.name
            named.name = hashlib.blake2b(above + _pack(named.key), digest_size=NAME).digest()
            for tokens, blocks in self._unclaimed.pop(named.name, ()):
                child = named.children[tokens] = Node(tokens, named)
                child.disk = blocks
                self._disk_idle[child] = None
                pending.append(child)

    def restore(self, index: Iterable[tuple[int, bytes]]) -> None:
        """Blocks found on disk, by key. Nodes that are not whole are left to be overwritten."""
        found: dict[tuple[bytes, bytes], dict[int, int]] = {}
        for block, key in index:
            if len(key) > NAME + 1 and block < self.disk.size:
                parts = found.setdefault((key[:NAME], key[NAME + 1 :]), {})
                parts[key[NAME]] = block
        taken: set[int] = set()
        for (above, packed), parts in found.items():
            if sorted(parts) == list(range(self._blocks_per_node)) and len(packed) % 4 == 0:
                tokens = struct.unpack(f"<{len(packed) // 4}i", packed)
                blocks = tuple(parts[i] for i in range(self._blocks_per_node))
                self._unclaimed.setdefault(above, []).append((tokens, blocks))
                taken.update(blocks)
        self.disk.claim(taken)

    def unclaimed(self) -> list[int]:
        """Disk blocks of an earlier run that no node stands for."""
        return [block for entries in self._unclaimed.values() for _, blocks in entries for block in blocks]

    def forget_unclaimed(self) -> None:
        while self._unclaimed:
            self._forget_entry(*self._unclaimed.popitem())

    def _forget_entry(self, name: bytes, entries: list[tuple[tuple[int, ...], Blocks]]) -> None:
        for _, blocks in entries:
            for block in blocks:
                self.disk.drop(block)

    # ---------------------------------------------------------------- out

    def forget(self, node: Node) -> None:
        """Cut a node without device blocks out of the trie, with everything below it."""
        assert node.parent is not None
        del node.parent.children[node.key]
        pending = [node]
        while pending:
            gone = pending.pop()
            assert not gone.blocks, "what hangs below an evicted node is evicted first"
            self.pin((gone,))
            self._free_host(gone)
            self._free_disk(gone)
            pending.extend(gone.children.values())

    def forget_copies(self, node: Node) -> None:
        """Drop the copies below the device that no swapped sequence relies on."""
        if node in self._host_idle:
            del self._host_idle[node]
            self._free_host(node)
        if node in self._disk_idle:
            del self._disk_idle[node]
            self._free_disk(node)

    def idle_nodes(self) -> list[Node]:
        return [*self._host_idle, *self._disk_idle]

    def on_host(self) -> list[Node]:
        """Nodes whose host copy only the index holds, those above others first."""
        return list(reversed(self._host_idle))

    def _free_host(self, node: Node) -> None:
        for copy in node.host:
            self.host.drop(copy)
        node.host = ()

    def _free_disk(self, node: Node) -> None:
        for copy in node.disk:
            self.disk.drop(copy)
        node.disk = ()


def _pack(tokens: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def _keys(node: Node) -> list[bytes]:
    """What each block of the node holds: the name of the node above, its place, the node's tokens."""
    assert node.parent is not None
    return [node.parent.name + bytes((i,)) + _pack(node.key) for i in range(len(node.disk))]
