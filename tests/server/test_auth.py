"""API keys: who gets in, what each may use, and that no key is ever shown."""

import asyncio
import logging

import pytest

from server.settings import ApiKey
from tests.server.conftest import Api, chat_body, error_of, serving

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
KEYS = (ApiKey.of("sesame", "first"), ApiKey.of("second-key", "second"))
GUARDED = ("/v1/models", "/metrics", "/debug/kv", "/debug/requests", "/version", "/openapi.json", "/v1/nothing")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("wrong"), {"authorization": "sesame"}, {"authorization": "Basic sesame"}, {"authorization": "Bearer"},
     bearer("SESAME"), bearer("sesame2"), {"x-api-key": "sesame"}, bearer("sésame")],
)  # fmt: skip
async def test_without_the_right_key_nothing_is_reached(tokenizer, headers):
    async with serving(tokenizer, api_keys=KEYS) as api:
        raw = {name: value.encode() for name, value in headers.items()}
        for path in GUARDED:
            error = error_of(await api.http.get(path, headers=raw), 401)
            assert error["code"] == "invalid_api_key"
        for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize", "/v1/embeddings"):
            error_of(await api.http.post(path, json={"model": "x"}, headers=raw), 401)
        for path in ("/health", "/health/live", "/health/ready"):
            assert (await api.http.get(path, headers=raw)).status_code == 200


async def test_each_of_several_keys_opens_and_labels_its_requests(tokenizer):
    async with serving(tokenizer, api_keys=KEYS) as api:
        for key in ("sesame", "second-key"):
            response = await api.http.post(CHAT, json=chat_body(max_tokens=1), headers=bearer(key))
            assert response.status_code == 200
        assert [request.key for request in api.client.submitted] == ["first", "second"]


async def test_metrics_can_be_opened_by_the_operator(tokenizer):
    async with serving(tokenizer, api_keys=KEYS, public_metrics=True) as api:
        assert (await api.http.get("/metrics")).status_code == 200
        assert (await api.http.get("/debug/kv")).status_code == 401


async def test_a_preflight_needs_no_key_and_errors_can_be_read_by_the_page(tokenizer):
    ask = {
        "origin": "http://localhost:3000",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with serving(tokenizer, api_keys=KEYS, cors_origins=("http://localhost:3000",)) as api:
        response = await api.http.options(CHAT, headers=ask)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://localhost:3000"
        refused = await api.http.post(CHAT, json={}, headers={"origin": "http://localhost:3000"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "http://localhost:3000"
    async with serving(tokenizer, api_keys=KEYS) as api:
        response = await api.http.options(CHAT, headers=ask)
        assert response.status_code == 405
        assert "access-control-allow-origin" not in response.headers


async def test_no_key_is_written_to_the_log(tokenizer, caplog):
    caplog.set_level(logging.DEBUG)
    async with serving(tokenizer, api_keys=KEYS) as api:
        await api.http.post(CHAT, json=chat_body(), headers=bearer("sesame"))
        await api.http.post(CHAT, json=chat_body(), headers=bearer("a-wrong-one"))
    assert "sesame" not in caplog.text
    assert "a-wrong-one" not in caplog.text
    assert "sesame" not in repr(KEYS)


async def send(api: Api, **fields) -> int:
    response = await api.http.post(CHAT, json=chat_body(**fields), headers=bearer("k"))
    if response.status_code == 429:
        assert int(response.headers["retry-after"]) >= 1
        error_of(response, 429)
    return response.status_code


async def test_a_key_may_send_so_many_requests_a_minute(tokenizer):
    async with serving(tokenizer, api_keys=(ApiKey.of("k", requests_per_minute=3),)) as api:
        assert [await send(api) for _ in range(5)] == [200, 200, 200, 429, 429]


async def test_a_key_may_use_so_many_tokens_a_minute(tokenizer):
    async with serving(tokenizer, api_keys=(ApiKey.of("k", tokens_per_minute=60),)) as api:
        assert [await send(api, max_tokens=12) for _ in range(3)] == [200, 200, 429]  # 45 tokens each


async def test_a_key_may_run_so_many_requests_at_once_and_gets_its_places_back(tokenizer):
    async with serving(tokenizer, api_keys=(ApiKey.of("k", max_concurrency=2),)) as api:
        api.client.hold.clear()
        running = [asyncio.create_task(send(api, stream=stream)) for stream in (True, False)]
        while len(api.client.submitted) < 2:
            await asyncio.sleep(0.001)
        assert await send(api) == 429
        api.client.hold.set()
        assert await asyncio.gather(*running) == [200, 200]
        assert await send(api) == 200
        assert await send(api, temperature=-1) == 400
        assert await send(api) == 200


async def test_the_priority_of_a_key_is_added_to_the_requests_own(tokenizer):
    async with serving(tokenizer, api_keys=(ApiKey.of("k", priority=10),)) as api:
        await send(api, priority=-3)
        assert api.client.submitted[0].priority == 7
