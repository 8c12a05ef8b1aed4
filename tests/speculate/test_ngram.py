"""Look-up against a plain search, and the rule that decides whether a guess is made."""

from __future__ import annotations

import random

import pytest

from engine.core.plan import SlotParams
from engine.core.proposer import Ask
from engine.speculate.ngram import LONGEST, TRIES, Match, NgramProposer
from engine.speculate.worth import FRESH_STEPS, Worth


def text(seed: int, length: int, letters: int) -> list[int]:
    """Random tokens, some stretches of which are copies of earlier ones."""
    rng = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < length:
        if len(tokens) > 10 and rng.random() < 0.3:
            start = rng.randrange(len(tokens) - 5)
            tokens += tokens[start : start + rng.randrange(2, 30)]
        else:
            tokens.append(rng.randrange(letters))
    return tokens[:length]


def longest_match(tokens: list[int]) -> int:
    """By trying every place."""
    best = 0
    for place in range(2, len(tokens)):
        length = 0
        while length < place and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= 2 else 0


@pytest.mark.parametrize("letters", [2, 5, 100])
@pytest.mark.parametrize("seed", range(4))
def test_a_guess_is_what_followed_an_equal_stretch(seed: int, letters: int) -> None:
    tokens = text(seed, 300, letters)
    match = Match(tokens[:20], [0.5] * (LONGEST + 1))
    for end in range(20, 300):
        known = tokens[:end]
        judged = match.follow(known)
        assert len(judged) <= 1
        if not match.length:
            assert longest_match(known) == 0
            continue
        assert 0 < match.at < end
        assert known[match.at - match.length : match.at] == known[end - match.length :]
        guess = match.guess(known, 5)
        going_on = known + guess
        assert guess == going_on[match.at : match.at + 5]
        again = Match(known, [0.5] * (LONGEST + 1))
        assert again.length <= max(match.length, longest_match(known))
        places = sum(known[i : i + 2] == known[-2:] for i in range(end - 2))
        followed = bool(judged) and judged[0][1]
        if places <= TRIES and not followed:
            assert match.length >= min(longest_match(known), LONGEST)


def test_tokens_may_come_one_by_one_or_many_at_once() -> None:
    tokens = text(7, 400, 6)
    slow, fast = (Match(tokens[:10], [0.5] * (LONGEST + 1)) for _ in range(2))
    judged = [judgement for end in range(11, 401) for judgement in slow.follow(tokens[:end])]
    assert fast.follow(tokens) == judged
    assert (fast.at, fast.length) == (slow.at, slow.length)
    assert fast.outlook(8) == slow.outlook(8)


def propose(proposer: NgramProposer, seq: int, tokens: list[int], limit: int) -> list[int]:
    """As the scheduler asks it."""
    number = proposer.number(seq, tokens, limit)
    return proposer.propose([Ask(seq, tokens, number, "", SlotParams)])[0] if number else []


def test_what_repeats_itself_right_away_is_guessed_beyond_its_end() -> None:
    proposer = NgramProposer(7)
    proposer.saw_step(1, 1, 0, 0.01)
    assert list(propose(proposer, 0, [1, 2, 3, 1, 2, 3, 1, 2], 7)) == [3, 1, 2, 3, 1, 2, 3]
    assert list(propose(proposer, 0, [1, 2, 3, 1, 2, 3, 1, 2], 2)) == [3, 1]
    assert not propose(proposer, 1, [1, 2, 3, 4], 7)
    assert not propose(proposer, 2, [1], 7)
    assert not propose(proposer, 3, [], 7)


def drafts_used(proposer: NgramProposer, seq: int, tokens: list[int], prompt: int, cost: float) -> tuple[int, int]:
    """Guesses made, and how many of them were right, over a text; a row more costs `cost` of a step of one."""
    made = right = 0
    at = prompt
    while at < len(tokens):
        guess = list(propose(proposer, seq, tokens[:at], 8))
        proposer.saw_step(1, 1 + len(guess), len(guess), 0.01 * (1 + cost * len(guess)))
        made += len(guess)
        hit = 0
        while hit < len(guess) and at + hit < len(tokens) and tokens[at + hit] == guess[hit]:
            hit += 1
        right += hit
        at += hit + 1
    return made, right


