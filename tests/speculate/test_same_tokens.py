"""Whatever is guessed, right or wrong: tokens, logprobs and their distribution are those of plain decoding."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from engine import LLM, SamplingParams
from engine.api import AddRequest, Grammar
from engine.core.engine import EngineCore
from engine.core.plan import Geometry
from engine.core.proposer import Ask, Proposer
from engine.core.settings import CoreSettings
from engine.model.config import load_spec
from engine.model.pull import pull
from engine.speculate.draft import DraftProposer
from engine.speculate.ngram import NgramProposer
from engine.worker.native_executor import NativeExecutor
from engine.worker.settings import ExecutorSettings
from tests.shadow import ShadowExecutor, next_token
from tests.worker.driver import tiny_model

ITEMS = "apples, pears, plums, cherries, grapes, figs, dates, limes, melons and quinces"
COPY = f"<|im_start|>user\nRepeat: We sell {ITEMS}.<|im_end|>\n<|im_start|>assistant\nWe sell apples, pears, plums,"
FORM = Grammar(
    kind="json_schema",
    text='{"type":"object","properties":{"name":{"type":"string","maxLength":20},"names":{"type":"array","items":'
    '{"type":"string","maxLength":12},"maxItems":4}},"required":["name","names"],"additionalProperties":false}',
)
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COPY, {"temperature": 0.0}),
    (COPY, {"temperature": 0.8, "seed": 7, "n": 2}),
    (COPY, {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2}),
    (COPY, {"temperature": 0.7, "seed": 3, "presence_penalty": 0.5, "bad_words": ((28,),), "min_tokens": 12}),
    ("A list of names as JSON: ", {"temperature": 0.0, "grammar": FORM}),
    ("A list of names as JSON: ", {"temperature": 1.0, "seed": 5, "grammar": FORM, "n": 2}),
    ("one two three one two three one two", {"temperature": 0.0, "logit_bias": {30: -2.0}}),
]
Answers = list[tuple[tuple[int, ...], Any, str | None]]


def real(**settings: Any) -> tuple[Answers, Any]:
    """What the real model gives all of them at once."""
    with LLM("smollm2", max_model_len=128, max_num_seqs=16, **settings) as llm:
        params = [SamplingParams(max_tokens=32, logprobs=2, **fields) for _, fields in REQUESTS]
        answers = llm.generate([prompt for prompt, _ in REQUESTS], params)
        return [(c.tokens, c.logprobs, c.finish) for answer in answers for c in answer.choices], llm.stats()


@pytest.fixture(scope="module")
def plain() -> Answers:
    answers, stats = real(speculate="off")
    assert stats.spec_proposed == 0
    return answers


@pytest.mark.parametrize("settings", [{}, {"num_kv_blocks": 10}], ids=["ample pool", "pool that preempts"])
def test_look_up_changes_no_bit_of_the_real_model(plain: Answers, settings: dict[str, Any]) -> None:
    answers, stats = real(speculate="ngram", **settings)
    assert answers == plain
    assert stats.spec_proposed >= stats.spec_accepted  # it is switched off where steps are slow
    if not settings:  # how many meet in the small pool depends on how many guesses paid
        assert stats.preemptions_swap + stats.preemptions_recompute == 0


def test_a_draft_model_changes_no_bit_of_the_real_model(plain: Answers) -> None:
    """The draft is the same model in 4 bits."""
    answers, stats = real(speculate="draft", draft_model=str(next(pull().glob("*.gguf"))))
    assert answers == plain
    assert stats.spec_proposed >= stats.spec_accepted  # it is switched off where steps are slow


class Scripted:
    """A `Proposer` that always guesses: what `script` says, by the tokens so far."""

    def __init__(self, script: Any) -> None:
        self.script = script

    def number(self, seq: int, tokens: Sequence[int], limit: int) -> int:
        return len(self.script(list(tokens), limit))

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [self.script(list(ask.tokens), ask.number) for ask in asks]

    def saw_step(self, sequences: int, tokens: int, drafts: int, seconds: float) -> None: ...

    def forget(self, seq: int) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


SETTINGS = ExecutorSettings(
    max_model_len=256, max_num_seqs=32, max_batched_tokens=256, num_blocks=400, host_blocks=64, image_cache=False
)


def serve(
    model: Path, requests: list[AddRequest], proposer: Proposer | None, settings: ExecutorSettings, **core: Any
) -> tuple[dict[tuple[str, int], list[Any]], Any]:
    executor = NativeExecutor(model, load_spec(model), settings)
    numbers = CoreSettings(max_num_batched_tokens=256, max_num_seqs=32, num_drafts=3, **core)
    engine = EngineCore(executor, executor.start(), numbers, frozenset(), None, proposer=proposer)
    for request in requests:
        engine.add(request)
    answers: dict[tuple[str, int], list[Any]] = {}
    while engine.has_work():
        for delta in engine.step().deltas:
            assert not delta.error
            pairs = itertools.zip_longest(delta.tokens, delta.logprobs)
            answers.setdefault((delta.id, delta.choice), []).extend(pairs)
    stats = engine.stats()
    engine.close()
    return answers, stats


def mixed() -> list[AddRequest]:
    """Greedy and drawn, penalised, two choices."""
    return [
        AddRequest(
            id=str(i),
            prompt=tuple(range(i + 1, i + 20)),
            params=SamplingParams(
                temperature=0.8 if i % 2 else 0.0,
                seed=i,
                max_tokens=24,
                logprobs=1,
                repetition_penalty=1.2 if i % 3 == 0 else 1.0,
                n=2 if i % 4 == 0 else 1,
            ),
            arrival=float(i),
        )
        for i in range(12)
    ]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("blocks", [400, 24])
def test_right_and_wrong_guesses_change_no_bit(model: Path, blocks: int, overlap: int) -> None:
    """The guesses are the undisturbed answer with every third token wrong, and none for half of the prompts."""
    requests = mixed()
    want, _ = serve(model, requests, None, SETTINGS)
    whole = {
        (request.prompt, choice): [*request.prompt, *(token for token, _ in want[request.id, choice])]
        for request in requests
        for choice in range(request.params.n)
    }

    def script(tokens: list[int], limit: int) -> list[int]:
        for known in whole.values():
            if known[: len(tokens)] == tokens and tokens[0] % 2:
                at = len(tokens)
                return [(t + (i % 3 == 2)) % 515 for i, t in enumerate(known[at : at + limit], at)]
        return []

    got, stats = serve(model, requests, Scripted(script), replace(SETTINGS, num_blocks=blocks), overlap=overlap)
    assert got == want
    assert stats.spec_proposed > stats.spec_accepted > 40
    assert (stats.preemptions_swap + stats.preemptions_recompute > 0) == (blocks == 24)


class Eager(DraftProposer):
    """A draft model that always guesses as much as it may: what its guesses are worth is another test's."""

    def number(self, seq: int, tokens: Sequence[int], limit: int) -> int:
        super().number(seq, tokens, limit)
        return max(0, min(limit, self.max_tokens - len(tokens)))


