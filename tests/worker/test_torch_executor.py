"""The oracle executor over a small Llama: schedules change nothing, and it matches the plain decoder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.core.plan import Executor, Geometry, KVOp, Plan, Row, SlotParams
from engine.errors import ConfigError, RequestFailed
from engine.model.config import load_spec
from engine.model.decoder import Decoder, DenseCausalAttention
from engine.worker.settings import ExecutorSettings
from engine.worker.torch_executor import TorchExecutor
from tests.worker.driver import VOCAB, Driver, Job, overlapped, prompts, tiny_model

GREEDY = SlotParams(temperature=0.0, logprobs=2)
SETTINGS = ExecutorSettings(
    max_model_len=256,
    max_num_seqs=8,
    max_batched_tokens=512,
    block_size=16,
    num_blocks=96,
    host_blocks=24,
    dtype="float32",
    kv_dtype="float32",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[tuple[Executor, Geometry]]:
    executor = TorchExecutor(model, load_spec(model), SETTINGS)
    geometry = executor.start()
    yield executor, geometry
    executor.close()
    executor.close()


def started(model: Path, **changes: object) -> tuple[TorchExecutor, Geometry]:
    settings = {f: getattr(SETTINGS, f) for f in SETTINGS.__dataclass_fields__} | changes
    executor = TorchExecutor(model, load_spec(model), ExecutorSettings(**settings))
    return executor, executor.start()


@torch.inference_mode()
def greedy(decoder: Decoder, prompt: tuple[int, ...], n: int) -> tuple[list[int], torch.Tensor]:
    """The most likely continuation, and the logprobs [n, vocab] it was chosen by."""
    attend, fed, found, rows, position = DenseCausalAttention(decoder.spec), list(prompt), [], [], 0
    for _ in range(n):
        hidden = decoder.forward(torch.tensor(fed), torch.arange(position, position + len(fed)), attend)
        rows.append(torch.log_softmax(decoder.logits(hidden[-1]).double(), -1))
        position += len(fed)
        fed = [int(rows[-1].argmax())]
        found += fed
    return found, torch.stack(rows)


@pytest.fixture(scope="module")
def decoder(model: Path) -> Decoder:
    return Decoder.load(load_spec(model), model)


def test_greedy_tokens_are_those_of_the_plain_decoder(running: tuple[Executor, Geometry], decoder: Decoder) -> None:
    jobs = [Job(prompt, GREEDY, 12) for prompt in prompts([1, 9, 40])]
    for job in Driver(*running).generate(jobs, chunk=13):
        tokens, exact = greedy(decoder, job.prompt, 12)
        assert [s.token for s in job.sampled] == tokens
        for i, s in enumerate(job.sampled):
            assert s.logprob == pytest.approx(float(exact[i, s.token]), abs=1e-4)
            assert s.rank == 1
            assert s.top[0][0] == s.token
            assert [token for token, _ in s.top] == exact[i].topk(2).indices.tolist()


def test_what_a_sequence_gets_depends_on_it_alone(running: tuple[Executor, Geometry]) -> None:
    params = SlotParams(temperature=0.9, top_p=0.9, seed=11, logprobs=1, repetition_penalty=1.2)

    def jobs() -> list[Job]:
        return [Job(prompt, params, 10) for prompt in prompts([3, 20, 33, 50, 1])]

    alone = Driver(*running, seed=1).generate(jobs(), together=False)
    together = Driver(*running, seed=2).generate(jobs(), swap=True)
    assert [job.sampled for job in together] == [job.sampled for job in alone]


@pytest.mark.parametrize("block_size", [1, 7, 544])
def test_block_size_changes_nothing(model: Path, running: tuple[Executor, Geometry], block_size: int) -> None:
    executor, geometry = started(model, block_size=block_size, num_blocks=1 + 512 // block_size, max_model_len=544)
    job = Driver(executor, geometry).generate([Job(prompts([50])[0], GREEDY, 10)])[0]
    want = Driver(*running).generate([Job(prompts([50])[0], GREEDY, 10)])[0]
    executor.close()
    assert job.sampled == want.sampled


def test_steps_in_flight_use_the_token_sampled_before_them(running: tuple[Executor, Geometry]) -> None:
    params = SlotParams(temperature=0.8, seed=3, frequency_penalty=0.7, logprobs=0)
    want = Driver(*running).generate([Job(prompts([9])[0], params, 8)])[0]
    assert overlapped(Driver(*running), Job(prompts([9])[0], params, 8), slot=5).sampled == want.sampled


def test_drafts_are_sampled_as_if_they_had_come_one_by_one(running: tuple[Executor, Geometry]) -> None:
    """Right drafts give the tokens of plain decoding, penalties included; a wrong one leaves no trace."""
    params = SlotParams(temperature=0.8, seed=3, repetition_penalty=1.5, presence_penalty=0.3, logprobs=0)
    want = Driver(*running).generate([Job(prompts([9])[0], params, 8)])[0]
    tokens = [s.token for s in want.sampled]
    wrong = (tokens[2] + 1) % VOCAB

    driver, job = Driver(*running), Job(prompts([9])[0], params, 8)
    table = tuple(driver.free[:4])
    first = driver.run(Plan(0, (Row(0, 0, job.prompt, 0, table, sample=True),), slots=((0, job.params),)))[0].sampled
    row = Row(0, 9, (tokens[0], tokens[1], wrong, tokens[3]), sample=True, drafts=3)
    second = driver.run(Plan(1, (row,)))[0].sampled
    row = Row(0, 11, (tokens[2], tokens[3], tokens[4]), sample=True, drafts=2)
    third = driver.run(Plan(2, (row,)))[0].sampled

    assert [first[0].token, *(s.token for s in second[:2])] == tokens[:3]
    assert [s.token for s in third] == tokens[3:6]
    # A row of several tokens is another matrix product than a row of one: the last bits may differ.
    assert third[2].logprob == pytest.approx(want.sampled[5].logprob, abs=1e-5)


def test_bad_words_bias_allowed_ids_and_min_tokens_hold(running: tuple[Executor, Geometry]) -> None:
    driver = Driver(*running)
    prompt = prompts([9])[0]
    plain = [s.token for s in driver.generate([Job(prompt, GREEDY, 6)])[0].sampled]

    banned = SlotParams(temperature=0.0, bad_words=((plain[0], plain[1]), (plain[3],)))
    tokens = [s.token for s in driver.generate([Job(prompt, banned, 6)])[0].sampled]
    assert len({*plain[:2], plain[3]}) == 3
    assert tokens[0] == plain[0]
    assert tokens[1] != plain[1]
    assert plain[3] not in tokens

    biased = SlotParams(temperature=0.0, logit_bias={77: 1e4})
    assert {s.token for s in driver.generate([Job(prompt, biased, 4)])[0].sampled} == {77}

    allowed = SlotParams(temperature=1.0, allowed_token_ids=(3, 400, 514))
    assert {s.token for s in driver.generate([Job(prompt, allowed, 20)])[0].sampled} <= {3, 400, 514}

    patient = SlotParams(temperature=0.0, min_tokens=3, stop_ids=(plain[0], plain[2], plain[4]))
    tokens = [s.token for s in driver.generate([Job(prompt, patient, 3)])[0].sampled]
    assert not set(tokens) & {plain[0], plain[2], plain[4]}


def test_a_resumed_sequence_goes_on_as_if_nothing_had_happened(running: tuple[Executor, Geometry]) -> None:
    params = SlotParams(seed=5, presence_penalty=1.0, frequency_penalty=0.4, min_tokens=6, stop_ids=(1, 2))
    prompt = prompts([12])[0]
    whole = [s.token for s in Driver(*running).generate([Job(prompt, params, 10)])[0].sampled]
    fields = {f: getattr(params, f) for f in params.__struct_fields__}
    fields |= {"prompt": prompt, "prompt_len": 12, "output": tuple(whole[:4])}
    driver = Driver(*running)
    row = Row(2, 0, prompt + tuple(whole[:4]), 0, tuple(driver.free[:4]), sample=True)
    tokens = [driver.run(Plan(0, (row,), slots=((2, SlotParams(**fields)),)))[0].sampled[0].token]
    for i in range(5):
        row = Row(2, 16 + i, (tokens[-1],), sample=True)
        tokens.append(driver.run(Plan(1, (row,)))[0].sampled[0].token)
    assert tokens == whole[4:]


def test_a_grammar_mask_holds_at_its_own_position(running: tuple[Executor, Geometry]) -> None:
    driver = Driver(*running)
    only = np.zeros((VOCAB + 31) // 32, np.uint32)
    only[9] = 1 << 4
    row = Row(0, 0, (1, 2, 3), 0, (driver.free[0],), sample=True, drafts=1, masks=(only.tobytes(), None), top=3)
    sampled = driver.run(Plan(0, (row,), slots=((0, SlotParams(temperature=0.0, prompt_len=2)),)))[0].sampled
    assert sampled[0].token == 9 * 32 + 4
    assert sampled[1].token != 9 * 32 + 4
    assert all(len(s.top) == 3 for s in sampled)
    assert sampled[0].top[0][0] != 9 * 32 + 4  # alternatives are raw


def test_prompts_are_scored_chunk_by_chunk(running: tuple[Executor, Geometry], decoder: Decoder) -> None:
    driver, prompt = Driver(*running), prompts([30])[0]
    table = tuple(driver.free[:2])
    with torch.inference_mode():
        hidden = decoder.forward(torch.tensor(prompt), torch.arange(30), DenseCausalAttention(decoder.spec))
        exact = torch.log_softmax(decoder.logits(hidden).double(), -1)
    first = Row(0, 0, prompt[:17], 0, table, score=2, targets=prompt[1:18])
    last = Row(0, 17, prompt[17:], sample=True, score=2, targets=prompt[18:])
    scores = driver.run(Plan(0, (first,), slots=((0, GREEDY),)))[0].scores
    result = driver.run(Plan(1, (last,)))[0]
    scores += result.scores
    assert [s.token for s in scores] == list(prompt[1:])
    assert len(result.sampled) == 1
    for i, s in enumerate(scores):
        assert s.logprob == pytest.approx(float(exact[i, prompt[i + 1]]), abs=1e-4)
        assert s.rank == 1 + int((exact[i] > exact[i, prompt[i + 1]]).sum())
        assert [token for token, _ in s.top] == exact[i].topk(2).indices.tolist()


def test_pooling_gives_the_last_state_and_the_sum_over_chunks(
    running: tuple[Executor, Geometry], decoder: Decoder
) -> None:
    driver, prompt = Driver(*running), prompts([30])[0]
    with torch.inference_mode():
        want = decoder.forward(torch.tensor(prompt), torch.arange(30), DenseCausalAttention(decoder.spec))
    for pooling, exact in (("last", want[-1]), ("mean", want.sum(0))):
        rows = [
            Row(1, 0, prompt[:7], 0, tuple(driver.free[:2]), pooling=pooling),
            Row(1, 7, prompt[7:], pooling=pooling),
        ]
        driver.run(Plan(0, (rows[0],), slots=((1, GREEDY),)))
        hidden = driver.run(Plan(1, (rows[1],)))[0].hidden
        assert np.frombuffer(hidden, "<f4") == pytest.approx(exact.numpy(), abs=2e-3)


def test_a_fork_writes_to_its_own_copy_of_the_shared_block(running: tuple[Executor, Geometry]) -> None:
    driver, prompt = Driver(*running), prompts([20])[0]
    a, b = driver.free[:2], driver.free[2]
    params = [SlotParams(temperature=1.5, seed=seed, choice=choice) for seed, choice in ((1, 0), (1, 1))]
    want = [[s.token for s in Driver(*running).generate([Job(prompt, p, 5)])[0].sampled] for p in params]
    rows = (Row(0, 0, prompt, 0, tuple(a), sample=True),)
    tokens = [[driver.run(Plan(0, rows, slots=((0, params[0]),)))[0].sampled[0].token], []]
    # The fork recomputes the last prompt token in its copy, so as to draw its own first token.
    ops = (KVOp("copy", a[1], b),)
    row = Row(1, 19, prompt[19:], 0, (a[0], b), sample=True)
    tokens[1].append(driver.run(Plan(1, (row,), ops, ((1, params[1]),)))[0].sampled[0].token)
    for i in range(4):
        rows = tuple(Row(slot, 20 + i, (tokens[slot][-1],), sample=True) for slot in (0, 1))
        for slot, result in enumerate(driver.run(Plan(2, rows))):
            tokens[slot].append(result.sampled[0].token)
    assert tokens == want
    assert want[0] != want[1]


def test_what_cannot_be_run_fails_its_plan_and_nothing_else(running: tuple[Executor, Geometry]) -> None:
    driver = Driver(*running)
    blocks = running[1].num_blocks
    for row, reason in (
        (Row(0, 0, (VOCAB,), 0, (0,), sample=True), "vocabulary"),
        (Row(0, 300, (1,), 0, (0,), sample=True), "don't fit"),
        (Row(0, 0, (1,), 0, (blocks,), sample=True), "outside of"),
    ):
        with pytest.raises(RequestFailed, match=reason):
            driver.run(Plan(0, (row,), slots=((0, GREEDY),)))
    no_token = SlotParams(temperature=0.0, logit_bias={5: float("inf")})
    with pytest.raises(RequestFailed, match="not finite"):
        driver.run(Plan(0, (Row(0, 0, (1,), 0, (0,), sample=True),), slots=((0, no_token),)))
    assert len(driver.generate([Job((1, 2, 3), GREEDY, 3)])[0].sampled) == 3


def test_the_pool_is_made_from_a_budget_and_a_budget_too_small_is_one_line(model: Path) -> None:
    block = 2 * 3 * 16 * 2 * 64 * 2
    budget = {"num_blocks": 0, "kv_bytes": 10 * block + 5, "host_blocks": 0, "host_bytes": 3 * block}
    executor, geometry = started(model, **budget, kv_dtype="bfloat16")
    executor.close()
    assert (geometry.num_blocks, geometry.host_blocks, geometry.bytes_per_block) == (10, 3, block)
    with pytest.raises(ConfigError, match="no room for KV blocks"):
        started(model, num_blocks=0, kv_bytes=block - 1, kv_dtype="bfloat16")
    with pytest.raises(ConfigError, match="device 'nowhere'"):
        started(model, device="nowhere")


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_every_kv_dtype_serves_and_swaps_without_a_trace(model: Path, kv_dtype: str) -> None:
    executor, geometry = started(model, kv_dtype=kv_dtype)
    plain = Driver(executor, geometry).generate([Job(p, GREEDY, 8) for p in prompts([20, 33])])
    swapped = Driver(executor, geometry).generate([Job(p, GREEDY, 8) for p in prompts([20, 33])], swap=True)
    executor.close()
    assert [job.sampled for job in swapped] == [job.sampled for job in plain]