def test_a_copy_is_guessed_and_a_text_that_repeats_nothing_is_left_alone() -> None:
    rng = random.Random(1)
    page = [rng.randrange(1000) for _ in range(200)]
    proposer = NgramProposer(8)
    made, right = drafts_used(proposer, 0, page + page, 202, cost=0.05)
    assert right > 150
    assert right > 0.9 * made
    # Words recur here, but what follows them doesn't.
    noise = [token for i in range(1000) for token in (1, 2, 1000 + i)]
    made, right = drafts_used(proposer, 1, noise, 10, cost=0.3)
    assert made < 0.05 * len(noise)


def test_a_copy_isnt_guessed_where_rows_cost_as_much_as_steps() -> None:
    rng = random.Random(2)
    page = [rng.randrange(1000) for _ in range(300)]
    made, _ = drafts_used(NgramProposer(8), 0, page + page, 302, cost=1.0)
    assert made < 60  # what it took to measure that


def test_a_sequence_that_begins_to_repeat_is_noticed_while_nothing_is_guessed() -> None:
    rng = random.Random(3)
    noise = [token for i in range(300) for token in (1, 2, 1000 + i)]
    page = [rng.randrange(1000) for _ in range(100)]
    proposer = NgramProposer(8)
    _, before = drafts_used(proposer, 0, noise + page + page, 10, cost=0.3)
    assert before > 60


def test_the_number_of_drafts_is_the_one_that_gains_most() -> None:
    worth = Worth(8)
    assert worth.drafts([0.9] * 8) == 0  # first a step without any is measured
    worth.saw_step(1, 1, 0, 1.0)
    assert worth.drafts([0.9] * 8) == 8  # then this is tried
    for _ in range(50):
        for tokens, seconds in ((1, 1.0), (2, 1.4), (5, 1.5), (9, 5.0)):
            worth.saw_step(1, tokens, tokens - 1, seconds)
    assert worth.drafts([0.9] * 8) == 4
    assert worth.drafts([0.9, 0.9, 0.0, 0.9]) == 2
    assert worth.drafts([0.9]) == 1
    assert worth.drafts([0.1] * 8) == 0
    assert worth.drafts([]) == 0


def test_the_time_of_guessing_counts() -> None:
    worth = Worth(4)
    for _ in range(50):
        for n in range(5):
            worth.saw_step(1, 1 + n, n, 1.0)  # rows are for nothing
    assert worth.drafts([0.9] * 4, each_s=0.1) == 4
    assert worth.drafts([0.9] * 4, each_s=0.7) == 2
    assert worth.drafts([0.9] * 4, each_s=0.8) == 0
    assert worth.drafts([0.9] * 4, each_s=0.1, once_s=5.0) == 0


def test_many_sequences_pay_for_all_their_rows() -> None:
    worth = Worth(4)
    for _ in range(50):
        for n in (0, 1, 3):
            worth.saw_step(32, 32 * (1 + n), 32 * n, 0.01 * (1 + n))  # no row is for nothing
    assert worth.drafts([0.9] * 4) == 0


def test_an_old_measurement_is_taken_again() -> None:
    worth = Worth(4)
    worth.saw_step(1, 1, 0, 1.0)
    worth.saw_step(1, 5, 4, 50.0)
    worth.saw_step(1, 1, 0, 1.0)
    assert worth.drafts([0.9] * 4) == 0
    for _ in range(FRESH_STEPS + 1):
        worth.saw_step(1, 1, 0, 1.0)
    assert worth.drafts([0.9] * 4) == 4


def test_what_has_ended_is_forgotten() -> None:
    proposer = NgramProposer(4)
    proposer.saw_step(1, 1, 0, 0.01)
    assert propose(proposer, 5, [1, 2, 3, 1, 2], 4)
    proposer.forget(5)
    proposer.forget(5)
    assert not propose(proposer, 5, [1, 2, 3], 4)
