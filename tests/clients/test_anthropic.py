"""The official Python client of Anthropic's API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.conftest import Server
from tests.server.test_messages import TOOL
from tests.server.test_tools import LIGHT_CALL

ASK: Any = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "Say hello."}]}


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="EMPTY", max_retries=0, timeout=30) as client:
        yield client


def test_a_message_is_the_same_whole_and_streamed(server: Server, claude: anthropic.Anthropic):
    server.says("Hello there.")
    whole = claude.messages.create(**ASK)
    assert (whole.content[0].type, whole.stop_reason) == ("text", "end_turn")
    with claude.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == "Hello there."  # type: ignore[union-attr]
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_tools_are_called_and_answered(server: Server, claude: anthropic.Anthropic):
    server.says(LIGHT_CALL)
    with claude.messages.stream(tools=[TOOL], tool_choice={"type": "any"}, **ASK) as stream:
        first = stream.get_final_message()
    (call,) = first.content
    assert first.stop_reason == "tool_use"
    assert call.type == "tool_use"
    assert call.input == {"room": "hall", "on": True}
    server.says("It is on.")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "on"}]}
    history = [*ASK["messages"], {"role": "assistant", "content": first.content}, result]
    second = claude.messages.create(**{**ASK, "messages": history}, tools=[TOOL])
    assert second.content[0].text == "It is on."  # type: ignore[union-attr]


def test_tokens_are_counted(server: Server, claude: anthropic.Anthropic):
    counted = claude.messages.count_tokens(model="m", messages=ASK["messages"])
    claude.messages.create(**ASK)
    assert counted.input_tokens == len(server.client.submitted[-1].prompt)


def test_errors_are_of_the_clients_classes(claude: anthropic.Anthropic):
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**{**ASK, "model": "nobody"})
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(**ASK, extra_body={"temperature": 9})
