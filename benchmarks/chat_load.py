"""Load generators for chat completions whose own cost stays small beside the server's.

`request_once` is a blocking socket with TCP_QUICKACK for latencies; `drive` keeps many streams
open from one event loop for throughput. Neither parses what it does not measure.
"""

import asyncio
import random
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from kvmesh.demo.corpus import words

MODEL = "kvmesh-demo"
LONGEST_S = 300.0
USAGE = re.compile(rb'"(prompt|completion)_tokens": ?(\d+)')
TAIL = 1024  # bytes at the end of an answer that hold its usage
TCP_QUICKACK = getattr(socket, "TCP_QUICKACK", None)


class LoadError(Exception):
    """The server gave an unexpected response; the message quotes it."""


def chat(messages: list[dict[str, str]], tokens: int, stream: bool) -> bytes:
    """A request body that generates exactly `tokens` tokens and asks for their count."""
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": tokens}
    body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return msgspec.json.encode({**body, "ignore_eos": True})


def user(text: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def prompts(seed: int, tokens: int) -> Iterator[str]:
    """Endless distinct texts of `tokens` tokens of the demo model."""
    rng = random.Random(seed)
    known = words()
    while True:
        yield "".join(f" {rng.choice(known)}" for _ in range(tokens))


def post(url: str, body: bytes) -> bytes:
    place = urlsplit(url)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass
class Timing:
    """Seconds of one response: to the first token, to the end, and between pieces; its usage."""

    first_s: float = 0.0
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0

    def count(self, tail: bytes) -> None:
        """Take the numbers of tokens from the end of the answer; 0 where it has none."""
        usage = {name: int(number) for name, number in USAGE.findall(tail)}
        self.prompt_tokens = usage.get(b"prompt", 0)
        self.output_tokens = usage.get(b"completion", 0)


class Connection:
    """One keep-alive connection with blocking calls and immediate acknowledgements."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._url = url
        self._socket = socket.create_connection((place.hostname or "", place.port or 80), 60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self._socket.close()

    def stream(self, body: bytes) -> Timing:
        """Send one streaming request and time its answer. Raises LoadError."""
        data = post(self._url, body)
        timing = Timing()
        started = time.perf_counter()
        self._socket.sendall(data)
        seen = b""
        while not ended(seen):
            if TCP_QUICKACK is not None:
                self._socket.setsockopt(socket.IPPROTO_TCP, TCP_QUICKACK, 1)
            piece = self._socket.recv(1 << 16)
            if not piece:
                raise LoadError(f"the server hung up: {seen[-200:]!r}")
            seen += piece
            check(seen)
            if not timing.first_s and has_token(seen):
                timing.first_s = time.perf_counter() - started
        timing.total_s = time.perf_counter() - started
        timing.count(seen[-TAIL:])
        return timing


def check(seen: bytes) -> None:
    """Raises LoadError unless the response has status 200."""
    if len(seen) > 12 and not seen.startswith(b"HTTP/1.1 200"):
        raise LoadError(seen[:400].decode(errors="replace"))


def ended(seen: bytes) -> bool:
    return seen.endswith(b"0\r\n\r\n")


def has_token(seen: bytes) -> bool:
    """True if a piece of the response with text has arrived."""
    start = seen.find(b'"content":"')
    while start >= 0:
        if seen[start + 11 : start + 12] != b'"':
            return True
        start = seen.find(b'"content":"', start + 11)
    return b'"reasoning_content":"' in seen


class _Stream(asyncio.Protocol):
    """Sends requests one after another on one connection until `bodies` ends."""

    def __init__(self, url: str, bodies: Iterator[bytes], timings: list[Timing]) -> None:
        self._url = url
        self._bodies = bodies
        self._timings = timings
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        body = next(self._bodies, None)
        if body is None:
            self._transport.close()
            return
        self._timing = Timing()
        self._head, self._need, self._tail = b"", -1, b""
        self._started = self._latest = time.perf_counter()
        self._transport.write(post(self._url, body))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._need == -1:
            self._head += data
            data = self._read_head()
        elif self._need:
            self._need -= len(data)
        if not self._timing.first_s and b'"content":"' in data:
            self._timing.first_s = now - self._started
        self._timing.gaps_s.append(now - self._latest)
        self._latest = now
        self._tail = (self._tail + data)[-TAIL:]
        if self._need <= 0 and (self._need == 0 or ended(self._tail)):
            self._timing.total_s = now - self._started
            self._timing.count(self._tail)
            self._timings.append(self._timing)
            self._send()

    def _read_head(self) -> bytes:
        """Set -2 for a chunked body, else the number of its bytes still to come.

        Returns the part of the body that has come: a head may end like a chunked body.
        """
        head, found, rest = self._head.partition(b"\r\n\r\n")
        if not found:
            return b""
        if not head.startswith(b"HTTP/1.1 200"):
            self._fail(LoadError(self._head[:400].decode(errors="replace")))
            return b""
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = fields.get(b"content-length")
        self._need = int(length) - len(rest) if length else -2
        return rest

    def _fail(self, error: LoadError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is not None or next(self._bodies, None) is not None:
            self.done.set_exception(LoadError(f"the server hung up: {error}"))
        else:
            self.done.set_result(None)


async def drive(url: str, bodies: Iterator[bytes], concurrency: int) -> list[Timing]:
    """Send all `bodies` over `concurrency` connections; a timing per answer. Raises LoadError."""
    place = urlsplit(url)
    loop = asyncio.get_running_loop()
    timings: list[Timing] = []
    streams = []
    for _ in range(concurrency):
        _, stream = await loop.create_connection(
            lambda: _Stream(url, bodies, timings), place.hostname or "", place.port or 80
        )
        streams.append(stream.done)
    async with asyncio.timeout(LONGEST_S):
        await asyncio.gather(*streams)
    return timings
