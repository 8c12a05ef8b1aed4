"""Random bytes for everything that reads bytes from outside: `python -m tests.fuzz --examples 5000 [TARGET ...]`.

A target takes a source of randomness and tries one input. What it may do with it is an answer or a clean refusal;
anything else is a fault. A small part of this runs in the suite (test_fuzz.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from engine.api import Abort, AddRequest, Control, Grammar, Inspect, SamplingParams, Shutdown, ToEngine
from engine.config import EngineConfig
from engine.errors import ConfigError, InvalidRequest
from engine.model.config import load_spec
from engine.model.gguf import GGUFFile
from engine.model.lora import LoraAdapter
from engine.model.pull import pull
from engine.model.safetensors_files import SafetensorsFiles
from engine.process import Loads, handle
from engine.text.chat import ChatTemplate
from engine.text.grammar import verdict
from engine.text.tokenizer import Tokenizer
from server.app import ROUTES, create_app
from server.settings import ServerSettings
from tests.engine.fake import build
from tests.server.fake_client import FakeClient
from tests.worker.driver import tiny_lora, tiny_model

Target = Callable[[random.Random], str]  # one input; what came of it

BYTES = (0, 1, 0x7F, 0x80, 0xFF)
NUMBERS = (0, 1, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0.0, -0.0, 1e308, 1e-308)
TEXTS = (
    "",
    "x",
    "\0",
    "é",
    "\U0001f600",
    "a" * 300,
    "<|im_end|>",
    "</think>",
    "{{",
    "%json",
    "../..",
    "\u202e",
    "[" * 99,
)


def mutated(rng: random.Random, data: bytes) -> bytes:
    """`data` with some bytes changed, inserted, removed or repeated."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        what = rng.randrange(5)
        if what == 0 and at < len(out):
            out[at] = rng.choice(BYTES) if rng.random() < 0.5 else rng.randrange(256)
        elif what == 1:
            out[at:at] = rng.randbytes(rng.randint(1, 8))
        elif what == 2:
            del out[at : at + rng.randint(1, 8)]
        elif what == 3:
            out[at:at] = out[at : at + rng.randint(1, 30)]
        else:
            out[at : at + 8] = struct.pack("<q", rng.choice((0, -1, 1 << 40, 2**63 - 1)))
    return bytes(out)


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = rng.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {rng.choice(TEXTS) or "type": value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return (None, rng.random() < 0.5, rng.choice(NUMBERS), rng.choice(TEXTS), rng.randrange(100))[kind]


def edited(rng: random.Random, tree: Any) -> Any:
    """`tree` with one place in it replaced, or with one more."""
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        name = rng.choice(list(tree))
        return {**tree, name: edited(rng, tree[name])} if rng.random() < 0.9 else {**tree, "": value(rng)}
    if isinstance(tree, list) and tree and rng.random() < 0.7:
        at = rng.randrange(len(tree))
        return [*tree[:at], edited(rng, tree[at]), *tree[at + 1 :]]
    return value(rng)


# ---------------------------------------------------------------- files


def files(read: Callable[[Path], Any], good: bytes, name: str, head: int) -> Target:
    """A copy of a good file with a changed head."""
    directory = Path(tempfile.mkdtemp(prefix="octavo-fuzz-"))
    path = directory / name

    def target(rng: random.Random) -> str:
        data = mutated(rng, good[:head]) + good[head:]
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)
        try:
            read(path)
        except ConfigError as error:
            if "\n" in str(error):
                raise AssertionError(f"more than one line: {error}") from error
            return "refused"
        return "read"

    return target


