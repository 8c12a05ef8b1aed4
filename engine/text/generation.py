"""What a model's publisher advises: the sampling defaults in generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from engine.api import SamplingParams
from engine.errors import ConfigError, InvalidRequest
from engine.validate import Limits, sampling_params

# As vLLM takes them. Others of that file (num_beams, do_sample, penalties of other servers) change no default.
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_COUNTS = {"top_k": "top_k", "max_new_tokens": "max_tokens"}


def sampling_defaults(config: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a request that names none. Raises ConfigError for a value that no request could have."""
    found: dict[str, Any] = {}
    for name in _NUMBERS:
        if isinstance(value := config.get(name), (int, float)) and not isinstance(value, bool):
            found[name] = float(value)
    for name, ours in _COUNTS.items():
        if isinstance(value := config.get(name), int) and not isinstance(value, bool):
            found[ours] = value
    defaults = SamplingParams(**found)
    try:
        checked = sampling_params(defaults, Limits(max_model_len=1, vocab_size=1))
    except InvalidRequest as error:
        raise ConfigError(
            f"generation_config.json: {error}; --generation-config none serves this model without it"
        ) from None
    return msgspec.structs.replace(checked, seed=None)


def advised(defaults: SamplingParams) -> dict[str, Any]:
    """Those that differ from what a request has anyway, by the names of the API."""
    own = SamplingParams()
    names = (*_NUMBERS, *_COUNTS.values())
    return {name: getattr(defaults, name) for name in names if getattr(defaults, name) != getattr(own, name)}
