"""Real coding agents, run headless, and records of their requests and output."""

import asyncio
import io
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from support import streams

INSTALLED = Path(__file__).parents[2] / ".agents" / "node_modules" / ".bin"
KEY = "sk-of-the-tests"
OWN_HEADERS = {"host", "content-length", "transfer-encoding", "accept-encoding", "content-encoding"}


@dataclass(frozen=True)
class ClientResult:
    """The result of a client that has ended."""

    status: int
    output: str
    errors: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON objects that it printed, one per line."""
        lines = [line for line in self.output.splitlines() if line.startswith("{")]
        return [json.loads(line) for line in lines]


class Workspace:
    """An empty home and an empty git repository in which a client runs without other settings."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.repository = folder / "repository"
        self.home.mkdir(parents=True)
        self.repository.mkdir()
        author = ("-c", "user.name=Tester", "-c", "user.email=tester@localhost")
        for command in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "Begin"]):
            subprocess.run(["git", *command], cwd=self.repository, check=True)

    async def run(
        self, program: str | Path, *arguments: str, env: dict[str, str], timeout: float = 90.0
    ) -> ClientResult:
        """Run an installed client to its end; raises TimeoutError after killing it.

        A path is that of another program.
        """
        command = INSTALLED / program
        assert command.exists(), f"{command} is missing: run `make agents`"
        process = await asyncio.create_subprocess_exec(
            command,
            *arguments,
            cwd=self.repository,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), "TERM": "dumb", **env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), timeout)
        finally:
            _kill_group(process.pid)
        assert process.returncode is not None
        return ClientResult(process.returncode, output.decode(), errors.decode())


def _kill_group(pid: int) -> None:
    """Kill the client and all processes that it started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@dataclass(frozen=True)
class RecordedRequest:
    """A request as the client sent it, and the status and body that it received.

    `id` is the mesh's id of it, empty if the mesh gave none; `arrived` orders requests.
    """

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    status: int
    answer: bytes = field(repr=False)
    id: str = ""
    arrived: float = 0.0


Intervene = Callable[[str, dict[str, Any]], web.Response | None]


class Recorder:
    """A proxy between a client and the mesh that records requests and responses.

    At its end every whole stream must build an answer or fail, as `support.streams` has it.
    `intervene`, if set, may respond in place of the mesh; a response 429 sets `refused`. The mesh
    keeps the requests apart from those of another `tenant`.
    """

    def __init__(self, target: str, refused: asyncio.Event | None = None, tenant: str = "") -> None:
        self.requests: list[RecordedRequest] = []
        self.intervene: Intervene | None = None
        self.url = ""
        self._target = target
        self._streams: list[tuple[str, bytes]] = []
        self._refused = refused
        self._added = {"x-tenant-id": tenant} if tenant else {}

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Recorder"]:
        application = web.Application(client_max_size=1 << 26)
        application.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = "http://{}:{}".format(*runner.addresses[0])
        yield self
        await runner.cleanup()
        for path, sent in self._streams:
            streams.check(path, streams.parse(sent.decode()))

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        arrived = time.monotonic()
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        headers = {name.lower(): value for name, value in request.headers.items()}
        own = self.intervene(request.path, body) if self.intervene is not None else None
        if own is not None:
            answer = own.body if isinstance(own.body, bytes) else b""
            self.requests.append(
                RecordedRequest(request.path_qs, headers, body, own.status, answer)
            )
            return own
        return await self._forward(request, raw, body, headers, arrived)

    async def _forward(
        self,
        request: web.Request,
        raw: bytes,
        body: dict[str, Any],
        headers: dict[str, str],
        arrived: float,
    ) -> web.StreamResponse:
        url = self._target + request.path_qs
        kept = {k: v for k, v in headers.items() if k not in OWN_HEADERS} | self._added
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as session,
            session.request(request.method, url, data=io.BytesIO(raw), headers=kept) as answer,
        ):
            found = {k: v for k, v in answer.headers.items() if k.lower() not in OWN_HEADERS}
            response = web.StreamResponse(status=answer.status, headers=found)
            await response.prepare(request)
            parts = []
            async for part in answer.content.iter_any():
                parts.append(part)
                await response.write(part)
            answered, named = b"".join(parts), answer.headers.get("request-id", "")
            path, status = request.path_qs, answer.status
            seen = RecordedRequest(path, headers, body, status, answered, named, arrived)
            self.requests.append(seen)
            if answer.content_type == "text/event-stream":
                self._streams.append((path, answered))
            if answer.status == 429 and self._refused is not None:
                self._refused.set()
            await response.write_eof()
            return response

    def requests_to(self, path: str) -> list[RecordedRequest]:
        """Requests to one path, with any query."""
        return [request for request in self.requests if request.path.partition("?")[0] == path]


class LimitedMesh:
    """A mesh with a single key that allows one request at a time."""

    def __init__(self, url: str) -> None:
        self._url = url

    @asynccontextmanager
    async def at_limit(self) -> AsyncIterator[Recorder]:
        """Occupy the key until another request is rejected; yields a recorder for the other."""
        refused = asyncio.Event()
        async with (
            Recorder(self._url, refused).listening() as recorder,
            asyncio.TaskGroup() as tasks,
        ):
            occupied = asyncio.Event()
            tasks.create_task(self._occupy(occupied, refused))
            await occupied.wait()
            yield recorder

    async def _occupy(self, occupied: asyncio.Event, refused: asyncio.Event) -> None:
        body = {"model": "kvmesh-demo", "prompt": "Go on", "max_tokens": 100_000, "stream": True}
        body["ignore_eos"] = True
        headers = {"Authorization": f"Bearer {KEY}"}
        url = f"{self._url}/v1/completions"
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(url, json=body) as answer,
        ):
            assert answer.status == 200
            occupied.set()
            await asyncio.wait_for(refused.wait(), 60)