def gguf_target() -> Target:
    import gguf
    import numpy as np

    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        writer = gguf.GGUFWriter(file.name, "llama")
        writer.add_block_count(2)
        writer.add_array("tokenizer.ggml.tokens", ["a", "b", "<s>"])
        writer.add_array("tokenizer.ggml.scores", [0.5, 1.0, -1.0])
        for i in range(4):
            writer.add_tensor(f"blk.{i}.weight", np.ones((4, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        good = Path(file.name).read_bytes()

    def read(path: Path) -> None:
        found = GGUFFile(path)
        for tensor in found.tensors.values():
            found.blocks(tensor)

    head = len(good) - 4 * 4 * 32 * 4
    return files(read, good, "model.gguf", head)


def safetensors_target() -> Target:
    entry = {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}
    more = {"dtype": "BF16", "shape": [2, 2], "data_offsets": [128, 136]}
    header = json.dumps({"a": entry, "b": more, "__metadata__": {"format": "pt"}}).encode()
    good = struct.pack("<Q", len(header)) + header + bytes(136)

    def read(path: Path) -> None:
        found = SafetensorsFiles(path.parent)
        for name in found.names():
            found.read(name)

    return files(read, good, "model.safetensors", 8 + len(header))


def adapter_target() -> Target:
    """An adapter's configuration and the head of its weights, of the right model."""
    directory = Path(tempfile.mkdtemp(prefix="octavo-fuzz-"))
    spec = load_spec(tiny_model(directory / "base"))
    adapter = tiny_lora(directory / "adapter", 1, ("self_attn.q_proj", "mlp.down_proj"))
    config, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    fields = {**json.loads(config.read_bytes()), "use_rslora": False, "bias": "none", "rank_pattern": {}}
    good = weights.read_bytes()
    head = 8 + struct.unpack("<Q", good[:8])[0]

    def target(rng: random.Random) -> str:
        data = json.dumps(edited(rng, fields)).encode("utf-8", "replace")
        config.write_bytes(mutated(rng, data) if rng.random() < 0.3 else data)
        weights.write_bytes((mutated(rng, good[:head]) if rng.random() < 0.5 else good[:head]) + good[head:])
        try:
            LoraAdapter(adapter, spec)
        except ConfigError as error:
            if "\n" in str(error):
                raise AssertionError(f"more than one line: {error}") from error
            return "refused"
        return "read"

    return target


# ---------------------------------------------------------------- texts

PIECES = (
    "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ m['role'] }}", "{% if tools %}", "{% endif %}",
    "{% set x = messages|length %}", "{{ x * 9 }}", "{{ ''.join(messages) }}", "{{ messages[0].content * 9999999 }}",
    "{{ raise_exception('no') }}", "{{ x ~ x ~ x }}", "{% macro f(n) %}", "{% endmacro %}", "{{ f(9) }}",
    "{{ messages|tojson(indent=9999) }}", "{% for i in range(99999) %}", "{{ cycler.__init__ }}", "{{ '%s' % m }}",
    "{{ messages|map(attribute='x')|list|sum }}", "{% set ns = namespace(a='a') %}", "{% set ns.a = ns.a + ns.a %}",
    "{{ strftime_now('%' * 50) }}", "{% break %}", "{{ '{}'.format(self) }}", "{{ dict(a=1)|xmlattr }}",
    "{{ 'x'|center(999999) }}", "{{ 'ab'|indent(99999) }}", "{{ '{:>99999999}'.format(1) }}", "{{ '%099999999d' % 1 }}",
    "{% set ns.a = [ns.a, 'a' * 9999999] %}", "{% set y %}", "{% endset %}", "{{ y }}",
    "{{ [1]|batch(9999999, 0)|list }}",
    "{{ []|slice(9999999)|list }}", "{{ x|string|forceescape|urlencode }}", "{{ messages|tojson|list|sort|join }}",
    "{{ range(10**12)|list }}", "{{ 9 ** 9 ** 9 }}", "{{ 'x' * 10**9 }}", "{{ (1, 2)[::-1] }}", "{% call f(1) %}",
    "{% endcall %}", "{{ loop(messages) }}", "{% filter upper %}", "{% endfilter %}", "{{ self.__init__.__globals__ }}",
    "{{ messages|groupby('role')|list }}", "{{ ''|attr('__class__') }}", "{{ 1.5|round(10**9) }}", "{% include 'x' %}",
    "{% import 'os' as o %}", "{% extends 'x' %}", "{% block b %}{{ super() }}{% endblock %}", "{{ caller() }}",
    "{{ '{0.__class__}'.format(m) }}", "{{ m.content.encode().hex() }}", "{{ 'a,b' * 99999|int }}", "{% raw %}",
    "{{ 'a'.ljust(999999999) }}", "{{ 'a'|wordwrap(1, true, 'a' * 9999) }}", "{{ 'aa'.replace('a', 'a' * 99999) }}",
)  # fmt: skip


def template_target() -> Target:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]

    def target(rng: random.Random) -> str:
        source = "".join(rng.choices(PIECES, k=rng.randint(1, 9)))
        if rng.random() < 0.4:
            source = mutated(rng, source.encode()).decode(errors="replace")
        begin = time.process_time()
        try:
            ChatTemplate(source).render(messages, tools=[] if rng.random() < 0.5 else None)
        except (ConfigError, InvalidRequest):
            return "refused"
        finally:
            if time.process_time() - begin > 10:
                raise AssertionError(f"took {time.process_time() - begin:.1f} s: {source[:300]!r}")
        return "rendered"

    return target


SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"enum": ["x", 1, None]}}},
    {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,5}$", "maxLength": 9}, "minItems": 1},
    {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
    {"anyOf": [{"type": "number", "multipleOf": 0.5}, {"oneOf": [{"const": 1}, {"type": "null"}]}]},
)
REGEXES = ("a+b*", "(a|b){2,5}", "[^x]\\d+\\.", "(?i)abc", "\\p{L}+", "a{1,100}(b|c)?", "^.*$", "(x(y(z)?)?)?")
LARKS = (
    'start: "a" b*\nb: /[0-9]+/ "," | "c"',
    'start: %json {"type": "integer"}',
    'root ::= "a" x\nx ::= [0-9]+ | "b" x',
    'start: a a?\na: "x" | "(" a ")"',
    'start: a\na: b b\nb: c c\nc: d d\nd: e e\ne: "x"*',
    "start: ((((((x?)?)*)*)+)+)+\nx: /(a|aa|aaa)+/",
)
LAYERS = (  # around a schema, again and again
    lambda schema: {"type": "array", "items": schema, "minItems": 3, "maxItems": 99},
    lambda schema: {"type": "object", "properties": dict.fromkeys("abc", schema), "additionalProperties": schema},
    lambda schema: {"anyOf": [schema, schema, {"not": schema}]},
    lambda schema: {"allOf": [schema, {"type": "object", "patternProperties": {"^(a+)+$": schema}}]},
)


