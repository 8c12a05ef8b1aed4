"""config.json -> EncoderSpec: encoders of the BERT family, whose tokens attend in both directions.

BERT: Devlin et al., 2018. RoBERTa and XLM-RoBERTa count positions from beyond the padding token; DistilBERT has no
token types. How a text's states become one vector is said by the files of sentence-transformers beside the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.errors import ConfigError
from engine.model.config import architecture_of, read_config

Config = Mapping[str, Any]
EncoderFamily = Literal["bert", "roberta", "distilbert"]
VectorPooling = Literal["mean", "cls"]

ENCODERS: Mapping[str, EncoderFamily] = {
    "BertModel": "bert",
    "BertForMaskedLM": "bert",
    "RobertaModel": "roberta",
    "RobertaForMaskedLM": "roberta",
    "XLMRobertaModel": "roberta",
    "XLMRobertaForMaskedLM": "roberta",
    "DistilBertModel": "distilbert",
    "DistilBertForMaskedLM": "distilbert",
}
_MOST = {"vocab_size": 1 << 24, "hidden_size": 1 << 20, "num_layers": 4096, "num_heads": 1 << 14, "positions": 1 << 24}
_OTHER_MODULES = ("Transformer", "Pooling", "Normalize")  # Normalize: vectors get unit length in any case


class EncoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes of an encoder. Sizes in elements."""

    family: EncoderFamily
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    positions: int  # rows of the position table
    padding: int  # >= 0: positions count from beyond this token id, and it has none itself (RoBERTa)
    activation: Literal["gelu", "gelu_tanh", "relu"]
    norm_eps: float
    pooling: VectorPooling  # what the model was trained for

    @property
    def max_position(self) -> int:
        """Tokens of the longest text, special ones included."""
        return self.positions - self.padding - 1


def is_encoder(path: str | Path) -> bool:
    """Is the model directory's architecture one of `ENCODERS`? Raises ConfigError when it can't be read."""
    path = Path(path)
    return path.is_dir() and architecture_of(read_config(path)) in ENCODERS


def load_encoder_spec(path: Path) -> EncoderSpec:
    """The encoder in a model directory. Raises ConfigError in one line for what can't be served."""
    config = read_config(path)
    architecture = architecture_of(config)
    try:
        spec = _spec(ENCODERS[architecture], config, _pooling(path))
    except KeyError as error:
        raise ConfigError(f"config.json of this {architecture} misses the field {error}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.json of this {architecture} has a field that can't be used: {error}") from error
    for name, most in _MOST.items():
        value = getattr(spec, name)
        if type(value) is not int or not 1 <= value <= most:
            raise ConfigError(f"config.json says {name} = {value!r}; it must be a number from 1 to {most}")
    if spec.hidden_size % spec.num_heads or spec.max_position < 1:
        raise ConfigError(
            f"{spec.num_heads} heads of a hidden size of {spec.hidden_size} and {spec.positions} positions don't fit"
        )
    return spec


def _spec(family: EncoderFamily, config: Config, pooling: VectorPooling) -> EncoderSpec:
    distil = family == "distilbert"
    if (kind := config.get("position_embedding_type", "absolute")) != "absolute":
        raise ConfigError(f"an encoder with positions of the kind {kind!r} is not supported, only absolute ones")
    if config.get("is_decoder"):
        raise ConfigError("this BERT says is_decoder: it writes text, which is not supported for its family")
    activations: dict[str, Literal["gelu", "gelu_tanh", "relu"]] = {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
    }
    named = config.get("activation" if distil else "hidden_act", "gelu")
    if named not in activations:
        raise ConfigError(f"activation {named!r} is not supported (supported: {', '.join(activations)})")
    return EncoderSpec(
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=config["dim" if distil else "hidden_size"],
        num_layers=config["n_layers" if distil else "num_hidden_layers"],
        num_heads=config["n_heads" if distil else "num_attention_heads"],
        intermediate_size=config["hidden_dim" if distil else "intermediate_size"],
        positions=config["max_position_embeddings"],
        padding=int(config.get("pad_token_id", 1)) if family == "roberta" else -1,
        activation=activations[named],
        norm_eps=1e-12 if distil else float(config.get("layer_norm_eps", 1e-12)),
        pooling=pooling,
    )


def _pooling(path: Path) -> VectorPooling:
    """How sentence-transformers makes a vector with this model; the mean where nothing is said."""
    modules = _json(path / "modules.json", [])
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules if isinstance(module, dict)]
    for kind in kinds:
        if kind not in _OTHER_MODULES:
            raise ConfigError(f"{path} ends in a module {kind!r}; only pooling and normalising are supported")
    where = next((str(module.get("path", "")) for module in modules if "Pooling" in str(module.get("type"))), "")
    config = _json(path / where / "config.json", {}) if where and ".." not in where else {}
    modes = [
        name.removeprefix("pooling_mode_") for name, on in config.items() if name.startswith("pooling_mode_") and on
    ]
    known: dict[str, VectorPooling] = {"mean_tokens": "mean", "cls_token": "cls"}
    if len(modes) > 1 or not set(modes) <= known.keys():
        raise ConfigError(f"{path} pools by {' and '.join(modes)}; one of mean_tokens and cls_token is supported")
    return known[modes[0]] if modes else "mean"


def _json(path: Path, default: Any) -> Any:
    """The file's value, where it is there and of the default's kind."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return default
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(value, type(default)):
        raise ConfigError(f"{path} is not what sentence-transformers writes")
    return value
