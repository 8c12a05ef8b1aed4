"""A served encoder, as clients of embeddings see it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.e2e.serving import Server, serving

MODEL = "all-minilm-l6-v2"
TEXTS = ["A small boat.", "That is a happy person", "river " * 200, "x", "The capital of France is Paris."]


@pytest.fixture(scope="module")
def encoder() -> Iterator[Server]:
    with serving(model=MODEL) as running:
        yield running


@pytest.fixture(scope="module")
def oai(encoder: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=encoder.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def vectors(oai: openai.OpenAI, given: str | list[str]) -> list[list[float]]:
    return [entry.embedding for entry in oai.embeddings.create(model=MODEL, input=given).data]


def test_a_text_has_the_same_vector_alone_among_others_and_after_a_crash(encoder: Server, oai: openai.OpenAI):
    alone = [vectors(oai, text)[0] for text in TEXTS]
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda i: vectors(oai, TEXTS[i:] + TEXTS[:i]), range(5)):
            assert sorted(found) == sorted(alone)
    before = encoder.health()["engine"]["restarts"]
    os.kill(encoder.health()["engine"]["pid"], signal.SIGKILL)
    assert vectors(oai, TEXTS) == alone
    while encoder.health()["engine"]["restarts"] == before:
        time.sleep(0.1)
    assert encoder.health()["status"] == "ready"


def test_near_texts_score_higher_and_come_first(encoder: Server):
    score = {"model": MODEL, "text_1": TEXTS[1], "text_2": ["That is a happy dog", "Today is a sunny day", TEXTS[1]]}
    scores = [entry["score"] for entry in httpx.post(f"{encoder.url}/v1/score", json=score).json()["data"]]
    assert scores == pytest.approx([0.695, 0.257, 1.0], abs=1e-3)
    rerank = {"model": MODEL, "query": "What is the capital of France?", "documents": TEXTS, "top_n": 1}
    assert httpx.post(f"{encoder.url}/v1/rerank", json=rerank).json()["results"][0]["index"] == 4


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x", "background": True}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
    ],
)
def test_what_writes_text_is_refused(encoder: Server, path: str, fields: dict[str, object]):
    response = httpx.post(encoder.url + path, json={"model": MODEL, **fields})
    assert response.status_code == 400
    assert "is an encoder" in response.json()["error"]["message"]


def test_a_text_beyond_512_tokens_is_refused_unless_it_may_be_cut(oai: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="602 tokens, the context has 512"):
        oai.embeddings.create(model=MODEL, input="word " * 600)
    cut = {"truncate_prompt_tokens": -1}
    got = oai.embeddings.create(model=MODEL, input="word " * 600, extra_body=cut)
    assert got.usage.prompt_tokens == 512
    assert got.data[0].embedding == vectors(oai, "word " * 510)[0]
    with pytest.raises(openai.BadRequestError, match="leave no room"):
        oai.embeddings.create(model=MODEL, input="word", extra_body={"truncate_prompt_tokens": 2})
