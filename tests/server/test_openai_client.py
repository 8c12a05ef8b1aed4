"""The official Python client against a real server: its types, its streams, its error classes."""

import asyncio

import openai
import pytest

from tests.server.conftest import listening

MESSAGES = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def address(tokenizer):
    with listening(tokenizer) as (address, _):
        yield address


@pytest.fixture
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def chat(client, **fields):
    return client.chat.completions.create(
        **{"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 16, **fields}
    )


def test_models_are_listed_and_retrieved(client):
    assert [model.id for model in client.models.list()] == ["m", "alias"]
    assert client.models.retrieve("m").id == "m"


def test_a_stream_gives_the_text_and_then_the_usage(client):
    whole = chat(client)
    parts = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in parts if c.choices) == whole.choices[0].message.content
    assert parts[-1].choices == []
    assert parts[-1].usage == whole.usage


def test_the_stream_helper_builds_the_same_message(client):
    with client.chat.completions.stream(model="m", messages=MESSAGES, temperature=0, max_tokens=16) as stream:
        for _ in stream:
            pass
        with pytest.raises(openai.LengthFinishReasonError) as cut:
            stream.get_final_completion()
    assert cut.value.completion.choices[0].message.content == chat(client).choices[0].message.content


def test_legacy_completions_have_their_logprobs(client):
    answer = client.completions.create(model="m", prompt="Hello", max_tokens=4, temperature=0, logprobs=2, echo=True)
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    assert answer.choices[0].text.startswith("Hello")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "no"}, openai.NotFoundError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
    ],
)
def test_refusals_become_the_clients_own_errors(client, fields, kind, stream):
    with pytest.raises(kind) as raised:
        chat(client, stream=stream, **fields)
    assert raised.value.body.keys() == {"message", "type", "param", "code"}


def test_many_calls_at_once_are_served(address):
    async def ten():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            return await asyncio.gather(*[chat(client) for _ in range(10)])

    assert len({answer.choices[0].message.content for answer in asyncio.run(ten())}) == 1
