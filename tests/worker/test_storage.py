"""KV operations: batching into runs changes nothing, every tier's bytes come back identical."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.cache import KVCache
from engine.core.plan import KVOp
from engine.errors import ConfigError, EngineDead, RequestFailed
from engine.worker.disk_writer import DiskWriter
from engine.worker.storage import KVStorage, runs
from engine.worker.tiers import DiskTier, HostPool
from engine.worker.torch_blocks import TorchBlocks

BLOCKS, HOST, DISK, WIDTH = 12, 9, 7, 64


class PlainBlocks:
    """Device blocks as rows of one array."""

    def __init__(self) -> None:
        self.num_blocks, self.bytes_per_block = BLOCKS, WIDTH
        self.blocks = np.random.default_rng(0).integers(0, 256, (BLOCKS, WIDTH), np.uint8)
        self.moves = 0

    def copy(self, src: int, dst: int, n: int) -> None:
        self.moves += 1
        self.blocks[dst : dst + n] = self.blocks[src : src + n].copy()

    def read(self, src: int, into: np.ndarray) -> None:
        self.moves += 1
        into[:] = self.blocks[src : src + len(into)]

    def write(self, dst: int, data: np.ndarray) -> None:
        self.moves += 1
        self.blocks[dst : dst + len(data)] = data

    def wait(self) -> None:
        pass

    def commit(self, slot: int, page: int) -> None:
        raise AssertionError("no pages here")

    def release(self, slot: int, page: int) -> None:
        raise AssertionError("no pages here")


POOLS = {
    "copy": (BLOCKS, BLOCKS),
    "out": (BLOCKS, HOST),
    "in": (HOST, BLOCKS),
    "disk_out": (HOST, DISK),
    "disk_in": (DISK, HOST),
}


@st.composite
def operations(draw: st.DrawFn) -> list[KVOp]:
    ops = []
    for kind in draw(st.lists(st.sampled_from(["copy", "out", "in"]), max_size=30)):
        sources, targets = POOLS[kind]
        ops.append(KVOp(kind, draw(st.integers(0, sources - 1)), draw(st.integers(0, targets - 1))))
    return ops


@given(ops=operations())
def test_runs_have_the_effect_of_the_operations_one_by_one(ops: list[KVOp]) -> None:
    device, host = PlainBlocks(), HostPool(HOST, WIDTH)
    model, swapped = device.blocks.copy(), np.zeros((HOST, WIDTH), np.uint8)
    for op in ops:
        source = swapped if op.kind == "in" else model
        target = swapped if op.kind == "out" else model
        target[op.dst] = source[op.src]

    copies = KVStorage(device, host, None).run(tuple(ops), {})

    assert {copied.kind: copied.size_bytes for copied in copies} == {
        kind: n * WIDTH for kind, n in Counter(op.kind for op in ops).items()
    }
    assert (device.blocks == model).all()
    assert (host.blocks == swapped).all()


def test_neighbouring_blocks_move_as_one_run_in_whatever_order_they_came() -> None:
    ops = tuple(KVOp("out", block, block - 2) for block in (5, 3, 4, 8, 2))
    assert [(run.src, run.dst, run.n) for run in runs(ops)] == [(2, 0, 4), (8, 6, 1)]
    chained = (KVOp("copy", 1, 2), KVOp("copy", 2, 3))
    assert [(run.src, run.dst, run.n) for run in runs(chained)] == [(1, 2, 1), (2, 3, 1)]


@pytest.mark.parametrize(
    ("kind", "src", "dst"), [("copy", BLOCKS, 0), ("out", 0, HOST), ("in", -1, 0), ("disk_in", 0, 0)]
)
def test_an_operation_outside_of_its_pool_is_refused(kind: str, src: int, dst: int) -> None:
    device = PlainBlocks()
    before = device.blocks.copy()
    with pytest.raises(RequestFailed, match=kind):
        KVStorage(device, HostPool(HOST, WIDTH), None).run((KVOp(kind, src, dst),), {})
    assert (device.blocks == before).all()


def test_an_operation_that_fails_keeps_none_of_the_others_from_running() -> None:
    device, host = PlainBlocks(), HostPool(HOST, WIDTH)
    with pytest.raises(RequestFailed, match="copy"):
        KVStorage(device, host, None).run((KVOp("copy", 0, BLOCKS), KVOp("out", 2, 3), KVOp("out", 4, 5)), {})
    assert (host.blocks[3] == device.blocks[2]).all()
    assert (host.blocks[5] == device.blocks[4]).all()


def disk(directory: Path, fingerprint: str = "f") -> DiskTier:
    return DiskTier(directory, DISK * (WIDTH + 256 + 8 * 4 + 16), WIDTH, 4, fingerprint)


def test_a_block_comes_back_identical_from_every_tier(tmp_path: Path) -> None:
    device = PlainBlocks()
    storage = KVStorage(device, HostPool(HOST, WIDTH), disk(tmp_path))
    block = device.blocks[3].copy()
    down = (KVOp("out", 3, 1), KVOp("disk_out", 1, 6), KVOp("copy", 0, 3), KVOp("out", 3, 1))
    storage.run(down, {6: b"key"})
    assert not (device.blocks[3] == block).all()
    storage.run((KVOp("disk_in", 6, 8), KVOp("in", 8, 5)), {})
    assert (device.blocks[5] == block).all()
    storage.close()
    storage.close()


def test_a_write_to_disk_keeps_what_the_block_was_and_a_read_waits_for_it(tmp_path: Path) -> None:
    device, host = PlainBlocks(), HostPool(HOST, WIDTH)
    storage = KVStorage(device, host, disk(tmp_path))
    host.blocks[0] = before = 1
    for value in range(1, 200):  # the next move overwrites the source at once
        storage.run((KVOp("disk_out", 0, value % DISK), KVOp("out", 3, 0)), {value % DISK: b"key %d" % value})
        storage.run((KVOp("disk_in", value % DISK, 1),), {})
        assert (host.blocks[1] == before).all()
        device.blocks[3] = before = value + 1 & 255
        storage.run((KVOp("out", 3, 0),), {})
    storage.close()
    tier = disk(tmp_path)
    assert dict(tier.index()) == {value % DISK: b"key %d" % value for value in range(200 - DISK, 200)}
    tier.close()


def test_a_disk_that_fails_ends_the_engine(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    writer = DiskWriter(tier, WIDTH)
    tier._blocks.flags.writeable = False
    writer.write(0, np.ones(WIDTH, np.uint8), b"k")
    with pytest.raises(EngineDead, match="can't be written"):
        writer.read(0, np.zeros(WIDTH, np.uint8))
    writer.close()


def test_disk_blocks_survive_a_killed_process_and_give_their_keys_back(tmp_path: Path) -> None:
    script = f"""
