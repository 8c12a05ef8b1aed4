"""The reference decoder against transformers, in float32: every native family, and the real default model."""

from pathlib import Path

import pytest
import torch

from engine.model.config import load_spec
from engine.model.decoder import Decoder, DenseCausalAttention
from engine.model.pull import pull
from engine.text.chat import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.model.families import FAMILIES, VOCAB, make
from tests.model.oracle import greedy


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # tiny products: threads only cost


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_the_logits_and_greedy_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = make(name, tmp_path)
    spec = load_spec(tmp_path, max_model_len=100)
    decoder = Decoder.load(spec, tmp_path)
    prompt = torch.randint(3, VOCAB, (20,)).tolist()
    tokens, logits = greedy(decoder, prompt, 64)
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].float()
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert tokens == expected.argmax(-1).tolist()


def test_a_context_beyond_the_trained_length_takes_the_long_factors_for_all_its_tokens(tmp_path: Path) -> None:
    theirs = make("phi3-long", tmp_path)  # trained on 128 tokens
    short, long = (load_spec(tmp_path, max_model_len=length) for length in (128, 129))
    assert short.rope != long.rope == load_spec(tmp_path).rope
    tokens = torch.randint(3, VOCAB, (140,))
    decoder = Decoder.load(long, tmp_path)
    with torch.inference_mode():
        ours = decoder.logits(decoder.forward(tokens, torch.arange(140), DenseCausalAttention(long)))
        torch.testing.assert_close(ours, theirs(tokens[None]).logits[0], atol=1e-4, rtol=0)


def test_chunks_give_what_the_whole_gives(tmp_path: Path) -> None:
    make("gemma3", tmp_path)
    decoder = Decoder.load(load_spec(tmp_path), tmp_path)
    tokens = torch.randint(3, VOCAB, (23,))
    whole = decoder.forward(tokens, torch.arange(23), DenseCausalAttention(decoder.spec))
    attend, parts, at = DenseCausalAttention(decoder.spec), [], 0
    for size in (5, 1, 9, 8):
        parts.append(decoder.forward(tokens[at : at + size], torch.arange(at, at + size), attend))
        at += size
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=0)


def test_the_default_model_gives_the_logits_of_transformers_and_knows_paris() -> None:
    from transformers import AutoModelForCausalLM

    path = pull("smollm2")
    tokenizer = Tokenizer.load(path)
    decoder = Decoder.load(load_spec(path), path)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.encode(ChatTemplate.of(tokenizer).render(question), add_special_tokens=False)
    tokens, logits = greedy(decoder, prompt, 12)
    assert tokenizer.decode(tokens).startswith("The capital of France is Paris.")
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=0)
    assert tokens == expected.argmax(-1).tolist()
