"""The commands and environment of the compose files, run as processes without containers."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
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
from support.wait import eventually

from kvmesh.bus.permissions import inbox_prefix
from kvmesh.settings import Settings, load
from kvmesh.worker.models.tiny_model import make_tiny_model

SERVICES = ("indexer", "router", "kvbm", "worker", "frontend", "dashboard")
EXTENSIONS = ("cluster.yaml", "redis.yaml", "scaling.yaml")
IN_PLACE_OF = {"engine": "worker", "torch": "worker", "openai": "worker"}


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[str]:
    with nats_of_compose(tmp_path) as address:
        yield address


async def test_the_default_profile_serves(nats: str, tmp_path: Path) -> None:
    with running(SERVICES, nats, tmp_path, {"KVMESH_ALLOW_ANONYMOUS": "true"}) as containers:
        await serve(containers)
    check_log(tmp_path / "log")
    assert "Violation" not in (tmp_path / "nats.log").read_text()


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
    for name in (*SERVICES, *IN_PLACE_OF, "planner"):
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
        ):  # else a wrong setting, status 2, would be retried until cancelled
            assert service["restart"] == "on-failure:3", name


def test_nats_and_blocks_are_unreachable_from_outside() -> None:
    tree = parsed("compose.yaml")
    assert "ports" not in tree["services"]["nats"]
    text = (COMPOSE / "Dockerfile").read_text()
    users, groups = re.findall(r"--uid (\d+) --gid (\d+)", text), re.findall(r"--gid (\d+) k", text)
    assert len(users) == len(groups) == 2  # of the services' image and of the engine's
    ((uid, gid),) = set(users)
    assert {gid} == set(groups)
    options = tree["volumes"]["blocks"]["driver_opts"]["o"].split(",")
    assert set(options) == {"mode=0700", f"uid={uid}", f"gid={gid}"}


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


def test_scaled_services_publish_no_port() -> None:
    services = parsed("compose.yaml")["services"]
    published = [name for name, service in services.items() if "ports" in service]
    assert published == ["balancer", "dashboard", "prometheus", "grafana"]


def test_the_balancer_serves_the_port_of_the_frontends(tmp_path: Path) -> None:
    port = settings_of("frontend", tmp_path / "seed").frontend.port
    assert parsed("compose.yaml")["services"]["balancer"]["ports"] == [f"127.0.0.1:8000:{port}"]
    config = (COMPOSE / "haproxy.cfg").read_text()
    assert config.count(f" frontend:{port}\n") == 2
    linger = settings_of("frontend", tmp_path / "seed").frontend.linger_s
    assert linger > 1.0, "the balancer asks once a second"


def test_one_service_builds_each_image() -> None:
    built: dict[str, str] = {}
    used = set()
    for file in ("compose.yaml", *EXTENSIONS):
        for name, service in parsed(file)["services"].items():
            used.add(service.get("image"))
            if "build" in service:
                image = service["image"]
                assert built.setdefault(image, name) == name, image
    assert {image for image in used if image and image.startswith("kvmesh")} == set(built)


def test_health_is_asked_without_an_interpreter() -> None:
    for name, service in parsed("compose.yaml")["services"].items():
        if "healthcheck" in service:
            assert service["healthcheck"]["test"][:3] == ["CMD", "bash", "-c"], name
            assert service["healthcheck"]["interval"] == "30s", name


def test_a_folder_in_memory_belongs_to_the_user_of_the_image() -> None:
    for file in ("compose.yaml", *EXTENSIONS):
        for name, service in parsed(file)["services"].items():
            for folder in service.get("tmpfs", ()):
                path, _, options = folder.partition(":")
                assert path == "/tmp" or "uid=" in options, f"{file}: {name}: {folder}"


def test_services_have_the_time_to_stop(tmp_path: Path) -> None:
    for name, service in parsed("compose.yaml")["services"].items():
        if name in (*SERVICES, *IN_PLACE_OF):
            settings = settings_of(name, tmp_path / "seed")
            needs = {
                "worker": settings.worker.drain_timeout_s + settings.worker.drain_blocks_s + 10,
                "frontend": settings.frontend.drain_timeout_s + settings.frontend.linger_s + 10,
            }.get(IN_PLACE_OF.get(name, name), 20)
            if name == "openai":  # it drains no blocks
                needs -= settings.worker.drain_blocks_s
            assert float(service["stop_grace_period"].rstrip("s")) >= needs, name


def test_clients_wait_as_long_as_a_container_starts(tmp_path: Path) -> None:
    assert settings_of("frontend", tmp_path / "seed").frontend.restart_wait_s == 30


def test_the_command_line_is_a_service_of_an_operator_or_observer(tmp_path: Path) -> None:
    for variables, user in (({}, "operator"), ({"KVMESH_USER": "observer"}, "observer")):
        settings = settings_of("kvmesh", tmp_path / "seed", **variables)
        service = parsed("compose.yaml", **variables)["services"]["kvmesh"]
        assert settings.nats.inbox_prefix == inbox_prefix(user)
        assert mounted(service, MINE) == f"credentials/{user}"
        assert settings.log.format == "text"
        assert "depends_on" not in service, "`run` would start, and perhaps recreate, the mesh"


def test_each_file_of_compose_extends_it_for_the_real_compose_or_yaml(tmp_path: Path) -> None:
    """Merged by Docker's own Compose where it is installed, else only read."""
    variables = {"PATH": os.environ["PATH"], "PWD": str(COMPOSE.parent), "DOCKER_GID": "999"}
    has = (
        shutil.which("docker")
        and not subprocess.run(
            ["docker", "compose", "version"], capture_output=True, env=variables
        ).returncode
    )
    for file in EXTENSIONS:
        services = parsed(file)["services"]
        known = parsed("compose.yaml")["services"]
        own = {name for name, service in services.items() if "image" in service}
        extended = {name for name, service in services.items() if "extends" in service}
        assert set(services) - own - extended <= set(known), file
        if has:
            merged = subprocess.run(
                [
                    *("docker", "compose", "-f", "compose/compose.yaml", "-f", f"compose/{file}"),
                    *("--profile", "*", "config", "--format", "json"),
                ],
                capture_output=True,
                env=variables,
                cwd=COMPOSE.parent,
            )
            assert merged.returncode == 0, merged.stderr.decode()
            assert not merged.stderr, merged.stderr.decode()