def drafter(model: Path, **settings: Any) -> Eager:
    executor = NativeExecutor(model, load_spec(model), replace(SETTINGS, host_blocks=0, **settings))
    return Eager(executor, executor.start(), most_drafts=3, max_batched_tokens=256, vocab_size=515)


@pytest.mark.parametrize(
    ("seed", "settings", "blocks"),
    [(0, {}, 400), (1, {}, 24), (0, {"num_blocks": 12, "max_num_seqs": 5}, 24)],
    ids=["same model", "another model", "draft pool for few"],
)
def test_whatever_a_draft_model_guesses_changes_no_bit(
    model: Path, tmp_path: Path, seed: int, settings: dict[str, Any], blocks: int
) -> None:
    """Greedy and drawn, penalised, two choices, some resumed as after a crash; the served pool preempts or doesn't."""
    requests = mixed()
    want, _ = serve(model, requests, None, SETTINGS)
    resumed = [
        structs.replace(request, resume=tuple(tuple(t for t, _ in want[request.id, c][:9]) for c in range(n)))
        if i % 3 == 1
        else request
        for i, request in enumerate(requests)
        if (n := request.params.n)
    ]
    proposer = drafter(model if seed == 0 else tiny_model(tmp_path, seed=seed), **settings)
    got, stats = serve(model, resumed, proposer, replace(SETTINGS, num_blocks=blocks), overlap=1)
    for request in resumed:
        for choice in range(request.params.n):
            skipped = len(request.resume[choice]) if request.resume else 0
            assert got[request.id, choice] == want[request.id, choice][skipped:]
    assert stats.spec_proposed > 50
    if seed == 0:
        assert stats.spec_accepted > 0.95 * stats.spec_proposed - 20  # the same model draws the same tokens
    assert (stats.preemptions_swap + stats.preemptions_recompute > 0) == (blocks == 24)


