"""`octavo chat`: a conversation in the terminal, with a server or with a model in this process."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from engine.config import EngineConfig
from engine.errors import OctavoError, RequestFailed

HELP = "/new starts over, /system TEXT sets the system message, /quit or Ctrl-D ends; Ctrl-C stops an answer"
Message = dict[str, str]
Ask = Callable[[list[Message]], Iterator[str]]


def chat_with_model(args: argparse.Namespace, config: EngineConfig) -> int:
    """Load the model here and talk to it."""
    from engine.api import SamplingParams
    from engine.llm import LLM

    print(f"loading {config.model.model} ...", file=sys.stderr)
    with LLM(config) as llm:
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)

        def ask(messages: list[Message]) -> Iterator[str]:
            prompt = llm.render(messages)
            return llm.stream(prompt, llm.within_context(prompt, params))

        return converse(ask, args.system)


def chat_with_server(args: argparse.Namespace) -> int:
    """Talk to the first model of a server."""
    import httpx

    headers = {"Authorization": f"Bearer {args.client_key}"} if args.client_key else {}
    with httpx.Client(base_url=args.url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=None) as http:
        try:
            model = _json(http.get("/v1/models"))["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RequestFailed(f"--url {args.url}: no server answers there ({error})") from None

        def ask(messages: list[Message]) -> Iterator[str]:
            body = {"model": model, "messages": messages, "stream": True}
            body |= {"temperature": args.temperature, "max_tokens": args.max_tokens}
            try:
                with http.stream("POST", "/v1/chat/completions", json=body) as response:
                    if response.status_code != 200:
                        response.read()
                        _json(response)
                    yield from _pieces(response.iter_lines())
            except httpx.HTTPError as error:
                raise RequestFailed(f"the server went away: {error}") from None

        return converse(ask, args.system)


def _json(response: Any) -> Any:
    """The body; raises RequestFailed with the server's own words for an error."""
    try:
        body = response.json()
    except ValueError:
        body = {}
    if response.status_code != 200:
        message = body.get("error", {}).get("message", "") if isinstance(body, dict) else ""
        raise RequestFailed(f"the server said {response.status_code}: {message}")
    return body


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """Text of a stream of chunks. A stream without its [DONE] is an error."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise RequestFailed(chunk["error"]["message"])
        for choice in chunk["choices"]:
            yield choice["delta"].get("content") or ""
    raise RequestFailed("the stream ended before its [DONE]")


def converse(ask: Ask, system: str) -> int:
    """Read, ask, print, until the user has enough."""
    if sys.stdin.isatty():
        print(HELP, file=sys.stderr)
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return 0
        if text in ("/quit", "/exit"):
            return 0
        if text == "/new" or text.startswith("/system "):
            if text != "/new":
                start = [{"role": "system", "content": text.removeprefix("/system ")}]
            messages = list(start)
        elif text.startswith("/"):
            print(HELP, file=sys.stderr)
        elif text:
            messages.append({"role": "user", "content": text})
            answer = _answer(ask, messages)
            if answer:
                messages.append({"role": "assistant", "content": answer})
            else:
                messages.pop()


def _answer(ask: Ask, messages: list[Message]) -> str:
    """Print an answer as it comes; what was printed. An error is one line, and the conversation goes on."""
    answer = ""
    pieces = ask(messages)
    try:
        for piece in pieces:
            answer += piece
            print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print()
    except OctavoError as error:
        print(f"\noctavo: {error}", file=sys.stderr)
    finally:
        close = getattr(pieces, "close", None)
        if close:
            close()
    return answer
