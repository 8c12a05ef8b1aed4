"""Server-sent events: order, shape, and that they say the same as an answer in one piece."""

import asyncio

import pytest

from engine.api import Delta, FinishReason
from tests.server.conftest import Api, chat_body, complete_body, error_of, parse_events, serving

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def joined(events, index=0):
    parts = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join((part.get("delta") or {}).get("content") or part.get("text") or "" for part in parts)


def finishes(events, index=0):
    return [c["finish_reason"] for e in events for c in e["choices"] if c["index"] == index and c["finish_reason"]]


@pytest.mark.parametrize("n", [1, 3])
async def test_a_streamed_chat_says_the_same_as_a_whole_one(api: Api, n):
    body = chat_body(n=n, temperature=1, seed=4, max_tokens=30)
    whole = await api.ok(CHAT, body)
    events = await api.events(CHAT, {**body, "stream_options": {"include_usage": True}})
    for choice in whole["choices"]:
        assert joined(events, choice["index"]) == choice["message"]["content"]
        assert finishes(events, choice["index"]) == [choice["finish_reason"]]
    assert events[-1]["usage"] == whole["usage"]


async def test_the_chunks_of_a_chat_come_in_the_documented_order(api: Api):
    events = await api.events(CHAT, chat_body(n=2))
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    for index in (0, 1):
        parts = [c for e in events for c in e["choices"] if c["index"] == index]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in part["delta"] for part in parts[1:])
        assert parts[-1]["delta"] == {}
        assert parts[-1]["finish_reason"] == "length"
        assert all(part["finish_reason"] is None for part in parts[:-1])


async def test_usage_comes_last_without_choices_and_is_null_before(api: Api):
    events = await api.events(CHAT, chat_body(stream_options={"include_usage": True}))
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 12
    assert all(event["usage"] is None for event in events[:-1])


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_no_usage_unless_it_is_asked_for(api: Api, options):
    events = await api.events(CHAT, chat_body(stream_options=options))
    assert all("usage" not in event and event["choices"] for event in events)