def grammar_target() -> Target:
    def target(rng: random.Random) -> str:
        kind = rng.choice(("json_schema", "regex", "lark", "choice"))
        if kind == "json_schema":
            schema = edited(rng, rng.choice(SCHEMAS))
            for _ in range(rng.choice((0, 0, 0, 1, 3, 7))):
                schema = rng.choice(LAYERS)(schema)
            text = json.dumps(schema)
        else:
            choices = json.dumps(["yes", "no", "é"])
            text = rng.choice({"regex": REGEXES, "lark": LARKS, "choice": (choices,)}[kind])
        if kind != "json_schema" or rng.random() < 0.3:
            text = mutated(rng, text.encode()).decode(errors="replace")
        begin = time.process_time()
        refused = verdict(Grammar(kind, text))  # type: ignore[arg-type]
        if time.process_time() - begin > 10:
            raise AssertionError(f"took {time.process_time() - begin:.1f} s: {kind} {text!r}")
        return "refused" if refused else "compiled"

    return target


# ---------------------------------------------------------------- messages between the processes


def ipc_target() -> Target:
    core = build(EngineConfig.of("shadow", num_kv_blocks=200)).core
    decoder = msgspec.msgpack.Decoder(ToEngine)
    counter = iter(range(10**9))

    def message(rng: random.Random) -> Any:
        kind = rng.randrange(8)
        if kind == 5:
            return Abort(f"r{rng.randrange(20)}", rng.randint(-3, 3))
        if kind == 6:
            return Inspect(1, rng.choice(("kv", "requests", "request", "live", "block")), rng.choice(TEXTS))
        if kind == 7:
            return Control(1, "reset_prefix_cache", {"x": "y"})
        params: dict[str, Any] = {"n": rng.randint(-1, 3), "max_tokens": rng.choice((None, -1, 0, 1, 5, 10**9))}
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"):
            if rng.random() < 0.2:
                params[name] = float(rng.choice((0, -1, 1e308, -1e308, 1e-308)))
        for name in ("top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs", "beam_width"):
            if rng.random() < 0.15:
                params[name] = rng.choice((-5, 0, 1, 3, 20))
        if rng.random() < 0.2:
            params["logit_bias"] = {rng.randint(-5, 2000): 1e300}
        prompt = tuple(rng.choice((rng.randrange(997), rng.randrange(997), -1)) for _ in range(rng.randrange(30)))
        return AddRequest(
            id=f"r{rng.randrange(20) if rng.random() < 0.2 else next(counter)}",
            prompt=prompt if rng.random() < 0.2 else tuple(max(0, t) for t in prompt),
            params=SamplingParams(**params),
            arrival=rng.choice((0.0, -1e308, 1e308, time.time())),
            priority=rng.randint(-3, 3),
            resume=tuple((1,) * rng.randrange(9) for _ in range(rng.randrange(4))) if rng.random() < 0.2 else (),
            deadline=rng.choice((None, None, 0.0, -1e308, 1e308)),
            pooling=rng.choice(("", "", "", "last", "mean")),
            adapter=rng.choice(("", "", "", "none")),
            key=rng.choice(TEXTS),
        )

    def target(rng: random.Random) -> str:
        frame = msgspec.msgpack.encode(message(rng))
        if rng.random() < 0.5:
            frame = mutated(rng, frame)
        try:
            decoded = decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return "dropped"
        if not isinstance(decoded, Shutdown):
            handle(core, decoded, lambda _: None, Loads(core, lambda _: None))
        for _ in range(20):
            if core.has_work():
                core.step()
        stats = core.stats()
        if not core.has_work() and stats.blocks_free != stats.blocks_total:
            raise AssertionError(f"{stats.blocks_total - stats.blocks_free} blocks are lost")
        return "taken"

    return target


