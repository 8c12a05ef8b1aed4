"""POST /v1/chat/completions: what is accepted, what comes back."""

import time

import pytest

from tests.server.conftest import Api, chat_body, error_of, serving

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Name a colour."}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "red"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


async def test_an_answer_has_every_field_of_the_contract(api: Api):
    doc = await api.chat()
    assert doc["object"] == "chat.completion"
    assert doc["id"].startswith("chatcmpl-")
    assert abs(doc["created"] - time.time()) < 60
    assert doc["model"] == "m"
    (choice,) = doc["choices"]
    assert choice["index"] == 0
    assert choice["message"].keys() == {"role", "content", "refusal"}
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    usage = doc["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4


async def test_an_alias_answers_under_its_own_name(api: Api):
    assert (await api.chat(model="alias"))["model"] == "alias"


async def test_null_means_default_for_every_field(api: Api):
    names = "max_tokens stop seed n logit_bias user response_format tools tool_choice top_p logprobs stream_options"
    nulls = dict.fromkeys([*names.split(), "frequency_penalty", "presence_penalty", "temperature", "stream"])
    doc = await api.chat(**{**nulls, "max_completion_tokens": 3, "temperature": 0})
    assert doc["choices"][0]["message"]["content"] == (await api.chat(max_tokens=3))["choices"][0]["message"]["content"]


async def test_the_newer_limit_field_wins_over_the_deprecated_one(api: Api):
    assert (await api.chat(max_tokens=9, max_completion_tokens=3))["usage"]["completion_tokens"] == 3


async def test_without_a_limit_the_answer_may_fill_the_context(api: Api):
    usage = (await api.chat(max_tokens=...))["usage"]
    assert usage["total_tokens"] == 512


async def test_a_limit_beyond_the_room_is_cut_and_the_real_one_is_reported(api: Api):
    response = await api.post(PATH, chat_body(max_tokens=10_000))
    assert response.status_code == 200
    usage = response.json()["usage"]
    assert int(response.headers["x-octavo-max-tokens"]) == usage["completion_tokens"] == 512 - usage["prompt_tokens"]


async def test_a_limit_beyond_the_room_is_refused_where_the_operator_says_so(tokenizer):
    async with serving(tokenizer, max_tokens_policy="refuse") as api:
        error = await api.refused(PATH, chat_body(max_tokens=10_000))
    assert error["code"] == "context_length_exceeded"
    assert "10000" in error["message"]
    assert "512" in error["message"]


async def test_text_parts_developer_and_name_are_forms_of_the_same_prompt(api: Api):
    def body(*messages):
        return {**chat_body(max_tokens=4), "messages": list(messages)}

    plain = await api.ok(PATH, body({"role": "system", "content": "Be brief."}, USER))
    parts = [{"type": "text", "text": USER["content"]}]
    other = await api.ok(PATH, body({"role": "developer", "content": "Be brief."}, {**USER, "content": parts}))
    assert other["choices"] == plain["choices"]
    assert other["usage"] == plain["usage"]


@pytest.mark.parametrize(
    "messages",
    [
        [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
        [USER, {"role": "assistant", "tool_calls": [CALL]}, USER],
        [USER, USER],
        [{"role": "system", "content": "Greet."}],
        [{"role": "user", "content": ""}],
        [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, USER],
        [{**USER, "name": "ada"}],
        [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, USER],
    ],
)  # fmt: skip
async def test_histories_that_real_clients_send_are_accepted(api: Api, messages):
    await api.ok(PATH, {**chat_body(max_tokens=2), "messages": messages})


@pytest.mark.parametrize(
    "messages",
    [
        [], "hello", {"role": "user", "content": "x"}, [{"content": "x"}], [{"role": "wizard", "content": "x"}],
        [{"role": "user"}], [{"role": "user", "content": None}], [{"role": "user", "content": 5}], ["hi"], [None],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "hologram"}]}],
        [{"role": "tool", "content": "x"}], [{"role": "assistant", "content": None}],
        [{"role": "User", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        [{"role": "assistant", "tool_calls": [{"id": "x", "type": "function"}]}], None,
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_malformed_messages_are_400_and_never_reach_the_engine(api: Api, messages, stream):
    error = await api.refused(PATH, {**chat_body(stream=stream), "messages": messages})
    assert "messages" in error["param"]
    assert not api.client.submitted


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.5), ("temperature", "warm"), ("temperature", True), ("top_p", -0.1),
        ("top_p", 1.5), ("top_p", [1]), ("frequency_penalty", 3), ("presence_penalty", -3), ("max_tokens", -1),
        ("max_tokens", 0), ("max_tokens", 2.5), ("max_tokens", True), ("max_completion_tokens", 0), ("seed", "x"),
        ("seed", 2**64), ("stop", 5), ("stop", ""), ("stop", ["ok", ""]), ("stop", list("abcde")), ("stream", "yes"),
        ("logit_bias", [1]), ("logit_bias", {"x": 1}), ("logit_bias", {"999999999": 1}), ("logit_bias", {"-1": 5}),
        ("logit_bias", {"5": "high"}), ("logit_bias", {"5": 101}), ("n", 0), ("n", -1), ("n", 1.5), ("n", 10**6),
        ("top_k", -2), ("min_p", 1.5), ("repetition_penalty", 0), ("min_tokens", -1), ("stop_token_ids", [10**8]),
        ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("bad_words", [""]), ("prompt_logprobs", -1),
        ("prompt_logprobs", 21), ("truncate_prompt_tokens", 0), ("priority", "high"), ("timeout_s", 0),
        ("timeout_ttft_s", 10**9), ("request_id", "a b"), ("request_id", "x" * 129), ("cache_salt", "x" * 257),
        ("response_format", {}), ("response_format", "json"), ("response_format", {"type": "yaml"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}),
        ("structured_outputs", {}), ("structured_outputs", {"choice": []}), ("structured_outputs", {"json": "{"}),
        ("stream_options", {"include_usage": True}), ("top_logprobs", 2), ("functions", [{"name": "f"}]),
        ("modalities", ["audio"]), ("metadata", {"k": "v" * 513}), ("chat_template", "x"), ("beam_width", 2),
        ("chat_template_kwargs", {"no_such_switch": 1}), ("stop_regex", "a+"), ("documents", []), ("lora_path", "x"),
        ("reasoning_effort", "enormous"), ("length_penalty", 1.5),
    ],
)  # fmt: skip
async def test_a_value_that_cannot_be_served_is_refused_by_name(api: Api, field, value):
    error = await api.refused(PATH, chat_body(**{field: value}))
    assert field in error["param"] or field in error["message"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500
    assert not api.client.submitted


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0), ("temperature", 2), ("top_p", 0), ("top_p", 1), ("frequency_penalty", -2.0), ("seed", -5),
        ("seed", 2**62), ("logit_bias", {}), ("logit_bias", {"5": -100}), ("stop", []), ("stop", ["a", "b", "c", "d"]),
        ("user", "u"), ("n", 3), ("top_k", -1), ("top_k", 0), ("min_p", 1.0), ("store", False),
        ("metadata", {"k": "v"}),
        ("service_tier", "auto"), ("structured_outputs", {"choice": ["a", "b"]}),
        ("guided_regex", "a+"),
        ("response_format", {"type": "text"}), ("response_format", {"type": "json_object"}), ("priority", -3),
        ("use_beam_search", True), ("timeout_s", 5.5), ("reasoning_effort", "low"), ("parallel_tool_calls", True),
    ],
)  # fmt: skip
async def test_the_ends_of_every_range_are_accepted(api: Api, field, value):
    await api.chat(**{field: value})


