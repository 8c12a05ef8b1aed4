"""What the checks are for: faults planted into a copy of the sources must be noticed, each barrier must be missed."""

import shutil
from pathlib import Path

import pytest

from csrc.build_gpu import SOURCES
from tests.gpu.harness import driver, run_driver

FAULTS = {
    "the merge of parts forgets to rescale": (
        "attention.h", "fmaf(total, f.old, part * f.added)", "total + part", "plain"),
    "one key too many at the last block": (
        "attention.h", "row < p.rows && key <= position", "row < p.rows && key <= position + 1", "plain"),
    "the last key is left out": (
        "attention.h", "row < p.rows && key <= position", "row < p.rows && key < position", "plain"),
    "fp8 keys are read without their scale": (
        "attention_plain.h", "one_scale ? a.scale * *a.k_scale : a.scale", "a.scale", "plain_fp8"),
}  # fmt: skip
BARRIERS = {"plain": 5, "tensor": 2, "cache_write": 2, "rms_norm": 1, "sample": 3}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str, tmp_path: Path) -> None:
    file, right, wrong, kernel = FAULTS[name]
    sources = tmp_path / "gpu"
    shutil.copytree(SOURCES, sources)
    text = (sources / file).read_text()
    assert text.count(right) == 1
    (sources / file).write_text(text.replace(right, wrong))
    done = run_driver(driver(sources=sources), kernel)
    assert done.returncode == 1
    assert "off by" in done.stdout


@pytest.mark.parametrize("kernel", [*BARRIERS, "plain_fp8"])
def test_the_kernels_as_they_are_pass_the_race_check(kernel: str) -> None:
    done = run_driver(driver("-fsanitize=thread"), kernel)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("kernel", "barrier"), [(k, n) for k, count in BARRIERS.items() for n in range(1, count + 1)])
def test_the_race_check_misses_every_single_barrier(kernel: str, barrier: int) -> None:
    # Where the race is on an index, the wild access that follows may be reported before the race itself.
    report = run_driver(driver("-fsanitize=thread"), kernel, barrier).stderr
    assert "data race" in report or "ThreadSanitizer: SEGV" in report
