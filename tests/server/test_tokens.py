"""/tokenize, /detokenize and /v1/models."""

import pytest

from tests.server.conftest import Api, chat_body, error_of

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "text", ["Hello world", "  two  spaces ", "naïve 🦊 日本", "line\n\nbreak\t", "<|im_end|>", "a" * 500, ""]
)
async def test_tokens_give_their_text_back(api: Api, text):
    doc = await api.ok(
        "/tokenize", {"model": "m", "prompt": text, "add_special_tokens": False, "return_token_strs": True}
    )
    assert doc["count"] == len(doc["tokens"]) == len(doc["token_strs"])
    assert doc["max_model_len"] == 512
    assert (await api.ok("/detokenize", {"model": "m", "tokens": doc["tokens"]}))["prompt"] == text


async def test_a_chat_has_the_tokens_that_a_generation_counts(api: Api):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    doc = await api.ok("/tokenize", {"model": "m", "messages": messages})
    answer = await api.ok("/v1/chat/completions", {**chat_body(), "messages": messages})
    assert doc["count"] == answer["usage"]["prompt_tokens"]
    assert tuple(doc["tokens"]) == api.client.submitted[0].prompt
    shorter = await api.ok("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert doc["tokens"][: shorter["count"]] == shorter["tokens"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"model": "m"}), ("/tokenize", {"prompt": "x", "messages": []}), ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"messages": []}), ("/detokenize", {"tokens": [10**9]}), ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "abc"}), ("/detokenize", {"tokens": [True]}), ("/detokenize", {}),
    ],
)  # fmt: skip
async def test_what_is_no_text_and_no_token_is_400(api: Api, path, body):
    await api.refused(path, body)


async def test_unknown_models_are_404_everywhere(api: Api):
    for path, body in (("/tokenize", {"model": "x", "prompt": "a"}), ("/detokenize", {"model": "x", "tokens": [1]})):
        assert (await api.refused(path, body, 404))["code"] == "model_not_found"
    error_of(await api.http.get("/v1/models/x"), 404)


async def test_the_model_is_listed_under_each_of_its_names(api: Api):
    doc = (await api.http.get("/v1/models")).json()
    assert doc["object"] == "list"
    assert [model["id"] for model in doc["data"]] == ["m", "alias"]
    for model in doc["data"]:
        assert model["object"] == "model"
        assert model["max_model_len"] == 512
        assert (await api.http.get(f"/v1/models/{model['id']}")).json() == model


async def test_a_text_far_beyond_the_context_is_refused_before_all_of_it_is_tokenised(api: Api):
    for text in ("word " * 500_000, "a" * 2_000_000, " " * 2_000_000):
        error = await api.refused("/v1/completions", {"model": "m", "prompt": text})
        assert error["code"] == "context_length_exceeded"
        assert (await api.refused("/v1/chat/completions", chat_body(text)))["code"] == "context_length_exceeded"
        assert (await api.refused("/tokenize", {"prompt": text}))["param"] == "prompt"
    await api.ok("/v1/completions", {"model": "m", "prompt": "word " * 50_000, "truncate_prompt_tokens": 9})
    assert len(api.client.submitted[0].prompt) == 9