# ---------------------------------------------------------------- HTTP


def http_target() -> Target:
    tokenizer = Tokenizer.load(pull("smollm2"))
    client = FakeClient(tokenizer)
    settings = ServerSettings(("m",), data_dir=tempfile.mkdtemp(prefix="octavo-fuzz-"))
    app = create_app(client, tokenizer, ChatTemplate.of(tokenizer), settings, "1")
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    loop = asyncio.new_event_loop()
    http = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)
    document = app.openapi()
    examples: dict[str, Any] = {}
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        for kind in content.values():
            found = kind.get("example") or next((e["value"] for e in kind.get("examples", {}).values()), {})
            examples[path] = json.loads(json.dumps(found).replace('"' + document_model(found) + '"', '"m"'))

    async def send(rng: random.Random) -> str:
        route = rng.choice(ROUTES)
        path = route.path.replace("{id}", rng.choice(("x", "..%2f..", "%00", "9" * 200)))
        path = path.replace("{model:path}", rng.choice(("m", "a/b", "%ff"))).replace(
            "{block}", rng.choice(("0", "-1", "x"))
        )
        if route.method != "POST":
            response = await http.request(
                route.method, path, params={rng.choice(("limit", "after", "x")): rng.choice(TEXTS)}
            )
        else:
            body = examples.get(route.path, {})
            for _ in range(rng.randint(0, 3)):
                body = edited(rng, body)
            if isinstance(body, dict):
                body = {
                    **body,
                    **{n: 3 for n in ("max_tokens", "max_output_tokens") if n not in body},
                    "n": body.get("n", 1),
                }
            data = json.dumps(body, allow_nan=True).encode("utf-8", "replace")
            if rng.random() < 0.3:
                data = mutated(rng, data)
            kind = (
                "application/json" if rng.random() < 0.95 else rng.choice(("text/plain", "multipart/form-data", "\xff"))
            )
            response = await http.post(path, content=data, headers={"content-type": kind.encode("latin-1")})
        if response.status_code >= 500:
            raise AssertionError(f"{response.status_code} of {route.method} {path}: {response.text[:300]}")
        return str(response.status_code)

    return lambda rng: loop.run_until_complete(send(rng))


def document_model(example: Any) -> str:
    return str(example.get("model", "m")) if isinstance(example, dict) else "m"


TARGETS: dict[str, Callable[[], Target]] = {
    "gguf": gguf_target,
    "safetensors": safetensors_target,
    "adapter": adapter_target,
    "template": template_target,
    "grammar": grammar_target,
    "ipc": ipc_target,
    "http": http_target,
}


def fuzz(name: str, *, seed: int, inputs: int = 10**9, seconds: float = 1e9) -> tuple[Counter[str], list[str]]:
    """What came of the inputs, and the faults: each with the number that makes it again."""
    target = TARGETS[name]()
    came: Counter[str] = Counter()
    faults: list[str] = []
    end = time.monotonic() + seconds
    for i in range(inputs):
        if time.monotonic() > end or len(faults) >= 20:
            break
        try:
            came[target(random.Random(f"{name}/{seed}/{i}"))] += 1
        except Exception as error:
            faults.append(f"{name}/{seed}/{i}: {type(error).__name__}: {str(error)[:300]}")
    return came, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--examples", type=int, default=10**9, metavar="N", help="for each target")
    parser.add_argument("--seconds", type=float, default=60, help="at most, for each target")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    bad = 0
    for name in args.targets:
        came, faults = fuzz(name, seed=args.seed, inputs=args.examples, seconds=args.seconds)
        print(
            f"{name}: {sum(came.values())} inputs, {dict(came.most_common())}, {len(faults)} faults",
            *faults,
            sep="\n  ",
            flush=True,
        )
        bad += len(faults)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
