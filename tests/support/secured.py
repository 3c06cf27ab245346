"""A NATS server under the configuration that `kvmesh secure` writes, and its users."""

import os
import shlex
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.runtime.service import bus_options
from kvmesh.settings import load
from support import forks
from support.nats import NatsServer
from support.wait import PATIENCE_S


def secure(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVMESH_")}
    return forks.run(("secure", str(folder), *arguments), env, PATIENCE_S)


class Users:
    """The users in a folder that the command has written."""

    folder: Path

    @property
    def users(self) -> list[str]:
        parts = sorted(path.name for path in self.folder.iterdir())
        return [part for part in parts if part not in ("authority", "nats")]

    def env(self, user: str) -> dict[str, str]:
        """The variables of a user's environment file."""
        lines = (self.folder / user / "env").read_text().splitlines()
        return dict(shlex.split(line)[0].split("=", 1) for line in lines)

    def options(self, user: str) -> BusOptions:
        return bus_options(load(None, self.env(user), {}).nats)

    @asynccontextmanager
    async def connected(self, user: str) -> AsyncIterator[Bus]:
        bus = await Bus.connect(self.options(user), user)
        try:
            yield bus
        finally:
            await bus.close()


class SecuredServer(Users, NatsServer):
    """A server with mutual TLS and nkeys or JWTs; its credentials are in `folder`."""

    def __init__(self, store: Path, *arguments: str) -> None:
        super().__init__(store)
        self.folder = store / "credentials"
        self._arguments = ("--port", str(self.port), "--hosts", "127.0.0.1", *arguments)

    @property
    def url(self) -> str:
        return f"tls://127.0.0.1:{self.port}"

    def config(self) -> str:
        done = secure(self.folder, *self._arguments)
        assert done.returncode == 0, done.stderr
        return f"{(self.folder / 'nats' / 'nats.conf').read_text()}\n{self.settings}\n"


class _Member(NatsServer):
    def __init__(self, folder: Path, store: Path) -> None:
        super().__init__(store)
        self._folder = folder

    def config(self) -> str:
        return (self._folder / "nats" / f"127.0.0.1-{self.port}" / "nats.conf").read_text()


class SecuredCluster(Users):
    """Three servers on this machine."""

    def __init__(self, store: Path, *arguments: str) -> None:
        self.folder = store / "credentials"
        self.servers = [_Member(self.folder, store / f"n{n}") for n in range(3)]
        addresses = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        done = secure(self.folder, "--cluster", addresses, *arguments)
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        for server in self.servers:
            server.start()

    def stop(self) -> None:
        for server in self.servers:
            server.kill()
