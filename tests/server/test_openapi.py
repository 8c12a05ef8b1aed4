"""The OpenAPI document: it covers every route, its references resolve, and its examples run."""

import json
import re

import pytest

from engine.validate import RANGES
from server.app import ROUTES
from tests.server.conftest import Api

pytestmark = pytest.mark.anyio


async def test_every_route_is_described_and_every_reference_resolves(api: Api):
    doc = (await api.http.get("/openapi.json")).json()
    assert doc["openapi"].startswith("3.1")
    described = {(method.upper(), path) for path, operations in doc["paths"].items() for method in operations}
    assert described == {(route.method, route.path.replace(":path", "")) for route in ROUTES}
    for operations in doc["paths"].values():
        for operation in operations.values():
            assert operation["summary"].endswith((".", "?", ":"))
            assert operation["responses"]["200"]
    for reference in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(doc)):
        assert reference in doc["components"]["schemas"]


async def test_the_limits_of_the_document_are_those_of_the_server(api: Api):
    doc = (await api.http.get("/openapi.json")).json()
    fields = doc["components"]["schemas"]["CompletionRequest"]["properties"]
    asked = {"model": "m", "prompt": "x", "max_tokens": 2, "n": 1}
    checked = 0
    for name in RANGES.keys() & fields.keys():
        (number,) = [branch for branch in fields[name]["anyOf"] if "minimum" in branch]
        for bound, beyond in (("minimum", -1), ("maximum", 1)):
            if bound in number and name not in ("beam_width", "length_penalty"):  # they need a search
                error = await api.refused("/v1/completions", asked | {name: number[bound] + beyond})
                assert error["param"] == name
                checked += 1
    assert checked > 15


async def test_the_examples_run(api: Api):
    doc = (await api.http.get("/openapi.json")).json()
    ran = 0
    for path, operations in doc["paths"].items():
        for operation in operations.values():
            content = operation.get("requestBody", {"content": {}})["content"]
            example = content.get("application/json", {}).get("example")
            if example is not None:
                await api.ok(path, example)
                ran += 1
    assert ran >= 10
