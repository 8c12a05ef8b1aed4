"""/v1/files and /v1/batches: a directory of records, lines done below interactive traffic, and restarts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from server.settings import ApiKey
from tests.server.conftest import Api, error_of, serving
from tests.server.fake_client import FakeClient

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Api]:
    async with serving(tokenizer, data_dir=str(tmp_path)) as api:
        yield api
        await api.http._transport.app.state.batches.close()  # type: ignore[attr-defined]


def line(id: str, content: str = "Say hello.", **fields: Any) -> dict[str, Any]:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 5,
        "temperature": 0,
        **fields,
    }
    return {"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body}


async def upload(api: Api, data: bytes, purpose: str = "batch", **more: Any) -> dict[str, Any]:
    response = await api.http.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": purpose}, **more)
    assert response.status_code == 200, response.text
    doc: dict[str, Any] = response.json()
    return doc


async def create(api: Api, lines: list[Any], endpoint: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    data = b"\n".join(one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines)
    file = await upload(api, data)
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h", **fields}
    doc: dict[str, Any] = await api.ok("/v1/batches", body)
    assert doc["status"] == "validating"
    return doc


async def ended(api: Api, id: str) -> dict[str, Any]:
    for _ in range(1000):
        doc: dict[str, Any] = (await api.http.get(f"/v1/batches/{id}")).json()
        if doc["status"] in ("completed", "failed", "cancelled", "expired"):
            return doc
        await asyncio.sleep(0.01)
    raise AssertionError("the batch never ended")


async def answers(api: Api, file_id: str | None) -> dict[str, Any]:
    text = (await api.http.get(f"/v1/files/{file_id}/content")).text
    return {answer["custom_id"]: answer["response"] for answer in map(json.loads, text.splitlines())}


async def test_a_file_can_be_stored_listed_read_and_deleted(store: Api):
    data = bytes(range(256)) + b"\r\n--boundary\n"
    doc = await upload(store, data, "user_data")
    assert (doc["object"], doc["bytes"], doc["filename"], doc["purpose"]) == (
        "file",
        len(data),
        "in.jsonl",
        "user_data",
    )
    second = await upload(store, b"x")
    assert (await store.http.get(f"/v1/files/{doc['id']}")).json() == doc
    assert (await store.http.get(f"/v1/files/{doc['id']}/content")).content == data
    listed = (await store.http.get("/v1/files?order=asc")).json()
    assert {d["id"] for d in listed["data"]} == {doc["id"], second["id"]}
    assert [d["id"] for d in (await store.http.get("/v1/files?purpose=batch")).json()["data"]] == [second["id"]]
    assert (await store.http.delete(f"/v1/files/{doc['id']}")).json()["deleted"] is True
    for path in (f"/v1/files/{doc['id']}", f"/v1/files/{doc['id']}/content"):
        error_of(await store.http.get(path), 404)


async def test_bad_uploads_and_ids_are_refused(store: Api, tmp_path: Path):
    error_of(await store.http.post("/v1/files", json={"purpose": "batch"}), 415)
    error_of(await store.http.post("/v1/files", files={"file": ("a", b"x")}, data={"purpose": "fun"}), 400)
    error_of(await store.http.post("/v1/files", files={"other": ("a", b"x")}, data={"purpose": "batch"}), 400)
    broken = {"content-type": "multipart/form-data"}
    error_of(await store.http.post("/v1/files", content=b"no boundary", headers=broken), 400)
    (tmp_path / "secret.json").write_text("{}")
    for id in ("..%2Fsecret", "%2e%2e%2fsecret", "file-nope", "batch_" + "0" * 24):
        error_of(await store.http.get(f"/v1/files/{id}"), 404)
    error_of(await store.http.get("/v1/files?limit=0"), 400)
    error_of(await store.http.get("/v1/files?order=up"), 400)
    error_of(await store.http.get("/v1/files?after=file-x"), 400)


async def test_every_line_gets_its_answer(store: Api):
    lines = [line(f"r{i}", f"Question {i}.") for i in range(40)] + [line("bad", temperature=9), line("gone", model="x")]
    done = await ended(store, (await create(store, lines, metadata={"a": "b"}))["id"])
    assert (done["status"], done["metadata"]) == ("completed", {"a": "b"})
    assert done["request_counts"] == {"total": 42, "completed": 40, "failed": 2}
    good, bad = await answers(store, done["output_file_id"]), await answers(store, done["error_file_id"])
    assert set(good) == {f"r{i}" for i in range(40)}
    assert {id: a["status_code"] for id, a in bad.items()} == {"bad": 400, "gone": 404}
    direct = await store.chat("Question 7.", max_tokens=5)
    assert good["r7"]["body"]["choices"] == direct["choices"]
    assert good["r7"]["body"]["object"] == "chat.completion"
    assert bad["bad"]["body"]["error"]["param"] == "temperature"
    assert all(r.priority == 1000 for r in store.client.submitted[:40])
    assert done["created_at"] <= done["in_progress_at"] <= done["finalizing_at"] <= done["completed_at"]


async def test_the_other_endpoints_can_be_batched_too(store: Api):
    for endpoint, body in {
        "/v1/completions": {"model": "m", "prompt": "x", "max_tokens": 2},
        "/v1/embeddings": {"model": "m", "input": "x"},
        "/v1/responses": {"model": "m", "input": "x", "max_output_tokens": 2},
    }.items():
        one = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
        done = await ended(store, (await create(store, [one], endpoint))["id"])
        assert done["status"] == "completed"
        assert (await answers(store, done["output_file_id"]))["a"]["status_code"] == 200
        assert store.client.submitted[-1].priority == 1000


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line("a"), b"{not json"], "invalid_json_line", 2),
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([{**line("a"), "method": "GET"}], "invalid_method", 1),
        ([{**line("a"), "url": "/v1/completions"}], "mismatched_url", 1),
        ([{**line("a"), "custom_id": 5}], "missing_required_parameter", 1),
        ([{**line("a"), "body": []}], "invalid_request", 1),
        ([line("a", stream=True)], "invalid_request", 1),
        ([b""], "empty_file", None),
    ],
)
async def test_a_bad_input_file_fails_as_a_whole_and_names_the_line(
    store: Api, lines: list[Any], code: str, number: int | None
):
    done = await ended(store, (await create(store, lines))["id"])
    assert done["status"] == "failed"
    assert [(e["code"], e["line"]) for e in done["errors"]["data"]] == [(code, number)]
    assert store.client.submitted == []


async def test_what_is_no_batch_is_refused(store: Api):
    file = (await upload(store, b"{}"))["id"]
    good = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for change in ({"endpoint": "/health"}, {"completion_window": "1h"}, {"metadata": {"a": "x" * 600}}):
        await store.refused("/v1/batches", good | change)
    for unknown in ("file-nope", "file-" + 24 * "0", "../x"):
        error = await store.refused("/v1/batches", good | {"input_file_id": unknown}, 404)
        assert error["param"] == "input_file_id"
    await store.refused("/v1/batches", good | {"input_file_id": (await upload(store, b"", "vision"))["id"]})
    error_of(await store.http.get("/v1/batches/batch_nope"), 404)


async def test_a_cancelled_batch_keeps_what_it_has(tokenizer: Tokenizer, tmp_path: Path):
    async with serving(tokenizer, FakeClient(tokenizer, delay_s=0.02), data_dir=str(tmp_path)) as api:
        id = (await create(api, [line(f"r{i}") for i in range(60)]))["id"]
        while (await api.http.get(f"/v1/batches/{id}")).json()["request_counts"]["completed"] < 5:
            await asyncio.sleep(0.01)
        assert (await api.post(f"/v1/batches/{id}/cancel", {})).json()["status"] == "cancelling"
        done = await ended(api, id)
        assert done["status"] == "cancelled"
        completed = done["request_counts"]["completed"]
        assert 5 <= completed < 60
        assert len(await answers(api, done["output_file_id"])) == completed
        error_of(await api.post(f"/v1/batches/{(await create(api, [b'']))['id']}x/cancel", {}), 404)


async def test_a_refusal_for_now_is_tried_again(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("server.batch_runner.RETRY_S", 0.02)
    async with serving(tokenizer, data_dir=str(tmp_path)) as api:
        api.client.state = "loading"
        id = (await create(api, [line("a")]))["id"]
        await asyncio.sleep(0.1)
        assert (await api.http.get(f"/v1/batches/{id}")).json()["request_counts"]["failed"] == 0
        api.client.state = "ready"
        assert (await ended(api, id))["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_after_a_restart_only_the_lines_without_an_answer_are_done(tokenizer: Tokenizer, tmp_path: Path):
    lines = [line(f"r{i}", f"Question {i}.") for i in range(50)]
    async with serving(tokenizer, FakeClient(tokenizer, delay_s=0.01), data_dir=str(tmp_path)) as api:
        id = (await create(api, lines))["id"]
        while (await api.http.get(f"/v1/batches/{id}")).json()["request_counts"]["completed"] < 17:
            await asyncio.sleep(0.01)
        await api.http._transport.app.state.batches.close()  # type: ignore[attr-defined]
    (out,) = tmp_path.glob("batches/*.out")
    before = out.read_bytes()
    done_before = {json.loads(one)["custom_id"] for one in before.splitlines()}
    out.write_bytes(before + b'{"id": "batch_req_cut", "custom_id": "r4')  # the crash came while a line was written
    async with serving(tokenizer, data_dir=str(tmp_path)) as api:
        api.http._transport.app.state.batches.resume()  # type: ignore[attr-defined]
        done = await ended(api, id)
        assert done["status"] == "completed"
        assert done["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
        assert len(api.client.submitted) == 50 - len(done_before)
        found = await answers(api, done["output_file_id"])
        assert set(found) == {f"r{i}" for i in range(50)}
        text = (await api.http.get(f"/v1/files/{done['output_file_id']}/content")).content
        assert text.startswith(before)
    assert [p for p in tmp_path.glob("batches/*") if p.suffix != ".json"] == []


async def test_a_key_sees_its_own_files_and_batches_alone(tokenizer: Tokenizer, tmp_path: Path):
    keys = (ApiKey.of("one", "one"), ApiKey.of("two", "two", priority=3))
    async with serving(tokenizer, data_dir=str(tmp_path), api_keys=keys) as api:
        api.http.headers["authorization"] = "Bearer two"
        id = (await create(api, [line("a")]))["id"]
        done = await ended(api, id)
        assert (api.client.submitted[0].key, api.client.submitted[0].priority) == ("two", 1003)
        api.http.headers["authorization"] = "Bearer one"
        error_of(await api.http.get(f"/v1/batches/{id}"), 404)
        error_of(await api.http.get(f"/v1/files/{done['output_file_id']}"), 404)
        assert (await api.http.get("/v1/files")).json()["data"] == []
        assert (await api.http.get("/v1/batches")).json()["data"] == []


async def test_without_a_data_directory_there_are_no_files(api: Api):
    error = error_of(await api.http.get("/v1/files"), 404)
    assert "--data-dir" in error["message"]
    await api.refused("/v1/batches", {"input_file_id": "a", "endpoint": "b", "completion_window": "24h"}, 404)
