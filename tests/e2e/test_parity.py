"""The served model says what transformers says of the same weights, in float32, token for token."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import LLM, SamplingParams
from engine.model.pull import pull
from tests.texts import english

NEW_TOKENS = 64
LENGTHS = (5, 8, 13, 17, 24, 31, 40, 55, 64, 79, 97, 120, 151, 200, 256, 333, 480, 700, 1024, 1500)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """Twenty prompts of 5 to 1,500 tokens, each from another place of a long text."""
    from engine.text.tokenizer import Tokenizer

    ids = Tokenizer.load(pull("smollm2")).encode(english(60_000))
    assert len(ids) > sum(LENGTHS)
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return [tuple(ids[s : s + n]) for s, n in zip(starts, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def oracle() -> AutoModelForCausalLM:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(pull("smollm2"), dtype=torch.float32).eval()


def generate(prompts: list[tuple[int, ...]], **config: object) -> list:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    with LLM("smollm2", **config) as llm:
        return llm.generate(prompts, params, progress=False)


def test_greedy_tokens_equal_those_of_transformers_in_float32(prompts, oracle) -> None:
    # One forward pass over prompt + answer decides it: if every token is the argmax after those before it,
    # greedy decoding gives exactly this answer.
    for prompt, answer in zip(prompts, generate(prompts, dtype="float32"), strict=True):
        tokens = list(answer.choices[0].tokens)
        assert len(tokens) == NEW_TOKENS
        with torch.no_grad():
            logits = oracle(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == tokens, f"prompt of {len(prompt)} tokens"


def test_bfloat16_logprobs_are_near_those_of_float32(prompts, oracle) -> None:
    # bf16 keeps 8 bits of mantissa: 2^-8 relative on activations of size ~10 gives some hundredths of a nat.
    for prompt, answer in zip(prompts[::3], generate(prompts[::3], dtype="bfloat16"), strict=True):
        choice = answer.choices[0]
        with torch.no_grad():
            logits = oracle(torch.tensor([[*prompt, *choice.tokens[:-1]]])).logits[0, len(prompt) - 1 :]
        want = torch.log_softmax(logits.double(), -1)[torch.arange(NEW_TOKENS), torch.tensor(choice.tokens)]
        got = torch.tensor([p.logprob for p in choice.logprobs], dtype=torch.float64)
        difference = (want - got).abs()
        assert difference.mean() < 0.05, f"prompt of {len(prompt)} tokens: mean {difference.mean():.3f}"
        assert difference.max() < 0.5, f"prompt of {len(prompt)} tokens: max {difference.max():.3f}"