def scores_of(model: Path, prompts: list[tuple[int, ...]]) -> list[list[float]]:
    """The raw logprob of each prompt token but the first."""
    executor = NativeExecutor(model, load_spec(model), SETTINGS)
    engine = EngineCore(executor, executor.start(), CoreSettings(), frozenset(), None)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        engine.add(AddRequest(id=str(i), prompt=prompt, params=params, arrival=0.0))
    scores: dict[str, list[float]] = {}
    while engine.has_work():
        for delta in engine.step().deltas:
            if delta.prompt_logprobs:
                scores[delta.id] = [entry.logprob for entry in delta.prompt_logprobs if entry is not None]
    engine.close()
    return [scores[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize("guesser", ["script", "draft model"])
def test_what_is_sampled_behind_guesses_is_distributed_as_the_model_says(
    model: Path, guesser: str, tmp_path: Path
) -> None:
    """Chi-square of three tokens, each one of four, against the product of the model's own probabilities."""
    allowed, draws, prompt = (11, 200, 301, 402), 2000, (5, 9, 70, 3)

    def ask(id: str, tokens: tuple[int, ...], **fields: Any) -> AddRequest:
        return AddRequest(id=id, prompt=tokens, params=SamplingParams(temperature=4.0, **fields), arrival=0.0)

    triples = list(itertools.product(allowed, repeat=3))
    scored = scores_of(model, [prompt + triple for triple in triples])
    chance = dict.fromkeys(triples, 1.0)
    for place in range(3):
        weights = {
            triple[: place + 1]: math.exp(scores[place - 3] / 4.0)
            for triple, scores in zip(triples, scored, strict=True)
        }
        for triple in triples:
            among = sum(weights[(*triple[:place], token)] for token in allowed)
            chance[triple] *= weights[triple[: place + 1]] / among

    def script(tokens: list[int], limit: int) -> list[int]:
        return [allowed[(sum(tokens) + i) % 4] for i in range(limit)]

    samples = [ask(str(i), prompt, max_tokens=3, seed=i, allowed_token_ids=allowed) for i in range(draws)]
    proposer = Scripted(script) if guesser == "script" else drafter(tiny_model(tmp_path, seed=1))
    got, stats = serve(model, samples, proposer, SETTINGS)
    assert 0.05 < stats.spec_accepted / stats.spec_proposed < 0.95
    counts = Counter(tuple(token for token, _ in answer) for answer in got.values())
    cells = sorted((chance[triple] * draws, counts[triple]) for triple in triples)
    pooled: list[list[float]] = [[0.0, 0.0]]
    for expected, seen in cells:
        pooled[-1][0] += expected
        pooled[-1][1] += seen
        if pooled[-1][0] >= 8:
            pooled.append([0.0, 0.0])
    pooled[-2] = [pooled[-2][0] + pooled[-1][0], pooled[-2][1] + pooled[-1][1]]
    pooled.pop()
    freedom = len(pooled) - 1
    assert freedom >= 8
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in pooled)
    bound = freedom * (1 - 2 / (9 * freedom) + 3.7 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty, p = 1e-4
    assert statistic < bound


def test_the_kv_of_rejected_guesses_is_never_found_by_another_prompt() -> None:
    vocab = 40
    geometry = Geometry(
        num_blocks=64, block_size=2, max_model_len=128, max_num_seqs=4, vocab_size=vocab, bytes_per_block=1000
    )
    prompt = [1, 2, 3, 4, 5, 6]
    first = next_token(prompt, 0, 0, vocab)
    second = next_token([*prompt, first], 0, 0, vocab)
    wrong = [(second + 1 + i) % vocab for i in range(6)]
    core = EngineCore(
        executor := ShadowExecutor(geometry),
        geometry,
        CoreSettings(max_num_seqs=4, num_drafts=6),
        frozenset(),
        None,
        proposer=Scripted(lambda tokens, limit: wrong[:limit]),
    )
    executor.keep_plans = True

    def cached(tokens: list[int], most: int) -> int:
        request = AddRequest(
            id=str(tokens), prompt=tuple(tokens), params=SamplingParams(seed=0, max_tokens=most), arrival=0.0
        )
        core.add(request)
        found = -1
        while core.has_work():
            for delta in core.step().deltas:
                assert not delta.error
                found = max(found, delta.cached_tokens)
        assert executor.broken is None
        core.kv.check()
        return found

    assert cached(prompt, 8) == 0
    assert max(row.drafts for plan in executor.plans for row in plan.rows) == 6
    assert cached([*prompt, first, *wrong, 1], 1) == len(prompt)
    assert cached([*prompt, first, second, 0, 1], 1) == len(prompt) + 2


def test_an_engine_that_guesses_by_look_up_forgets_what_has_ended() -> None:
    geometry = Geometry(
        num_blocks=64, block_size=4, max_model_len=128, max_num_seqs=4, vocab_size=5, bytes_per_block=1000
    )
    proposer = NgramProposer(4)
    executor = ShadowExecutor(geometry)
    executor.compute_s_per_token = 0.0  # rows are for nothing
    core = EngineCore(executor, geometry, CoreSettings(num_drafts=4), frozenset(), None, proposer=proposer)
    for i in range(6):
        core.add(
            AddRequest(id=str(i), prompt=(1, 2, 3), params=SamplingParams(n=2, max_tokens=60, seed=i), arrival=0.0)
        )
    while core.has_work():
        core.step()
    assert core.stats().spec_proposed > 0
    assert not proposer._matches
