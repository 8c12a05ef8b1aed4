"""Chunks of a streamed answer: constant bytes around the little that changes from token to token."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from server.protocol import StreamOptions
from server.run import Run
from server.service import usage_object
from server.sse import DONE

encode = msgspec.json.Encoder().encode


class Chunks:
    """`head` holds what every chunk of the stream has: id, object, created, model."""

    def __init__(self, head: dict[str, Any], options: StreamOptions | None, run: Run) -> None:
        self._prefix = b"data: " + encode(head)[:-1] + b',"choices":['
        self._run = run
        self._usage = bool(options and options.include_usage)
        self._running_usage = self._usage and bool(options and options.continuous_usage_stats)
        self._obfuscate = bool(options and options.include_obfuscation)
        self._tail = b'],"usage":null}\n\n' if self._usage else b"]}\n\n"
        self._plain = not self._running_usage and not self._obfuscate

    def choice(self, body: bytes) -> bytes:
        """One chunk with the JSON object `body` as its only choice."""
        return self._prefix + body + (self._tail if self._plain else self._special_tail())

    def _special_tail(self) -> bytes:
        tail = self._tail
        if self._running_usage:
            tail = b'],"usage":' + encode(usage_object(self._run.usage)) + b"}\n\n"
        if self._obfuscate:  # padding of random length hides the length of the text from who sees the packets
            pad = secrets.token_urlsafe(secrets.randbelow(16) + 1).encode()
            tail = tail[:-3] + b',"obfuscation":"' + pad + b'"}\n\n'
        return tail

    def end(self) -> bytes:
        """The usage chunk, when it was asked for, and [DONE]."""
        if not self._usage:
            return DONE
        fields: dict[str, Any] = {"usage": usage_object(self._run.usage)}
        if self._run.timing_headers():
            fields["timing"] = self._run.timing
        return self._prefix + b"]," + encode(fields)[1:] + b"\n\n" + DONE
