"""What the HTTP server is told at start. The command line builds this; nothing else reads the environment."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ApiKey:
    """One API key, kept only as its SHA-256 digest, and the limits of whoever holds it. 0 = no limit.

    `label` names the key in the engine's fairness and in logs; it never is the key itself.
    """

    digest: bytes
    label: str
    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # prompt and completion tokens
    max_concurrency: int = 0
    priority: int = 0  # added to each request's priority; lower runs first

    @staticmethod
    def of(key: str, label: str = "", **limits: int) -> ApiKey:
        """Hash `key` (UTF-8). Without a label the first 8 hex digits of the digest name it."""
        digest = hashlib.sha256(key.encode()).digest()
        return ApiKey(digest, label or digest.hex()[:8], **limits)


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP side. Times in seconds, sizes in bytes."""

    served_model_names: tuple[str, ...]  # the first one is shown in responses; the others are aliases
    model_root: str = ""  # shown as `root` in /v1/models; "" = the first served name
    api_keys: tuple[ApiKey, ...] = ()  # empty = no authentication
    public_metrics: bool = False  # /metrics needs no key
    otlp_endpoint: str = ""  # URL of an OpenTelemetry collector; "" = no traces
    vllm_metric_aliases: bool = False  # every octavo_ metric a second time under vLLM's name
    max_body_bytes: int = 10 * 2**20
    max_tokens_policy: Literal["clamp", "refuse"] = "clamp"  # chat: max_tokens beyond the room in the context
    generation_config: bool = True  # the model's own sampling defaults hold where a request names none
    trust_request_chat_template: bool = False  # allow `chat_template` in a request
    tool_parser: str = ""  # name in server.parsers; "" = chosen by the model's template
    reasoning_parser: str = ""  # name in server.parsers; "" = chosen by the model's template
    cors_origins: tuple[str, ...] = ()  # ("*",) = any
    root_path: str = ""  # prefix that a proxy strips
    keep_alive_s: float = 15.0  # a comment is sent on a stream that was silent for so long
    stuck_after_s: float = 30.0  # /health/ready fails when work waits and no step ended for so long
    kv_transfer_dir: str = ""  # cached prefixes may be exported to it and imported from it; "" = none
    lora_dir: str = ""  # adapters below it may be loaded over HTTP; "" = none
    data_dir: str = ""  # store of /v1/files and /v1/batches; "" = these routes answer 404
    log_prompts: bool = False
