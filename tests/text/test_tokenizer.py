"""The tokenizer against transformers, and the exact bytes of tokens."""

import functools
import json
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError, InvalidRequest
from engine.model.gguf_tokenizer import tokenizer_files
from engine.text.tokenizer import _BYTE_OF, Tokenizer
from tests.text.conftest import encodable
from tests.texts import english

TEXTS = [
    "",
    " ",
    "Hello, world! It's 12345 o'clock; they'll pay $3.50.",
    "  leading and   inner\t\ttabs \n\n\n and newlines\r\n",
    "naïve café, Größe, ÅNGSTRÖM, ﬁ ligature, e\u0301 combined",
    "日本語のテキスト、中文文本，한국어 텍스트. Ελληνικά, Русский язык, العربية, עברית",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 🎉 and \u200bzero width \ufeff",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x",
    "def f(x):\n    return x ** 2  # 0xFF, 1_000_000\n",
    "\x00\x01\x7f\x80\xff",
    english(3000),
]


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_transformers_does(tokenizer: Tokenizer, theirs: Any, text: str) -> None:
    for special in (False, True):
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        for skip in (False, True):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@given(text=encodable())
def test_the_bytes_of_the_tokens_of_a_text_are_the_bytes_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids) == text


def test_knows_the_ends_and_the_size_of_the_default_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.is_special(2)
    assert not tokenizer.is_special(100)


def test_an_id_outside_of_the_vocabulary_has_no_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(10**9) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([10**9]) == ""
    with pytest.raises(InvalidRequest):
        tokenizer.decode([-1])


def test_refuses_an_unpaired_surrogate(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate at character 2"):
        tokenizer.encode("ab\ud800")


def test_gives_the_same_from_many_threads(tokenizer: Tokenizer) -> None:
    expected = tokenizer.encode(english(2000))
    with ThreadPoolExecutor(8) as pool:
        assert all(ids == expected for ids in pool.map(tokenizer.encode, [english(2000)] * 64))


def test_reads_the_older_form_of_vocab_and_merges(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = json.loads(tokenizer.backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    old = Tokenizer.load(tmp_path)
    text = "No digits here, so it's cut alike."
    assert old.encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", "{", "can't be read"),
        ("tokenizer.json", '{"model": 3}', "can't be read"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("tokenizer_config.json", "[]", "is not a JSON object"),
        ("README.md", "", "has no tokenizer.json"),
    ],
)
def test_says_in_one_line_what_is_wrong_with_a_directory(
    smollm2: Path, tmp_path: Path, name: str, content: str, says: str
) -> None:
    if name == "tokenizer_config.json":
        (tmp_path / "tokenizer.json").write_bytes((smollm2 / "tokenizer.json").read_bytes())
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_ends_come_from_generation_config_and_templates_from_their_own_file(smollm2: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((smollm2 / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')
    (tmp_path / "chat_template.jinja").write_text("hello")
    loaded = Tokenizer.load(tmp_path)
    assert loaded.eos_token_ids == (0, 2, 7)
    assert loaded.chat_templates == {"default": "hello"}


# ---------------------------------------------------------------- vocabularies inside of GGUF files


def sentencepiece_metadata() -> dict[str, Any]:
    """A small SentencePiece vocabulary: control tokens, all bytes, characters, and words with scores."""
    words = [
        "▁the",
        "▁th",
        "th",
        "he",
        "▁t",
        "▁h",
        "hel",
        "lo",
        "▁hello",
        "ello",
        "ll",
        "el",
        "▁▁",
        "e▁",
        "ö",
        "▁world",
    ]
    characters = sorted(set("▁abcdefghijklmnopqrstuvwxyz.,"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *characters]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(characters))
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [-100.0 - i for i in range(len(characters))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def best_score_merges(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's rule, plainly: merge the adjacent pair whose union scores best, the leftmost of equals."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens)}
    pieces = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        pairs = [(i, a + b) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
        if not pairs:
            break
        at, union = max(pairs, key=lambda pair: (scores[ids[pair[1]]], -pair[0]))
        pieces[at : at + 2] = [union]
    found = []
    for piece in pieces:
        found += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return found


SENTENCEPIECE = sentencepiece_metadata()


@pytest.fixture(scope="module")
def spm() -> Tokenizer:
    return Tokenizer._from_files(tokenizer_files(SENTENCEPIECE), Path("spm.gguf"))


@given(text=st.text(st.sampled_from("helo wrdtö é日.")))
def test_a_sentencepiece_vocabulary_merges_by_score_and_falls_back_to_bytes(spm: Tokenizer, text: str) -> None:
    ids = spm.encode(text, add_special_tokens=False)
    assert ids == best_score_merges(SENTENCEPIECE, text)
    assert spm.decode(ids) == text
    assert b"".join(map(spm.token_bytes, ids)) == ((" " + text) if text else "").encode()
    assert spm.encode(text) == [1, *ids]


BYTES = "".join(_BYTE_OF)
BYTE_LEVEL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["<end>", *BYTES, "Ġt", "he", "Ġthe", "12", "123"],
    "tokenizer.ggml.merges": ["Ġ t", "h e", "Ġt he", "1 2", "12 3"],
    "tokenizer.ggml.token_type": [3] + [1] * 261,
    "tokenizer.ggml.eos_token_id": 0,
}


def words_of(pre: str) -> str:
    """The expression that the tokenizer of this kind cuts words by."""
    files = tokenizer_files(BYTE_LEVEL | {"tokenizer.ggml.pre": pre})
    found: str = json.loads(files["tokenizer.json"])["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    return found


def test_words_are_cut_by_the_expressions_that_the_models_were_trained_with() -> None:
    import inspect

    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35

    assert words_of("llama-bpe") == inspect.signature(TikTokenConverter).parameters["pattern"].default
    assert words_of("qwen2") == QWEN2
    assert words_of("qwen35") == QWEN35


@given(text=st.text(), pre=st.sampled_from(["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"]))
def test_a_byte_level_vocabulary_gives_every_text_back(text: str, pre: str) -> None:
    loaded = byte_level(pre)
    ids = loaded.encode(text)
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert loaded.decode(ids) == expected
    assert b"".join(map(loaded.token_bytes, ids)) == expected.encode()


@functools.cache
def byte_level(pre: str) -> Tokenizer:
    return Tokenizer._from_files(tokenizer_files(BYTE_LEVEL | {"tokenizer.ggml.pre": pre}), Path("bpe.gguf"))


def test_named_templates_come_from_the_file_too() -> None:
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_templates": ["tool_use"]}
    files = tokenizer_files(BYTE_LEVEL | templates | {"tokenizer.chat_template.tool_use": "tools"})
    loaded = Tokenizer._from_files(files, Path("bpe.gguf"))
    assert loaded.chat_templates == {"default": "plain", "tool_use": "tools"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'; supported are"),
        ({"tokenizer.ggml.tokens": []}, "holds no tokenizer"),
        ({"tokenizer.ggml.scores": [1.0]}, "has no scores"),
        ({"tokenizer.ggml.model": "gpt2"}, "has no merges"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": [], "tokenizer.ggml.pre": "new"}, "'new' is not"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["zz qq"]}, "is broken"),
    ],
)
def test_refuses_a_gguf_vocabulary_that_cannot_be_rebuilt(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tokenizer_files(SENTENCEPIECE | change)