import os, numpy as np
from pathlib import Path
from engine.worker.tiers import DiskTier
tier = DiskTier(Path({str(tmp_path)!r}), {DISK * (WIDTH + 256 + 32 + 16)}, {WIDTH}, 4, "f")
for block in (2, 4):
    tier.write(block, np.full({WIDTH}, block, np.uint8), b"prefix %d" % block)
tier.write(5, np.full({WIDTH}, 5, np.uint8), b"")
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9

    tier = disk(tmp_path)
    assert tier.index() == ((2, b"prefix 2"), (4, b"prefix 4"))
    block = np.zeros(WIDTH, np.uint8)
    tier.read(4, block)
    assert (block == 4).all()
    tier.close()


def damaged(directory: Path) -> DiskTier:
    """A tier of two blocks after a bit of block 0 has flipped."""
    tier = disk(directory)
    tier.index()
    for block in (0, 1):
        tier.write(block, np.full(WIDTH, 7, np.uint8), b"k%d" % block)
    tier.close()
    data = bytearray(tier.path.read_bytes())
    data[-WIDTH * (DISK - 1) - 5] ^= 1
    tier.path.write_bytes(data)
    return disk(directory)


def test_a_damaged_disk_block_ends_the_engine_once_and_is_not_known_to_the_next(tmp_path: Path) -> None:
    tier = damaged(tmp_path)
    assert tier.index() == ((0, b"k0"), (1, b"k1"))
    with pytest.raises(EngineDead, match="damaged"):
        tier.read(0, np.zeros(WIDTH, np.uint8))
    tier.close()
    tier = disk(tmp_path)
    assert tier.index() == ((1, b"k1"),)
    tier.close()


def test_when_one_block_is_found_damaged_the_next_engine_checks_them_all(tmp_path: Path) -> None:
    tier = damaged(tmp_path)
    tier.close()
    data = bytearray(tier.path.read_bytes())
    data[-WIDTH * (DISK - 2) - 5] ^= 1
    tier.path.write_bytes(data)
    tier = disk(tmp_path)
    assert len(tier.index()) == 2
    with pytest.raises(EngineDead, match="damaged"):
        tier.read(1, np.zeros(WIDTH, np.uint8))
    tier.close()
    tier = disk(tmp_path)
    assert tier.index() == ()
    tier.close()


def test_after_another_boot_every_block_is_checked(tmp_path: Path) -> None:
    tier = damaged(tmp_path)
    tier.close()
    data = bytearray(tier.path.read_bytes())
    data[0] ^= 1
    tier.path.write_bytes(data)
    tier = disk(tmp_path)
    assert tier.index() == ((1, b"k1"),)
    tier.close()


def test_another_model_never_sees_the_blocks_and_takes_the_room(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    tier.write(0, np.ones(WIDTH, np.uint8), b"k")
    with pytest.raises(ConfigError, match="another engine"):
        disk(tmp_path)
    other = disk(tmp_path, "g")
    assert other.index() == ()
    assert tier.path.exists()  # in use
    other.close()
    tier.close()
    disk(tmp_path, "g").close()
    assert not tier.path.exists()


def test_a_disk_tier_that_cannot_be_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't use"):
        disk(tmp_path / "file")
    with pytest.raises(ConfigError, match="smaller than one KV block"):
        DiskTier(tmp_path, WIDTH - 1, WIDTH, 4, "f")


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8_e4m3"])
def test_torch_blocks_move_keys_values_and_scales_of_all_layers(kv_dtype: str) -> None:
    cache = KVCache.allocate(2, 5, 3, 2, 16, kv_dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    slots = torch.arange(15)
    for layer in (0, 1):
        cache.write(layer, *torch.randn(2, 15, 2, 16, generator=generator), slots)
    before = [cache.read(layer, slots) for layer in (0, 1)]
    storage = KVStorage(TorchBlocks(cache), HostPool(4, TorchBlocks(cache).bytes_per_block), None)

    storage.run((KVOp("out", 1, 0), KVOp("out", 2, 1), KVOp("copy", 3, 1), KVOp("copy", 3, 2)), {})
    storage.run((KVOp("in", 0, 4), KVOp("in", 1, 0)), {})

    moved = torch.cat([torch.arange(3 * block, 3 * block + 3) for block in (2, 3, 3, 3, 1)])
    for layer in (0, 1):
        for now, then in zip(cache.read(layer, slots), before[layer], strict=True):
            assert torch.equal(now, then[moved])
