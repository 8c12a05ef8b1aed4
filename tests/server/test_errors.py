"""Malformed requests of every kind: one error object, the right status, and a server that lives on."""

import json

import pytest

from engine.errors import EngineDead, InvalidRequest, Overloaded
from server.app import ROUTES
from tests.server.conftest import Api, chat_body, complete_body, error_of, serving

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b'{"model": "m", }', b"[]", b'"text"', b"null", b"{'a': 1}", b"\xff\xfe{}",
        b'{"messages": [{"role": "user", "content": "\xc3\x28"}]}', b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"[" * 100_000, json.dumps(chat_body())[:-1].encode() + b', "top_p": NaN}', b'{"top_p": Infinity}',
        json.dumps(chat_body())[:-1].encode() + b', "top_p": 1e999}', b'{"model": "m", "messages": "x \\ud800 y"}',
        json.dumps(chat_body("\ud800")).encode(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize"])
async def test_a_body_that_is_no_json_object_is_400(api: Api, data, path):
    error = error_of(await api.http.post(path, content=data, headers=JSON), 400)
    assert error["type"] == "invalid_request_error"
    await api.chat(max_tokens=1)


async def test_another_content_type_is_415_and_none_is_json(api: Api):
    data = json.dumps(chat_body(max_tokens=1)).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        error_of(await api.http.post(CHAT, content=data, headers={"content-type": kind}), 415)
    for kind in ("application/json; charset=utf-8", "application/vnd.api+json"):
        assert (await api.http.post(CHAT, content=data, headers={"content-type": kind})).status_code == 200
    assert (await api.http.post(CHAT, content=data)).status_code == 200


async def test_a_body_over_the_limit_is_413_also_without_a_declared_length(tokenizer):
    async with serving(tokenizer, max_body_bytes=1000) as api:
        error = error_of(await api.post(CHAT, chat_body("x" * 2000)), 413)
        assert "1000" in error["message"]

        async def pieces():
            for _ in range(100):
                yield b" " * 100

        error_of(await api.http.post(CHAT, content=pieces(), headers=JSON), 413)
        assert (await api.post(CHAT, chat_body())).status_code == 200
        assert await api.metric("octavo_requests_refused_total", reason="too_large") == 2


@pytest.mark.parametrize("path", ["/v1/no/such", "/v1/chat/completions/", "/docs", "/v1/%00"])
async def test_unknown_routes_are_404_with_an_error_object(api: Api, path):
    error_of(await api.http.get(path), 404)


async def test_a_wrong_method_is_405_and_names_the_right_one(api: Api):
    response = await api.http.get(CHAT)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    assert (await api.http.put("/v1/files")).headers["allow"] == "GET, POST"
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        error_of(await api.http.request(method, CHAT), 405)


async def test_a_huge_bad_value_is_not_echoed(api: Api):
    for body in (
        chat_body(temperature="x" * 200_000),
        chat_body(model="m" * 200_000),
        chat_body(logit_bias={"y" * 10**5: 1}),
    ):
        assert len((await api.post(CHAT, body)).text) < 1000


async def test_what_the_engine_refuses_keeps_its_own_status(api: Api):
    api.client.refusal = Overloaded("full", retry_after_s=7.2)
    response = await api.post(CHAT, chat_body())
    error = error_of(response, 429)
    assert error["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "8"
    api.client.refusal = EngineDead("gone", retry_after_s=3)
    response = await api.post(CHAT, chat_body(stream=True))
    assert error_of(response, 503)["type"] == "server_error"
    assert response.headers["retry-after"] == "3"
    api.client.refusal = InvalidRequest("too big", param="prompt", code="context_length_exceeded")
    assert error_of(await api.post(CHAT, chat_body()), 400)["code"] == "context_length_exceeded"


async def test_a_bug_is_a_500_that_gives_nothing_away(api: Api):
    def broken(request, choice):
        raise ZeroDivisionError("secret /home/user/file.py")

    api.client.submit = broken
    response = await api.post(CHAT, chat_body())
    assert error_of(response, 500)["message"].startswith("internal error")
    assert "secret" not in response.text


async def test_while_the_model_loads_everything_but_health_is_503(api: Api):
    api.client.state = "loading"
    error_of(await api.post(CHAT, chat_body()), 503)
    error_of(await api.http.get("/v1/models"), 503)
    assert (await api.http.get("/metrics")).status_code == 200
    assert (await api.http.get("/health")).json()["status"] == "loading"


async def test_every_answer_names_its_request(api: Api):
    first, second = [await api.post(CHAT, chat_body(temperature=-1)) for _ in range(2)]
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    given = await api.http.post(CHAT, json=chat_body(), headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    forged = await api.http.post(CHAT, json=chat_body(), headers={"x-request-id": "a b<script>"})
    assert "<" not in forged.headers["x-request-id"]


async def test_a_burst_of_broken_requests_leaves_a_working_server(api: Api):
    for i in range(30):
        await api.refused(CHAT, chat_body(temperature=-1 - i))
        await api.refused("/v1/completions", complete_body([i, -1]))
    await api.chat()
    assert await api.metric("octavo_requests_refused_total", reason="invalid") == 60


@pytest.mark.parametrize("route", [route for route in ROUTES if route.queued], ids=lambda route: route.path)
async def test_who_finds_the_queue_full_is_refused_before_the_body_is_read(api, route):
    api.client.refusal = Overloaded("full", retry_after_s=3)
    read = []

    async def body():
        read.append(True)
        yield b"{"

    response = await api.http.post(route.path, content=body())
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert not read
    assert await api.metric("octavo_requests_refused_total", reason="overloaded") == 1
    assert await api.metric("octavo_http_requests_total", route=route.path, code="429") == 1
    assert await api.metric("octavo_refusal_time_seconds_count") == 1
