"""/v1/embeddings, /v1/score and /v1/rerank over the vectors of the engine."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import pytest

from engine.api import AddRequest, Delta, FinishReason
from engine.text.tokenizer import Tokenizer
from tests.server.conftest import Api, serving
from tests.server.fake_client import FakeClient

pytestmark = pytest.mark.anyio

PATH = "/v1/embeddings"


async def embed(api: Api, given: Any = "A small boat", **fields: Any) -> Any:
    return await api.ok(PATH, {"model": "m", "input": given, **fields})


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


async def test_a_vector_has_unit_length_and_the_shape_of_the_contract(api: Api):
    doc = await embed(api)
    (entry,) = doc["data"]
    assert (doc["object"], doc["model"], entry["object"], entry["index"]) == ("list", "m", "embedding", 0)
    assert dot(entry["embedding"], entry["embedding"]) == pytest.approx(1, abs=1e-6)
    assert doc["usage"]["prompt_tokens"] == doc["usage"]["total_tokens"] > 0
    (request,) = api.client.submitted
    assert request.pooling == "mean"


async def test_base64_is_the_same_vector_as_little_endian_floats(api: Api):
    numbers = (await embed(api, encoding_format="float"))["data"][0]["embedding"]
    raw = base64.b64decode((await embed(api, encoding_format="base64"))["data"][0]["embedding"])
    assert struct.unpack(f"<{len(numbers)}f", raw) == pytest.approx(numbers)


async def test_a_list_gives_one_vector_each_in_order(api: Api):
    texts = [f"text number {i}" for i in range(70)]  # more than are in the engine at once
    doc = await embed(api, texts)
    assert [e["index"] for e in doc["data"]] == list(range(70))
    for i in (0, 33, 69):
        one = await embed(api, texts[i])
        assert doc["data"][i]["embedding"] == pytest.approx(one["data"][0]["embedding"])
    assert doc["usage"]["total_tokens"] == sum(len(r.prompt) for r in api.client.submitted[:70])


async def test_token_ids_give_the_vector_of_their_text(api: Api):
    ids = api.client.tokenizer.encode("A small boat")
    expected = (await embed(api))["data"][0]["embedding"]
    for given in (ids, [ids]):
        assert (await embed(api, given))["data"][0]["embedding"] == pytest.approx(expected)


async def test_fewer_dimensions_are_the_first_ones_at_unit_length(api: Api):
    whole = (await embed(api))["data"][0]["embedding"]
    short = (await embed(api, dimensions=8))["data"][0]["embedding"]
    length = math.sqrt(dot(whole[:8], whole[:8]))
    assert short == pytest.approx([x / length for x in whole[:8]], rel=1e-5)
    error = await api.refused(PATH, {"model": "m", "input": "x", "dimensions": 10_000})
    assert error["param"] == "dimensions"


@pytest.mark.parametrize(
    "fields",
    [
        {"input": ""},
        {"input": []},
        {"input": 5},
        {"input": None},
        {"input": ["a", ""]},
        {"input": [[]]},
        {"input": ["a", 1]},
        {"input": [1, [2]]},
        {"input": [10**8]},
        {"input": [-1]},
        {"input": "x", "encoding_format": "hex"},
        {"input": "x", "dimensions": 0},
        {"input": "x", "pooling": "max"},
        {"input": "x", "pooling": "cls"},
        {"input": "x", "priority": 10**30},
        {"input": "x", "priority": -1_000_001},
        {"input": "x", "truncate_prompt_tokens": 0},
        {"input": "x", "truncate_prompt_tokens": 513},
        {"input": ["x"] * 2049},
        {"input": "word " * 600},
    ],
)
async def test_what_has_no_vector_is_refused(api: Api, fields: dict[str, Any]):
    await api.refused(PATH, {"model": "m", **fields})
    assert api.client.submitted == []


async def test_one_bad_input_of_many_stops_all_before_any_is_computed(api: Api):
    await api.refused(PATH, {"model": "m", "input": ["fine", "word " * 600]})
    assert api.client.submitted == []


async def test_an_unknown_model_is_404(api: Api):
    await api.refused(PATH, {"model": "nobody", "input": "x"}, 404)


class Compass(FakeClient):
    """Vectors that point where the last token says."""

    def _embedding(self, request: AddRequest) -> Delta:
        angle = {"north": 0.0, "east": 0.5, "south": 1.0}[self.tokenizer.decode(request.prompt).split()[-1]]
        data = struct.pack("<2f", 3 * math.cos(angle * math.pi), 3 * math.sin(angle * math.pi))
        return Delta(request.id, 0, (), finish=FinishReason.STOP, cached_tokens=0, queued_s=0.0, embedding=data)


async def test_scores_are_cosines(tokenizer: Tokenizer):
    async with serving(tokenizer, Compass(tokenizer)) as api:
        doc = await api.ok("/v1/score", {"model": "m", "text_1": "go north", "text_2": ["north", "east", "south"]})
        assert [e["score"] for e in doc["data"]] == pytest.approx([1, 0, -1], abs=1e-6)
        assert doc["data"][0]["object"] == "score"
        pairs = {"model": "m", "text_1": ["north", "east"], "text_2": ["south", "east"]}
        assert [e["score"] for e in (await api.ok("/v1/score", pairs))["data"]] == pytest.approx([-1, 1], abs=1e-6)
        await api.refused("/v1/score", {**pairs, "text_2": ["north"]})
        for name in ("text_1", "text_2"):
            for bad in ([], "", "word " * 600):
                error = await api.refused("/v1/score", {**pairs, "text_1": "north", name: bad})
                assert error["param"] == name


async def test_documents_come_back_nearest_first(tokenizer: Tokenizer):
    async with serving(tokenizer, Compass(tokenizer)) as api:
        body = {"model": "m", "query": "go north", "documents": ["south", {"text": "north"}, "east"]}
        doc = await api.ok("/v1/rerank", body)
        assert [(r["index"], r["document"]["text"]) for r in doc["results"]] == [
            (1, "north"),
            (2, "east"),
            (0, "south"),
        ]
        assert [r["relevance_score"] for r in doc["results"]] == pytest.approx([1, 0, -1], abs=1e-6)
        top = await api.ok("/v1/rerank", {**body, "top_n": 1, "return_documents": False})
        assert [r["index"] for r in top["results"]] == [1]
        assert "document" not in top["results"][0]
        for field in ({"documents": []}, {"documents": [""]}, {"query": ""}, {"query": "word " * 600}, {"top_n": 0}):
            error = await api.refused("/v1/rerank", {**body, **field})
            assert error["param"] in field
