"""The commands and environment of the compose files, run as processes without containers."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.api_server import ApiServer
from support.compose import (
    COMPOSE,
    MINE,
    Container,
    mounted,
    nats_of_compose,
    parsed,
    running,
    serve,
)

from kvmesh.bus.permissions import inbox_prefix
from kvmesh.settings import Settings, load
from kvmesh.worker.models.tiny_model import make_tiny_model

SERVICES = ("indexer", "router", "kvbm", "worker", "frontend", "dashboard")
IN_PLACE_OF = {"engine": "worker", "openai": "worker"}


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[str]:
    with nats_of_compose(tmp_path) as address:
        yield address


async def test_the_default_profile_serves(nats: str, tmp_path: Path) -> None:
    with running(SERVICES, nats, tmp_path, {"KVMESH_ALLOW_ANONYMOUS": "true"}) as containers:
        await serve(containers)
    check_log(tmp_path / "log")


async def test_a_running_server_serves_by_the_profile_openai(nats: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "tiny")
    server = ApiServer(tmp_path, "vllm")
    await server.start()
    variables = {
        "KVMESH_ALLOW_ANONYMOUS": "true",
        "KVMESH_ENGINE_MODEL": str(tmp_path / "tiny"),
        "KVMESH_REMOTE_URL": server.url,
        "KVMESH_REMOTE_KV_EVENTS": server.publisher.endpoint,
        "KVMESH_REMOTE_KV_REPLAY": server.publisher.replay,
        "KVMESH_REMOTE_PRIORITY": "lower",
    }
    names = ("indexer", "router", "openai", "frontend")
    try:
        with running(names, nats, tmp_path, variables) as containers:
            await serve(containers)
    finally:
        await server.close()
    check_log(tmp_path / "log")


def check_log(log: Path) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    messages = [line["message"] for line in lines if line.get("log") != "access"]
    assert len(messages) < len(lines)
    assert all(messages)
    assert not any("violation" in message for message in messages)


def settings_of(name: str, seed: Path, **variables: str) -> Settings:
    """The settings of a service of the file, with some seed of an nkey."""
    seed.write_text("S")
    container = Container(name, parsed("compose.yaml", **variables)["services"][name], "")
    return load(None, {**container.environment, "KVMESH_NATS_NKEY_SEED_FILE": str(seed)}, {})


def test_every_variable_is_a_setting_with_a_valid_value(tmp_path: Path) -> None:
    for name in (*SERVICES, *IN_PLACE_OF, "planner", "oracle"):
        settings = settings_of(name, tmp_path / "seed")
        service = parsed("compose.yaml")["services"][name]
        role = IN_PLACE_OF.get(name, name)
        assert settings.nats.url == "tls://nats:4222"
        assert settings.nats.inbox_prefix == inbox_prefix(role)
        assert mounted(service, MINE) == f"credentials/{role}"
        assert service["command"] == [role]


def test_engine_arguments_and_model_are_variables(tmp_path: Path) -> None:
    variables = {"KVMESH_ENGINE_MODEL": "/models/q", "KVMESH_VLLM_ARGS": "max_model_len=8192,a.b=1"}
    settings = settings_of("engine", tmp_path / "seed", **variables)
    assert (settings.worker.engine, settings.worker.model) == ("vllm", Path("/models/q"))
    assert settings.vllm.args == ["max_model_len=8192", "a.b=1"]
    assert settings.vllm.kvbm
    assert (
        settings_of("engine", tmp_path / "seed", KVMESH_ENGINE="sglang").worker.engine == "sglang"
    )


def test_an_engine_shares_the_blocks_of_the_block_manager(tmp_path: Path) -> None:
    services = parsed("compose.yaml")["services"]
    assert "blocks:/blocks" in services["engine"]["volumes"]
    assert "blocks:/blocks" in services["kvbm"]["volumes"]
    node = settings_of("engine", tmp_path / "seed").worker.node
    assert node == settings_of("kvbm", tmp_path / "seed").kvbm.node


def test_containers_are_confined() -> None:
    for name, service in parsed("compose.yaml")["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "mem_limit" in service, name
        if name in (
            *SERVICES,
            *IN_PLACE_OF,
            "planner",
            "oracle",
        ):  # else a wrong setting, status 2, would be retried until cancelled
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


def test_the_dashboard_requires_the_keys_of_the_frontend(tmp_path: Path) -> None:
    seed = tmp_path / "seed"
    assert not settings_of("dashboard", seed).dashboard.allow_anonymous
    assert settings_of("dashboard", seed, KVMESH_ALLOW_ANONYMOUS="true").dashboard.allow_anonymous
    keys = settings_of("dashboard", seed, KVMESH_KEYS_FILE="/keys/keys.toml").dashboard.keys_file
    assert keys == Path("/keys/keys.toml")
    (port,) = parsed("compose.yaml")["services"]["dashboard"]["ports"]
    assert port == "127.0.0.1:8090:8090"


def test_the_only_scaled_service_publishes_no_port() -> None:
    services = parsed("compose.yaml")["services"]
    published = [name for name, service in services.items() if "ports" in service]
    assert published == ["frontend", "dashboard", "prometheus", "grafana"]


def test_prometheus_scrapes_the_ports_of_the_services(tmp_path: Path) -> None:
    for job in parsed("prometheus/prometheus.yml")["scrape_configs"]:
        (discovery,) = job["dns_sd_configs"]
        for name in discovery["names"]:
            role = IN_PLACE_OF.get(name, name)
            own = getattr(settings_of(name, tmp_path / "seed"), role)
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
