"""The tokenizer that a GGUF file carries in its metadata, as the files of a Hugging Face model directory.

Two kinds of vocabulary: byte-level BPE ("gpt2") with a pre-tokenizer named by `tokenizer.ggml.pre`, and
SentencePiece BPE with byte fallback ("llama").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import ConfigError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# How published models cut text into words before BPE, by the names that GGUF gives them.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"), _WORDS_LLAMA3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"), _WORDS_QWEN2),
    "tekken": _WORDS_TEKKEN,
    "qwen35": _WORDS_QWEN35,
}
_GPT2_WORDS = ("gpt-2", "gpt2", "default", "olmo", "phi-2", "mpt", "jina-es", "jina-de", "roberta-bpe")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_ADDS_BOS = ("llama-bpe", "llama3", "llama-v3", "tekken")


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and generation_config.json made of GGUF metadata.

    Raises ConfigError for a vocabulary of a kind that can't be rebuilt exactly.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise ConfigError("this GGUF file holds no tokenizer (tokenizer.ggml.tokens)")
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        types = [_NORMAL] * len(tokens)
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens, types)
    else:
        raise ConfigError(f"this GGUF file's tokenizer is of the kind {kind!r}; supported are 'gpt2' and 'llama'")
    special = _special_tokens(metadata, tokens)
    _add_tokens(tokenizer, tokens, types, special)
    _add_bos(tokenizer, metadata, special)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    config |= _chat_templates(metadata)
    generation: dict[str, Any] = {}
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    generation["eos_token_id"] = sorted({end for end in ends if isinstance(end, int)})
    if isinstance(metadata.get("tokenizer.ggml.bos_token_id"), int):
        generation["bos_token_id"] = metadata["tokenizer.ggml.bos_token_id"]
    for name, key in _SAMPLING.items():
        if isinstance(metadata.get(f"general.sampling.{key}"), (int, float)):
            generation[name] = metadata[f"general.sampling.{key}"]
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode(),
        "generation_config.json": json.dumps(generation, indent=2).encode(),
    }


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ConfigError("this GGUF file's tokenizer has no merges (tokenizer.ggml.merges)")
    pairs = [(left, right) for left, _, right in (str(merge).partition(" ") for merge in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    whole_words = pre in ("llama-bpe", "llama3", "llama-v3", "tekken")
    try:
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=whole_words))
    except Exception as error:
        raise ConfigError(f"this GGUF file's tokenizer is broken: {error}") from error
    if pre in _GPT2_WORDS:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in _SINGLE_DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre in _WORDS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_WORDS[pre]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        if pre in ("qwen2", "qwen35"):
            tokenizer.normalizer = normalizers.NFC()
    else:
        known = sorted({*_GPT2_WORDS, *_SINGLE_DIGITS, *_WORDS})
        raise ConfigError(f"this GGUF file's pre-tokenizer {pre!r} is not supported (supported: {', '.join(known)})")
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ConfigError("this GGUF file's tokenizer has no scores (tokenizer.ggml.scores)")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    model = models.BPE(
        vocab=vocab,
        merges=_merges_by_score(vocab, tokens, scores, types),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefixed else parts)
    return tokenizer


def _merges_by_score(
    vocab: Mapping[str, int], tokens: list[str], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """SentencePiece merges the adjacent pair whose union scores best; BPE wants that order as a list of pairs."""
    mergeable = (_NORMAL, _USER_DEFINED, _UNUSED)
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind not in mergeable:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, -cut, vocab[left], left, right))
    ranked.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in ranked]


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`chat_template` as tokenizer_config.json has it: one, or a list of named ones."""
    key = "tokenizer.chat_template"
    named = [name for name in metadata.get(f"{key}s", ()) if isinstance(metadata.get(f"{key}.{name}"), str)]
    default = metadata.get(key)
    if not isinstance(default, str):
        return {}
    if not named:
        return {"chat_template": default}
    templates = {"default": default} | {name: metadata[f"{key}.{name}"] for name in named}
    return {"chat_template": [{"name": name, "template": text} for name, text in templates.items()]}


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special: dict[str, str] = {}
    for name, role in names.items():
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            special[role] = tokens[token_id]
    return special


def _add_tokens(
    tokenizer: tokenizers.Tokenizer, tokens: list[str], types: list[int], special: Mapping[str, str]
) -> None:
    """Mark control and user-defined tokens, in the order of their ids, so that text is searched for them first."""
    control = {*special.values()}
    added = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _UNKNOWN) or token in control:
            added.append(tokenizers.AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            added.append(tokenizers.AddedToken(token, special=False, normalized=False))
    tokenizer.add_tokens(added)


def _add_bos(tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any], special: Mapping[str, str]) -> None:
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    default = is_sentencepiece or metadata.get("tokenizer.ggml.pre") in _ADDS_BOS
    bos = special.get("bos_token")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", default):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", bos, "$B:1"],
            special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])],
        )
    elif not is_sentencepiece:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
