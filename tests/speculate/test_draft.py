"""The draft's own bookkeeping against the shadow executor, which reads every token back through its block tables."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers

from engine.build import choose
from engine.build_draft import check_vocabulary
from engine.config import EngineConfig
from engine.core.plan import Geometry, SlotParams
from engine.core.proposer import Ask
from engine.errors import ConfigError
from engine.model.config import load_spec
from engine.model.pull import pull
from engine.speculate.draft import DraftProposer
from tests.shadow import ShadowExecutor, next_token

VOCAB = 40


def proposer(executor: ShadowExecutor, *, most: int = 4, vocab_size: int = VOCAB) -> DraftProposer:
    return DraftProposer(executor, executor.start(), most_drafts=most, max_batched_tokens=16, vocab_size=vocab_size)


def shadow(**geometry: int) -> ShadowExecutor:
    sizes = {"num_blocks": 40, "block_size": 4, "max_model_len": 96, "max_num_seqs": 4, "vocab_size": VOCAB}
    return ShadowExecutor(Geometry(bytes_per_block=1000, **(sizes | geometry)))


def params_of(tokens: list[int], prompt_len: int, seed: int) -> SlotParams:
    return SlotParams(seed=seed, prompt_len=prompt_len, output=tuple(tokens[prompt_len:]))


@pytest.mark.parametrize(
    "geometry", [{}, {"num_blocks": 13}, {"block_size": 1, "num_blocks": 160}, {"max_num_seqs": 1}]
)
@pytest.mark.parametrize("seed", range(6))
def test_every_guess_is_what_the_draft_samples_after_the_tokens(seed: int, geometry: dict[str, int]) -> None:
    """Sequences come, grow by what was guessed or by something else, pause and end, in a pool that holds few."""
    rng = random.Random(seed)
    executor = shadow(**geometry)
    draft = proposer(executor)
    texts: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    guessed = 0
    for step in range(120):
        if len(texts) < 5 and rng.random() < 0.3:
            prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9][: rng.randrange(1, 10)] + [
                rng.randrange(VOCAB) for _ in range(rng.randrange(30))
            ]
            texts[step], lengths[step] = prompt, len(prompt)
        asks = [
            Ask(seq, tokens, rng.randrange(1, 5), "", lambda s=seq, t=tokens: params_of(t, lengths[s], s))
            for seq, tokens in texts.items()
            if rng.random() < 0.8 and len(tokens) < 40
        ]
        for ask in asks:
            draft.number(ask.seq, ask.tokens, ask.number)
        for ask, guess in zip(asks, draft.propose(asks), strict=True):
            assert len(guess) <= ask.number
            known = list(ask.tokens)
            for token in guess:
                assert token == next_token(known, ask.seq, 0, VOCAB)
                known.append(token)
            guessed += len(guess)
            if rng.random() < 0.5:
                texts[ask.seq] += guess
            elif guess and rng.random() < 0.5:
                texts[ask.seq] += guess[: rng.randrange(len(guess))]
            texts[ask.seq].append(rng.randrange(VOCAB))
        assert executor.broken is None
        for seq in [seq for seq in texts if rng.random() < 0.05 or len(texts[seq]) >= 40]:
            draft.forget(seq)
            del texts[seq]
    assert guessed > 40


def test_a_draft_that_is_seldom_right_is_left_alone_and_one_that_is_right_is_used() -> None:
    def drafts_used(right: float, cost: float) -> tuple[int, int]:
        executor, rng = shadow(num_blocks=400, max_model_len=1600), random.Random(1)
        draft = proposer(executor, most=4)
        tokens, made, steps = [1, 2, 3], 0, 0
        while len(tokens) < 1000:
            number = draft.number(0, tokens, 4)
            guess: list[int] = []
            if number:
                ask = Ask(0, tokens, number, "", lambda: params_of(tokens, 3, 0))
                guess = draft.propose([ask])[0]
            draft.saw_step(1, 1 + len(guess), len(guess), 10.0 * (1 + cost * len(guess)))
            for token in guess:
                if rng.random() > right:
                    break
                tokens.append(token)
            tokens.append(rng.randrange(VOCAB))
            made += len(guess)
            steps += 1
        return made, steps

    made, steps = drafts_used(right=0.95, cost=0.1)
    assert steps < 500
    assert made > 500
    made, steps = drafts_used(right=0.95, cost=1.0)
    assert made < 50
    made, steps = drafts_used(right=0.02, cost=0.1)
    assert made < 200


def test_what_the_draft_cant_compute_gets_no_guess_and_harms_no_other() -> None:
    executor = shadow()
    draft = proposer(executor)
    draft.saw_step(1, 1, 0, 1.0)
    assert draft.number(1, [3, VOCAB], 4) == 0  # a token that only the served model has
    assert draft.number(2, [3, 4], 4) == 4
    assert draft.number(3, [3] * 95, 4) == 1  # the draft's context ends
    executor.fail_next = 1
    assert draft.propose([Ask(2, [3, 4], 4, "", SlotParams)]) == [[]]
    assert draft.number(2, [3, 4, 5], 4) == 0
    assert draft.number(4, [3, 4], 2) == 2
    assert len(draft.propose([Ask(4, [3, 4], 2, "", SlotParams)])[0]) == 2


def test_a_guess_ends_before_a_token_that_the_served_model_lacks() -> None:
    executor = shadow()
    first = next_token([3, 4], 0, 0, VOCAB)
    draft = proposer(executor, vocab_size=first)
    draft.number(1, [3, 4], 4)
    assert draft.propose([Ask(1, [3, 4], 4, "", SlotParams)]) == [[]]


def test_another_vocabulary_is_refused_in_one_line(tmp_path: Path) -> None:
    smollm2 = pull()
    check_vocabulary("itself", next(smollm2.glob("*.gguf")), smollm2)
    other = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    other.add_tokens(["<|another|>"])
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError) as refused:
        check_vocabulary("other", tmp_path, smollm2)
    assert "\n" not in str(refused.value)
    assert "49153 tokens, 1 of them are not among its 49152" in str(refused.value)


def test_speculation_by_a_draft_needs_one() -> None:
    path = pull()
    with pytest.raises(ConfigError, match="--draft-model"):
        choose(EngineConfig.of("smollm2", speculate="draft"), path, load_spec(path))
