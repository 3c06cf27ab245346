"""A mesh of two frontends with tenants, and the conditions under which its streams are whole."""

import asyncio
import hashlib
import json
import signal
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.cards import read_cards
from kvmesh.bus.messages import Role
from kvmesh.bus.storage.buckets import keys_bucket, read_bucket
from kvmesh.bus.streams.keeper import stream_names
from support.mesh import Mesh
from support.nats import free_port
from support.wait import PATIENCE_S, eventually

MODEL = "kvmesh-demo"
WHOLE_S = 30.0  # after NATS is well
_numbers = count()


def sha(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


@dataclass
class Tenants:
    """Calls of the key `one`, of one tenant, to both frontends of a mesh with one worker.

    `started` are the frontends by name, with their ports; `before` is the configuration of each
    stream.
    """

    mesh: Mesh
    bus: Bus
    started: dict[str, int] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)

    async def start(self) -> None:
        keys = self.mesh.folder / "keys.toml"
        keys.write_text(
            f'[[key]]\nname = "one"\ntenant = "t"\nscopes = ["cache"]\nsha256 = "{sha("one")}"\n'
        )
        self.mesh.env["KVMESH_FRONTEND_KEYS_FILE"] = str(keys)
        self.mesh.env["KVMESH_FRONTEND_KEYS_BUCKET"] = "true"
        await (await keys_bucket(self.bus)).put("bob", key_entry("bob"))
        self.mesh.start("indexer", "indexer-0", KVMESH_INDEXER_SNAPSHOT_THRESHOLD="1")
        self.mesh.start("router", "router-0")
        self.mesh.start("worker", "worker-0", KVMESH_MOCK_SPEEDUP="100")
        for name in ("frontend-0", "frontend-1"):
            self.start_frontend(name)
        await self.ready()
        self.before = await self.configurations()

    def start_frontend(self, name: str) -> None:
        """Start a frontend, or start one again at its port."""
        port = self.started.setdefault(name, free_port())
        metrics = {"KVMESH_FRONTEND_METRICS_PORT": str(free_port())} if port else {}
        self.mesh.start("frontend", name, KVMESH_FRONTEND_PORT=str(port), **metrics)

    async def restart(self, name: str, number: int = signal.SIGKILL) -> None:
        """End a frontend and start it again."""
        self.mesh.kill(name, number)
        self.start_frontend(name)
        await self.ready()

    def log(self, name: str) -> str:
        """The log of a process so far."""
        return (self.mesh.folder / f"{name}.log").read_text()

    async def ready(self) -> None:
        for name in self.started:
            await eventually(partial(self._is_ready, name), what=f"{name} is ready")

    def _is_ready(self, name: str) -> bool:
        try:
            return self.call(name, "/health", method="GET")[0] == 200
        except OSError:
            return False

    def status_of(self, key: str) -> int:
        """The status of a request with this key."""
        return self.call("frontend-0", "/v1/models", method="GET", key=key)[0]

    def call(
        self,
        frontend: str,
        path: str,
        body: dict[str, Any] | None = None,
        method: str = "POST",
        key: str = "one",
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps({"model": MODEL, **body}).encode()
        url = f"http://127.0.0.1:{self.started[frontend]}{path}"
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def cached(self, frontend: str, text: str) -> int:
        """Cached tokens of a prompt, which then is cached."""
        messages = [{"role": "user", "content": text}]
        status, answer = self.call(
            frontend, "/v1/chat/completions", {"messages": messages, "max_tokens": 1}
        )
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def configurations(self) -> dict[str, Any]:
        """The configuration of each stream of the mesh, by its name."""
        names = [n for n in await stream_names(self.bus) if self.bus.subjects.owns(n)]
        infos = await asyncio.gather(*(self.bus.js.stream_info(name) for name in names))
        return {info.config.name or "": info.config.evolve(metadata=None) for info in infos}

    async def whole(self) -> float:
        """Wait until everything is as before; the seconds that this took."""
        began = time.monotonic()
        await eventually(self._is_whole, timeout=WHOLE_S, what="the mesh is whole")
        return time.monotonic() - began

    async def _is_whole(self) -> bool:
        now = await self.configurations()
        assert now.keys() == self.before.keys(), now.keys() ^ self.before.keys()
        differs = [name for name in self.before if now.get(name) != self.before[name]]
        assert not differs, [(now.get(name), self.before[name]) for name in differs]
        for name in self.before:  # a damaged one refuses this, or does not answer
            if not self.before[name].deny_purge:
                await self.bus.js.purge_stream(name, subject=f"{name}.nothing")
        models = await self.bus.js.stream_info(f"OBJ_{self.bus.subjects.model_bucket}")
        assert models.state.bytes, "the model files are stored"
        secret = await read_bucket(self.bus, self.bus.subjects.secrets_bucket)
        assert secret, "the secret is stored"
        return await asyncio.to_thread(self.serves_alike)

    async def warnings(self, text: str) -> list[str]:
        """Wait for warnings with a text on the cards of processes."""

        async def found() -> list[str]:
            cards = await read_cards(self.bus, *Role)
            return [w for card in cards for w in card.warnings if text in w]

        return await eventually(found, what=f"a card warns: {text}")

    def serves_alike(self) -> bool:
        """Each frontend stores what the others read, and finds what the others have cached."""
        names = list(self.started)
        for name, other in zip(names, names[1:] + names[:1], strict=True):
            text = f"Prompt {next(_numbers)} of this tenant, and of no other one. " * 12
            self.cached(name, text)
            assert self.cached(other, text) > 0, f"{other} finds nothing of {name}"
            body = {"input": "Hi", "store": True, "max_output_tokens": 4}
            status, made = self.call(name, "/v1/responses", body)
            assert (status, made.get("store")) == (200, True), made
            path = f"/v1/responses/{made['id']}"
            assert self.call(other, path, method="GET")[0] == 200
            assert self.call(other, path, method="DELETE")[0] == 200
            assert self.call(name, path, method="GET")[0] == 404
            pin = {"messages": [{"role": "user", "content": text}], "id": name, "ttl": "10m"}
            status, pinned = self.call(name, "/v1/cache/pins", pin)
            assert status == 200, pinned
            assert name in str(self.call(other, "/v1/cache/pins", method="GET")[1])
        return True


def key_entry(name: str) -> bytes:
    """An API key as `kvmesh keys` stores it; the secret is its name."""
    return json.dumps({"name": name, "sha256": sha(name)}).encode()
