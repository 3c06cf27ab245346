"""Recorded sessions of real agents: their files, and their replay against a mesh.

`data/agent_sessions` holds a file per client, one request per line, and the mock engine's script of
all of them; `make agents` writes them anew (docs/clients.md). Ids that the mesh gave in its answers
stand in later bodies as ⟦REQUEST.NAME.N⟧: the N-th distinct value of the key NAME in the answer to
REQUEST. A replay puts its own ids there.
"""

import json
import lzma
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

FOLDER = Path(__file__).with_name("data") / "agent_sessions"
SCRIPT = "script.jsonl.xz"
ID = re.compile(r"[a-z]+[_-][0-9a-f]{20,}")
ID_KEYS = ("id", "call_id", "response_id")
PLACEHOLDER = re.compile(r"⟦[0-9]+\.[a-z_]+\.[0-9]+⟧")
BLOCK = 16  # tokens, the default of the engines


class ReplayError(Exception):
    """A mesh answered a recorded request otherwise than it did when the session was recorded."""


class Recorded(msgspec.Struct, frozen=True):
    """One request, the raw text that answered it, and the index of the request it continues."""

    path: str
    headers: dict[str, str]
    body: msgspec.Raw
    answer: str
    previous: int | None = None


@dataclass(frozen=True)
class Session:
    """The requests of one client, in order."""

    name: str
    requests: list[Recorded]

    def longest(self) -> list[int]:
        """The requests of its longest conversation."""
        chains: list[list[int]] = []
        for index, request in enumerate(self.requests):
            before = [] if request.previous is None else chains[request.previous]
            chains.append([*before, index])
        return max(chains, key=len)


def sessions(names: Iterable[str] = ()) -> list[Session]:
    """The recorded sessions, or those whose names begin with one of `names`."""
    files = [file for file in sorted(FOLDER.glob("*.jsonl.xz")) if file.name != SCRIPT]
    found = [(file.name.partition(".")[0], file) for file in files]
    wanted = tuple(names) or ("",)
    return [Session(name, read(file)) for name, file in found if name.startswith(wanted)]


def read(file: Path) -> list[Recorded]:
    with lzma.open(file, "rb") as lines:
        return [msgspec.json.decode(line, type=Recorded) for line in lines]


def script() -> bytes:
    """The mock engine's script."""
    return lzma.decompress((FOLDER / SCRIPT).read_bytes())


def answer_ids(index: int, answer: bytes) -> dict[str, str]:
    """The ids in the answer to request `index`, by the placeholder of each."""
    found: dict[str, list[str]] = {key: [] for key in ID_KEYS}
    for key, value in _strings(_objects(answer.decode())):
        if key in found and ID.fullmatch(value) and value not in found[key]:
            found[key].append(value)
    return {
        f"⟦{index}.{key}.{number}⟧": value
        for key, values in found.items()
        for number, value in enumerate(values)
    }


def _objects(text: str) -> list[Any]:
    """The JSON objects of an answer, streamed or not."""
    if text.lstrip().startswith("{"):
        return [json.loads(text)]
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def _strings(content: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(content, str):
        yield name, content
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from _strings(value, key)
    elif isinstance(content, list):
        for value in content:
            yield from _strings(value, name)


class Replay:
    """One replay of a session; a mesh keeps it apart from those of other tenants."""

    def __init__(self, session: Session, url: str, tenant: str, padding: str = "") -> None:
        """`padding` lengthens the system prompt of requests to `/v1/messages`."""
        self._session = session
        self._url = url
        self._tenant = tenant
        self._padding = padding
        self._ids: dict[str, str] = {}

    async def run(self, client: aiohttp.ClientSession) -> list[str]:
        """Send all requests, one after another; the mesh's ids of them. Raises ReplayError."""
        return [await self.send(client, index) for index in range(len(self._session.requests))]

    async def send(self, client: aiohttp.ClientSession, index: int) -> str:
        """Send one request; the mesh's id of it. Raises ReplayError."""
        recorded = self._session.requests[index]
        headers = {**recorded.headers, "content-type": "application/json"}
        headers["x-tenant-id"] = self._tenant
        body = self._body(recorded)
        async with client.post(self._url + recorded.path, data=body, headers=headers) as answer:
            content = await answer.read()
            if answer.status != 200:
                where = f"request {index} of {self._session.name}"
                raise ReplayError(f"{where}: {answer.status} {content[:500]!r}")
            self._ids |= answer_ids(index, content)
            return answer.headers["request-id"]

    def _body(self, recorded: Recorded) -> bytes:
        text = PLACEHOLDER.sub(self._own, bytes(recorded.body).decode())
        if not self._padding:
            return text.encode()
        body = msgspec.json.decode(text)
        body["system"].append({"type": "text", "text": self._padding})
        return msgspec.json.encode(body)

    def _own(self, found: re.Match[str]) -> str:
        if found[0] not in self._ids:
            raise ReplayError(f"{self._session.name}: no answer has an id for {found[0]}")
        return self._ids[found[0]]
