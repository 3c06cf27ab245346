"""The access log: one line per request, without any text of prompts, answers or secrets."""

import json
import logging
import re
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import msgspec
from msgspec import Struct

from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.generation.active_request import ActiveRequest
from kvmesh.frontend.namespaces import own_name
from kvmesh.frontend.pooling.run import PoolingRun
from kvmesh.runtime.line_writer import LineWriter

Format = Literal["off", "text", "json"]
CLIENT_CLOSED = 499  # status of requests whose client leaves before the response
MAX_SHOWN = 256  # characters of a path, or of the name of a model
_PLAIN = re.compile(r"[^\s\"\\=\x00-\x1f\x7f-\x9f]+")
_encode = msgspec.json.Encoder().encode


class AccessEntry(Struct, kw_only=True, omit_defaults=True):
    """One request: times in seconds, tokens as in the answer's usage.

    `time` is the Unix time of its end. `client` is the client's own id of the request. `key` is the
    name of the API key. `ttft` is missing if there was no token. `attempts` counts dispatches of
    the first choice. A stream that fails on the way has status 200 and `finish` "error".
    """

    time: float
    id: str
    client: str = ""
    method: str
    path: str
    api: str
    status: int
    model: str = ""
    tenant: str = ""
    key: str = ""
    session: str = ""
    prompt: int = 0
    cached: int = 0
    output: int = 0
    ttft: float | None = None
    total: float
    finish: str = ""
    worker: str = ""
    attempts: int = 0

    def describe(self, request: GenerateRequest) -> None:
        """Add what the request says of itself."""
        self.model = request.model[:MAX_SHOWN]
        self.tenant = request.tenant_name
        self.key = request.key_name
        self.session = own_name(request.hints.session or "")

    def add_answer(self, active: ActiveRequest | PoolingRun) -> None:
        """Add tokens, times and worker of a request that ran."""
        task, usage = active.tasks[0], active.usage()
        stream = task.stream
        self.prompt, self.cached, self.output = usage.prompt, usage.cached, usage.output
        if stream.first_token_at is not None:
            self.ttft = round(stream.first_token_at - active.started, 6)
        self.finish = "error" if CLIENT_CLOSED != self.status >= 400 else stream.finish or ""
        self.worker, self.attempts = stream.instance, stream.attempts


def configure(
    mode: Format, service: str, text: logging.Formatter, writer: LineWriter
) -> Callable[[AccessEntry], None] | None:
    """The function that logs an entry, None for no log; `text` formats lines of text.

    Lines go to `writer` and not to the process's log: `log.level` does not silence them, JSON lines
    are pure, and a reader that is slow or frozen delays no request.
    """
    if mode == "off":
        return None
    if mode == "text":
        record = logging.LogRecord("kvmesh.access", logging.INFO, "", 0, "", (), None)

        def line(entry: AccessEntry) -> str:
            record.created, record.msecs = entry.time, entry.time % 1 * 1000
            record.msg = as_text(entry)
            return text.format(record)

        return lambda entry: writer.put(line(entry))
    prefix = f'{{"log":"access","service":{json.dumps(service)},'
    return lambda entry: writer.put(prefix + _encode(entry)[1:].decode())


def as_text(entry: AccessEntry) -> str:
    """One line: method, path and status, then the fields that are known as NAME=VALUE."""
    fields = [entry.method, entry.path, str(entry.status), f"{entry.total:.3f}s"]
    if entry.ttft is not None:
        fields.append(f"ttft={entry.ttft:.3f}s")
    if entry.prompt:
        fields.append(f"tokens={entry.prompt}({entry.cached} cached)+{entry.output}")
    for name in ("finish", "model", "tenant", "key", "session", "worker"):
        value = getattr(entry, name)
        if value:
            fields.append(f"{name}={_quoted(value)}")
    if entry.attempts > 1:
        fields.append(f"attempts={entry.attempts}")
    fields.append(f"id={entry.id}")
    if entry.client:
        fields.append(f"client={entry.client}")
    return " ".join(fields)


def now() -> float:
    """The present time, to the millisecond."""
    return round(time.time(), 3)


@lru_cache(maxsize=1024)
def _quoted(value: str) -> str:
    """The value, as a JSON string if it could be read as several fields or lines."""
    return value if _PLAIN.fullmatch(value) else json.dumps(value)
