"""The reference sampler against its definition: distributions, filters, penalties, the generator."""

from __future__ import annotations

import numpy as np
import pytest

from engine.sampling.reference import RowParams, draw, edit, sample, score, uniform, weights

VOCAB = 37


def logits(seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=vocab).astype(np.float32) * 3


def test_the_generator_gives_the_published_numbers_of_philox() -> None:
    # Random123's known answers for philox4x32-10: counter and key all zero, and all ones.
    assert uniform(0, 0, 0) == ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) * 2.0**-53
    numbers = [uniform(seed, choice, position) for seed in (1, 2**63) for choice in (0, 1) for position in range(500)]
    assert len(set(numbers)) == len(numbers)
    assert abs(np.mean(numbers) - 0.5) < 0.03
    assert min(numbers) >= 0
    assert max(numbers) < 1


def test_draws_follow_the_softmax_of_the_tempered_logits() -> None:
    x = logits()
    params = [RowParams(temperature=0.7, seed=5, position=i) for i in range(20_000)]
    counts = np.bincount([draw(weights(x, p), uniform(p.seed, 0, p.position)) for p in params], minlength=VOCAB)
    p = np.exp((x - x.max()) / 0.7)
    p /= p.sum()
    # 5 standard deviations of a binomial share
    assert (np.abs(counts / 20_000 - p) <= 5 * np.sqrt(p * (1 - p) / 20_000) + 1e-9).all()


@pytest.mark.parametrize("params", [RowParams(temperature=0), RowParams(top_p=0.0), RowParams(top_k=1)])
def test_greedy_takes_the_first_of_the_largest(params: RowParams) -> None:
    x = logits()
    x[[7, 21]] = x.max() + 1
    assert sample(x, params) == 7


def test_top_k_counts_ties_by_id() -> None:
    x = np.array([1, 3, 2, 2, 2, 0], np.float32)
    assert np.flatnonzero(weights(x, RowParams(top_k=3))).tolist() == [1, 2, 3]


def test_top_p_keeps_the_shortest_head_that_weighs_enough() -> None:
    x = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    assert np.flatnonzero(weights(x, RowParams(top_p=0.79))).tolist() == [0, 1]
    assert np.flatnonzero(weights(x, RowParams(top_p=0.81))).tolist() == [0, 1, 2]
    assert np.flatnonzero(weights(x, RowParams(top_p=1.0))).tolist() == [0, 1, 2, 3]
    # of what top-k left: 0.5 and 0.3 weigh 0.8, half of it is the first alone
    assert np.flatnonzero(weights(x, RowParams(top_k=2, top_p=0.6))).tolist() == [0]


def test_min_p_is_a_share_of_the_likeliest() -> None:
    x = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    assert np.flatnonzero(weights(x, RowParams(min_p=0.29))).tolist() == [0, 1, 2]
    assert np.flatnonzero(weights(x, RowParams(min_p=1.0))).tolist() == [0]


def test_edits_follow_the_documented_order() -> None:
    x = np.array([2.0, -2.0, 1.0, 0.0], np.float32)
    seen = (np.array([0, 1, 3], np.int32), np.array([2, 0, 1], np.int32))
    bias = (np.array([1, 2], np.int32), np.array([4.0, -100.0], np.float32))
    mask = np.array([0b0111], np.uint32)
    params = RowParams(repetition=2.0, presence=0.25, frequency=0.5, seen=seen, bias=bias, mask=mask)
    #      2/2 - 2*0.5 - 0.25   (-2+4)/2   1-100   masked
    assert edit(x, params).tolist() == [-0.25, 1.0, -99.0, -np.inf]


def test_a_masked_token_is_never_drawn_and_an_empty_mask_is_an_error() -> None:
    x = logits()
    mask = np.zeros(2, np.uint32)
    mask[0] = 1 << 9 | 1 << 30
    drawn = {sample(x, RowParams(temperature=5.0, seed=1, position=i, mask=mask)) for i in range(200)}
    assert drawn == {9, 30}
    with pytest.raises(ValueError, match="no token is allowed"):
        sample(x, RowParams(mask=np.zeros(2, np.uint32)))


def test_scores_are_of_the_raw_distribution() -> None:
    x = logits()
    exact = x.astype(np.float64) - np.log(np.exp(x.astype(np.float64)).sum())
    order = np.argsort(-x, kind="stable")
    logprob, rank, top, top_logprobs = score(x, int(order[4]), 3)
    assert rank == 5
    assert logprob == pytest.approx(exact[order[4]], abs=1e-9)
    assert top.tolist() == order[:3].tolist()
    assert top_logprobs == pytest.approx(exact[order[:3]], abs=1e-6)


def test_logits_that_are_not_numbers_are_refused() -> None:
    x = logits()
    x[3] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        sample(x, RowParams())
