"""An agent's loop of tool calls over a WebSocket beside the same over HTTP, in turns.

Both clients send the body of a coding agent: instructions, ten tools, a task, then a result of each
call. Over HTTP each request has the whole history, as agents send it; over a WebSocket it has what
is new. The script prints CPU of the frontend and of the whole mesh, and bytes on the client's
connection, by loop. Clients speak both protocols on bare sockets and are not counted.
"""

import base64
import json
import os
import secrets
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from common import Report, measure, median, parser
from local_mesh import Mesh, running_mesh

Json = dict[str, Any]
SENTENCE = "Read the file before you change it, and say what you did. "
CALL = '<tool_call>\n{"name": "tool_3", "arguments": {"path": "a.py", "text": "x"}}\n</tool_call>'
ANSWER = f"<think>\n{SENTENCE * 3}\n</think>\n\nI look at the file.\n{CALL}"
TOOLS: list[Json] = [
    {
        "type": "function",
        "name": f"tool_{number}",
        "description": SENTENCE * 20,
        "parameters": {
            "type": "object",
            "properties": {
                name: {"type": "string", "description": SENTENCE * 2} for name in ("path", "text")
            },
        },
    }
    for number in range(10)
]
LINE = "def main() -> None:\n    print('Hello')\n"
LENGTH_2, LENGTH_8, COMPRESSED, TAIL = 126, 127, 0x40, b"\x00\x00\xff\xff"  # of frames
TIMEOUT_S = 60.0


