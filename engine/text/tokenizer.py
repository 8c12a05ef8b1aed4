"""The tokenizer of a model directory or GGUF file, over the `tokenizers` library alone.

All methods may be called from several threads at once: nothing is changed after construction but a cache
whose entries are functions of their key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from engine.errors import ConfigError, InvalidRequest


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Header(msgspec.Struct):
    """The parts of tokenizer.json that say how tokens become bytes; the vocabulary is left to the library."""

    added_tokens: list[_AddedToken] = []
    decoder: dict[str, Any] | None = None


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2), as character -> byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet |= {chr(256 + i): byte for i, byte in enumerate(others)}
    return alphabet


_BYTE_OF = _byte_level_alphabet()


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return {part.get("type", "") for part in parts}


class Tokenizer:
    """Text <-> token ids, and the exact bytes of every token.

    `special_tokens` maps roles ("bos_token", "eos_token", ...) to their text, as chat templates expect them.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        *,
        config: dict[str, Any] | None = None,
        special_tokens: dict[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_templates: dict[str, str] | None = None,
        generation_config: dict[str, Any] | None = None,
    ) -> None:
        try:
            header = msgspec.json.decode(tokenizer_json, type=_Header)
            self.backend = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises plain Exception for whatever it does not like
            raise ConfigError(f"tokenizer.json can't be read: {error}") from error
        # A published file may carry the padding and truncation of its training run.
        self.backend.no_padding()
        self.backend.no_truncation()
        self.config = config or {}
        self.special_tokens = special_tokens or {}
        self.chat_templates = chat_templates or {}
        self.generation_config = generation_config or {}
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)
        self._added = {token.id: token.content.encode() for token in header.added_tokens}
        self.special_ids = frozenset(token.id for token in header.added_tokens if token.special)
        self._byte_level = "ByteLevel" in _decoder_kinds(header.decoder)
        wordpiece = header.decoder is not None and header.decoder.get("type") == "WordPiece"
        self._inner = str((header.decoder or {}).get("prefix", "##")) if wordpiece else ""
        self._bytes: dict[int, bytes] = {}
        self.bos_token_id = self._role_id("bos_token")
        self.eos_token_id = self._role_id("eos_token")
        known = {int(i) for i in eos_token_ids}
        if self.eos_token_id is not None:
            known.add(self.eos_token_id)
        self.eos_token_ids = tuple(sorted(known))

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of a model directory (Hugging Face form) or of a GGUF file.

        Raises ConfigError in one line when there is none.
        """
        path = Path(path)
        if path.is_file():
            from engine.model.gguf import GGUFFile
            from engine.model.gguf_tokenizer import tokenizer_files

            return cls._from_files(tokenizer_files(GGUFFile(path).metadata), path)
        files: dict[str, bytes] = {}
        for name in _FILES:
            if (path / name).is_file():
                files[name] = (path / name).read_bytes()
        for template in sorted((path / "additional_chat_templates").glob("*.jinja")):
            files[f"{template.stem}.jinja"] = template.read_bytes()
        if "tokenizer.json" not in files and {"vocab.json", "merges.txt"} <= files.keys():
            files["tokenizer.json"] = _byte_level_bpe(files["vocab.json"], files["merges.txt"])
        return cls._from_files(files, path)

    @classmethod
    def _from_files(cls, files: dict[str, bytes], path: Path) -> Tokenizer:
        if "tokenizer.json" not in files:
            raise ConfigError(
                f"{path} has no tokenizer.json (nor vocab.json with merges.txt); "
                "transformers' AutoTokenizer makes one of other forms with save_pretrained"
            )
        parsed: dict[str, dict[str, Any]] = {}
        for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"):
            try:
                parsed[name] = json.loads(files.get(name, b"{}"))
            except ValueError as error:
                raise ConfigError(f"{path / name} is not JSON: {error}") from error
            if not isinstance(parsed[name], dict):
                raise ConfigError(f"{path / name} is not a JSON object")
        config = parsed["tokenizer_config.json"]
        special: dict[str, str] = {}
        for source in (parsed["special_tokens_map.json"], config):
            for role, value in source.items():
                text = value.get("content") if isinstance(value, dict) else value
                if role.endswith("_token") and isinstance(text, str):
                    special[role] = text
        generation = parsed["generation_config.json"]
        eos = generation.get("eos_token_id", parsed["config.json"].get("eos_token_id"))
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        templates = _named_templates(config.get("chat_template"))
        if "chat_template.jinja" in files:
            templates["default"] = files["chat_template.jinja"].decode()
        for name, data in files.items():
            if name.endswith(".jinja") and name != "chat_template.jinja":
                templates[name.removesuffix(".jinja")] = data.decode()
        return cls(
            files["tokenizer.json"],
            config=config,
            special_tokens=special,
            eos_token_ids=ids,
            chat_templates=templates,
            generation_config=generation,
        )

    def _role_id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        found: int | None = self.backend.token_to_id(text) if text is not None else None
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised.

        `add_special_tokens` adds what the model expects around a plain text (such as a leading BOS); a rendered
        chat holds these already. Raises InvalidRequest for text that is no valid Unicode (unpaired surrogates).
        """
        _check_unicode(text)
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    @property
    def special_tokens_added(self) -> int:
        """How many special tokens `encode` adds around a text."""
        count: int = self.backend.num_special_tokens_to_add(False)
        return count

    def encode_start(self, text: str, count: int) -> list[int]:
        """The first tokens of a text with the special tokens around them, `count` in all at most.

        `count` is above `special_tokens_added`. No more of the text is looked at than that takes. Raises
        InvalidRequest for text that is no valid Unicode.
        """
        _check_unicode(text)
        size = 8 * count
        encoding = self.backend.encode(text[:size], add_special_tokens=False)
        while size < len(text) and len(encoding.ids) < count + 16:  # where the text is cut, tokens differ
            size *= 2
            encoding = self.backend.encode(text[:size], add_special_tokens=False)
        encoding.truncate(count - self.special_tokens_added)
        ids: list[int] = self.backend.post_process(encoding, None, True).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `ids` as a whole; bytes that are no UTF-8 become U+FFFD. Ids outside the vocabulary are left out."""
        try:
            text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest("token ids must be integers from 0 to 4294967295") from error
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that this token adds to a text; b"" for an id outside the vocabulary. O(1)."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._compute_bytes(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """The token alone as text, for logprobs; U+FFFD where it is only a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """True for control tokens, which `skip_special_tokens` hides."""
        return token_id in self.special_ids

    def _compute_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        token = self.backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_BYTE_OF[char] for char in token)
            except KeyError:  # not in the byte alphabet: a token written as plain text
                return token.encode()
        if self._inner:  # WordPiece (BERT): all but the marked ones begin a word
            return (token.removeprefix(self._inner) if token.startswith(self._inner) else " " + token).encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes((int(token[3:5], 16),))
            except ValueError:
                pass
        return token.replace("▁", " ").encode()


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text has an unpaired surrogate at character {error.start}; it can't be encoded as UTF-8"
        ) from error


_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def _named_templates(value: object) -> dict[str, str]:
    """`chat_template` of tokenizer_config.json: one template, or a list of {name, template}."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {t["name"]: t["template"] for t in value if isinstance(t, dict) and {"name", "template"} <= t.keys()}
    return {}


def _byte_level_bpe(vocab: bytes, merges: bytes) -> bytes:
    """tokenizer.json of the older GPT-2 form (vocab.json and merges.txt)."""
    try:
        pairs = [line.split(" ") for line in merges.decode().splitlines() if line and not line.startswith("#version")]
        model = tokenizers.models.BPE(vocab=json.loads(vocab), merges=[(a, b) for a, b in pairs])
    except Exception as error:
        raise ConfigError(f"vocab.json and merges.txt can't be read: {error}") from error
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    text: str = tokenizer.to_str()
    return text.encode()
