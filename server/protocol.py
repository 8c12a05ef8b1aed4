"""The wire types of the OpenAI routes. `msgspec` checks them strictly: an integer is no boolean, string or float.

Null means "default" everywhere. Ranges are checked where a struct becomes an engine request
(`engine.validate`); here is only the form. A field that none of these structs has is ignored and reported in a
response header, unless it would change the output (`REFUSED`): then it is refused by name.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.errors import InvalidRequest

# Fields of other servers that change what comes out and that are not built here.
_REFUSED = """
    custom_logit_processor custom_params documents dry_allowed_length dry_base dry_multiplier dry_penalty_last_n
    dry_sequence_breakers dynatemp_exponent dynatemp_range ebnf grammar hidden_states id_slot json_schema
    kv_transfer_params logits_processors logprob_token_ids lora_path media_io_kwargs min_new_tokens mirostat
    mirostat_eta mirostat_tau mm_processor_kwargs n_keep n_predict n_probs no_stop_trim post_sampling_probs
    prompt_embeds regex repetition_detection return_hidden_states return_progress samplers stop_regex
    stream_interval t_max_predict_ms thinking_token_budget timings_per_token typical_p vllm_xargs xtc_probability
    xtc_threshold
"""
REFUSED = frozenset(_REFUSED.split())

# Fields of the hosted API that have no meaning on one's own machine: accepted, without effect, and reported so.
_HOSTED_ONLY = """
    moderation prediction prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier
    service_tier store user verbosity web_search_options metadata modalities audio
"""
HOSTED_ONLY = frozenset(_HOSTED_ONLY.split())


class _Form(msgspec.Struct):
    """Base of all wire types: unknown fields are let through."""


# ---------------------------------------------------------------- messages


class TextPart(_Form, tag="text"):
    text: str


class RefusalPart(_Form, tag="refusal"):
    refusal: str


class ImagePart(_Form, tag="image_url"):
    image_url: Any


class AudioPart(_Form, tag="input_audio"):
    input_audio: Any


class FilePart(_Form, tag="file"):
    file: Any


class CalledFunction(_Form):
    name: str
    arguments: str


class FunctionCall(_Form, tag="function"):
    id: str
    function: CalledFunction


class CalledCustom(_Form):
    name: str
    input: str


class CustomCall(_Form, tag="custom"):
    id: str
    custom: CalledCustom


class SystemMessage(_Form, tag_field="role", tag="system"):
    content: str | list[TextPart]
    name: str | None = None


class DeveloperMessage(_Form, tag_field="role", tag="developer"):
    content: str | list[TextPart]
    name: str | None = None


class UserMessage(_Form, tag_field="role", tag="user"):
    content: str | list[TextPart | ImagePart | AudioPart | FilePart]
    name: str | None = None


class AssistantMessage(_Form, tag_field="role", tag="assistant"):
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[FunctionCall | CustomCall] | None = None
    function_call: CalledFunction | None = None
    audio: Any = None


class ToolMessage(_Form, tag_field="role", tag="tool"):
    content: str | list[TextPart]
    tool_call_id: str


class FunctionMessage(_Form, tag_field="role", tag="function"):
    name: str
    content: str | None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


# ---------------------------------------------------------------- tools and structured output


class FunctionDefinition(_Form):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(_Form, tag="function"):
    function: FunctionDefinition


class CustomDefinition(_Form):
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class CustomTool(_Form, tag="custom"):
    custom: CustomDefinition


Tool = FunctionTool | CustomTool


class TextFormat(_Form, tag="text"):
    pass


class JsonObjectFormat(_Form, tag="json_object"):
    pass


class JsonSchema(_Form):
    name: str
    schema: dict[str, Any] | bool
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(_Form, tag="json_schema"):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(_Form, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: exactly one of these. Anything else in it would constrain the answer too."""

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


# ---------------------------------------------------------------- requests


class StreamOptions(_Form):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(_Form, kw_only=True):
    """What chat and completions have in common: OpenAI's fields, then the ones that vLLM's users know."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Octavo's own
    timeout_s: float | None = None
    timeout_ttft_s: float | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    # hosted only
    store: bool | None = None
    metadata: dict[str, str] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    web_search_options: Any = None
    verbosity: str | None = None
    moderation: Any = None
    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    best_of: int | None = None
    logprobs: int | None = None
    suffix: str | None = None


class TokenizeRequest(_Form):
    """POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Form):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Raise InvalidRequest for a field that would change the output and isn't built here; null and false don't."""
    for name in body:
        if name in REFUSED and body[name] is not None and body[name] is not False:
            raise InvalidRequest(f"{name} is not supported by this server", param=name)
