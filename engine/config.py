"""Every setting, defined once: its flag, its TOML key, its environment variable, its limits and its help.

A field `max_model_len` is `--max-model-len`, `max-model-len = ...` in a file (underscores work too) and
`OCTAVO_MAX_MODEL_LEN`. A flag beats the environment, the environment a file, a file the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import ipaddress
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import ConfigError


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    form: str = "",
    metavar: str = "",
    common: bool = False,
    secret: bool = False,
) -> Any:
    """A field with all that is known of it. `form` names a check in FORMS; `common` ones are in the short help."""
    metadata = {
        "help": help,
        "choices": choices,
        "low": low,
        "high": high,
        "form": form,
        "metavar": metavar,
        "common": common,
        "secret": secret,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What is served."""

    model: str = option("smollm2", "name, directory, GGUF file or hub id of the model", common=True)
    served_model_name: tuple[str, ...] = option((), "name in the API; repeat for aliases", metavar="NAME", common=True)
    revision: str = option("", "branch, tag or commit of a hub model", metavar="REV")
    max_model_len: int | None = option(
        None, "context length in tokens (default: the model's, as far as the KV pool holds it)", low=1, common=True
    )
    dtype: str = option("auto", "arithmetic", choices=("auto", "float32", "bfloat16", "float16"), common=True)
    quantization: str = option(
        "auto", "how matrices are kept; auto: as the files have them", choices=("auto", "none", "int8", "gguf")
    )
    lora: tuple[str, ...] = option((), "LoRA adapter to serve beside the model; repeatable", metavar="NAME=DIR")
    chat_template: str = option("", "file with a Jinja chat template to use instead of the model's", metavar="FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConfig:
    """The KV pool and its tiers."""

    num_kv_blocks: int | None = option(None, "blocks in the pool (default: from --kv-memory)", low=1, common=True)
    kv_memory: str = option(
        "auto", "pool size: 2GiB, 30%% of what is free, or auto", form="memory", metavar="SIZE", common=True
    )
    gpu_memory_utilization: float = option(
        0.9, "share of a GPU's memory for weights, steps and pool, with --kv-memory auto", low=0.1, high=1.0
    )
    block_size: int = option(16, "tokens a block", low=1, high=4096, common=True)
    kv_cache_dtype: str = option(
        "auto",
        "element type of K and V",
        choices=("auto", "float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2"),
    )
    enable_prefix_caching: bool = option(True, "share the KV of common prefixes", common=True)
    preemption: str = option("auto", "what to do when blocks run out", choices=("auto", "swap", "recompute"))
    swap_space: str = option("auto", "host memory for evicted blocks; 0 turns it off", form="memory", metavar="SIZE")
    kv_disk: str = option("", "directory of the disk tier", metavar="DIR")
    kv_disk_size: str = option("4GiB", "size of the disk tier", form="memory", metavar="SIZE")
    kv_events: str = option("", "ZeroMQ endpoint to publish KV events on, tcp://127.0.0.1:5557", form="endpoint")
    kv_events_replay: str = option("", "endpoint where subscribers get events that they missed", form="endpoint")
    kv_events_topic: str = option("", "topic of KV events", metavar="TOPIC")
    kv_manager: str = option("paged", "paged, or virtual-contiguous (vAttention)", choices=("paged", "virtual"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """What runs when."""

    max_num_seqs: int = option(64, "sequences that run at once", low=1, high=65536, common=True)
    max_num_batched_tokens: int | None = option(
        None, "tokens computed in one step (default: 512, or --max-num-seqs when larger)", low=1, common=True
    )
    speculate: str = option(
        "auto",
        "guess tokens and check many at once; ngram: by what stood there before; draft: by --draft-model; "
        "auto: draft where there is one, else none",
        choices=("auto", "off", "ngram", "draft"),
    )
    draft_model: str = option("", "small model of the same vocabulary that guesses tokens", metavar="MODEL")
    num_drafts: int = option(8, "most guesses a sequence and step", low=1, high=64)
    target_itl: int = option(
        100,
        "milliseconds that prompts may hold up running answers a step; 0 = no bound",
        low=0,
        high=60_000,
        metavar="MS",
        common=True,
    )
    max_waiting: int = option(256, "requests that may wait before new ones get 429", low=0, high=10**6, common=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """What computes."""

    device: str = option("auto", "auto, cpu, cuda, cuda:1 ...", form="device", metavar="DEVICE")
    threads: int = option(0, "CPU threads; 0 = one a core", low=0, high=1024, common=True)
    tensor_parallel_size: int = option(1, "ranks that share every layer, a GPU each", low=1, high=64, metavar="N")
    replicas: int = option(1, "engine processes, each with its part of the cores or a GPU", low=1, high=64, common=True)
    isa: str = option(
        "auto", "CPU instruction set", choices=("auto", "amx", "avx512bf16", "avx512", "avx2", "portable", "neon")
    )
    attention_backend: str = option(
        "auto",
        "native = C++ kernels, reference = torch (slow); on a GPU: cuda or rocm = kernels of ours, triton, flashinfer",
        choices=("auto", "native", "reference", "cuda", "rocm", "triton", "flashinfer"),
    )
    deterministic: bool = option(True, "reference and GPU: bits that don't depend on the batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side and the supervision of the engine. Times in seconds."""

    host: str = option("127.0.0.1", "address to listen on", common=True)
    port: int = option(8000, "port to listen on", low=0, high=65535, common=True)
    api_key: tuple[str, ...] = option(
        (), "key that clients must send; repeatable", metavar="KEY", common=True, secret=True
    )
    api_key_file: str = option("", "file with one key a line: KEY [LABEL [name=value ...]]", metavar="FILE")
    auth: bool = option(True, "--no-auth serves other machines without a key")
    public_metrics: bool = option(False, "/metrics needs no key")
    root_path: str = option("", "path prefix that a proxy strips", metavar="PATH")
    cors_origin: tuple[str, ...] = option((), "origin that browsers may call from, or *; repeatable", metavar="ORIGIN")
    ssl_certfile: str = option("", "TLS certificate (PEM)", metavar="FILE")
    ssl_keyfile: str = option("", "TLS key (PEM)", metavar="FILE")
    max_body_size: str = option("10MiB", "largest request body", form="memory", metavar="SIZE")
    max_connections: int = option(2048, "open connections before new ones get 503", low=1, high=10**6)
    max_tokens_policy: str = option(
        "clamp", "chat max_tokens beyond the room in the context", choices=("clamp", "refuse")
    )
    generation_config: str = option(
        "auto",
        "auto: requests have the sampling defaults of the model's generation_config.json",
        choices=("auto", "none"),
    )
    trust_request_chat_template: bool = option(False, "allow a chat_template in a request")
    tool_parser: str = option("", "parser of tool calls (default: chosen by the template)", metavar="NAME")
    reasoning_parser: str = option("", "parser of reasoning (default: chosen by the template)", metavar="NAME")
    data_dir: str = option("", "directory of the files and batches routes", metavar="DIR")
    kv_transfer_dir: str = option("", "directory that cached prefixes may be exported to over HTTP", metavar="DIR")
    lora_dir: str = option("", "directory whose LoRA adapters may be loaded over HTTP", metavar="DIR")
    metrics_vllm_aliases: bool = option(False, "every metric a second time under vLLM's name")
    otlp_endpoint: str = option("", "collector that gets traces, OTLP over HTTP", form="url", metavar="URL")
    log_level: str = option("info", "", choices=("debug", "info", "warning", "error"))
    log_prompts: bool = option(False, "write prompts to the log")
    shutdown_timeout: float = option(30.0, "time that running requests get after SIGTERM", low=0, common=True)
    watchdog_timeout: float = option(60.0, "an engine without a step for so long is restarted; 0 = never", low=0)
    max_restarts: int = option(5, "restarts in a row that get nowhere before the server exits", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that the engine process is told; it crosses to it as msgpack."""

    model: ModelConfig = ModelConfig()
    kv: KVConfig = KVConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    replica: int = 0  # which of `parallel.replicas` this engine is

    @classmethod
    def of(cls, model: str, **settings: Any) -> EngineConfig:
        """The configuration of an offline `LLM(model, **settings)`. Raises ConfigError."""
        given = [Given("argument", name, name, value) for name, value in {"model": model, **settings}.items()]
        return Settings.resolve(given, only=ENGINE_GROUPS).engine


@dataclass(frozen=True, slots=True)
class Given:
    """One value as somebody wrote it; `place` names it in an error: "--port", "OCTAVO_PORT", "a.toml: port"."""

    source: str
    place: str
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything, and where each value came from."""

    engine: EngineConfig
    server: ServerConfig
    sources: Mapping[str, str]  # option name -> "flag", "environment", the file, or "default"

    @staticmethod
    def resolve(given: list[Given], only: tuple[str, ...] = ()) -> Settings:
        """Later entries win. `only` limits which groups may be named. Raises ConfigError."""
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for item in given:
            known = OPTIONS.get(item.name.replace("-", "_"))
            if known is None or (only and known.group not in only):
                raise ConfigError(
                    unknown(item.place, item.name, [n for n, o in OPTIONS.items() if not only or o.group in only])
                )
            values[known.name] = known.parse(item.value, item.place)
            sources[known.name] = item.source
        groups = {
            name: cls(**{n: v for n, v in values.items() if OPTIONS[n].group == name}) for name, cls in GROUPS.items()
        }
        server = groups.pop("server")
        settings = Settings(EngineConfig(**groups), server, {n: sources.get(n, "default") for n in OPTIONS})
        settings.check()
        return settings

    def value(self, name: str) -> Any:
        """The value of an option by its name."""
        group = OPTIONS[name].group
        return getattr(self.server if group == "server" else getattr(self.engine, group), name)

    def check(self) -> None:
        """Rules that span several options."""
        s, k = self.server, self.engine.kv
        if bool(s.ssl_certfile) != bool(s.ssl_keyfile):
            raise ConfigError("--ssl-certfile and --ssl-keyfile belong together: give both or neither")
        if k.preemption == "swap" and k.swap_space == "0":
            raise ConfigError("--preemption swap needs --swap-space above 0: raise it, or choose recompute")
        adapters(self.engine.model.lora)
        if s.auth and not s.api_key and not s.api_key_file and not is_loopback(s.host):
            raise ConfigError(
                f"--host {s.host} lets other machines in without a key: "
                "give --api-key-file or --api-key, or --no-auth if that is meant"
            )


class Option:
    """One field of one group, with its parser. The annotation is the type of the value."""

    def __init__(self, group: str, field: dataclasses.Field[Any]) -> None:
        self.group = group
        self.name = field.name
        self.flag = "--" + field.name.replace("_", "-")
        self.kind = str(field.type)
        self.default = field.default
        self.help: str = field.metadata["help"]
        self.choices: tuple[str, ...] = field.metadata["choices"]
        self.low: float | None = field.metadata["low"]
        self.high: float | None = field.metadata["high"]
        self.form: str = field.metadata["form"]
        self.metavar: str = field.metadata["metavar"]
        self.common: bool = field.metadata["common"]
        self.secret: bool = field.metadata["secret"]

    def parse(self, raw: Any, place: str) -> Any:
        """A value of the right type from a flag, the environment (text) or TOML. Raises ConfigError."""
        if self.kind == "bool":
            return self._bool(raw, place)
        if self.kind.startswith("int"):
            return None if raw is None and "None" in self.kind else self._number(raw, place, int)
        if self.kind == "float":
            return self._number(raw, place, float)
        if self.kind.startswith("tuple"):
            items = raw.split(",") if isinstance(raw, str) else raw
            if not isinstance(items, (list, tuple)) or not all(isinstance(i, str) and i.strip() for i in items):
                self._refuse(raw, place, "must be a list of non-empty texts")
            return tuple(i.strip() for i in items)
        return self._text(raw, place)

    def _bool(self, raw: Any, place: str) -> bool:
        value = raw if isinstance(raw, bool) else TRUTH.get(raw.strip().lower()) if isinstance(raw, str) else None
        if value is None:
            self._refuse(raw, place, "must be true or false")
        return value

    def _number(self, raw: Any, place: str, of: type[int] | type[float]) -> int | float:
        value: int | float | None = None
        if isinstance(raw, str):
            try:
                value = of(raw.strip())
            except ValueError:
                value = None
        elif isinstance(raw, (int, float)) and not isinstance(raw, bool) and (of is float or isinstance(raw, int)):
            value = of(raw)
        word = "a whole number" if of is int else "a number"
        low, high = self.low or 0, self.high or MOST
        if value is None or not low <= value <= high:
            limits = f"of at least {low:g}" if self.high is None else f"from {low:g} to {high:g}"
            self._refuse(raw, place, f"must be {word} {limits}")
        return value

    def _text(self, raw: Any, place: str) -> str:
        if isinstance(raw, int) and not isinstance(raw, bool) and self.form == "memory":
            raw = str(raw)
        if not isinstance(raw, str) or "\0" in raw:
            self._refuse(raw, place, "must be a text")
        value = raw.strip()
        if self.choices and value not in self.choices:
            near = difflib.get_close_matches(value, self.choices, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self._refuse(raw, place, f"must be one of {', '.join(self.choices)}{hint}")
        if self.form and (problem := FORMS[self.form](value)):
            self._refuse(raw, place, problem)
        return value

    def _refuse(self, raw: Any, place: str, problem: str) -> NoReturn:
        shown = "***" if self.secret else raw if isinstance(raw, str) and raw.isprintable() else repr(raw)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise ConfigError(f"{place} {shown}: {problem}")


def _memory_problem(text: str) -> str:
    try:
        if text != "auto":
            memory(text, 1 << 40)
    except ValueError:
        return "must be a size such as 512MiB or 2GiB, or a share of what is free such as 30%"
    return ""


def _device_problem(text: str) -> str:
    good = re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", text)
    return "" if good else "must be auto, cpu, cuda or cuda:N"


def _endpoint_problem(text: str) -> str:
    good = re.fullmatch(r"|tcp://\S+:\d{1,5}|ipc://.+", text)
    return "" if good else "must be tcp://ADDRESS:PORT or ipc://PATH"


def _url_problem(text: str) -> str:
    good = re.fullmatch(r"|https?://[^\s/]+(/\S*)?", text)
    return "" if good else "must be a URL such as http://127.0.0.1:4318"


FORMS = {"memory": _memory_problem, "device": _device_problem, "url": _url_problem, "endpoint": _endpoint_problem}
ADAPTER_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
MOST = 10**18  # of a number without a limit of its own
TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def memory(text: str, free: int) -> int:
    """Bytes of "2GiB", "512M", "1073741824" or "30%" of `free`. Raises ValueError."""
    if share := re.fullmatch(r"(\d{1,3}(?:\.\d+)?)\s*%", text):
        percent = float(share[1])
        if not 0 <= percent <= 100:
            raise ValueError(text)
        return int(free * percent / 100)
    size = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*(?:([KMGT])(?:i?B)?|B)?", text, re.IGNORECASE)
    if not size:
        raise ValueError(text)
    return int(float(size[1]) * UNITS[(size[2] or "").upper()])


def adapters(lora: Iterable[str]) -> dict[str, str]:
    """Directories of LoRA adapters by name, from the values of --lora. Raises ConfigError."""
    found: dict[str, str] = {}
    for item in lora:
        name, _, directory = item.partition("=")
        if not ADAPTER_NAME.fullmatch(name) or not directory:
            raise ConfigError(f"--lora {item}: must be NAME=DIR, the name of up to 128 of A-Z a-z 0-9 . _ : / -")
        if name in found:
            raise ConfigError(f"--lora {item}: the name {name} is given twice")
        found[name] = directory
    return found


def nth_endpoint(endpoint: str, n: int) -> str:
    """The endpoint of replica n: n ports further, or another path."""
    if not n or not endpoint:
        return endpoint
    if endpoint.startswith("tcp://"):
        address, _, port = endpoint.rpartition(":")
        return f"{address}:{int(port) + n}"
    return f"{endpoint}-{n}"


def is_private(endpoint: str) -> bool:
    """Does only this machine reach a ZeroMQ endpoint?"""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return not endpoint.startswith("tcp://") or is_loopback(host)


def is_loopback(host: str) -> bool:
    """Does only this machine reach `host`?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


GROUPS: dict[str, Any] = {
    "model": ModelConfig,
    "kv": KVConfig,
    "schedule": ScheduleConfig,
    "parallel": ParallelConfig,
    "server": ServerConfig,
}
ENGINE_GROUPS = ("model", "kv", "schedule", "parallel")
OPTIONS: dict[str, Option] = {f.name: Option(g, f) for g, cls in GROUPS.items() for f in dataclasses.fields(cls)}


def unknown(place: str, name: str, known: list[str]) -> str:
    """The sentence for a name that isn't there, with the nearest one that is."""
    near = difflib.get_close_matches(name.replace("-", "_"), known, 1, 0.5)
    hint = f"; did you mean {near[0].replace('_', '-')}?" if near else "; `octavo config show` lists all"
    return f"{place}: no such setting{hint}"


def from_environment(environ: Mapping[str, str]) -> list[Given]:
    """The OCTAVO_* variables. OCTAVO_CACHE and OCTAVO_CONFIG are no settings and are left out."""
    prefix = "OCTAVO_"
    names = sorted(n for n in environ if n.startswith(prefix) and n not in NOT_SETTINGS)
    return [Given("environment", n, n.removeprefix(prefix).lower(), environ[n]) for n in names]


NOT_SETTINGS = {"OCTAVO_CONFIG", "OCTAVO_CACHE"}


def from_file(path: str) -> list[Given]:
    """The keys of a TOML file: flat, or under the tables [model], [kv], [schedule], [parallel], [server]."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: can't be read ({error.strerror})") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {path}: no valid TOML: {error}") from None
    return [Given(path, f"{path}: {shown}", name, value) for shown, name, value in _keys(document, path)]


def _keys(document: dict[str, Any], path: str) -> Iterator[tuple[str, str, Any]]:
    for key, value in document.items():
        if not isinstance(value, dict):
            yield key, key, value
            continue
        if key not in GROUPS:
            raise ConfigError(unknown(f"{path}: [{key}]", key, list(GROUPS)))
        for inner, item in value.items():
            known = OPTIONS.get(inner.replace("-", "_"))
            if known and known.group != key:
                raise ConfigError(f"{path}: [{key}] {inner}: belongs under [{known.group}]")
            yield f"[{key}] {inner}", inner, item


def add_options(parser: argparse.ArgumentParser, groups: tuple[str, ...], *, everything: bool) -> None:
    """Add the flags of `groups`; only those given end up in the namespace. The short help has the common ones."""
    for name in groups:
        for o in (o for o in OPTIONS.values() if o.group == name):
            text: str = o.help if everything or o.common else argparse.SUPPRESS
            if text != argparse.SUPPRESS and o.default not in (None, "", ()) and o.kind != "bool":
                text = f"{text} [{o.default}]".strip()
            if o.name == "model":
                parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=text)
            elif o.kind == "bool":
                parser.add_argument(o.flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
            else:
                metavar = o.metavar or ("N" if o.kind.startswith(("int", "float")) else o.name.upper())
                if o.choices:
                    metavar = "|".join(o.choices) if len(o.choices) <= 4 else "KIND"
                    text = (
                        f"{text}: {', '.join(o.choices)}" if len(o.choices) > 4 and text != argparse.SUPPRESS else text
                    )
                action = "append" if o.kind.startswith("tuple") else "store"
                parser.add_argument(o.flag, action=action, default=argparse.SUPPRESS, metavar=metavar, help=text)
    parser.add_argument("--config", default=argparse.SUPPRESS, metavar="FILE.toml", help="read settings from a file")


def from_arguments(namespace: argparse.Namespace) -> list[Given]:
    """The settings among parsed arguments."""
    return [
        Given("flag", "model" if name == "model" else OPTIONS[name].flag, name, value)
        for name, value in vars(namespace).items()
        if name in OPTIONS
    ]


def load(namespace: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Default < file < environment < flag. The file is --config or OCTAVO_CONFIG. Raises ConfigError."""
    path = getattr(namespace, "config", None) or environ.get("OCTAVO_CONFIG")
    file = from_file(path) if path else []
    return Settings.resolve([*file, *from_environment(environ), *from_arguments(namespace)])
