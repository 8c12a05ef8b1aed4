"""The virtual memory of a GPU over a fake driver: the order of its calls, granules, and nothing left when one fails."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from csrc.build import compiler
from engine.attention import contiguous
from engine.attention.address_ranges import DeviceRange
from engine.attention.contiguous import VirtualCache
from engine.errors import ConfigError, RequestFailed
from engine.model.spec import DecoderSpec, LayerSpec
from tests.gpu.vmm_layouts import check_layouts

HERE = Path(__file__).parent
GRANULE = 64 << 10  # of the fake driver
CPU = torch.device("cpu")


class FakeDriver:
    """`fake_driver.cpp`, loaded once more than the code under test loads it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._lib = ctypes.CDLL(self.path)
        self._lib.fake_calls.restype = ctypes.c_char_p
        self._lib.fake_left.restype = ctypes.c_size_t

    def calls(self) -> list[str]:
        """Since the last time."""
        found = self._lib.fake_calls().decode().splitlines()
        self._lib.fake_forget()
        return found

    def fail(self, call: str, n: int = 1) -> None:
        """The n-th such call from now fails."""
        self._lib.fake_fail(call.encode(), n)

    @property
    def left(self) -> int:
        """Ranges, handles and mappings that were not given back."""
        return int(self._lib.fake_left())

    def range(self, size: int, prefix: str = "cu") -> DeviceRange:
        return DeviceRange(size, CPU, self.path, prefix)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("driver") / "driver.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Werror"]
    subprocess.run([compiler(), *flags, str(HERE / "fake_driver.cpp"), "-o", str(out)], check=True)
    return out


@pytest.fixture
def driver(library: Path, tmp_path: Path) -> Iterator[FakeDriver]:
    """A fresh one for each test: a copy of the file is another library."""
    fake = FakeDriver(shutil.copy(library, tmp_path / "fake.so"))
    yield fake
    assert not fake._lib.fake_misused(), "the driver was called with what it doesn't take"
    assert fake.left == 0, "something was not given back"


@pytest.mark.parametrize("prefix", ["cu", "hip"])
def test_a_range_is_reserved_in_whole_granules_and_memory_comes_and_goes_in_the_drivers_order(
    driver: FakeDriver, prefix: str
) -> None:
    memory = driver.range(3 * GRANULE + 1, prefix)
    assert driver.calls() == ["init", "granularity of device 0", "reserve 4"]
    memory.commit(GRANULE + 5, GRANULE)  # touches two granules
    assert driver.calls() == ["create", "map 1", "access 1", "create", "map 2", "access 2"]
    assert memory.committed == 2 * GRANULE
    memory.tensor()[GRANULE + 5 : 2 * GRANULE + 5] = 7  # really there
    memory.release(GRANULE + 5, GRANULE)
    assert driver.calls() == ["unmap 1", "release", "unmap 2", "release"]
    memory.commit(0, 1)
    driver.calls()
    memory.close()
    memory.close()
    assert driver.calls() == ["unmap 0", "release", "free"]


def test_a_granule_stays_as_long_as_any_part_of_it_is_committed(driver: FakeDriver) -> None:
    memory = driver.range(2 * GRANULE)
    for part in range(4):
        memory.commit(part * GRANULE // 2, GRANULE // 2)
    assert memory.committed == 2 * GRANULE
    memory.release(0, GRANULE // 2)
    assert memory.committed == 2 * GRANULE
    memory.release(GRANULE // 2, GRANULE // 2)
    assert memory.committed == GRANULE
    memory.close()


@pytest.mark.parametrize("call", ["create", "map", "access"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_commit_that_fails_changes_nothing(driver: FakeDriver, call: str, n: int) -> None:
    memory = driver.range(6 * GRANULE)
    memory.commit(GRANULE, 1)
    before = driver.left
    driver.fail(call, n)
    with pytest.raises(RequestFailed, match="failed with status 2"):
        memory.commit(0, 5 * GRANULE)
    assert driver.left == before
    assert memory.committed == GRANULE
    memory.commit(0, 5 * GRANULE)
    memory.close()


@pytest.mark.parametrize("call", ["init", "granularity", "reserve"])
def test_a_range_that_cannot_be_reserved_is_one_clear_line(driver: FakeDriver, call: str) -> None:
    driver.fail(call)
    with pytest.raises(ConfigError, match="failed with status 2"):
        driver.range(GRANULE)


def test_a_missing_driver_and_a_hip_of_another_layout_are_refused(driver: FakeDriver) -> None:
    with pytest.raises(ConfigError, match="loading the driver"):
        DeviceRange(GRANULE, CPU, "/nowhere/libcuda.so", "cu")
    driver.fail("old")  # version 5.2
    with pytest.raises(ConfigError, match="loading the driver"):
        driver.range(GRANULE, "hip")


@pytest.mark.parametrize(("at", "size"), [(2 * GRANULE, 1), (0, 2 * GRANULE + 1), (GRANULE, 0), (GRANULE, 1 << 63)])
def test_what_lies_outside_or_is_not_committed_is_refused(driver: FakeDriver, at: int, size: int) -> None:
    memory = driver.range(2 * GRANULE)
    for act in (memory.commit, memory.release):
        with pytest.raises(RequestFailed, match="outside"):
            act(at, size)
    with pytest.raises(RequestFailed, match="isn't committed"):
        memory.release(0, 1)
    memory.close()


def spec() -> DecoderSpec:
    return DecoderSpec(
        family="test", vocab_size=32, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_size=16,
        intermediate_size=64, max_position=256, attn_scale=0.25, layers=(LayerSpec(), LayerSpec()),
    )  # fmt: skip


def test_the_virtual_cache_is_the_same_over_the_driver_as_over_mmap(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host = VirtualCache.reserve(spec(), 2, 64, 32, "float32")
    monkeypatch.setattr(contiguous, "reserve", lambda size, device: driver.range(size))
    on_device = VirtualCache.reserve(spec(), 2, 64, 32, "float32")
    generator = torch.Generator().manual_seed(0)
    for cache in (on_host, on_device):
        for page in range(3):
            cache.commit(1, page)
            cache.commit(1, page)  # harmless
        generator.manual_seed(0)
        for layer in (0, 1):
            rows = torch.randn(2, 80, 2, 16, generator=generator)
            cache.write(layer, rows[0], rows[1], torch.arange(80) + 64 * 32)
    for layer in (0, 1):
        for one, two in zip(on_host.sequence(layer, 1, 80), on_device.sequence(layer, 1, 80), strict=True):
            assert torch.equal(one, two)

    driver.fail("create", 3)  # of the second layer: the first gives its memory back
    left = driver.left
    with pytest.raises(RequestFailed):
        on_device.commit(0, 0)
    assert driver.left == left
    assert on_device.committed == {64, 65, 66}
    for page in (0, 1, 2, 5):  # the last has none: harmless
        on_device.release(1, page)
    assert sum(memory.committed for memory in on_device.memory) == 0
    on_device.layers.clear()
    for memory in on_device.memory:
        memory.close()


def test_the_layouts_are_those_of_the_drivers_headers_that_are_here() -> None:
    check_layouts()
