"""The native executor: the same bits whatever the schedule, and within stated tolerances of the torch oracle."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine import native
from engine.core.plan import Executor, Geometry, KVOp, Plan, Result, Row, Sampled, SlotParams
from engine.errors import ConfigError, RequestFailed
from engine.model.config import load_spec
from engine.worker.native_executor import NativeExecutor, image_path
from engine.worker.settings import ExecutorSettings
from engine.worker.torch_executor import TorchExecutor
from tests.worker.driver import VOCAB, Driver, Job, overlapped, prompts, tiny_gguf, tiny_model

ROOT = Path(__file__).parent.parent.parent
SETTINGS = ExecutorSettings(
    max_model_len=544,
    max_num_seqs=40,
    max_batched_tokens=2048,
    block_size=16,
    num_blocks=400,
    host_blocks=40,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    quantization="none",
    image_cache=False,
)
# How weights are kept, and how KV is.
CONFIGURATIONS = {
    "f32": {"dtype": "float32", "kv_dtype": "float32"},
    "bf16": {},
    "int8": {"quantization": "int8"},
    "q4_0": {"quantization": "auto"},
    "q4_1": {"quantization": "auto"},
    "q8_0": {"quantization": "auto"},
    "f16-kv": {"dtype": "float32", "kv_dtype": "float16"},
    "int8-kv": {"kv_dtype": "int8"},
    "int8-int8-kv": {"quantization": "int8", "kv_dtype": "int8"},
    "e4m3-kv": {"kv_dtype": "fp8_e4m3"},
    "e5m2-kv": {"kv_dtype": "fp8_e5m2"},
}


Configured = tuple[Path, dict[str, object], list[list[Sampled]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def path_of(models: Path, name: str) -> Path:
    kind = {"q4_0": "Q4_0", "q4_1": "Q4_1", "q8_0": "Q8_0"}.get(name)
    return tiny_gguf(models, gguf.GGMLQuantizationType[kind]) if kind else models


def start(model: Path, **changes: object) -> tuple[Executor, Geometry]:
    executor = NativeExecutor(model, load_spec(model), replace(SETTINGS, **changes))
    return executor, executor.start()


@functools.cache
def requests() -> tuple[tuple[tuple[int, ...], SlotParams], ...]:
    """32 prompts of 1 to 90 tokens, greedy and drawn by turns."""
    params = (
        SlotParams(temperature=0.0, logprobs=2),
        SlotParams(temperature=0.9, top_p=0.9, top_k=40, seed=7, logprobs=1),
        SlotParams(min_p=0.02, seed=8, choice=3, repetition_penalty=1.3, frequency_penalty=0.2, logprobs=0),
    )
    lengths = [1, 90, 17, 16, 33, 64, 5, 48, 80, 2, 31, 15, 70, 8, 24, 41] * 2
    return tuple((prompt, params[i % 3]) for i, prompt in enumerate(prompts(lengths)))


def jobs() -> list[Job]:
    return [Job(prompt, params, 6) for prompt, params in requests()]


def results(done: list[Job]) -> list[list[Sampled]]:
    return [job.sampled for job in done]


@pytest.fixture(scope="module", params=list(CONFIGURATIONS))
def configured(request: pytest.FixtureRequest, models: Path) -> Configured:
    """A model, its settings, and what its sequences get when each runs alone, its prompt in one piece."""
    changes = CONFIGURATIONS[request.param]
    model = path_of(models, request.param)
    executor, geometry = start(model, **changes)
    alone = results(Driver(executor, geometry).generate(jobs(), chunk=1000, together=False))
    executor.close()
    assert len({tuple(s.token for s in sampled) for sampled in alone}) > 24  # they differ, so equality says something
    return model, changes, alone


@pytest.mark.parametrize("block_size", [1, 7, 16, 544])
def test_no_bit_depends_on_batch_chunk_block_size_or_swapping(configured: Configured, block_size: int) -> None:
    model, changes, alone = configured
    blocks = {1: 5000, 7: 800, 16: 400, 544: 41}[block_size]
    changes = {**changes, "block_size": block_size, "num_blocks": blocks, "host_blocks": -(-110 // block_size)}
    executor, geometry = start(model, **changes)
    together = results(Driver(executor, geometry, seed=1).generate(jobs(), chunk=1000))
    chunked = results(Driver(executor, geometry, seed=2).generate(jobs(), chunk=13, swap=True))
    executor.close()
    assert together == alone
    assert chunked == alone


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_long_contexts_are_the_same_bits_on_any_number_of_threads(models: Path, kv_dtype: str) -> None:
    """Contexts long enough that their keys are shared out among threads."""

    def run(chunk: int, *, together: bool, **changes: object) -> list[list[Sampled]]:
        executor, geometry = start(models, kv_dtype=kv_dtype, max_model_len=2048, **changes)
        params = SlotParams(temperature=0.8, seed=2, logprobs=1)
        todo = [Job(prompt, params, 6) for prompt in prompts([1700, 20, 530, 1025])]
        done = results(Driver(executor, geometry).generate(todo, chunk=chunk, together=together))
        executor.close()
        return done

    alone = run(2048, together=False)
    assert run(97, together=True) == alone
    assert run(512, together=True, block_size=544, num_blocks=16) == alone
    assert run(300, together=True, threads=1) == alone


def test_no_bit_depends_on_the_schedule_on_any_instruction_set(models: Path) -> None:
    """The kernels are chosen once a process, so each set has one of its own; the default is the tests' above."""
    gguf_file = tiny_gguf(models, gguf.GGMLQuantizationType.Q4_1)
    for isa in native.Kernels(native.library()).isas[:-1]:
        script = f"""
from pathlib import Path
from tests.worker import test_native_executor as here
for model, name in (({str(models)!r}, "f32"), ({str(models)!r}, "int8-int8-kv"), ({str(gguf_file)!r}, "q4_1")):
    executor, geometry = here.start(Path(model), isa={isa!r}, **here.CONFIGURATIONS[name])
    assert here.native.load({isa!r}).isa == {isa!r}
    alone = here.Driver(executor, geometry).generate(here.jobs()[:8], chunk=1000, together=False)
    mixed = here.Driver(executor, geometry, seed=2).generate(here.jobs()[:8], chunk=13, swap=True)
    executor.close()
    assert here.results(mixed) == here.results(alone), name
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, f"{isa}: {done.stderr}"


def test_virtual_storage_gives_the_same_bits_and_takes_its_pages_back(models: Path) -> None:
    executor, geometry = start(models, kv_manager="virtual", num_blocks=100)
    assert geometry.num_blocks == 100
    pages = 544 // 16
    prompt, params = requests()[1]
    for slot in (3, 17):
        table = tuple(range(slot * pages, (slot + 1) * pages))
        mapped = tuple(KVOp("map", slot, page) for page in range(7))
        rows = (Row(slot, 0, prompt, 0, table, sample=True),)
        executor.submit(Plan(0, rows, mapped, ((slot, params),)))
        got = executor.collect().rows[0].sampled
        if slot == 3:
            first = got
        unmapped = tuple(KVOp("unmap", slot, page) for page in range(7))
        executor.submit(Plan(1, (), unmapped))
        executor.collect()
    assert got == first
    executor.submit(Plan(2, (), (KVOp("map", 0, pages),)))
    with pytest.raises(RequestFailed, match="no page 34 of slot 0"):
        executor.collect()
    executor.close()
    paged, geometry = start(models)
    want = Driver(paged, geometry).generate([Job(prompt, params, 1)])[0].sampled
    paged.close()
    assert list(first) == want


# Largest difference of a logprob from the float32 oracle with the same rounding of weights and KV, in nats. f32
# differs by the order of additions; bf16 rounds activations at other places than torch does.
@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"dtype": "float32", "kv_dtype": "float32"}, 2e-4),
        ({"dtype": "float32", "kv_dtype": "int8"}, 0.1),
        ({"dtype": "float32", "kv_dtype": "fp8_e4m3"}, 0.1),
        ({"dtype": "float32", "kv_dtype": "bfloat16"}, 0.1),
        ({}, 0.5),
    ],
)
def test_logprobs_are_those_of_the_oracle(models: Path, changes: dict[str, object], tolerance: float) -> None:
    spec = load_spec(models)
    scored = []
    for kind in (NativeExecutor, TorchExecutor):
        executor = kind(models, spec, replace(SETTINGS, **changes))
        driver = Driver(executor, executor.start())
        entries: list[Sampled] = []
        for prompt, params in requests()[1:6]:
            table = tuple(driver.free[: -(-len(prompt) // 16)])
            row = Row(0, 0, prompt, 0, table, score=3, targets=prompt[1:], sample=True)
            result = driver.run(Plan(0, (row,), slots=((0, params),)))[0]
            entries += result.scores
        executor.close()
        scored.append(entries)
    native, oracle = scored
    assert [s.token for s in native] == [s.token for s in oracle]
    difference = np.abs([a.logprob - b.logprob for a, b in zip(native, oracle, strict=True)])
    assert difference.max() < tolerance
    assert difference.mean() < tolerance / 4


def test_in_float32_both_executors_draw_the_same_tokens(models: Path) -> None:
    settings = replace(SETTINGS, dtype="float32", kv_dtype="float32")
    drawn = []
    for kind in (NativeExecutor, TorchExecutor):
        executor = kind(models, load_spec(models), settings)
        done = Driver(executor, executor.start()).generate(jobs())
        executor.close()
        drawn.append([[s.token for s in job.sampled] for job in done])
    assert drawn[0] == drawn[1]


@pytest.fixture(scope="module")
def running(models: Path) -> Iterator[tuple[Executor, Geometry]]:
    executor, geometry = start(models)
    yield executor, geometry
    executor.close()
    executor.close()


def test_steps_in_flight_use_the_token_sampled_before_them(running: tuple[Executor, Geometry]) -> None:
    params = SlotParams(temperature=0.8, seed=3, frequency_penalty=0.7, logprobs=0)
    want = Driver(*running).generate([Job(prompts([9])[0], params, 12)])[0]
    assert overlapped(Driver(*running), Job(prompts([9])[0], params, 12), slot=5).sampled == want.sampled


def test_drafts_give_the_bits_of_decoding_one_by_one(running: tuple[Executor, Geometry]) -> None:
    params = SlotParams(temperature=0.8, seed=3, repetition_penalty=1.5, presence_penalty=0.3, logprobs=1)
    want = Driver(*running).generate([Job(prompts([9])[0], params, 6)])[0].sampled
    tokens = [s.token for s in want]
    driver = Driver(*running)
    table = tuple(driver.free[:4])
    first = Row(0, 0, prompts([9])[0], 0, table, sample=True)
    job = Job(prompts([9])[0], params, 6)
    got = list(driver.run(Plan(0, (first,), slots=((0, job.params),)))[0].sampled)
    wrong = (tokens[2] + 1) % VOCAB
    row = Row(0, 9, (tokens[0], tokens[1], wrong, 3), sample=True, drafts=3)
    got += driver.run(Plan(1, (row,)))[0].sampled[:2]
    row = Row(0, 11, (tokens[2], tokens[3], tokens[4]), sample=True, drafts=2)
    got += driver.run(Plan(2, (row,)))[0].sampled
    assert got == want


def test_masks_bias_and_bad_words_reach_the_native_sampler(running: tuple[Executor, Geometry]) -> None:
    driver, prompt = Driver(*running), prompts([9])[0]
    plain = [s.token for s in driver.generate([Job(prompt, SlotParams(temperature=0.0), 4)])[0].sampled]
    limits = (
        SlotParams(temperature=0.0, bad_words=((plain[0],), (plain[1], plain[2]))),
        SlotParams(temperature=0.0, logit_bias={77: 1e4}),
        SlotParams(seed=1, allowed_token_ids=(3, 400, 514)),
        SlotParams(temperature=0.0, min_tokens=2, stop_ids=(plain[0],)),
        SlotParams(temperature=0.0),
    )
    done = [[s.token for s in job.sampled] for job in driver.generate([Job(prompt, p, 4) for p in limits])]
    assert plain[0] not in done[0]
    assert set(done[1]) == {77}
    assert set(done[2]) <= {3, 400, 514}
    assert done[3][0] != plain[0]
    assert done[4] == plain


def test_pooled_states_are_the_same_bits_however_the_prompt_is_cut(running: tuple[Executor, Geometry]) -> None:
    driver, prompt = Driver(*running), prompts([50])[0]
    for pooling in ("last", "mean"):
        states = []
        for cuts in ((50,), (7, 50), (1, 2, 33, 50)):
            start_at, hidden = 0, b""
            for i, end in enumerate(cuts):
                row = Row(1, start_at, prompt[start_at:end], 0, tuple(driver.free[:4]), pooling=pooling)
                slots = ((1, SlotParams()),) if i == 0 else ()
                hidden = driver.run(Plan(i, (row,), slots=slots))[0].hidden
                start_at = end
            states.append(hidden)
        assert len(states[0]) == 4 * 192
        assert states[0] == states[1] == states[2]


def test_an_adapter_that_is_not_there_is_never_ignored(running: tuple[Executor, Geometry]) -> None:
    row = Row(0, 0, (1,), 0, (0,), sample=True)
    with pytest.raises(RequestFailed, match="adapter 'french' is not loaded"):
        Driver(*running).run(Plan(0, (row,), slots=((0, SlotParams(adapter="french")),)))


def test_a_long_prompt_is_scored_in_one_step(running: tuple[Executor, Geometry]) -> None:
    driver, prompt = Driver(*running), prompts([300])[0]
    row = Row(0, 0, prompt, 0, tuple(driver.free[:19]), score=0, targets=prompt[1:], sample=True)
    whole = driver.run(Plan(0, (row,), slots=((0, SlotParams()),)))[0]
    cut: tuple[Sampled, ...] = ()
    for first in range(0, 300, 23):
        part = prompt[first : first + 23]
        row = Row(0, first, part, score=0, targets=prompt[first + 1 : first + 24])
        cut += driver.run(Plan(0, (row,)))[0].scores
    assert len(whole.scores) == 299
    assert cut == whole.scores


def test_a_bad_step_fails_alone(running: tuple[Executor, Geometry]) -> None:
    driver = Driver(*running)
    bad = SlotParams(temperature=0.0, logit_bias={5: float("inf")})
    with pytest.raises(RequestFailed):
        driver.run(Plan(0, (Row(0, 0, (1,), 0, (0,), sample=True),), slots=((0, bad),)))
    with pytest.raises(RequestFailed, match="vocabulary"):
        driver.run(Plan(1, (Row(0, 0, (-7,), 0, (0,), sample=True),), slots=((0, SlotParams()),)))
    assert len(driver.generate([Job((1, 2, 3), SlotParams(), 3)])[0].sampled) == 3


def test_swapping_is_measured_and_comes_back_from_disk_after_a_restart(models: Path, tmp_path: Path) -> None:
    def run(executor: Executor, *ops: KVOp, keys: tuple = (), rows: tuple[Row, ...] = ()) -> Result:
        executor.submit(Plan(0, rows, ops, ((0, SlotParams(temperature=0.0, logprobs=3)),), keys))
        return executor.collect()

    disk = {"disk_dir": str(tmp_path), "disk_bytes": 10 << 20}
    prompt = prompts([40])[0]
    executor, geometry = start(models, **disk)
    last = Row(0, 39, prompt[39:], 0, (5, 6, 7), sample=True)
    run(executor, rows=(Row(0, 0, prompt, 0, (5, 6, 7)),))
    want = run(executor, rows=(last,)).rows[0].sampled
    out = run(executor, KVOp("out", 5, 0), KVOp("out", 6, 1), KVOp("out", 7, 2))
    (copied,) = out.copies
    assert (copied.kind, copied.size_bytes) == ("out", 3 * geometry.bytes_per_block)
    assert copied.seconds > 0
    run(executor, *(KVOp("disk_out", i, i) for i in range(3)), keys=((0, b"a"), (1, b"b"), (2, b"c")))
    executor.close()

    executor, geometry = start(models, **disk)
    assert geometry.disk_index == ((0, b"a"), (1, b"b"), (2, b"c"))
    ops = [KVOp("disk_in", i, 9 + i) for i in range(3)] + [KVOp("in", 9 + i, 50 + i) for i in range(3)]
    row = Row(0, 39, prompt[39:], 0, (50, 51, 52), sample=True)
    assert run(executor, *ops, rows=(row,)).rows[0].sampled == want
    executor.close()


def test_the_packed_image_is_used_while_it_belongs_to_the_files_and_written_again_when_not(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")

    def first_tokens() -> list[int]:
        executor, geometry = start(model, image_cache=True)
        job = Driver(executor, geometry).generate([Job(prompts([20])[0], SlotParams(temperature=0.0), 4)])[0]
        executor.close()
        return [s.token for s in job.sampled]

    packed = first_tokens()
    (image,) = (model / ".octavo").glob("*.packed")
    before = image.stat().st_mtime_ns
    assert first_tokens() == packed
    assert image.stat().st_mtime_ns == before

    tiny_model(model, seed=1)
    other = first_tokens()
    assert other != packed
    assert image.stat().st_mtime_ns != before
    image.write_bytes(image.read_bytes()[:1000])
    assert first_tokens() == other


def test_a_gguf_file_keeps_its_image_beside_it(tmp_path: Path) -> None:
    model = tmp_path / "a.gguf"
    model.touch()
    assert image_path(model, "avx2", SETTINGS) == tmp_path / ".octavo" / "a-avx2-bfloat16-none.packed"


def test_what_the_kernels_cannot_do_is_one_clear_line(models: Path) -> None:
    with pytest.raises(ConfigError, match="float16"):
        start(models, dtype="float16")
    with pytest.raises(ConfigError, match="no room for KV blocks"):
        start(models, num_blocks=0, kv_bytes=100)


def test_the_native_path_loads_no_torch(models: Path) -> None:
    script = f"""
import sys
from engine.model.config import load_spec
from engine.worker.native_executor import NativeExecutor
from engine.worker.settings import ExecutorSettings
path = {str(models)!r}
settings = ExecutorSettings(max_model_len=64, max_num_seqs=1, max_batched_tokens=64, num_blocks=4, image_cache=False)
executor = NativeExecutor(path, load_spec(path), settings)
executor.start()
executor.close()
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
