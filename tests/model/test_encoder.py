"""Encoders against transformers: hidden states, vectors as sentence-transformers make them, and what isn't served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine import LLM
from engine.errors import ConfigError, InvalidRequest
from engine.model.encoder import Encoder
from engine.model.encoder_config import is_encoder, load_encoder_spec
from engine.model.pull import pull
from engine.text.tokenizer import Tokenizer
from tests.texts import english

MINILM = "all-minilm-l6-v2"
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
}
DISTIL: dict[str, Any] = {
    "vocab_size": 384,
    "dim": 64,
    "hidden_dim": 96,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 80,
}
FAMILIES: list[tuple[str, str, dict[str, Any]]] = [
    ("Bert", "Model", SIZES),
    ("Bert", "ForMaskedLM", SIZES | {"hidden_act": "gelu_new"}),
    ("Roberta", "Model", SIZES),
    ("XLMRoberta", "ForMaskedLM", SIZES),
    ("DistilBert", "Model", DISTIL),
    ("DistilBert", "ForMaskedLM", DISTIL | {"activation": "relu"}),
]


def make(directory: Path, family: str, head: str, fields: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = getattr(transformers, family + head)(getattr(transformers, f"{family}Config")(**fields)).eval()
    for weight in model.parameters():  # made biases are zero and norms one: they would hide a mistake
        weight.data += 0.1 * torch.randn_like(weight)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize(("family", "head", "fields"), FAMILIES, ids=[family + head for family, head, _ in FAMILIES])
def test_hidden_states_are_those_of_transformers(family: str, head: str, fields: dict[str, Any], tmp_path: Path):
    theirs = make(tmp_path, family, head, fields).base_model
    assert is_encoder(tmp_path)
    spec = load_encoder_spec(tmp_path)
    texts = [torch.randint(0, 384, (n,)).tolist() for n in (1, 7, 31, spec.max_position)]
    ours = Encoder(spec, tmp_path, torch.float32, CPU).forward(texts)
    for text, states in zip(texts, ours, strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([text])).last_hidden_state[0]
        torch.testing.assert_close(states, expected, atol=2e-5, rtol=1e-4)


def test_a_text_has_the_same_states_in_every_company(tmp_path: Path):
    make(tmp_path, "Bert", "Model", SIZES)
    encoder = Encoder(load_encoder_spec(tmp_path), tmp_path, torch.float32, CPU)
    assert encoder.packs_without_trace(64)
    texts = [torch.randint(0, 384, (n,)).tolist() for n in (3, 17, 1, 40)]
    together = encoder.forward(texts)
    for text, states in zip(texts, together, strict=True):
        assert torch.equal(encoder.forward([text])[0], states)


@pytest.fixture(scope="module")
def minilm() -> Path:
    return pull(MINILM)


def test_sentences_have_the_vectors_that_sentence_transformers_gives(minilm: Path):
    torch.set_num_threads(1)
    sentences = [
        *english(6000).split(". "),
        "Ein Boot, 東京 und ein Café 🙂",
        "That is a happy person",
        "That is a happy dog",
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model = transformers.BertModel.from_pretrained(minilm).eval()
    with LLM(MINILM) as llm, torch.inference_mode():
        ours = torch.nn.functional.normalize(torch.tensor(llm.embed(sentences)))
        for sentence, vector in zip(sentences, ours, strict=True):
            batch = tokenizer([sentence], return_tensors="pt")
            expected = torch.nn.functional.normalize(model(**batch).last_hidden_state.mean(1))[0]
            assert float((vector - expected).abs().max()) < 1e-4
    # What the model's authors publish for these two.
    assert float(ours[-1] @ ours[-2]) == pytest.approx(0.695, abs=5e-4)


def test_neither_the_size_of_a_step_nor_the_company_changes_a_bit(minilm: Path):
    texts = ["A small boat.", "word " * 200, "The sky is blue because the light is scattered.", "x", "river " * 90]
    with LLM(MINILM) as llm:
        together = llm.embed(texts)
        assert [llm.embed(text)[0] for text in texts] == together
        first = llm.embed(texts, pooling="cls")
        assert first != together
    with LLM(MINILM, max_num_batched_tokens=37, max_num_seqs=2, threads=1) as small:
        assert small.embed(texts) == together
        assert small.embed(texts, pooling="cls") == first


def test_an_encoder_writes_no_text_and_takes_no_text_beyond_its_positions(minilm: Path):
    with LLM(MINILM) as llm:
        with pytest.raises(InvalidRequest, match="is an encoder"):
            llm.generate("Once upon a time")
        with pytest.raises(InvalidRequest, match="513 tokens, the context has 512"):
            llm.embed([[101] * 513])
        with pytest.raises(InvalidRequest, match="this model does mean or cls"):
            llm.embed("x", pooling="last")


def test_the_tokens_of_an_encoder_join_to_words(minilm: Path):
    tokenizer = Tokenizer.load(minilm)
    ids = tokenizer.encode("A small boat, unbelievably")
    assert len(ids) > 7
    text = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert text == "[CLS] a small boat , unbelievably[SEP]"


def test_the_start_of_a_text_is_kept_within_its_special_tokens(minilm: Path):
    tokenizer = Tokenizer.load(minilm)
    text = "  ".join(["river", "unbelievably", "boat"] * 400)
    whole = tokenizer.encode(text)
    for count in (3, 4, 9, 200, len(whole) - 1, len(whole), 10_000):
        kept = tokenizer.encode_start(text, count)
        assert kept == whole if count >= len(whole) else kept == [*whole[: count - 1], whole[-1]]
    assert tokenizer.encode_start(" " * 10_000 + text, 9) == tokenizer.encode_start(text, 9)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"kv_memory": "1GiB"}, "--kv-memory means nothing for an encoder"),
        ({"speculate": "ngram"}, "--speculate means nothing"),
        ({"num_kv_blocks": 7}, "--num-kv-blocks means nothing"),
        ({"max_model_len": 513}, "takes 512 tokens at most"),
    ],
)
def test_a_setting_without_meaning_for_an_encoder_is_refused(minilm: Path, setting: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        LLM(MINILM, **setting)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config.json": {"position_embedding_type": "relative_key"}}, "positions of the kind 'relative_key'"),
        ({"config.json": {"hidden_act": "swish"}}, "activation 'swish' is not supported"),
        ({"config.json": {"is_decoder": True}}, "says is_decoder"),
        ({"config.json": {"num_attention_heads": 5}}, "5 heads of a hidden size of 64"),
        ({"config.json": {"hidden_size": "64"}}, "hidden_size = '64'"),
        ({"config.json": {"architectures": ["BertForSequenceClassification"]}}, "gives classes"),
        ({"modules.json": [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]}, "module 'Dense'"),
        (
            {"modules.json": [{"type": "a.Pooling", "path": "p"}], "p/config.json": {"pooling_mode_max_tokens": True}},
            "pools by max_tokens",
        ),
    ],
)
def test_what_is_not_served_is_said_in_one_line(files: dict[str, Any], says: str, tmp_path: Path):
    make(tmp_path, "Bert", "Model", SIZES)
    for name, value in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        value = json.loads(path.read_text()) | value if name == "config.json" else value
        path.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=says) as caught:
        LLM(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_weight_that_is_missing_is_named(tmp_path: Path):
    make(tmp_path, "Bert", "Model", SIZES)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ConfigError, match=r"no tensor encoder\.layer\.3\.attention"):
        Encoder(load_encoder_spec(tmp_path), tmp_path, torch.float32, CPU)
