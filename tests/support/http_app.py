"""The HTTP application of a frontend in this process, without a bus: nothing behind it answers."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgspec
from aiohttp import web

from kvmesh.frontend.http.server import Runner
from kvmesh.frontend.service import FrontendService
from kvmesh.settings import Settings
from kvmesh.settings.schema import FrontendSettings

SHUTDOWN_S = 0.1


class HttpApp:
    """An application that listens on `port`, and its routes; `stopping` is set to stop it."""

    def __init__(
        self,
        app: web.Application,
        port: int,
        stopping: asyncio.Event,
        frontend: FrontendService,
    ) -> None:
        self.frontend = frontend
        self.port = port
        self.stopping = stopping
        found: dict[str, set[str]] = {}
        for route in app.router.routes():
            if route.resource is not None and route.method != "*":
                found.setdefault(route.resource.canonical, set()).add(route.method)
        self.routes: Mapping[str, frozenset[str]] = {p: frozenset(m) for p, m in found.items()}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def _table(key: str) -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[[key]]\nname = "{key}"\nsha256 = "{digest}"\n'


@asynccontextmanager
async def http_app(folder: Path, *keys: str, **settings: Any) -> AsyncIterator[HttpApp]:
    """Serve with API keys of these secrets, or without; `settings` are the frontend's."""
    if keys:
        file = folder / "keys.toml"
        digests = [hashlib.sha256(key.encode()).hexdigest() for key in keys]
        tables = [
            f'[[key]]\nname = "{k}"\nsha256 = "{d}"' for k, d in zip(keys, digests, strict=True)
        ]
        file.write_text("\n".join(tables))
        settings["keys_file"] = file
    service = MagicMock()
    service.bus.promptness.behind_s = 0.0
    service.stopping = asyncio.Event()
    service.settings = msgspec.structs.replace(
        Settings(), frontend=FrontendSettings(access_log="off", **settings)
    )
    frontend = FrontendService(service)
    await frontend.authenticator.open()
    app = frontend.application()
    app.on_shutdown.clear()
    runner = Runner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield HttpApp(app, runner.addresses[0][1], service.stopping, frontend)
    finally:
        await runner.cleanup()
