"""The commands and environment of the compose files, run as processes without containers.

The test replaces only the features of containers: one address and one port per container,
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

from kvmesh.bus.permissions import inbox_prefix
from kvmesh.settings import Settings, load

COMPOSE = Path(__file__).parents[2] / "compose"
SERVICES = ("indexer", "router", "kvbm", "worker", "frontend")
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
    return VARIABLE.sub(lambda match: variables.get(match[1], match[2]), value)


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
    process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {key: str(value) for key, value in self.service["environment"].items()}

    def port(self, container_port: str) -> int:
        """The port of this machine that replaces one of the container's."""
        return self.ports.setdefault(container_port, free_port())

    def start(self, log: Path) -> None:
        env = {**self.environment, "PATH": os.environ["PATH"]}
        env["KVMESH_NATS_URL"] = env["KVMESH_NATS_URL"].replace("nats:4222", self.nats)
        for key in [key for key in env if key.endswith("PORT")]:
            env[key] = str(self.port(env[key]))
        for key in [key for key in env if key.endswith("DIRECTORY")]:
            env[key] = str(log.parent / env[key].lstrip("/"))
        own = log.parent / mounted(self.service, MINE)
        env = {key: value.replace(MINE, str(own)) for key, value in env.items()}
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
    """The file's NATS server under the credentials that the file makes; yields its address."""
    services = parsed("compose.yaml")["services"]
    address = f"127.0.0.1:{free_port()}"
    made = [part.replace("/credentials", str(tmp_path / "credentials")) for part in credentials()]
    subprocess.run(
        [sys.executable, "-m", "kvmesh.cli.main", *made], check=True, stdout=subprocess.DEVNULL
    )
    own = tmp_path / mounted(services["nats"], MINE)
    config = own / "nats.conf"
    config.write_text(
        config.read_text()
        .replace("0.0.0.0:4222", address)
        .replace("127.0.0.1:4222", address)
        .replace("127.0.0.1:8222", f"127.0.0.1:{free_port()}")
        .replace('"/data"', f'"{tmp_path / "data"}"')
        .replace(MINE, str(own))
    )
    arguments = [part.replace(MINE, str(own)) for part in services["nats"]["command"]]
    with (tmp_path / "nats.log").open("wb") as output:
        server = subprocess.Popen([SERVER, *arguments], stdout=output, stderr=output)
    yield address
    server.terminate()
    server.wait(PATIENCE_S)


def credentials() -> list[str]:
    """Run the command that writes the credentials; the server gets an address, not a name."""
    command = parsed("compose.yaml")["services"]["credentials"]["command"]
    return [part.replace("--hosts=nats", "--hosts=127.0.0.1") for part in command]


@pytest.fixture
def containers(nats: str, tmp_path: Path) -> Iterator[dict[str, Container]]:
    """Every service of the image, running."""
    services = parsed("compose.yaml", KVMESH_ALLOW_ANONYMOUS="true")["services"]
    started = {name: Container(name, services[name], nats) for name in SERVICES}
    for container in started.values():
        container.start(tmp_path / "log")
    yield started
    for container in reversed(started.values()):
        container.stop()


async def test_the_commands_and_environment_serve(
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
    messages = [json.loads(line)["message"] for line in lines]
    assert all(messages)
    assert not any("violation" in message for message in messages)


def answers(port: int) -> bool:
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


def settings_of(name: str, seed: Path, **variables: str) -> Settings:
    """The settings of a service of the file, with some seed of an nkey."""
    seed.write_text("S")
    container = Container(name, parsed("compose.yaml", **variables)["services"][name], "")
    return load(None, {**container.environment, "KVMESH_NATS_NKEY_SEED_FILE": str(seed)}, {})


def test_every_variable_is_a_setting_with_a_valid_value(tmp_path: Path) -> None:
    for name in SERVICES:
        settings = settings_of(name, tmp_path / "seed")
        service = parsed("compose.yaml")["services"][name]
        assert settings.nats.url == "tls://nats:4222"
        assert settings.nats.inbox_prefix == inbox_prefix(name)
        assert mounted(service, MINE) == f"credentials/{name}"
        assert service["command"] == [name]


def test_containers_are_confined() -> None:
    for name, service in parsed("compose.yaml")["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "mem_limit" in service, name
        if name in SERVICES:  # else a wrong setting, status 2, would be retried until cancelled
            assert service["restart"] == "on-failure:3", name


def test_nats_and_blocks_are_unreachable_from_outside() -> None:
    tree = parsed("compose.yaml")
    assert "ports" not in tree["services"]["nats"]
    uid = re.search(r"--uid (\d+)", (COMPOSE / "Dockerfile").read_text())
    assert uid is not None
    options = tree["volumes"]["blocks"]["driver_opts"]["o"].split(",")
    assert set(options) == {"mode=0700", f"uid={uid[1]}", f"gid={uid[1]}"}


def test_a_frontend_serves_without_keys_only_if_set_so(tmp_path: Path) -> None:
    seed = tmp_path / "seed"
    assert not settings_of("frontend", seed).frontend.allow_anonymous
    assert settings_of("frontend", seed, KVMESH_ALLOW_ANONYMOUS="true").frontend.allow_anonymous
    keys = settings_of("frontend", seed, KVMESH_KEYS_FILE="/keys/keys.toml").frontend.keys_file
    assert keys == Path("/keys/keys.toml")


def test_the_only_scaled_service_publishes_no_port() -> None:
    services = parsed("compose.yaml")["services"]
    published = [name for name, service in services.items() if "ports" in service]
    assert published == ["frontend", "prometheus"]


def test_prometheus_scrapes_the_ports_of_the_services(tmp_path: Path) -> None:
    for job in parsed("prometheus.yml")["scrape_configs"]:
        (discovery,) = job["dns_sd_configs"]
        for name in discovery["names"]:
            own = getattr(settings_of(name, tmp_path / "seed"), name)
            assert discovery["port"] == own.metrics_port
            assert own.metrics_host == "0.0.0.0"


def test_the_image_copies_everything_that_the_build_needs() -> None:
    allowed = (COMPOSE / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in allowed if line.startswith("!")}
    root = COMPOSE.parent
    assert [name for name in kept if not (root / name).exists()] == []
    sources = shlex.split((root / "CMakeLists.txt").read_text(), comments=True)
    assert {"libs", "services", "tools", "pyproject.toml", "CMakeLists.txt"} <= kept
    assert all(word.split("/")[0] in kept for word in sources if word.startswith("libs/"))