async def test_every_parameter_reaches_the_engine(api: Api, tokenizer):
    await api.chat(
        temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, repetition_penalty=1.5, presence_penalty=0.5, seed=11,
        frequency_penalty=-0.5, logit_bias={"5": 3}, allowed_token_ids=[1, 2], bad_words=["no"], max_tokens=9, n=2,
        min_tokens=4, stop_token_ids=[7], ignore_eos=True, logprobs=True, top_logprobs=3, prompt_logprobs=1,
        priority=5, cache_salt="tenant", timeout_s=100, timeout_ttft_s=50,
    )  # fmt: skip
    (request,) = api.client.submitted
    p = request.params
    assert (p.temperature, p.top_p, p.top_k, p.min_p, p.repetition_penalty) == (0.5, 0.25, 7, 0.125, 1.5)
    assert (p.presence_penalty, p.frequency_penalty, p.logit_bias, p.allowed_token_ids) == (0.5, -0.5, {5: 3}, (1, 2))
    assert (p.seed, p.max_tokens, p.n, p.min_tokens, p.stop_token_ids, p.ignore_eos) == (11, 9, 2, 4, (7,), True)
    assert (p.logprobs, p.prompt_logprobs) == (3, 1)
    assert {tokenizer.decode(word) for word in p.bad_words} == {"no", " no"}
    assert (request.priority, request.cache_salt) == (5, "tenant")
    assert request.deadline == pytest.approx(request.arrival + 100)
    assert request.ttft_deadline == pytest.approx(request.arrival + 50)


