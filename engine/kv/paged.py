"""PagedKV: block tables over one pool, shared by reference, copied on write (PagedAttention, SOSP 2023).

table    [ b0 | b1 | b2 | b3 ]        block i holds the KV of tokens i*block_size ... (i+1)*block_size
nodes    [ n0 | n1 ]                  the published part: the trie's nodes on this sequence's path
         0        committed   computed    room
         published | own blocks  | writable, nothing in it yet

Where every layer has a sliding window, a sequence gives back the blocks that lie wholly behind it: table[:behind] are
holes then. Its nodes are no longer all held, so the index may lose them; the last one tells, for it goes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, count

from engine.core.plan import KVOp
from engine.kv import BlockView, Promotion, Usage
from engine.kv.costs import Costs
from engine.kv.events import EventLog
from engine.kv.pool import BlockPool
from engine.kv.prefix import PrefixIndex
from engine.kv.tiers import Blocks, Node, Tiers

TOKENS_PER_NODE_OF_SINGLE = 16  # with block_size 1 a node covers this many tokens: a trie of single tokens is slow

STORED_AT_ONCE = 64  # operations of one part of `store`

HOLE = 0  # stands in a table for a block that was given back; nothing reads there, but the id must be one of a block


class _Sequence:
    """What one sequence holds."""

    __slots__ = ("behind", "dirty", "next_publish", "nodes", "promotion", "room", "salt", "swapped", "table")

    def __init__(self, salt: str, next_publish: int) -> None:
        self.salt = salt
        self.table: list[int] = []
        self.behind = 0  # table[:behind] are holes
        self.nodes: list[Node] = []
        self.next_publish = next_publish  # once so many tokens are computed, another node can be published
        self.room = 0  # [computed, room) is writable as it is; 0 = look
        self.dirty = 0  # table[dirty:] was not sent yet
        self.promotion: Promotion | None = None
        self.swapped: Blocks | None = None  # host copies of what follows `nodes` and the holes, while swapped out


class PagedKV:
    """The paged manager. block_size is any integer from 1 (token granularity, as in TokenAttention)."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        costs: Costs,
        *,
        host_blocks: int = 0,
        disk_blocks: int = 0,
        disk_index: tuple[tuple[int, bytes], ...] = (),
        caching: bool = True,
        events: bool = False,
        window: int = 0,
    ) -> None:
        """`disk_index`: blocks of an earlier run that are still in the disk tier, by the keys that `drain` gave.

        `window`: see `Geometry`.
        """
        self.block_size = block_size
        self._window = window
        self._caching = caching
        self._costs = costs
        self._pool = BlockPool(num_blocks)
        self.events: EventLog | None = None
        span = TOKENS_PER_NODE_OF_SINGLE if block_size == 1 else 1
        self._tiers = Tiers(host_blocks, disk_blocks if caching else 0, costs, span)
        if self._tiers.disk.size:
            self._tiers.restore(disk_index)
        self.index = PrefixIndex(self._pool, self._tiers, block_size, span)
        self._span = span
        self._node_tokens = self.index.tokens_per_node
        if events:
            self._tiers.named = True
            self.events = self.index.events = EventLog(self._node_tokens)
        self._sequences: dict[int, _Sequence] = {}
        self._copies = 0
        self._queried = self._hits = self._hits_host = self._hits_disk = 0

    @property
    def ids_are_addresses(self) -> bool:
        return False

    @property
    def max_tokens(self) -> int:
        return self._pool.size * self.block_size

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def available(self) -> int:
        return self.index.available

    # ---------------------------------------------------------------- a sequence's life

    def admit(self, seq: int, tokens: Sequence[int], salt: str, limit: int, spare: int) -> int | None:
        assert seq not in self._sequences, "a sequence is admitted once"
        index = self.index
        path = index.match(tokens, salt, limit) if self._caching else []
        resident = sum(1 for node in path if node.blocks)  # a prefix of the path: leaves are evicted first
        promotion = self._promotion(path[resident:])
        if promotion is not None:
            del path[resident + promotion.worth // self._span :]
        busy = sum(1 for node in path[:resident] if node.busy)
        if self._blocks_for(len(tokens)) - busy * self._span + spare > index.available:
            return None
        record = self._sequences[seq] = _Sequence(salt, self._node_tokens)
        record.promotion = promotion
        self._queried += limit if self._caching else 0
        from_disk = self._claim(record, path, resident)
        self._hits += resident * self._node_tokens
        self._hits_disk += from_disk * self._node_tokens
        self._hits_host += (len(record.nodes) - resident - from_disk) * self._node_tokens
        return len(record.nodes) * self._node_tokens

    def _promotion(self, below: list[Node]) -> Promotion | None:
        """How many of these nodes to bring up: as many as save the most time against computing them."""
        if not below:
            return None
        costs, span = self._costs, self._span
        saved = most = 0.0
        worth = 0
        for n, node in enumerate(below, 1):
            on_disk = not node.host
            saved += costs.compute_s(self._node_tokens) - costs.bring_s(span * (not on_disk), span * on_disk)
            if saved > most:
                most, worth = saved, n
        if worth < len(below):
            refused = "in" if below[worth].host else "disk_in"
            costs.doubt((len(below) - worth) * span, refused)
        disk = sum(1 for node in below if not node.host) * span
        host = len(below) * span - disk
        compute_s = costs.compute_s(len(below) * self._node_tokens)
        return Promotion(host, disk, worth * span, costs.bring_s(host, disk), compute_s)

    def promotion(self, seq: int) -> Promotion | None:
        return self._sequences[seq].promotion

    def _claim(self, record: _Sequence, path: list[Node], resident: int) -> int:
        """Hold the nodes that are on the device, bring the others back; how many came from disk. Room was checked."""
        index, tiers = self.index, self._tiers
        from_disk = 0
        for node in path[:resident]:
            for block in node.blocks:
                index.hold(block)
            record.table.extend(node.blocks)
            record.nodes.append(node)
        below = path[resident:]
        tiers.pin(below)  # bringing one back must not evict another
        for node in below:
            on_disk = not node.host
            blocks = tuple(index.take() for _ in range(self._span))
            if not tiers.bring(node, blocks):
                for block in blocks:
                    index.drop(block)
                break
            index.place(node, blocks)
            record.table.extend(blocks)
            record.nodes.append(node)
            from_disk += on_disk
        tiers.unpin(below)
        record.next_publish = (len(record.nodes) + 1) * self._node_tokens
        return from_disk

    def extend(self, seq: int, computed: int, total: int) -> bool:
        record = self._sequences[seq]
        if total <= record.room:
            return True
        index, table, refs = self.index, record.table, self._pool.refs
        self._unpublish(record, computed)
        # A node's blocks are copied together, so that no block ever belongs to two nodes.
        first, end = computed // self._node_tokens * self._span, self._blocks_for(total)
        shared = [i for i in range(first, min(end, len(table))) if refs[table[i]] > 1]
        if len(shared) + max(0, end - len(table)) > index.available:
            return False
        for i in shared:
            block = index.take()
            if i * self.block_size < computed:  # else nothing in it is read before it is written
                self._tiers.ops.append(KVOp("copy", table[i], block))
                self._copies += 1
            index.drop(table[i])
            table[i] = block
            record.dirty = min(record.dirty, i)
        while len(table) < end:
            table.append(index.take())
        record.room = len(table) * self.block_size
        return True

    def _behind(self, computed: int) -> int:
        """Leading blocks, of whole nodes, that a row which begins at `computed` doesn't read."""
        return max(0, computed - self._window) // self._node_tokens * self._span

    def _unpublish(self, record: _Sequence, computed: int) -> None:
        """The cursor never stands beyond `computed`: what is written again must be published again."""
        while len(record.nodes) * self._node_tokens > computed:
            record.nodes.pop()
        record.next_publish = (len(record.nodes) + 1) * self._node_tokens

    def commit(self, seq: int, tokens: Sequence[int], computed: int) -> None:
        record = self._sequences[seq]
        while record.next_publish <= computed and self._caching and self._linked(record):
            self._publish_next(record, tokens)
        if self._window:
            self._give_back(record, self._behind(computed - 1))  # a choice that forks computes the last token again

    def _linked(self, record: _Sequence) -> bool:
        """Is its path still in the index, so that the next of its blocks can be hung below it?"""
        nodes = record.nodes
        return len(nodes) * self._span >= record.behind and (not nodes or bool(nodes[-1].blocks))

    def _give_back(self, record: _Sequence, behind: int) -> None:
        """Let go of table[:behind]; what was published of it stays cached until the room is needed."""
        if behind <= record.behind:
            return
        for i in reversed(range(record.behind, behind)):
            self.index.drop(record.table[i])
            record.table[i] = HOLE
        record.behind = behind

    def _publish_next(self, record: _Sequence, tokens: Sequence[int]) -> None:
        index, n, span = self.index, len(record.nodes), self._span
        key = tuple(tokens[n * self._node_tokens : record.next_publish])
        own = tuple(record.table[n * span : (n + 1) * span])
        node = index.publish(record.nodes[-1] if record.nodes else None, record.salt, key, own)
        if node.blocks != own:  # another sequence was first: share its blocks, drop ours
            for block in node.blocks:
                index.hold(block)
            for block in own:
                index.drop(block)
            record.table[n * span : (n + 1) * span] = node.blocks
            record.dirty = min(record.dirty, n * span)
        record.nodes.append(node)
        record.next_publish += self._node_tokens

    def fork(self, parent: int, child: int, computed: int) -> bool:
        assert child not in self._sequences, "a sequence is begun once"
        source = self._sequences[parent]
        if source.behind and source.behind > self._behind(computed):
            return False
        record = self._sequences[child] = _Sequence(source.salt, self._node_tokens)
        record.table = source.table[: self._blocks_for(computed)]
        record.behind = source.behind
        for block in record.table[record.behind :]:
            self.index.hold(block)
        record.nodes = list(source.nodes)
        self._unpublish(record, computed)  # the child may lag: it doesn't inherit the cursor
        source.room = 0
        return True

    def release(self, seq: int) -> None:
        record = self._sequences.pop(seq, None)
        if record is None:
            return
        if record.swapped is not None:
            for copy in record.swapped:
                self._tiers.host.drop(copy)
            self._tiers.let_go(record.nodes)
        for block in reversed(record.table[record.behind :]):
            self.index.drop(block)

    # ---------------------------------------------------------------- swapping

    def survives(self, seq: int) -> int:
        record = self._sequences[seq]
        if record.behind:
            return 0
        refs, owner, n = self._pool.refs, self.index.owner, 0
        for block in record.table:
            if refs[block] - (owner[block] is not None) < 2:
                break
            n += 1
        return n * self.block_size

    def swap_blocks(self, seq: int, computed: int) -> tuple[int, int] | None:
        if not self._tiers.host.size:
            return None
        record = self._sequences[seq]
        total = self._blocks_for(computed) - record.behind
        kept = 0 if record.behind else sum(1 for node in record.nodes if node.host) * self._span
        return max(0, total - kept), total

    def swap_out(self, seq: int, computed: int) -> bool:
        record, tiers = self._sequences[seq], self._tiers
        nodes = [] if record.behind else record.nodes  # a path with holes is no longer relied upon
        tail = record.table[max(len(nodes) * self._span, record.behind) : self._blocks_for(computed)]
        bare = [node for node in nodes if not node.host]
        tiers.pin(nodes)
        if not tiers.room(len(bare) * self._span + len(tail)):
            tiers.unpin(nodes)
            return False
        for node in bare:
            node.host = tiers.copy_out(node.blocks)
        for node in nodes:
            tiers.hold(node)
        tiers.unpin(nodes)
        record.swapped = tiers.copy_out(tail)
        for block in reversed(record.table[record.behind :]):
            self.index.drop(block)
        record.table = []
        record.nodes = nodes
        record.room = 0
        return True

    def swap_in(self, seq: int, total: int, spare: int) -> bool:
        record, tiers, index = self._sequences[seq], self._tiers, self.index
        assert record.swapped is not None, "only what was swapped out comes back"
        nodes = record.nodes
        resident = sum(1 for node in nodes if node.blocks)
        busy = sum(1 for node in nodes[:resident] if node.busy)
        if self._blocks_for(total) - record.behind - busy * self._span + spare > index.available:
            return False
        record.nodes = []
        record.table = [HOLE] * record.behind
        self._claim(record, nodes, resident)
        assert len(record.nodes) == len(nodes), "a swapped sequence's nodes have host copies"
        tail = [index.take() for _ in record.swapped]
        tiers.copy_in(record.swapped, tail)
        record.table.extend(tail)
        for copy in record.swapped:
            tiers.host.drop(copy)
        tiers.let_go(nodes)
        record.swapped = None
        return True

    # ---------------------------------------------------------------- views

    def table(self, seq: int) -> Sequence[int]:
        return self._sequences[seq].table

    def behind(self, seq: int) -> int:
        return self._sequences[seq].behind

    def changes(self, seq: int) -> tuple[int, tuple[int, ...]]:
        record = self._sequences[seq]
        start = record.dirty
        if start == len(record.table):
            return 0, ()
        record.dirty = len(record.table)
        return start, tuple(record.table[start:])

    def seat(self, seq: int, slot: int) -> None:
        self._sequences[seq].dirty = 0  # blocks lie anywhere: which slot it is doesn't matter

    def missing(self, seq: int, total: int) -> int:
        return max(0, self._blocks_for(total) - len(self._sequences[seq].table))

    def drain(self) -> tuple[tuple[KVOp, ...], tuple[tuple[int, bytes], ...]]:
        return self._tiers.drain()

    def store(self) -> Iterator[tuple[tuple[KVOp, ...], tuple[tuple[int, bytes], ...]]]:
        for _ in self.index.store():
            if len(self._tiers.ops) >= STORED_AT_ONCE:
                yield self._tiers.drain()
        if self._tiers.ops:
            yield self._tiers.drain()

    def reset(self) -> None:
        self.index.reset()

    def usage(self) -> Usage:
        pool, tiers, index = self._pool, self._tiers, self.index
        cached = len(index.idle) * self._span
        return Usage(
            total=pool.size,
            free=pool.free + cached,
            cached=cached,
            shared=index.shared,
            saved=max(0, index.held - (pool.size - pool.free - cached)),
            host_total=tiers.host.size,
            host_used=tiers.host.size - tiers.host.free,
            disk_used=tiers.disk.size - tiers.disk.free,
            queried_tokens=self._queried,
            hit_tokens=self._hits,
            hit_tokens_host=self._hits_host,
            hit_tokens_disk=self._hits_disk,
            swapped_out=tiers.outs,
            swapped_in=tiers.ins,
            copies=self._copies,
        )

    def held(self) -> Iterable[int]:
        return compress(count(), self._pool.refs)

    def blocks(self) -> list[BlockView]:
        holders: dict[int, list[int]] = {}
        for seq, record in self._sequences.items():
            for block in record.table[record.behind :]:
                holders.setdefault(block, []).append(seq)
        return [
            BlockView(block, refs, self.index.owner[block] is not None, tuple(holders.get(block, ())))
            for block, refs in enumerate(self._pool.refs)
            if refs
        ]

    def content(self, block: int) -> tuple[int, ...]:
        node = self.index.owner[block]
        if node is None:
            return ()
        size = len(node.key) // len(node.blocks)
        at = node.blocks.index(block) * size
        return node.key[at : at + size]

    def check(self) -> None:
        device, host, disk = [0] * self._pool.size, [0] * self._tiers.host.size, [0] * self._tiers.disk.size
        for record in self._sequences.values():
            for block in record.table[record.behind :]:
                device[block] += 1
            if record.swapped is not None:
                for copy in (*record.swapped, *(copy for node in record.nodes for copy in node.host)):
                    host[copy] += 1
        self._check_shares(device)
        for node in self._nodes():
            for counts, copies in ((device, node.blocks), (host, node.host), (disk, node.disk)):
                for block in copies:
                    counts[block] += 1
            assert node.kept, "a node without any copy should be forgotten"
            assert not node.blocks or node.parent is None or not node.parent.parent or node.parent.blocks, "a gap"
        for block in self._tiers.unclaimed():
            disk[block] += 1
        self._pool.check(device)
        self._tiers.host.check(host)
        self._tiers.disk.check(disk)

    def _check_shares(self, held: list[int]) -> None:
        index = self.index
        assert index.held == sum(held), "the count of references of sequences is wrong"
        assert index.shared == sum(1 for n in held if n > 1), "the count of shared blocks is wrong"
        for node in self._nodes():
            busy = sum(1 for block in node.blocks if held[block])
            assert node.busy == busy, f"a node has {busy} blocks in use, not {node.busy}"
            assert (node in index.idle) == (bool(node.blocks) and busy == 0), "an idle node is misfiled"
            assert all(index.owner[block] is node for block in node.blocks), "a block's owner is wrong"

    def _nodes(self) -> list[Node]:
        found: list[Node] = []
        pending = [child for root in self.index.roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            found.append(node)
            pending.extend(node.children.values())
        return found
