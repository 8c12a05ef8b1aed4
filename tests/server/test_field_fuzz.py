"""Every field of every generating route with values that no client should send: never a 500, never a dead server."""

import msgspec
import pytest

from server.messages_wire import MessagesRequest
from server.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from server.responses_wire import ResponsesRequest
from tests.server.conftest import Api, chat_body, complete_body

pytestmark = pytest.mark.anyio

EXTREME = [
    None, True, 0, -1, 2**63, 2**70, 1e308, "", "\x00", "\ud7ff\u202e", "9" * 400, [], [[]], [None], [-1],
    [2**40], ["", "x"], {}, {"0": 1}, {"type": "function", "function": {"name": "f"}}, {"a": {"b": [{}]}}, ["a"] * 3000,
    [{"type": "function", "function": {"name": "f"}}], [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
]  # fmt: skip

ROUTES = {
    "/v1/chat/completions": (ChatRequest, chat_body(max_tokens=3)),
    "/v1/completions": (CompletionRequest, complete_body(max_tokens=3)),
    "/v1/responses": (ResponsesRequest, {"model": "m", "input": "x", "max_output_tokens": 16}),
    "/v1/messages": (MessagesRequest, {"model": "m", "messages": chat_body()["messages"], "max_tokens": 3}),
    "/tokenize": (TokenizeRequest, {"model": "m", "prompt": "x"}),
}


@pytest.mark.parametrize("path", ROUTES)
async def test_no_value_of_any_field_is_an_internal_error(api: Api, path):
    kind, body = ROUTES[path]
    for field in kind.__struct_encode_fields__:
        for value in EXTREME:
            if value is None and field in ("max_tokens", "max_output_tokens"):
                continue  # valid: an answer to the end of the context
            data = msgspec.json.encode({**body, field: value})
            response = await api.http.post(path, content=data, headers={"content-type": "application/json"})
            assert response.status_code in (200, 400, 404), (field, value, response.text)
            if response.status_code != 200:
                assert len(response.text) < 3000, (field, response.text)
    assert (await api.chat(max_tokens=1))["choices"]
    assert not api.client.live
    assert await api.metric("octavo_requests_in_flight") == 0
    assert await api.metric("octavo_request_success_total", finished_reason="error") == 0