class Wire:
    """A connection that counts its bytes."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self._left = b""
        self.sent = self.received = 0

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)
        self.sent += len(data)

    def until(self, end: bytes) -> bytes:
        """All up to `end`, and it."""
        while end not in self._left:
            self._more()
        found, _, self._left = self._left.partition(end)
        return found + end

    def exactly(self, size: int) -> bytes:
        while len(self._left) < size:
            self._more()
        found, self._left = self._left[:size], self._left[size:]
        return found

    def _more(self) -> None:
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the frontend has closed the connection")
        self.received += len(data)
        self._left += data

    def close(self) -> None:
        self._socket.close()


class HttpLoop:
    """A request with the whole history for each step, on one connection that stays open."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._history: list[Json] = []

    def step(self, fixed: Json, new: list[Json]) -> Json:
        self._history += new
        body = json.dumps({**fixed, "stream": True, "input": self._history}).encode()
        head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        self._wire.send(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        self._wire.until(b"\r\n\r\n")
        events = b""
        while size := int(self._wire.until(b"\r\n"), 16):
            events += self._wire.exactly(size)
            self._wire.exactly(2)
        self._wire.exactly(2)
        response = last_response(json.loads(events.strip().rpartition(b"data: ")[2]))
        self._history += response["output"]
        return response


class SocketLoop:
    """A `response.create` with what is new for each step."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._previous: str | None = None
        self._inflate = zlib.decompressobj(wbits=-15)
        key = base64.b64encode(os.urandom(16)).decode()
        names = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        names += "Sec-WebSocket-Extensions: permessage-deflate\r\n"  # as Codex
        head = f"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\n{names}"
        wire.send(f"{head}Sec-WebSocket-Key: {key}\r\n\r\n".encode())
        wire.until(b"\r\n\r\n")

    def step(self, fixed: Json, new: list[Json]) -> Json:
        event = {"type": "response.create", **fixed, "input": new}
        text = json.dumps({**event, "previous_response_id": self._previous}).encode()
        long = len(text) >= 1 << 16
        size = bytes([0x80 | (LENGTH_8 if long else LENGTH_2)]) + len(text).to_bytes(
            8 if long else 2, "big"
        )
        self._wire.send(b"\x81" + size + bytes(4) + text)  # masked by zeros
        while True:
            bits, length = self._wire.exactly(2)
            if length >= LENGTH_2:
                wide = 2 if length == LENGTH_2 else 8
                length = int.from_bytes(self._wire.exactly(wide), "big")
            data = self._wire.exactly(length)
            if bits & COMPRESSED:
                data = self._inflate.decompress(data + TAIL)
            if b'"response.completed"' in data[:64] or b'"error"' in data[:64]:
                response = last_response(json.loads(data))
                self._previous = response["id"]
                return response


def last_response(event: Json) -> Json:
    if event["type"] != "response.completed":
        raise RuntimeError(f"the response ended by {event}")
    found: Json = event["response"]
    return found


class Sample(NamedTuple):
    """One loop: CPU seconds, bytes, and the tokens of its last prompt."""

    frontend: float
    mesh: float
    sent: int
    received: int
    tokens: int

    @property
    def bytes(self) -> int:
        return self.sent + self.received


def loop(
    mesh: Mesh, make: Callable[[Wire], HttpLoop | SocketLoop], steps: int, size: int
) -> Sample:
    """One conversation of its own, with so many calls of tools."""
    task = f"{secrets.token_hex(8)} {SENTENCE * 10}"
    fixed: Json = {
        "model": "kvmesh-demo",
        "instructions": SENTENCE * 100,
        "tools": TOOLS,
        "store": False,
    }
    wire = Wire(mesh.ports[0])
    with measure(mesh.pids) as use:
        agent = make(wire)
        response = agent.step(fixed, [{"role": "user", "content": task}])
        for _ in range(steps):
            calls = [item["call_id"] for item in response["output"] if "call_id" in item]
            results = [
                {
                    "type": "function_call_output",
                    "call_id": call,
                    "output": LINE * (size // len(LINE)),
                }
                for call in calls
            ]
            response = agent.step(fixed, results)
    wire.close()
    tokens = response["usage"]["input_tokens"]
    return Sample(use.of("frontend"), use.total_s, wire.sent, wire.received, tokens)


@contextmanager
def scripted() -> Iterator[Mesh]:
    """A mesh whose engine answers everything by a call."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.jsonl"
        script.write_text(json.dumps({"text": ANSWER}) + "\n")
        with running_mesh(
            workers=2, KVMESH_MOCK_SCRIPT=str(script), KVMESH_FRONTEND_ACCESS_LOG="off"
        ) as mesh:
            yield mesh


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--steps", type=int, default=20, help="calls of tools in a loop")
    arguments.add_argument("--result-bytes", type=int, default=4000, help="size of a tool's result")
    arguments.add_argument("--rounds", type=int, default=7)
    options = arguments.parse_args()
    makers: tuple[Callable[[Wire], HttpLoop | SocketLoop], ...] = (HttpLoop, SocketLoop)
    pairs: list[tuple[Sample, Sample]] = []
    with scripted() as mesh:
        for make in makers:
            loop(mesh, make, options.steps, options.result_bytes)
        for number in range(options.rounds):
            order = makers if number % 2 else makers[::-1]
            found = {make: loop(mesh, make, options.steps, options.result_bytes) for make in order}
            pairs.append((found[HttpLoop], found[SocketLoop]))
    report = Report(f"A loop of {options.steps} calls over a WebSocket, beside HTTP", "HTTP")
    rows: list[tuple[str, str, float, Callable[[Sample], float]]] = [
        ("CPU of the frontend", "ms", 1e3, lambda sample: sample.frontend),
        ("CPU of the mesh", "ms", 1e3, lambda sample: sample.mesh),
        ("bytes", "KB", 1e-3, lambda sample: sample.bytes),
        ("bytes sent by the client", "KB", 1e-3, lambda sample: sample.sent),
        ("tokens of the last prompt", "", 1, lambda sample: sample.tokens),
    ]
    ratios = {}
    for name, unit, scale, of in rows:
        http, ws = ([scale * of(pair[side]) for pair in pairs] for side in (0, 1))
        ratios[name] = median(b / a for a, b in zip(http, ws, strict=True))
        report.add_runs(name, ws, unit, f"{median(http):.4g}", f"ratio {ratios[name]:.2f}")
    cpu, size = ratios["CPU of the frontend"], ratios["bytes"]
    report.finish(
        f"over a WebSocket: {cpu:.2f} of the frontend's CPU, {size:.2f} of the bytes", options.json
    )


if __name__ == "__main__":
    main()
