"""The native sampler against its definition in float64, and its independence of the batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.kernels import sampler_oracle as oracle
from tests.kernels.harness import instruction_sets, library, sample

SETS = instruction_sets()
every_set = pytest.mark.parametrize("isa", SETS)


def model_like(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """Logits with a peaked head and a long tail, as a language model gives them."""
    return (rng.standard_normal(vocab) * 2.5 + 12 * (rng.random(vocab) < 20 / vocab)).astype(np.float32)


def filters(rng: np.random.Generator, rows: int) -> Iterator[dict[str, float]]:
    for _ in range(rows):
        yield {
            "temperature": float(np.float32(rng.choice([0.1, 0.7, 1.0, 1.9]))),
            "top_k": int(rng.choice([0, 0, 1, 5, 50, 1000])),
            "top_p": float(np.float32(rng.choice([1.0, 0.0, 0.3, 0.9, 0.95, 0.999]))),
            "min_p": float(np.float32(rng.choice([0.0, 0.0, 0.01, 0.2]))),
        }


def columns(parameters: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [p[name] for p in parameters] for name in parameters[0]}


def drawable(isa: str, logits: np.ndarray, rounds: int = 4000, **parameters: float) -> set[int]:
    """All tokens that turn up in many draws."""
    out = sample(isa, np.tile(logits, (rounds, 1)), seed=7, position=np.arange(rounds), **parameters)
    return set(out.token.tolist())


@every_set
def test_greedy_takes_the_largest_edited_logit_and_the_lowest_id_among_equals(isa: str) -> None:
    rng = np.random.default_rng(0)
    for vocab in (1, 31, 1000, 4099):
        logits = rng.standard_normal((8, vocab)).astype(np.float32).round(1)  # rounded: many ties
        out = sample(isa, logits, temperature=0)
        assert out.token.tolist() == logits.argmax(1).tolist()


@every_set
def test_edits_match_the_definition_bit_for_bit(isa: str) -> None:
    rng = np.random.default_rng(1)
    vocab, n = 501, 40
    logits = (rng.standard_normal((n, vocab)) * 3).astype(np.float32)
    masks = [None if i % 3 == 0 else rng.random(vocab) < 0.2 for i in range(n)]
    bias = [{int(t): float(rng.normal() * 4) for t in rng.choice(vocab, i % 5, False)} for i in range(n)]
    seen = [{int(t): int(rng.integers(0, 4)) for t in rng.choice(vocab, i * 3, False)} for i in range(n)]
    penalties = {"repetition": rng.uniform(0.5, 2, n), "presence": rng.normal(size=n), "frequency": rng.normal(size=n)}
    out = sample(isa, logits, temperature=0, masks=masks, bias=bias, seen=seen, **penalties)
    for i in range(n):
        mine = {name: float(values[i]) for name, values in penalties.items()}
        edited = oracle.edit(logits[i], mask=masks[i], bias=bias[i], seen=seen[i], **mine)
        assert out.token[i] == edited.argmax()


@every_set
@pytest.mark.parametrize("vocab", [300, 5000, 49152])
def test_draws_are_the_inverse_of_the_cumulative_sum_over_the_kept_tokens(isa: str, vocab: int) -> None:
    rng = np.random.default_rng(2)
    n = 120
    logits = np.stack([model_like(rng, vocab) for _ in range(n)])
    parameters = list(filters(rng, n))
    seeds = rng.integers(0, 2**63, n, dtype=np.uint64)
    out = sample(isa, logits, seed=seeds, choice=3, position=np.arange(n), **columns(parameters))
    for i in range(n):
        want, distance = oracle.draw(logits[i], oracle.philox(int(seeds[i]), 3, i), **parameters[i])
        assert out.token[i] == want or distance < 1e-6


@every_set
@pytest.mark.parametrize(
    ("parameters", "want"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 4}),  # the third of three equal tokens is out: lower ids go first
        ({"top_k": 4}, {0, 1, 4, 6}),
        ({"top_p": 0.0}, {0}),
        ({"top_p": 0.2}, {0}),
        ({"top_p": 0.26}, {0, 1}),
        ({"top_p": 0.76}, {0, 1, 4, 6}),
        ({"min_p": 0.499}, {0, 1, 4, 6}),
        ({"min_p": 0.501}, {0, 1, 4}),
        ({"top_k": 3, "top_p": 0.6}, {0, 1}),  # the mass is that of the three
        ({"min_p": 0.2, "top_p": 0.99}, {0, 1, 2, 4, 6}),
    ],
)
def test_filters_keep_exactly_the_head_of_the_ranking(isa: str, parameters: dict[str, float], want: set[int]) -> None:
    logits = np.log(np.array([8, 8, 2, 1, 8, 1, 4, 1e-30], np.float64)).astype(np.float32)
    logits = np.concatenate([logits, np.full(2000, -np.inf, np.float32)])
    assert drawable(isa, logits, temperature=1.0, **parameters) == want


@every_set
def test_draws_follow_the_distribution(isa: str) -> None:
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05])).astype(np.float32)
    rounds = 20000
    out = sample(isa, np.tile(logits, (rounds, 1)), seed=11, position=np.arange(rounds))
    counts, expected = np.bincount(out.token, minlength=5), np.exp(logits.astype(np.float64)) * rounds
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square, 4 degrees of freedom, p = 0.001
    neighbours = np.corrcoef(out.token[:-1], out.token[1:])[0, 1]
    assert abs(neighbours) < 4 / rounds**0.5


@every_set
def test_log_probabilities_ranks_and_alternatives_are_of_the_unedited_logits(isa: str) -> None:
    rng = np.random.default_rng(3)
    for vocab, n_top in ((7, 7), (1000, 20), (49152, 5)):
        logits = np.stack([model_like(rng, vocab) for _ in range(6)])
        logits[:, 3] = logits[:, 5]  # a tie
        logits[0, 2] = -np.inf
        bias = [{int(vocab - 1 - i): 60.0} for i in range(6)]
        out = sample(isa, logits, temperature=[0, 1, 0.3, 1, 2, 0], seed=5, bias=bias, n_top=n_top)
        assert (out.token == [vocab - 1 - i for i in range(6)]).all()
        for i in range(6):
            want, order = oracle.log_softmax(logits[i]), oracle.ranking(logits[i])
            want = np.maximum(want, -9999.0)
            assert abs(out.logprob[i] - want[out.token[i]]) < 1e-5
            assert order[out.rank[i] - 1] == out.token[i]
            assert out.top_ids[i].tolist() == order[:n_top].tolist()
            assert np.abs(out.top_logprobs[i] - want[order[:n_top]]).max() < (2e-3 if i == 0 else 1e-5)


@every_set
def test_scoring_reports_the_forced_token(isa: str) -> None:
    rng = np.random.default_rng(4)
    logits = np.stack([model_like(rng, 777) for _ in range(3)])
    out = sample(isa, logits, forced=[5, -1, 776], n_top=[0, 0, 2], temperature=0)
    assert out.token.tolist() == [5, int(logits[1].argmax()), 776]
    for i in range(3):
        assert abs(out.logprob[i] - oracle.log_softmax(logits[i])[out.token[i]]) < 1e-5


@every_set
def test_a_row_does_not_depend_on_its_batch_or_the_threads(isa: str) -> None:
    rng = np.random.default_rng(6)
    n, vocab = 33, 5000
    logits = np.stack([model_like(rng, vocab) for _ in range(n)])
    parameters = list(filters(rng, n))
    keys = {"seed": np.arange(n) * 977, "position": np.arange(n) + 4}
    together = sample(isa, logits, n_top=3, **keys, **columns(parameters))
    order = rng.permutation(n)
    shuffled = columns([parameters[i] for i in order])
    library(isa).h_threads(2)
    other = sample(isa, logits[order], n_top=3, **{k: v[order] for k, v in keys.items()}, **shuffled)
    library(isa).h_threads(1)
    for name in ("token", "logprob", "rank", "top_ids", "top_logprobs"):
        assert getattr(together, name)[order].tobytes() == getattr(other, name).tobytes()


def test_every_instruction_set_draws_the_same_tokens() -> None:
    rng = np.random.default_rng(8)
    n = 200
    logits = np.stack([model_like(rng, 2000) for _ in range(n)])
    parameters = columns(list(filters(rng, n)))
    tokens = [sample(isa, logits, seed=1, position=np.arange(n), **parameters).token.tolist() for isa in SETS]
    assert all(t == tokens[0] for t in tokens)


@every_set
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_an_error_that_names_the_row(isa: str, bad: float) -> None:
    logits = np.zeros((4, 100), np.float32)
    logits[2, 97] = bad
    with pytest.raises(ValueError, match="row 2"):
        sample(isa, logits, temperature=1.0)


@every_set
def test_a_mask_that_allows_nothing_is_an_error_that_names_the_row(isa: str) -> None:
    with pytest.raises(ValueError, match="row 1: no token is allowed"):
        sample(isa, np.zeros((2, 50), np.float32), masks=[None, np.zeros(50, bool)])


@every_set
def test_ids_outside_the_vocabulary_are_errors(isa: str) -> None:
    logits = np.zeros((1, 50), np.float32)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        sample(isa, logits, bias=[{50: 1.0}])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        sample(isa, logits, seen=[{-1: 1}], presence=1.0)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        sample(isa, logits, forced=[50])
