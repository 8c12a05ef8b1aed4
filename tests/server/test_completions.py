"""POST /v1/completions: prompts in every form, echo, scoring, best_of."""

import pytest

from tests.server.conftest import Api, complete_body

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"


async def test_an_answer_has_every_field_of_the_contract(api: Api):
    doc = await api.complete(max_tokens=...)
    assert doc["object"] == "text_completion"
    assert doc["id"].startswith("cmpl-")
    (choice,) = doc["choices"]
    assert choice["index"] == 0
    assert isinstance(choice["text"], str)
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "length"
    assert doc["usage"]["completion_tokens"] == 16


async def test_a_list_of_prompts_gives_groups_of_choices_in_order(api: Api):
    prompts = ["One, two,", "Red, green,"]
    alone = [(await api.complete(prompt, max_tokens=5))["choices"][0]["text"] for prompt in prompts]
    doc = await api.complete(prompts, n=2, max_tokens=5)
    assert [choice["index"] for choice in doc["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in doc["choices"]] == [alone[0], alone[0], alone[1], alone[1]]
    assert doc["usage"]["completion_tokens"] == 20
    sizes = [(await api.complete(prompt, max_tokens=5))["usage"]["prompt_tokens"] for prompt in prompts]
    assert doc["usage"]["prompt_tokens"] == sum(sizes)


async def test_token_ids_are_the_same_prompt_as_their_text(api: Api, tokenizer):
    ids = tokenizer.encode("A small boat", add_special_tokens=False)
    text = await api.complete("A small boat")
    assert (await api.complete(ids))["choices"] == text["choices"]
    assert (await api.complete([ids, ids]))["usage"]["prompt_tokens"] == 2 * len(ids)
    assert (await api.complete(ids, echo=True))["choices"][0]["text"].startswith("A small boat")


@pytest.mark.parametrize(
    "prompt", [[], [[]], [10**9], [-1], ["a", 5], [5, "a"], [[1], "a"], 7, {"a": 1}, [True], [1.5], [[1], [None]]]
)
async def test_malformed_prompts_are_400(api: Api, prompt):
    error = await api.refused(PATH, complete_body(prompt))
    assert error["param"].startswith("prompt")
    assert not api.client.submitted


@pytest.mark.parametrize("prompt", ["", None, ...])
async def test_no_prompt_starts_from_the_document_separator(api: Api, tokenizer, prompt):
    doc = await api.complete(prompt)
    assert doc["usage"]["prompt_tokens"] == 1
    assert tokenizer.is_special(api.client.submitted[0].prompt[0])


@pytest.mark.parametrize("prompt", ["Numbers:  one,\ttwo,\n three", "naïve 🦊 日本", "a\u0000b", "tab\t", " lead"])
async def test_echo_gives_the_prompt_back_exactly(api: Api, prompt):
    plain = (await api.complete(prompt))["choices"][0]["text"]
    assert (await api.complete(prompt, echo=True))["choices"][0]["text"] == prompt + plain


async def test_echo_with_no_tokens_gives_the_prompt_alone(api: Api):
    doc = await api.complete("The sky is blue", echo=True, max_tokens=0)
    assert doc["choices"][0]["text"] == "The sky is blue"
    assert doc["choices"][0]["finish_reason"] == "length"
    assert doc["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_a_scored_prompt_comes_first_and_its_first_token_has_null(api: Api, max_tokens):
    doc = await api.complete("The capital of France is", echo=True, logprobs=1, max_tokens=max_tokens)
    (choice,) = doc["choices"]
    lp = choice["logprobs"]
    count = doc["usage"]["prompt_tokens"] + max_tokens
    assert [len(values) for values in lp.values()] == [count] * 4
    assert lp["token_logprobs"][0] is None
    assert lp["top_logprobs"][0] is None
    assert all(value <= 0 for value in lp["token_logprobs"][1:])
    assert "".join(lp["tokens"]) == choice["text"]
    for token, offset in zip(lp["tokens"], lp["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


async def test_logprobs_hold_the_alternatives_and_the_chosen_token(api: Api):
    for k in (0, 1, 5):
        lp = (await api.complete(logprobs=k, max_tokens=4))["choices"][0]["logprobs"]
        for token, value, top in zip(lp["tokens"], lp["token_logprobs"], lp["top_logprobs"], strict=True):
            assert k <= len(top) <= k + 1
            assert top[token] == value


async def test_prompt_logprobs_have_vllms_shape(api: Api):
    doc = await api.complete("The sky is", prompt_logprobs=1)
    rows = doc["choices"][0]["prompt_logprobs"]
    assert len(rows) == doc["usage"]["prompt_tokens"]
    assert rows[0] is None
    for row, token in zip(rows[1:], api.client.submitted[0].prompt[1:], strict=True):
        assert row[str(token)].keys() == {"logprob", "rank", "decoded_token"}


async def test_best_of_returns_the_most_likely_and_counts_them_all(api: Api, tokenizer):
    from engine.api import TokenLogprobs

    quality = {0: -3.0, 1: -1.0, 2: -2.0, 3: -0.5}
    original = api.client._delta

    def ranked(request, choice, output, step):
        delta = original(request, choice, output, step)
        lps = tuple(TokenLogprobs(quality[choice], 1) for _ in delta.tokens)
        return type(delta)(request.id, choice, delta.tokens, logprobs=lps, finish=delta.finish)

    api.client._delta = ranked
    words = [tokenizer.encode(word, add_special_tokens=False)[0] for word in (" a", " b", " c", " d")]
    api.client.script = lambda request, choice: [words[choice]] * 5
    doc = await api.complete(best_of=4, n=2, temperature=1, max_tokens=5)
    assert [choice["text"].split()[0] for choice in doc["choices"]] == ["d", "b"]
    assert [choice["index"] for choice in doc["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in doc["choices"])
    assert doc["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"), ({"best_of": 3, "stream": True}, "best_of"), ({"best_of": 21}, "best_of"),
        ({"suffix": " and that was it."}, "suffix"), ({"logprobs": 1000}, "logprobs"), ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"), ({"max_tokens": -1}, "max_tokens"), ({"n": 129}, "n"),
        ({"max_tokens": 512}, "max_tokens"), ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"use_beam_search": True, "n": 3, "beam_width": 2}, "n"), ({"min_tokens": 20}, "min_tokens"),
        ({"spaces_between_special_tokens": True, "skip_special_tokens": False}, "spaces_between_special_tokens"),
    ],
)  # fmt: skip
async def test_contradictions_are_refused_before_a_stream_begins(api: Api, fields, param):
    error = await api.refused(PATH, complete_body(**fields))
    assert error["param"] == param


async def test_what_is_not_built_here_is_refused_unless_it_is_switched_off(api: Api):
    plain = await api.complete("A small boat")
    off = {"no_stop_trim": False, "return_hidden_states": False, "echo": False, "regex": None}  # as routers fill in
    assert (await api.complete("A small boat", **off))["choices"] == plain["choices"]
    for name, value in {"no_stop_trim": True, "n_keep": 0, "regex": ""}.items():
        assert (await api.refused(PATH, complete_body(**{name: value})))["param"] == name


async def test_prompt_and_limit_beyond_the_context_are_refused(api: Api):
    error = await api.refused(PATH, complete_body([9] * 20, max_tokens=500))
    assert error["code"] == "context_length_exceeded"
    for stream in (False, True):
        error = await api.refused(PATH, complete_body([9] * 600, max_tokens=1, stream=stream))
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]


async def test_beam_search_asks_for_beams(api: Api):
    await api.complete(use_beam_search=True, n=2, beam_width=4, length_penalty=0.5)
    params = api.client.submitted[0].params
    assert (params.beam_width, params.n, params.length_penalty) == (4, 2, 0.5)


async def test_special_tokens_are_shown_when_asked_for(api: Api, tokenizer):
    api.client.script = lambda request, choice: tokenizer.encode("a<|im_start|>b", add_special_tokens=False)
    assert (await api.complete(max_tokens=3))["choices"][0]["text"] == "ab"
    assert (await api.complete(max_tokens=3, skip_special_tokens=False))["choices"][0]["text"] == "a<|im_start|>b"


async def test_a_refused_prompt_of_a_list_refuses_the_whole_list(api: Api):
    await api.refused(PATH, complete_body(["fine", "x " * 600]))
    assert not api.client.submitted
    assert await api.metric("octavo_requests_received_total") == 1