async def test_a_request_without_a_seed_gets_its_own(api: Api):
    for _ in range(3):
        await api.chat(temperature=1)
    seeds = [request.params.seed for request in api.client.submitted]
    assert None not in seeds
    assert len(set(seeds)) == 3


async def test_choices_have_their_own_texts_and_the_prompt_counts_once(api: Api):
    doc = await api.chat(n=3, temperature=1, seed=1)
    assert [choice["index"] for choice in doc["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in doc["choices"]}) == 3
    assert doc["usage"]["completion_tokens"] == 36
    assert doc["usage"]["prompt_tokens"] == (await api.chat())["usage"]["prompt_tokens"]
    greedy = await api.chat(n=3)
    assert len({choice["message"]["content"] for choice in greedy["choices"]}) == 1


async def test_logprobs_describe_exactly_the_text(api: Api):
    (choice,) = (await api.chat(logprobs=True, top_logprobs=5))["choices"]
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(e["bytes"]) for e in entries).decode() == choice["message"]["content"]
    assert "".join(e["token"] for e in entries) == choice["message"]["content"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 5
        assert entry["top_logprobs"][-1]["logprob"] == -9999.0  # what the model gave as -inf
    (choice,) = (await api.chat(logprobs=True))["choices"]
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])


async def test_a_stop_token_ends_the_text_before_it(api: Api, tokenizer):
    text = (await api.chat())["choices"][0]["message"]["content"]
    token = tokenizer.encode(text, add_special_tokens=False)[5]
    doc = await api.chat(stop_token_ids=[token])
    (choice,) = doc["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == token
    assert text.startswith(choice["message"]["content"])
    assert doc["usage"]["completion_tokens"] == 6


async def test_an_end_token_is_not_shown(api: Api, tokenizer):
    api.client.script = lambda request, choice: [*tokenizer.encode("Yes."), tokenizer.eos_token_id, 5, 5]
    (choice,) = (await api.chat(logprobs=True))["choices"]
    assert choice["message"]["content"] == "Yes."
    assert choice["finish_reason"] == "stop"
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "Yes."


async def test_unknown_and_ineffective_fields_are_listed_in_a_header(api: Api):
    response = await api.post(PATH, chat_body(some_future_option={"a": 1}, temprature=1, user="u", store=False))
    assert response.status_code == 200
    listed = response.headers["x-octavo-ignored-fields"].split(", ")
    assert set(listed) == {"some_future_option", "temprature", "user", "store"}
    assert "x-octavo-ignored-fields" not in (await api.post(PATH, chat_body())).headers


async def test_fields_without_effect_inside_of_options_are_listed_too(api: Api):
    options = {"include_usag": True}
    format = {"type": "json_object", "strct": True}
    fields = chat_body(stream=True, stream_options=options, response_format=format, reasoning_effort="low")
    response = await api.post(PATH, fields)
    listed = response.headers["x-octavo-ignored-fields"].split(", ")
    assert set(listed) == {"stream_options.include_usag", "response_format.strct", "reasoning_effort"}


async def test_hostile_field_names_cannot_forge_headers(api: Api):
    response = await api.post(PATH, chat_body(**{"a\r\nset-cookie: x": 1, "ключ" * 99: 2}))
    assert response.status_code == 200
    assert "set-cookie" not in response.headers


async def test_timing_is_told_when_asked_for(api: Api):
    response = await api.http.post(PATH, json=chat_body(), headers={"x-octavo-timing": "1"})
    assert float(response.headers["x-octavo-ttft-ms"]) > 0
    assert float(response.headers["x-octavo-queue-ms"]) == 1
    assert response.headers["x-octavo-preemptions"] == "0"
    assert "x-octavo-ttft-ms" not in (await api.post(PATH, chat_body())).headers


async def test_token_ids_are_returned_when_asked_for(api: Api, tokenizer):
    doc = await api.chat(return_token_ids=True, return_tokens_as_token_ids=True, logprobs=True)
    (choice,) = doc["choices"]
    assert tokenizer.decode(choice["token_ids"]) == choice["message"]["content"]
    assert len(doc["prompt_token_ids"]) == doc["usage"]["prompt_tokens"]
    assert [e["token"] for e in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]


async def test_prompt_logprobs_have_a_row_for_each_prompt_token(api: Api):
    doc = await api.chat(prompt_logprobs=2)
    rows = doc["prompt_logprobs"]
    assert len(rows) == doc["usage"]["prompt_tokens"]
    assert rows[0] is None
    assert all(row for row in rows[1:])


async def test_the_final_message_can_be_continued(api: Api):
    messages = [USER, {"role": "assistant", "content": "1, 2,"}]
    body = {**chat_body(), "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    doc = await api.ok(PATH, {**body, "echo": True})
    assert doc["choices"][0]["message"]["content"].startswith("1, 2,")
    assert (
        doc["usage"]["prompt_tokens"]
        < (await api.ok(PATH, {**chat_body(), "messages": messages}))["usage"]["prompt_tokens"]
    )
    await api.refused(PATH, {**body, "add_generation_prompt": True})


async def test_a_prompt_can_be_cut_to_its_last_tokens(api: Api):
    await api.chat("word " * 300, truncate_prompt_tokens=20)
    await api.chat("word " * 900, truncate_prompt_tokens=-1, max_tokens=12)
    assert [len(request.prompt) for request in api.client.submitted] == [20, 500]


async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(api: Api):
    error = await api.refused(PATH, chat_body("word " * 900))
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]


async def test_a_client_label_names_the_response_and_never_has_to_be_unique(api: Api):
    first, second = [await api.chat(request_id="mine") for _ in range(2)]
    assert first["id"] == second["id"] == "chatcmpl-mine"
    assert len({request.id for request in api.client.submitted}) == 2


async def test_a_template_that_a_request_brings_needs_the_operators_trust(tokenizer):
    async with serving(tokenizer, trust_request_chat_template=True) as api:
        await api.chat(chat_template="{{ messages[0].content }}!")
        assert tokenizer.decode(api.client.submitted[0].prompt) == "Say hello.!"
        await api.refused(PATH, chat_body(chat_template="{% for %}"))
        loud = chat_body(chat_template="{{ 'LOUD' if loud }}", chat_template_kwargs={"loud": True})
        await api.ok(PATH, loud)
        assert tokenizer.decode(api.client.submitted[-1].prompt) == "LOUD"


async def test_a_deadline_with_some_text_ends_with_length_and_says_why(api: Api):
    api.client.times_out_after = 3
    doc = await api.chat(max_tokens=40, timeout_s=1)
    (choice,) = doc["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["stop_reason"] == "timeout"
    assert doc["usage"]["completion_tokens"] == 3
    assert await api.metric("octavo_request_success_total", finished_reason="abort") == 1


async def test_errors_of_the_client_library_form_come_for_unknown_models(api: Api):
    for stream in (False, True):
        response = await api.post(PATH, chat_body(model="nobody", stream=stream))
        assert error_of(response, 404)["code"] == "model_not_found"
        assert "nobody" in response.text
