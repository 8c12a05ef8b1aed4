"""Architectures without a native decoder: transformers computes everything but attention, which is ours.

The model's own code runs with an attention function that hands queries, keys and values to the caller's `attend`,
so KV memory, scheduling and sampling are the same as for any other model. Slower, and right.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_outputs import BaseModelOutputWithPast

from engine.errors import ConfigError
from engine.model.decoder import Attend, DenseCausalAttention
from engine.model.spec import TRANSFORMERS, DecoderSpec, LayerSpec

_NAME = "octavo"
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


def probe_spec(path: Path) -> DecoderSpec:
    """Shapes of the model in a directory, found by running its code on tensors without data.

    Raises ConfigError when its attention can't be plugged in: other code than the attention interface, a state
    other than keys and values, or an attention that ours doesn't compute.
    """
    config = _config(path)
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=_NAME
            )
        calls = _record_calls(model)
    except ConfigError:
        raise
    except Exception as error:  # code of any model: it can fail in any way
        raise _refusal(config, f"its code can't be run: {_first_line(error)}") from error
    return _spec_of_calls(config, calls)


class TransformersDecoder:
    """The same face as `engine.model.decoder.Decoder`, over a model of transformers."""

    def __init__(self, spec: DecoderSpec, path: Path, dtype: torch.dtype, device: str | torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = torch.device(device)
        try:
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=_NAME,
                experts_implementation="eager",
                local_files_only=True,
                use_safetensors=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ConfigError(f"{path} can't be loaded by transformers: {_first_line(error)}") from error
        self._model.to(self.device).eval()
        self._attention = _plug_in(self._model)
        self._base = self._model.base_model
        self._base_forward = self._base.forward
        self._base.forward = self._decode
        self._hidden: torch.Tensor | None = None
        self._verify()

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """tokens, positions [rows] -> hidden states after the final norm [rows, hidden_size]."""
        self._attention.attend = attend
        out = self._base(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = out[0][0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> float32 [rows, vocab_size], by whatever the model's own head does."""
        self._hidden = hidden[None]
        try:
            unread = torch.zeros(1, len(hidden), dtype=torch.long, device=self.device)
            logits: torch.Tensor = self._model(input_ids=unread, use_cache=False).logits[0]
        finally:
            self._hidden = None
        return logits.float()

    @torch.inference_mode()
    def _verify(self) -> None:
        """A few tokens in two pieces through our attention must come out as at once through the model's own.

        Code that takes positions from elsewhere than `position_ids`, or keeps a state, would be wrong in silence.
        """
        tokens = torch.arange(8, device=self.device)
        attend = DenseCausalAttention(self.spec)
        ours = torch.cat([self.forward(tokens[part], tokens[part], attend) for part in (slice(5), slice(5, 8))])
        self._model.set_attn_implementation("eager")
        own = self._base(input_ids=tokens[None], use_cache=False)[0][0]
        self._model.set_attn_implementation(_NAME)
        error = float((ours - own).float().norm() / own.float().norm())
        if not error < _TOLERANCE[self.dtype]:
            raise _refusal(self._model.config, f"its hidden states through our attention are off by {error:.2g}")

    def _decode(self, *args: Any, **kwargs: Any) -> Any:
        """The body of the model; for `logits`, the hidden states that are there already."""
        if self._hidden is not None:
            return _Hidden(last_hidden_state=self._hidden)
        return self._base_forward(*args, **kwargs)


class _Hidden(BaseModelOutputWithPast):
    """Output of a body that was not run: hidden states, and None for all that a head may want to pass on."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


# ---------------------------------------------------------------- the attention function


@dataclass(slots=True)
class _Plug:
    """What the attention layers of one model call; set anew for every forward pass."""

    attend: Attend | None = None
    record: list[_Call] | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the attention function: sizes, and what changes its arithmetic."""

    layer: int
    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    scale: float
    window: int
    softcap: float
    extras: tuple[str, ...]


# Arguments of attention functions that add something which ours doesn't compute.
_CHANGES_SCORES = frozenset({"s_aux", "sinks", "position_bias", "alibi", "head_mask", "bias"})


def _attention_function(
    module: Any,
    query: torch.Tensor,  # [1, heads, rows, head_size]
    key: torch.Tensor,  # [1, kv_heads, rows, head_size]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    plug: _Plug = module.octavo
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if plug.record is not None:
        extras = {name for name in _CHANGES_SCORES if kwargs.get(name) is not None}
        extras |= {"sinks"} & set(dir(module))
        extras |= {"a bidirectional mask"} if kwargs.get("is_causal") is False else set()
        sizes = (query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])
        window, softcap = int(kwargs.get("sliding_window") or 0), float(kwargs.get("softcap") or 0.0)
        plug.record.append(_Call(module.layer_idx, *sizes, scale, window, softcap, tuple(sorted(extras))))
        return torch.empty_like(query).transpose(1, 2), None
    assert plug.attend is not None
    rows = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
    return plug.attend(module.layer_idx, *rows)[None], None


transformers.utils.logging.disable_progress_bar()
transformers.AttentionInterface.register(_NAME, _attention_function)


def _plug_in(model: Any) -> _Plug:
    plug = _Plug()
    for module in model.modules():
        if getattr(module, "layer_idx", None) is not None:
            module.octavo = plug
    return plug


# ---------------------------------------------------------------- probing


def _config(path: Path) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds a model that transformers doesn't know: {_first_line(error)}") from error


def _record_calls(model: Any) -> list[_Call]:
    plug = _plug_in(model)
    plug.record = []
    base = model.base_model
    if base is model:
        raise _refusal(model.config, "its head can't be told from its body")
    rows = torch.zeros(1, 4, dtype=torch.long, device="meta")
    with torch.inference_mode():
        base(input_ids=rows, position_ids=rows, use_cache=False)
    return plug.record


def _spec_of_calls(config: Any, calls: list[_Call]) -> DecoderSpec:
    n_layers = config.num_hidden_layers
    if [call.layer for call in calls] != list(range(n_layers)):
        raise _refusal(config, f"{len(calls)} of its {n_layers} layers take attention from outside, once and in order")
    first = calls[0]
    for call in calls:
        if call.extras:
            raise _refusal(config, f"its attention uses {', '.join(call.extras)}")
        if call.value_size != call.head_size:
            raise _refusal(config, "its values are of another size than its keys")
        same = (call.heads, call.kv_heads, call.head_size, call.scale, call.softcap)
        if same != (first.heads, first.kv_heads, first.head_size, first.scale, first.softcap):
            raise _refusal(config, "its layers differ in shape")
    return DecoderSpec(
        family=TRANSFORMERS,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=n_layers,
        num_heads=first.heads,
        num_kv_heads=first.kv_heads,
        head_size=first.head_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        max_position=config.max_position_embeddings,
        attn_scale=first.scale,
        attn_softcap=first.softcap,
        layers=tuple(LayerSpec(window=call.window) for call in calls),
    )


def _refusal(config: Any, why: str) -> ConfigError:
    name = (config.architectures or [config.model_type])[0]
    return ConfigError(f"{name} has no native decoder and can't be served through transformers: {why}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
