"""The services of the compose files as processes without containers.

Only the features of containers are replaced: one address and one port per container, the data
volumes, and the image's file system.
"""

import asyncio
import http.client
import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import forks
from support.nats import SERVER, free_port
from support.wait import PATIENCE_S, eventually

COMPOSE = Path(__file__).parents[2] / "compose"
MINE = "/run/kvmesh"
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def parsed(name: str, **variables: str) -> dict[str, Any]:
    """Parse a YAML file of the folder; variables get their defaults unless given."""
    text = (COMPOSE / name).read_text()
    tree: dict[str, Any] = substituted(yaml.safe_load(text), variables)
    return tree


def substituted(value: Any, variables: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: substituted(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [substituted(item, variables) for item in value]
    if not isinstance(value, str):
        return value
    return VARIABLE.sub(lambda match: variables.get(match[1], match[2]), value).replace("$$", "$")


def entrypoint() -> list[str]:
    """The image's entry point, from its Dockerfile."""
    lines = (COMPOSE / "Dockerfile").read_text().splitlines()
    arguments = [line.removeprefix("ENTRYPOINT ") for line in lines if line.startswith("ENTRY")]
    found: list[str] = json.loads(arguments[-1])
    return found


def mounted(service: dict[str, Any], target: str) -> str:
    """The folder of the volume that a container mounts at `target`: volume, then its part."""
    found = [v for v in service["volumes"] if isinstance(v, dict) and v["target"] == target]
    return f"{found[0]['source']}/{found[0]['volume']['subpath']}"


@dataclass
class Container:
    """One service of the file as a process: its command, environment and ports."""

    name: str
    service: dict[str, Any]
    nats: str
    ports: dict[str, int] = field(default_factory=dict)
    process: forks.Process | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {key: str(value) for key, value in self.service["environment"].items()}

    def port(self, container_port: str) -> int:
        """The port of this machine that replaces one of the container's."""
        return self.ports.setdefault(container_port, free_port())

    def start(self, log: Path, **more: str) -> None:
        """Start the process with variables `more` of the image; it appends to `log`."""
        env = {**self.environment, "PATH": os.environ["PATH"], **more}
        env["KVMESH_NATS_URL"] = env["KVMESH_NATS_URL"].replace("nats:4222", self.nats)
        for key in [key for key in env if key.endswith("PORT")]:
            env[key] = str(self.port(env[key]))
        for key in [key for key in env if key.endswith("DIRECTORY")]:
            env[key] = str(log.parent / env[key].lstrip("/"))
        own = log.parent / mounted(self.service, MINE)
        env = {key: value.replace(MINE, str(own)) for key, value in env.items()}
        command = [*entrypoint(), *self.service["command"]]
        with log.open("ab") as output:
            self.process = forks.start(command[1:], env, output, output)

    def healthy(self) -> bool:
        """Run the file's own health check; fails the test if the process has ended."""
        if self.process is not None and self.process.poll() is not None:
            pytest.fail(f"{self.name} ended with status {self.process.returncode}; see its log")
        kind, *asks, port, path = self.service["healthcheck"]["test"]
        assert (kind, asks[:2]) == ("CMD", ["bash", "-c"])
        command = [*asks, str(self.port(port)), path]
        checked = subprocess.run(command, capture_output=True, timeout=PATIENCE_S)
        return checked.returncode == 0

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(PATIENCE_S)


@contextmanager
def nats_of_compose(folder: Path) -> Iterator[str]:
    """Run the file's NATS server under the credentials that the file makes; yields its address."""
    services = parsed("compose.yaml")["services"]
    address = f"127.0.0.1:{free_port()}"
    made = [part.replace("/credentials", str(folder / "credentials")) for part in credentials()]
    done = forks.run(made, os.environ)
    assert done.returncode == 0, done.stderr
    own = folder / mounted(services["nats"], MINE)
    config = own / "nats.conf"
    config.write_text(
        config.read_text()
        .replace("0.0.0.0:4222", address)
        .replace("127.0.0.1:4222", address)
        .replace("127.0.0.1:8222", f"127.0.0.1:{free_port()}")
        .replace('"/data"', f'"{folder / "data"}"')
        .replace(MINE, str(own))
    )
    arguments = [part.replace(MINE, str(own)) for part in services["nats"]["command"]]
    with (folder / "nats.log").open("wb") as output:
        server = subprocess.Popen([SERVER, *arguments], stdout=output, stderr=output)
    try:
        yield address
    finally:
        server.terminate()
        server.wait(PATIENCE_S)


def credentials() -> list[str]:
    """Run the command that writes the credentials; the server gets an address, not a name."""
    command = parsed("compose.yaml")["services"]["credentials"]["command"]
    return [part.replace("--hosts=nats", "--hosts=127.0.0.1") for part in command]


@contextmanager
def running(
    names: Sequence[str], nats: str, folder: Path, variables: dict[str, str], **image: str
) -> Iterator[dict[str, Container]]:
    """Run services of the file under `variables`; `image` are those of their images."""
    services = parsed("compose.yaml", **variables)["services"]
    started = {name: Container(name, services[name], nats) for name in names}
    try:
        for container in started.values():
            container.start(folder / "log", **image)
        yield started
    finally:
        for container in reversed(started.values()):
            container.stop()


async def serve(containers: dict[str, Container], patience_s: float = PATIENCE_S) -> None:
    """Wait until all containers are healthy and the frontend answers."""
    for container in containers.values():
        await eventually(
            lambda c=container: asyncio.to_thread(c.healthy),  # type: ignore[misc]
            what=f"{container.name} is healthy",
            timeout=patience_s,
        )
    port = containers["frontend"].port("8000")
    await eventually(lambda: asyncio.to_thread(_answers, port))


def _answers(port: int) -> bool:
    """True if a completion of the listed model succeeds."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        connection.request("GET", "/v1/models")
        listed = json.loads(connection.getresponse().read())["data"]
        assert listed
        messages = [{"role": "user", "content": "Hello"}]
        body = {"model": listed[0]["id"], "messages": messages, "max_tokens": 4}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = json.loads(connection.getresponse().read())
    return bool(answer["usage"]["completion_tokens"] == 4)
