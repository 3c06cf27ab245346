"""What `kvmesh up` does between starting processes and serving: check, wait, announce, leave."""

import asyncio
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvmesh.cli.local import token_file
from kvmesh.cli.supervisor import ready
from kvmesh.cli.supervisor.console import LogStream
from kvmesh.cli.supervisor.errors import UpError
from kvmesh.cli.supervisor.plan import Spec, frontend_ports
from kvmesh.settings import Settings, redacted

if TYPE_CHECKING:
    from kvmesh.cli.supervisor.mesh_view import MeshView


class StartupGuide:
    """The steps of one start; `watch` is there once the mesh is followed on the bus."""

    def __init__(self, settings: Settings, specs: list[Spec], log: LogStream) -> None:
        self._settings = settings
        self._names = [spec.name for spec in specs if spec.role != "nats"]
        self._external = len(self._names) == len(specs)
        self._log = log
        self._started = time.monotonic()
        self.watch: MeshView | None = None

    async def after_nats(self) -> None:
        """Before the services start: is a given NATS server there, and is the past to go?"""
        if self._external or self._settings.up.reset_states:
            watch = await self._connected()
            if self._settings.up.reset_states:
                await watch.purge()

    async def settle(self) -> None:
        """Return once the mesh serves, and say so; raises UpError if it takes too long."""
        timeout_s = self._settings.up.ready_timeout_s
        watch = await self._connected()
        try:
            async with asyncio.timeout(timeout_s):
                await watch.follow()
                await watch.everyone(self._names)
                await self._until_healthy()
        except TimeoutError:
            missing = ", ".join(sorted(set(self._names) - watch.ready))
            reason = f"; no sign of {missing}" if missing else ""
            raise UpError(f"not ready within {timeout_s:g} s{reason} (see the log above)") from None
        self._log.note(f"ready after {time.monotonic() - self._started:.1f} s")
        self._announce(keyless=await self._is_keyless(watch))

    async def leave(self) -> None:
        """Before NATS stops."""
        if self.watch is not None:
            await self.watch.close()

    @property
    def _token_file(self) -> Path | None:
        return None if self._external else token_file(self._settings.up.state_dir)

    async def _connected(self) -> "MeshView":
        if self.watch is None:
            module = await asyncio.to_thread(import_module, "kvmesh.cli.supervisor.mesh_view")
            self.watch = await module.MeshView.connect(self._settings)
        return self.watch

    async def _until_healthy(self) -> None:
        if self._settings.up.workers and self._settings.up.routers:
            host = ready.reachable(self._settings.frontend.host)
            await ready.until_healthy(host, frontend_ports(self._settings))

    async def _is_keyless(self, watch: "MeshView") -> bool:
        frontend = self._settings.frontend
        return frontend.keys_bucket and frontend.keys_file is None and not await watch.has_keys()

    def _announce(self, keyless: bool) -> None:
        ports = frontend_ports(self._settings)
        if ports:
            host = ready.reachable(self._settings.frontend.host)
            nats = redacted(self._settings.nats.url)
            models = self.watch.models if self.watch is not None else []
            frontend = self._settings.frontend
            key = ready.KEY if frontend.keys_file or frontend.keys_bucket else "none"
            said = ready.announcement(host, ports, models, nats, key, self._token_file, keyless)
            self._log.announce(said)
