"""Start hooks of `kvmesh up`: check NATS, wait until ready, announce the addresses, disconnect."""

import asyncio
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvmesh.bus.errors import BusError, cause
from kvmesh.cli.local import token_file
from kvmesh.cli.supervisor import ready
from kvmesh.cli.supervisor.console import LogStream
from kvmesh.cli.supervisor.errors import UpError
from kvmesh.cli.supervisor.plan import CARDLESS, ProcessSpec, frontend_ports
from kvmesh.cli.supervisor.starts.watch import StartWatch
from kvmesh.settings import Settings, redacted

if TYPE_CHECKING:
    from kvmesh.cli.rolling.replacements import Replacements
    from kvmesh.cli.supervisor.mesh import SupervisedMesh
    from kvmesh.cli.supervisor.mesh_view import MeshView
    from kvmesh.cli.supervisor.operator import FleetOperator

SERVING = ("frontend", "router", "worker")  # of these, requests need one each


class StartupGuide:
    """The hooks of one start; `view` is set once connected to the bus."""

    def __init__(self, settings: Settings, specs: list[ProcessSpec], log: LogStream) -> None:
        self._settings = settings
        self._names = {spec.name for spec in specs}  # without those that have ended for good
        self._cardless = {spec.name for spec in specs if spec.role in CARDLESS}
        names = ({s.name for s in specs if s.role == role} for role in SERVING)
        self._serving = [each for each in names if each]
        self._external = not any(spec.role == "nats" for spec in specs)
        self._log = log
        self._started = time.monotonic()
        self._watch = StartWatch(settings.up.ready_timeout_s, log)
        self._operator: FleetOperator | None = None
        self._replacements: Replacements | None = None
        self.view: MeshView | None = None

    async def after_nats(self) -> None:
        """Check that an external NATS server is reachable; purge old state if requested."""
        self._watch.open()
        if self._external or self._settings.up.reset_states:
            view = await self._connect()
            if self._settings.up.reset_states:
                await self._watch.in_time(view.purge(), "JetStream")

    async def until_ready(self, mesh: "SupervisedMesh") -> None:
        """Wait until the mesh serves and announce it; raises UpError if it makes no progress.

        The mesh then starts and stops workers as a planner demands.
        """
        self._watch.mesh = mesh
        view = await self._connect()
        await self._watch.in_time(view.follow())
        await self._watch.in_time(self._operate(mesh, view), "the wanted fleet")
        try:
            await self._until_complete(view)
        except UpError as error:
            if not self.serves():
                raise
            self._log.note(f"the mesh serves, but is {error}", "W")
        else:
            self._log.note(f"ready after {time.monotonic() - self._started:.1f} s")
        self._announce(keyless=await self._is_keyless(view))
        if self._operator is not None:
            self._operator.start()
        await self._obey_rolls(mesh, view)

    async def _until_complete(self, view: "MeshView") -> None:
        """Return once every process that is to join has joined, and what serves HTTP is healthy."""
        await self._watch.in_time(view.until_present(lambda: self._names - self._cardless))
        for name, host, port in self._health_checks():
            if name in self._names:
                work = ready.until_healthy(host, port)
                await self._watch.in_time(work, f"{ready.url(host, port)}/health")

    def serves(self) -> bool:
        served = self.view.have_served if self.view is not None else set()
        return bool(self._serving) and all(served & names for names in self._serving)

    def retired(self, name: str) -> None:
        self._names.discard(name)
        if self.view is not None:
            self.view.look_again()

    async def before_stop(self) -> None:
        """Disconnect before NATS stops."""
        await self._watch.close()
        if self._replacements is not None:
            await self._replacements.close()
        if self._operator is not None:
            await self._operator.close()
        if self.view is not None:
            await self.view.close()

    @property
    def _token_file(self) -> Path | None:
        return None if self._external else token_file(self._settings.up.state_dir)

    async def _connect(self) -> "MeshView":
        if self.view is None:
            module = await asyncio.to_thread(import_module, "kvmesh.cli.supervisor.mesh_view")
            self.view = await module.MeshView.connect(self._settings, once=self._external)
            self._watch.attach(self.view)
        return self.view

    async def _operate(self, mesh: "SupervisedMesh", view: "MeshView") -> None:
        """Become the operator of the mesh, unless its NATS server may have one elsewhere."""
        if self._external and not self._settings.up.planner:
            return
        module = await asyncio.to_thread(import_module, "kvmesh.cli.supervisor.operator")
        self._operator = module.FleetOperator(view.bus, self._settings, mesh, self._log.note)
        try:
            await self._operator.open()
        except BusError as error:
            raise UpError(f"cannot follow the wanted fleet: {cause(error)}") from error

    async def _obey_rolls(self, mesh: "SupervisedMesh", view: "MeshView") -> None:
        """Replace processes from now on, as `kvmesh fleet roll` orders."""
        module = await asyncio.to_thread(import_module, "kvmesh.cli.rolling.replacements")
        self._replacements = module.Replacements(view, self._settings, mesh, self._log.note)
        try:
            await self._replacements.open()
        except BusError as error:
            self._log.note(f"kvmesh fleet roll cannot replace processes here: {cause(error)}", "W")

    def _health_checks(self) -> list[tuple[str, str, int]]:
        """The processes, hosts and ports whose health shows that the mesh serves."""
        own, host = self._settings.dashboard, ready.reachable(self._settings.frontend.host)
        serves = self._settings.up.workers and self._settings.up.routers
        ports = enumerate(frontend_ports(self._settings)) if serves else ()
        checks = [(f"frontend-{number}", host, port) for number, port in ports]
        if self._settings.up.dashboard:
            checks.append(("dashboard-0", ready.reachable(own.host), own.port))
        return checks

    async def _is_keyless(self, view: "MeshView") -> bool:
        frontend = self._settings.frontend
        return frontend.keys_bucket and frontend.keys_file is None and not await view.has_keys()

    def _announce(self, keyless: bool) -> None:
        ports = frontend_ports(self._settings)
        if ports:
            host = ready.reachable(self._settings.frontend.host)
            nats = redacted(self._settings.nats.url)
            models = self.view.models if self.view is not None else []
            frontend = self._settings.frontend
            key = ready.KEY if frontend.keys_file or frontend.keys_bucket else "none"
            own = self._settings.dashboard
            page = ready.url(own.host, own.port) if self._settings.up.dashboard else ""
            text = ready.announcement(
                host, ports, models, nats, key, self._token_file, keyless, page
            )
            self._log.announce(text)
