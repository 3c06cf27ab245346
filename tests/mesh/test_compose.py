"""The compose files, without a container engine: their very commands and environment as processes.

What containers would give is replaced and nothing else: one address and one port per container,
the data volumes, and the image's file system.
"""

import asyncio
import http.client
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.nats import SERVER, free_port
from support.wait import PATIENCE_S, eventually

from kvmesh.settings import load

COMPOSE = Path(__file__).parents[2] / "compose"
SERVICES = ("indexer", "router", "kvbm", "worker", "frontend")
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def parsed(name: str) -> dict[str, Any]:
    """A YAML file of the folder, its variables replaced by their defaults."""
    tree: dict[str, Any] = substituted(yaml.safe_load((COMPOSE / name).read_text()))
    return tree


def substituted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: substituted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [substituted(item) for item in value]
    return VARIABLE.sub(r"\2", value) if isinstance(value, str) else value


def entrypoint() -> list[str]:
    """What the image runs, from its Dockerfile."""
    lines = (COMPOSE / "Dockerfile").read_text().splitlines()
    arguments = [line.removeprefix("ENTRYPOINT ") for line in lines if line.startswith("ENTRY")]
    found: list[str] = json.loads(arguments[-1])
    return found


@dataclass
class Container:
    """One service of the file as a process: its command, environment and ports."""

    name: str
    service: dict[str, Any]
    nats: str
    ports: dict[str, int] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {key: str(value) for key, value in self.service["environment"].items()}

    def port(self, container_port: str) -> int:
        """The port of this machine that stands for one of the container's."""
        return self.ports.setdefault(container_port, free_port())

    def start(self, log: Path) -> None:
        env = {**self.environment, "PATH": os.environ["PATH"]}
        env["KVMESH_NATS_URL"] = env["KVMESH_NATS_URL"].replace("nats:4222", self.nats)
        for key in [key for key in env if key.endswith("PORT")]:
            env[key] = str(self.port(env[key]))
        for key in [key for key in env if key.endswith("DIRECTORY")]:
            env[key] = str(log.parent / env[key].lstrip("/"))
        command = [*entrypoint(), *self.service["command"]]
        command[:1] = [sys.executable, "-m", "kvmesh.cli.main"]
        with log.open("ab") as output:
            self.process = subprocess.Popen(command, env=env, stdout=output, stderr=output)

    def healthy(self) -> bool:
        """Run the file's own health check."""
        kind, executable, *arguments = self.service["healthcheck"]["test"]
        assert (kind, executable) == ("CMD", "python")
        moved = [re.sub(r"(127\.0\.0\.1):(\d+)", self._moved, text) for text in arguments]
        checked = subprocess.run([sys.executable, *moved], capture_output=True, timeout=PATIENCE_S)
        return checked.returncode == 0

    def _moved(self, match: re.Match[str]) -> str:
        return f"{match[1]}:{self.port(match[2])}"

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(PATIENCE_S)


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[str]:
    """The file's NATS server with its own configuration; yields its address."""
    command = parsed("compose.yaml")["services"]["nats"]["command"]
    address = f"127.0.0.1:{free_port()}"
    text = (COMPOSE / "nats.conf").read_text()
    config = tmp_path / "nats.conf"
    config.write_text(
        text.replace("port: 4222", f"listen: {address}")
        .replace("http_port: 8222", f"http: 127.0.0.1:{free_port()}")
        .replace("/data", str(tmp_path / "data"))
    )
    arguments = [part.replace("/etc/nats/nats.conf", str(config)) for part in command]
    with (tmp_path / "nats.log").open("wb") as output:
        server = subprocess.Popen([SERVER, *arguments], stdout=output, stderr=output)
    yield address
    server.terminate()
    server.wait(PATIENCE_S)


@pytest.fixture
def containers(nats: str, tmp_path: Path) -> Iterator[dict[str, Container]]:
    """Every service of the image, running."""
    services = parsed("compose.yaml")["services"]
    started = {name: Container(name, services[name], nats) for name in SERVICES}
    for container in started.values():
        container.start(tmp_path / "log")
    yield started
    for container in reversed(started.values()):
        container.stop()


async def test_the_same_commands_and_environment_serve(
    containers: dict[str, Container], tmp_path: Path
) -> None:
    for container in containers.values():
        await eventually(
            lambda c=container: asyncio.to_thread(c.healthy),  # type: ignore[misc]
            what=f"{container.name} is healthy",
        )
    published = containers["frontend"].service["ports"][0].rpartition(":")[2]
    port = containers["frontend"].port(published)
    await eventually(lambda: asyncio.to_thread(answers, port))
    lines = (tmp_path / "log").read_text().splitlines()
    assert all(json.loads(line)["message"] for line in lines)


def answers(port: int) -> bool:
    """Whether a completion of the model that the frontend lists comes back."""
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


def test_every_variable_is_a_setting_with_a_good_value() -> None:
    for name in SERVICES:
        container = Container(name, parsed("compose.yaml")["services"][name], "")
        settings = load(None, container.environment, {})
        assert settings.nats.url == "nats://nats:4222"
        assert container.service["command"] == [name]


def test_the_only_scaled_service_publishes_no_port() -> None:
    services = parsed("compose.yaml")["services"]
    assert [name for name in SERVICES if "ports" in services[name]] == ["frontend"]


def test_prometheus_asks_the_ports_that_the_services_open() -> None:
    services = parsed("compose.yaml")["services"]
    for job in parsed("prometheus.yml")["scrape_configs"]:
        (discovery,) = job["dns_sd_configs"]
        for name in discovery["names"]:
            settings = load(None, Container(name, services[name], "").environment, {})
            own = getattr(settings, name)
            assert discovery["port"] == (own.port if name == "frontend" else own.metrics_port)


def test_the_image_copies_all_that_the_build_needs() -> None:
    allowed = (COMPOSE / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in allowed if line.startswith("!")}
    root = COMPOSE.parent
    assert [name for name in kept if not (root / name).exists()] == []
    sources = shlex.split((root / "CMakeLists.txt").read_text(), comments=True)
    assert {"libs", "services", "tools", "pyproject.toml", "CMakeLists.txt"} <= kept
    assert all(word.split("/")[0] in kept for word in sources if word.startswith("libs/"))
