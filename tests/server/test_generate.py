"""From deltas to visible text: the same whatever the deltas' borders, checked against the plain definition."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import Delta, FinishReason, SamplingParams, TokenLogprobs
from engine.validate import Limits, add_request
from server.generate import Generation, TextOptions
from server.metrics import Metrics
from tests.server.fake_client import FakeClient

TEXT = "abra cadabra 🦊 naïve, a\nban abab ana ñ the end of it all 日本"


class Cuts(FakeClient):
    """Gives out `tokens` in deltas of the given sizes."""

    def __init__(self, tokenizer, tokens, sizes, logprobs):
        super().__init__(tokenizer)
        self.tokens, self.sizes, self.logprobs = tokens, sizes, logprobs

    async def _steps(self, live):
        at = 0
        for size in [*self.sizes, len(self.tokens)]:
            part = tuple(self.tokens[at : at + max(1, size)])
            at += len(part)
            done = at >= len(self.tokens)
            lps = tuple(TokenLogprobs(-1.0, 1) for _ in part) if self.logprobs else ()
            live.put(Delta(live.request.id, 0, part, logprobs=lps, finish=FinishReason.LENGTH if done else None))
            await asyncio.sleep(0)
            if done or not live.open:
                return


def generate(tokenizer, tokens, sizes, options, logprobs):
    async def go():
        client = Cuts(tokenizer, tokens, sizes, logprobs)
        params = SamplingParams(max_tokens=len(tokens), logprobs=0 if logprobs else None)
        limits = Limits(512, tokenizer.vocab_size)
        request = add_request(limits, id="r", prompt=[1], params=params, arrival=0.0)
        generation = Generation(client, tokenizer, Metrics(client, "m", {}, aliases=False), request, options)
        await generation.start()
        return [piece async for piece in generation.pieces()], generation

    return asyncio.run(go())


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("include", [False, True])
def test_text_is_cut_at_the_first_stop_string_wherever_tokens_and_deltas_end(tokenizer, include, data):
    substring = st.tuples(st.integers(0, len(TEXT) - 1), st.integers(1, 12)).map(lambda p: TEXT[p[0] : p[0] + p[1]])
    near = substring.map(lambda text: text[:-1] + "~")
    stops = tuple(data.draw(st.lists(st.one_of(substring, near), max_size=3)))
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=30))
    logprobs = data.draw(st.booleans())
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    options = TextOptions(stop=stops, include_stop=include)
    pieces, generation = generate(tokenizer, tokens, sizes, options, logprobs)

    ends = [(TEXT.index(s) + len(s), -len(s), s) for s in stops if s in TEXT]
    text = "".join(piece.text for piece in pieces)
    if ends:
        end, _, stop = min(ends)
        assert text == (TEXT[:end] if include else TEXT[: end - len(stop)])
        assert (pieces[-1].finish, pieces[-1].stop_reason) == ("stop", stop)
    else:
        assert text == TEXT
        assert (pieces[-1].finish, pieces[-1].stop_reason) == ("length", None)
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    shown = tokenizer.decode([token for piece in pieces for token in piece.tokens])
    assert shown.startswith(text)
    assert generation.usage.completion_tokens == sum(len(piece.tokens) for piece in pieces)
    if logprobs:
        entries = [entry for piece in pieces for entry in piece.entries]
        assert [e.token for e in entries] == tokens[: len(entries)]
        joined = b"".join(tokenizer.token_bytes(e.token) for e in entries).decode("utf-8", "replace")
        assert joined.startswith(text)
        assert all(entry.start < max(len(text), 1) for entry in entries)


def test_stop_strings_are_not_looked_for_before_min_tokens(tokenizer):
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    pieces, _ = generate(tokenizer, tokens, [], TextOptions(stop=("ab",), min_tokens=len(tokens)), False)
    assert "".join(piece.text for piece in pieces) == TEXT
    pieces, _ = generate(tokenizer, tokens, [1] * 99, TextOptions(stop=("ab",), min_tokens=4), False)
    head = tokenizer.decode(tokens[:4])
    assert "".join(piece.text for piece in pieces) == head + TEXT[len(head) :].partition("ab")[0]