def test_a_cluster_is_one_for_every_service() -> None:
    services, base = parsed("cluster.yaml")["services"], parsed("compose.yaml")["services"]
    for name, service in base.items():
        if "KVMESH_NATS_URL" in service.get("environment", {}):
            assert services[name]["environment"]["KVMESH_NATS_REPLICAS"] == 3, name
            assert services[name]["environment"]["KVMESH_NATS_URL"].count("tls://nats") == 3, name


def test_folders_of_a_checkout_are_mounted_and_their_contents_ignored() -> None:
    for name in ("keys", "models"):
        assert (COMPOSE / name / ".gitignore").read_text().splitlines()[1:] == ["*", "!.gitignore"]


def test_prometheus_scrapes_the_ports_of_the_services(tmp_path: Path) -> None:
    for job in parsed("prometheus/prometheus.yml")["scrape_configs"]:
        (discovery,) = job["dns_sd_configs"]
        for name in discovery["names"]:
            role = IN_PLACE_OF.get(name, name)
            settings = settings_of(name, tmp_path / "seed")
            assert discovery["port"] == getattr(settings, role).metrics_port
            assert settings.process.metrics_host == "0.0.0.0"


def test_the_image_copies_everything_that_the_build_needs() -> None:
    allowed = (COMPOSE / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in allowed if line.startswith("!")}
    root = COMPOSE.parent
    assert [name for name in kept if not (root / name).exists()] == []
    sources = shlex.split((root / "CMakeLists.txt").read_text(), comments=True)
    assert {"libs", "services", "tools", "pyproject.toml", "CMakeLists.txt"} <= kept
    assert all(word.split("/")[0] in kept for word in sources if word.startswith("libs/"))


def test_the_native_part_is_built_before_the_sources_are_copied(tmp_path: Path) -> None:
    """All files that its build installs are there."""
    root = COMPOSE.parent
    for name in ("CMakeLists.txt", "pyproject.toml"):
        (tmp_path / name).write_bytes((root / name).read_bytes())
    subprocess.run([sys.executable, COMPOSE / "empty_packages.py"], cwd=tmp_path, check=True)
    words = shlex.split((root / "CMakeLists.txt").read_text().replace("(", " "), comments=True)
    files = {word for word in words if (root / word).is_file()}
    assert "libs/kvmesh/py.typed" in files
    native = {file for file in files if file.startswith("libs/native/")}
    assert [file for file in files - native if not (tmp_path / file).exists()] == []


def test_the_image_installs_dependencies_before_it_copies_sources() -> None:
    """A changed line of Python leaves the layers of packages and of compiled code as they are."""
    text = (COMPOSE / "Dockerfile").read_text()
    for stage in re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]:
        before, copied, _ = stage.partition("COPY . .")
        if copied and "native" not in stage.partition("\n")[0]:
            assert "-r /build.txt" in before, stage
            assert "COPY libs/native libs/native" in before, stage


@pytest.mark.parametrize(
    ("engine", "compose", "reason"),
    [
        ("26.1.5+dfsg1", "2.26.1-4", ""),
        ("28.2.2", "v2.36.2", ""),
        ("29.0.0", "5.0.1", ""),
        ("20.10.24+dfsg1", "", "this engine is 20.10.24+dfsg1"),
        ("24.0.7", "2.24.6+ds1", "this engine is 24.0.7"),
        ("26.1.5+dfsg1", "", "this docker has no compose"),
        ("27.5.1", "2.25.0", "this Compose is 2.25.0"),
        ("27.5.1", "1.29.2", "this Compose is 1.29.2"),
    ],
)
def test_another_docker_is_refused_in_one_sentence(
    tmp_path: Path, engine: str, compose: str, reason: str
) -> None:
    docker = tmp_path / "docker"
    shown = f"echo {compose}" if compose else "exit 1"
    docker.write_text(f"#!/bin/sh\ncase $1 in version) echo {engine};; *) {shown};; esac\n")
    docker.chmod(0o755)
    checked = subprocess.run(
        ["sh", COMPOSE / "check.sh"],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )
    assert checked.returncode == bool(reason)
    assert len(checked.stderr.splitlines()) == bool(reason)
    assert reason in checked.stderr
    assert not reason or "kvmesh needs Docker Engine 26" in checked.stderr


async def test_services_wait_until_a_frontend_has_made_the_streams(
    nats: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    waiters = ("indexer", "router", "kvbm", "worker", "dashboard")
    variables = {"KVMESH_ALLOW_ANONYMOUS": "true"}
    with running(waiters, nats, tmp_path, variables) as containers:
        await eventually(
            lambda: log.read_text().count("waiting for a frontend to create the streams") == 5
        )
        with running(("frontend",), nats, tmp_path, variables) as frontend:
            await serve({**containers, **frontend})
            logged = log.read_text()
    lines = [json.loads(line) for line in logged.splitlines()]
    warnings = [line["message"] for line in lines if line.get("level") in ("warning", "error")]
    assert all("open to everyone" in warning for warning in warnings), warnings
    assert "Violation" not in (tmp_path / "nats.log").read_text()
