"""/metrics: the text format, the numbers, and books that always balance."""

import math
import time

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.api import Delta, FinishReason
from engine.errors import Overloaded
from tests.server.conftest import Api, chat_body, complete_body, serving

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


async def families(api: Api):
    response = await api.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {family.name: family for family in text_string_to_metric_families(response.text)}


async def test_every_metric_parses_and_says_its_type_help_and_model(api: Api):
    await api.chat()
    found = await families(api)
    assert len(found) > 30
    for family in found.values():
        assert family.name.startswith("octavo_")
        assert family.type in ("counter", "gauge", "histogram")
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert math.isfinite(sample.value)
            if family.name != "octavo_http_requests":
                assert sample.labels["model_name"] == "m"


async def test_the_names_that_dashboards_and_routers_ask_for_are_there(api: Api):
    await api.chat()
    found = await families(api)
    stems = """
        num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info prompt_tokens
        generation_tokens prefix_cache_queries prefix_cache_hits num_preemptions request_success
        time_to_first_token_seconds request_decode_time_seconds request_prompt_tokens request_generation_tokens
        build_info kv_blocks engine_restarts last_step_timestamp_seconds requests_refused
        spec_decode_num_draft_tokens http_requests
    """
    for stem in stems.split():
        assert f"octavo_{stem}" in found


async def test_aliases_are_the_same_samples_under_vllms_prefix(tokenizer):
    async with serving(tokenizer, vllm_metric_aliases=True) as api:
        await api.chat()
        found = await families(api)
        for name, family in found.items():
            if name.startswith("octavo_") and name != "octavo_http_requests":
                other = found[name.replace("octavo_", "vllm:")]
                assert [s.value for s in other.samples] == [s.value for s in family.samples]
                assert all(sample.labels["engine"] == "0" for sample in other.samples)


async def test_histograms_are_cumulative_and_agree_with_their_counts(api: Api):
    api.client.delay_s = 0.002
    for _ in range(3):
        await api.chat(max_tokens=5)
    found = await families(api)
    histograms = [family for family in found.values() if family.type == "histogram"]
    assert len(histograms) >= 10
    for family in histograms:
        buckets = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
        assert buckets == sorted(buckets)
        (count,) = [sample.value for sample in family.samples if sample.name.endswith("_count")]
        assert buckets[-1] == count
    assert await api.metric("octavo_time_to_first_token_seconds_count") == 3
    assert await api.metric("octavo_inter_token_latency_seconds_count") == 12
    assert await api.metric("octavo_request_generation_tokens_sum") == 15
    assert 0.002 <= await api.metric("octavo_inter_token_latency_seconds_sum") / 12 < 1


async def test_token_counters_follow_the_usage_and_not_the_refused(api: Api):
    usage = (await api.chat(n=2))["usage"]
    await api.refused(CHAT, chat_body(temperature=-1))
    assert await api.metric("octavo_prompt_tokens_total") == usage["prompt_tokens"]
    assert await api.metric("octavo_generation_tokens_total") == usage["completion_tokens"]
    assert await api.metric("octavo_prompt_tokens_cached_total") == 4


async def test_the_engines_numbers_are_shown_as_they_are(api: Api):
    api.client.stats = msgspec.structs.replace(
        api.client.stats, running=3, waiting=2, blocks_total=100, blocks_free=75, blocks_cached=25, preemptions_swap=4
    )
    assert await api.metric("octavo_num_requests_running") == 3
    assert await api.metric("octavo_num_requests_waiting") == 2
    assert await api.metric("octavo_kv_cache_usage_perc") == 0.25
    assert await api.metric("octavo_kv_blocks", state="free") == 50
    assert await api.metric("octavo_num_preemptions_total", kind="swap") == 4


async def test_every_request_ends_in_exactly_one_counter(api: Api, tokenizer):
    yes = [*tokenizer.encode("Yes."), tokenizer.eos_token_id]
    await api.chat()  # length
    api.client.script = lambda request, choice: yes
    await api.chat()  # stop
    await api.events(CHAT, chat_body(n=2))  # stop, one request
    await api.complete(["a", "b", "c"])  # stop, three of them
    api.client.times_out_after = 1
    await api.chat()  # abort: a deadline
    api.client.times_out_after = None
    api.client.dies_after = 1
    await api.post(CHAT, chat_body())  # error
    api.client.dies_after = None
    await api.refused(CHAT, chat_body(temperature=-1))
    await api.refused(CHAT, chat_body(model="x"), 404)
    api.client.first_delta = Delta("", 0, (), finish=FinishReason.ERROR, error="no", error_kind="invalid")
    await api.refused(CHAT, chat_body())
    await api.refused("/v1/completions", complete_body(["a", "b"]))
    api.client.first_delta = Delta("", 0, (), finish=FinishReason.ERROR, error="no", error_kind="failed")
    await api.refused(CHAT, chat_body(), 500)  # error
    api.client.refusal = Overloaded("full")
    await api.refused(CHAT, chat_body(), 429)
    done = {
        r: await api.metric("octavo_request_success_total", finished_reason=r)
        for r in ("stop", "length", "abort", "error")
    }
    assert done == {"stop": 5, "length": 1, "abort": 1, "error": 2}
    refused = {
        r: await api.metric("octavo_requests_refused_total", reason=r) for r in ("invalid", "not_found", "overloaded")
    }
    assert refused == {"invalid": 3, "not_found": 1, "overloaded": 1}
    assert await api.metric("octavo_requests_received_total") == 14
    assert await api.metric("octavo_requests_in_flight") == 0


async def test_responses_are_counted_by_route_and_never_by_path(api: Api):
    await api.chat()
    for name in ("x", "y", "z"):
        await api.http.get(f"/v1/models/{name}")
        await api.http.get(f"/{name}")
    assert await api.metric("octavo_http_requests_total", route=CHAT, code="200") == 1
    assert await api.metric("octavo_http_requests_total", route="other", code="404") == 3
    assert await api.metric("octavo_http_requests_total", code="404") == 6


async def test_health_tells_live_ready_draining_and_hung_apart(api: Api):
    async def codes() -> tuple[int, ...]:
        paths = ("/health", "/health/live", "/health/ready")
        return tuple([(await api.http.get(path)).status_code for path in paths])

    assert await codes() == (200, 200, 200)
    body = (await api.http.get("/health")).json()
    assert body["status"] == "ready"
    assert body["engine"].keys() == {"pid", "state", "last_step_age_s", "restarts"}
    expected = {"loading": (503, 200, 503), "degraded": (200, 200, 503), "draining": (503, 200, 503)}
    for state, wanted in (*expected.items(), ("dead", (503, 503, 503))):
        api.client.state = state
        assert await codes() == wanted
    api.client.state = "ready"
    api.client.step_age_s = 1000
    assert await codes() == (200, 200, 200)  # idle for long is healthy
    api.client.stats = msgspec.structs.replace(api.client.stats, waiting=1, time=time.time())
    assert await codes() == (503, 200, 503)


async def test_the_inside_of_the_engine_is_shown_as_json(api: Api):
    assert (await api.http.get("/debug/kv")).json()["what"] == "kv"
    assert (await api.http.get("/debug/requests")).json()["what"] == "requests"
    assert (await api.http.get("/debug/requests/nobody")).status_code == 404
    assert (await api.http.get("/version")).json() == {"version": "1.2.3"}