async def test_continuous_usage_counts_up(api: Api):
    api.client.delay_s = 0.002
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await api.events(CHAT, chat_body(stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 12


async def test_obfuscation_pads_chunks_when_asked_for(api: Api):
    events = await api.events(CHAT, chat_body(stream_options={"include_obfuscation": True}))
    assert all(event["obfuscation"] for event in events)


async def test_text_comes_piece_by_piece(api: Api):
    api.client.delay_s = 0.005
    events = await api.events(CHAT, chat_body(max_tokens=20))
    assert sum(bool(joined([event])) for event in events) > 10


async def test_streamed_logprobs_are_those_of_the_whole_answer(api: Api):
    api.client.delay_s = 0.002
    body = chat_body(logprobs=True, top_logprobs=2)
    whole = (await api.ok(CHAT, body))["choices"][0]["logprobs"]["content"]
    events = await api.events(CHAT, body)
    got = [entry for e in events for c in e["choices"] if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert got == whole


async def test_streamed_completions_say_the_same_as_whole_ones(api: Api):
    body = complete_body(["One, two,", "Red, green,", "The moon"], n=2, logprobs=2, echo=True, temperature=1, seed=1)
    whole = await api.ok(COMPLETIONS, body)
    events = await api.events(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    assert {event["object"] for event in events} == {"text_completion"}
    for choice in whole["choices"]:
        index = choice["index"]
        assert joined(events, index) == choice["text"]
        assert finishes(events, index) == [choice["finish_reason"]]
        rows = [c["logprobs"] for e in events for c in e["choices"] if c["index"] == index and c["logprobs"]]
        for key, values in choice["logprobs"].items():
            assert [value for row in rows for value in row[key]] == values
    assert events[-1]["usage"] == whole["usage"]


async def test_streamed_token_ids_add_up(api: Api):
    for path, body in ((CHAT, chat_body()), (COMPLETIONS, complete_body())):
        whole = await api.ok(path, {**body, "return_token_ids": True})
        events = await api.events(path, {**body, "return_token_ids": True})
        ids = [i for event in events for choice in event["choices"] for i in choice.get("token_ids", [])]
        assert ids == whole["choices"][0]["token_ids"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("streams", [False, True])
async def test_stop_strings_cut_exactly_and_the_engine_is_told(api: Api, path, streams):
    make = chat_body if path == CHAT else complete_body
    text = joined(await api.events(path, make(max_tokens=40)))
    api.client.aborted.clear()
    stop = text[20:27]
    body = make(max_tokens=40, stop=stop, logprobs=True if path == CHAT else 1)
    if streams:
        events = await api.events(path, {**body, "stream_options": {"include_usage": True}})
        got, reasons, usage = joined(events), finishes(events), events[-1]["usage"]
    else:
        doc = await api.ok(path, body)
        (choice,) = doc["choices"]
        got = choice["message"]["content"] if path == CHAT else choice["text"]
        reasons, usage = [choice["finish_reason"]], doc["usage"]
        assert choice["stop_reason"] == stop
    assert got == text[: text.index(stop)]
    assert reasons == ["stop"]
    assert usage["completion_tokens"] < 20
    assert (api.client.submitted[-1].id, 0) in api.client.aborted
    assert not api.client.live


async def test_no_prefix_of_the_stream_shows_a_part_of_the_stop_string(api: Api):
    api.client.delay_s = 0.001
    text = joined(await api.events(COMPLETIONS, complete_body(max_tokens=40)))
    stop = text[15:40]
    seen = ""
    for event in await api.events(COMPLETIONS, complete_body(max_tokens=40, stop=stop)):
        seen += joined([event])
        assert text[: text.index(stop)].startswith(seen)


async def test_what_was_held_back_is_given_out_at_the_end(api: Api):
    text = (await api.complete(max_tokens=40))["choices"][0]["text"]
    stop = [text[-6:] + "~", text[12:20] + "~"]
    assert joined(await api.events(COMPLETIONS, complete_body(max_tokens=40, stop=stop))) == text


async def test_a_stop_string_can_be_kept(api: Api):
    text = (await api.complete(max_tokens=40))["choices"][0]["text"]
    stop = text[20:25]
    events = await api.events(COMPLETIONS, complete_body(max_tokens=40, stop=stop, include_stop_str_in_output=True))
    assert joined(events) == text[: text.index(stop)] + stop


async def test_one_choice_stopping_does_not_end_the_others(api: Api):
    texts = [c["text"] for c in (await api.complete(n=3, temperature=1, seed=2, max_tokens=30))["choices"]]
    stop = texts[1][10:16]
    doc = await api.complete(n=3, temperature=1, seed=2, max_tokens=30, stop=stop)
    for choice, text in zip(doc["choices"], texts, strict=True):
        assert choice["text"] == text.partition(stop)[0]
        assert choice["finish_reason"] == ("stop" if stop in text else "length")


async def test_characters_of_several_tokens_arrive_whole(api: Api, tokenizer):
    text = "🦊🦙🐧 日本語 naïve 👩‍👩‍👧‍👦"
    api.client.script = lambda request, choice: tokenizer.encode(text, add_special_tokens=False)
    api.client.delay_s = 0.001
    count = len(tokenizer.encode(text, add_special_tokens=False))
    events = await api.events(CHAT, chat_body(max_tokens=count))
    assert joined(events) == text
    assert not any("\ufffd" in joined([event]) for event in events)


async def test_half_a_character_at_the_limit_is_one_replacement_character(api: Api, tokenizer):
    fox = tokenizer.encode("🦊", add_special_tokens=False)
    api.client.script = lambda request, choice: fox
    doc = await api.chat(max_tokens=1, logprobs=True)
    (choice,) = doc["choices"]
    assert choice["message"]["content"] == "\ufffd"
    entry = choice["logprobs"]["content"][0]
    assert "🦊".encode().startswith(bytes(entry["bytes"]))
    assert entry["token"].startswith("bytes:\\x")
    assert joined(await api.events(CHAT, chat_body(max_tokens=1))) == "\ufffd"


@pytest.mark.parametrize(
    ("kind", "status"), [("invalid", 400), ("overloaded", 429), ("failed", 500), ("deadline", 504), ("", 500)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_fails_before_the_first_token_has_a_status(api: Api, kind, status, stream):
    api.client.first_delta = Delta("", 0, (), finish=FinishReason.ERROR, error="no", error_kind=kind)
    error = error_of(await api.post(CHAT, chat_body(stream=stream)), status)
    assert error["message"] == "no"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_fails_later_is_an_event_and_then_the_stream_ends(api: Api, path):
    api.client.dies_after = 3
    api.client.delay_s = 0.002
    body = chat_body(stream=True) if path == CHAT else complete_body(stream=True)
    response = await api.post(path, body)
    assert response.status_code == 200
    *chunks, last = parse_events(response.text)
    assert "[DONE]" not in chunks
    assert last["error"].keys() == {"message", "type", "param", "code"}
    assert last["error"]["type"] == "server_error"
    assert all("error" not in chunk for chunk in chunks)
    assert await api.metric("octavo_request_success_total", finished_reason="error") == 1


async def test_a_failure_of_an_answer_in_one_piece_is_a_status(api: Api):
    api.client.dies_after = 3
    error_of(await api.post(CHAT, chat_body()), 503)


async def test_a_stream_that_waits_long_begins_with_comments(tokenizer):
    async with serving(tokenizer, keep_alive_s=0.05) as api:
        api.client.hold.clear()
        asyncio.get_running_loop().call_later(0.3, api.client.hold.set)
        response = await api.post(CHAT, chat_body(stream=True))
    assert response.text.startswith(": keep-alive\n\n")
    assert parse_events(response.text)[-1] == "[DONE]"


async def test_a_refusal_after_a_long_wait_is_an_event(tokenizer):
    async with serving(tokenizer, keep_alive_s=0.05) as api:
        api.client.hold.clear()
        api.client.first_delta = Delta("", 0, (), finish=FinishReason.ERROR, error="no", error_kind="invalid")
        asyncio.get_running_loop().call_later(0.2, api.client.hold.set)
        response = await api.post(CHAT, chat_body(stream=True))
    assert response.status_code == 200
    assert parse_events(response.text)[-1]["error"]["message"] == "no"
