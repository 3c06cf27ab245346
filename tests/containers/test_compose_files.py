"""Each profile and file of docs/deployment.md that needs no GPU, and API keys."""

import shutil
import stat
from pathlib import Path

import pytest
from support.compose import COMPOSE
from support.containers import ComposeMesh, until
from support.docker import Docker, ensure_image

from kvmesh.cli.keyring import PREFIX
from kvmesh.worker.models.tiny_model import make_tiny_model

DOCKER_CLI = "docker:28-cli"


def test_keys_are_made_by_the_command_line(mesh: ComposeMesh) -> None:
    mesh.env = {"KVMESH_KEYS_BUCKET": "true"}
    mesh.up(worker=1)
    assert "error" in mesh.ask()
    added = mesh.kvmesh("keys", "add", "me").split()
    secret = next(word for word in added if word.startswith(PREFIX))
    answer = until(lambda: mesh.chat("-H", f"authorization: Bearer {secret}"))
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(("mode", "reason"), [(0o600, "user 10001"), (None, "No such file")])
def test_a_keys_file_that_cannot_be_read_is_named_with_its_variable(
    mesh: ComposeMesh, mode: int | None, reason: str
) -> None:
    keys = COMPOSE / "keys" / "test-keys.toml"
    if mode is not None:
        keys.write_text("")
        keys.chmod(mode)
    try:
        mesh.env = {"KVMESH_KEYS_FILE": "/keys/test-keys.toml"}
        mesh.compose("up", "--detach", "frontend", "dashboard")
        for service in ("frontend", "dashboard"):
            until(lambda s=service: reason in mesh.logs(s))  # type: ignore[misc]
            assert "KVMESH_KEYS_FILE" in mesh.logs(service)
        assert stat.S_IMODE((COMPOSE / "keys").stat().st_mode) != 0o700
    finally:
        keys.unlink(missing_ok=True)


def test_a_mesh_without_keys_or_consent_names_its_variables(mesh: ComposeMesh) -> None:
    mesh.env = {}
    mesh.compose("up", "--detach")
    for service in ("frontend", "dashboard"):
        until(lambda s=service: "KVMESH_ALLOW_ANONYMOUS" in mesh.logs(s))  # type: ignore[misc]


def test_workers_share_blocks_through_the_block_manager(mesh: ComposeMesh) -> None:
    mesh.up(worker=2)
    mesh.chat()
    until(lambda: stored_blocks(mesh) > 0)


def stored_blocks(mesh: ComposeMesh) -> int:
    (name,) = mesh.names("kvbm")
    script = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9090/metrics').read().decode())"
    text = mesh.docker.run("docker", "exec", name, "python", "-c", script).stdout
    rows = [line.split() for line in text.splitlines() if line.startswith("kvmesh_kvbm_blocks{")]
    return int(sum(float(row[-1]) for row in rows))


def test_a_planner_advises(mesh: ComposeMesh) -> None:
    mesh.profiles = ["planner"]
    mesh.up(worker=1)
    mesh.chat()
    until(lambda: "worker" in mesh.kvmesh("plan"))


def test_a_planner_scales_the_workers(mesh: ComposeMesh, docker: Docker) -> None:
    ensure_image(docker, DOCKER_CLI, ("docker-cli", "docker-compose"), prepare=as_in_docker_cli)
    group = docker.run("stat", "-c", "%g", "/var/run/docker.sock").stdout.strip()
    mesh.env |= {"DOCKER_GID": group, "KVMESH_PLANNER_POOLS": "worker:min=2,max=3"}
    mesh.files.append("scaling.yaml")
    mesh.profiles = ["planner"]
    mesh.compose("build", timeout=3600)
    mesh.up(worker=1)
    before = mesh.ids()
    until(lambda: len(mesh.names("worker")) == 2)
    assert before.items() <= mesh.ids().items()


def as_in_docker_cli(folder: Path) -> None:
    """Have Debian's files where the image of Docker's client has them."""
    local, libexec = folder / "usr" / "local", folder / "usr" / "libexec" / "docker"
    shutil.copytree(libexec, local / "libexec" / "docker", dirs_exist_ok=True)
    shutil.copy(folder / "usr" / "bin" / "docker", local / "bin")


def test_blocks_go_to_redis(mesh: ComposeMesh, docker: Docker) -> None:
    ensure_image(docker, "redis:8.2", ("redis-server",))
    mesh.env["KVMESH_KVBM_REMOTE_FREQUENCY"] = "1"
    mesh.files.append("redis.yaml")
    mesh.up(worker=2)
    for _ in range(4):
        mesh.chat()
    (redis,) = mesh.names("redis")
    size = ("docker", "exec", redis, "redis-cli", "dbsize")
    until(lambda: int(docker.run(*size).stdout.split()[-1]) > 0)
    reached = docker.run(
        *("docker", "exec", mesh.names("worker")[0], "getent", "hosts", "redis"), check=False
    )
    assert reached.returncode, "only the block manager reaches Redis"


def test_three_servers_keep_the_mesh_while_one_is_away(mesh: ComposeMesh) -> None:
    mesh.files.append("cluster.yaml")
    mesh.up(worker=2)
    assert "Violation" not in mesh.logs()
    listed = mesh.kvmesh("config", "streams", "list")
    assert "kvm-kvmesh-kv" in listed
    assert "num_replicas" not in listed, "a stream with fewer copies would be named"
    for server in ("nats", "nats-2", "nats-3"):
        (name,) = mesh.names(server)
        with mesh.traffic() as seen:
            mesh.docker.run("docker", "restart", name)
            mesh.wait_healthy()
        assert seen["failed"] == 0, (server, seen)


def test_prometheus_scrapes_every_container(mesh: ComposeMesh, docker: Docker) -> None:
    ensure_image(
        *(docker, "prom/prometheus:v3.7.3", ("prometheus",)),
        *('ENTRYPOINT ["/usr/bin/prometheus"]', "USER 65534", "WORKDIR /prometheus"),
        prepare=lambda folder: (folder / "prometheus").mkdir(exist_ok=True),
    )
    mesh.profiles = ["observability"]
    # without Grafana, which is no package of Debian
    services = ("indexer", "router", "kvbm", "worker", "frontend", "balancer", "prometheus")
    mesh.compose("up", "--detach", *services)
    mesh.wait_healthy()
    until(lambda: scraped(mesh) == {"up"})


def scraped(mesh: ComposeMesh) -> set[str]:
    """The states of Prometheus's targets."""
    answer = mesh.ask(url="http://127.0.0.1:9091/api/v1/targets?state=active")
    return {
        target["health"]
        for target in (answer or {"data": {"activeTargets": []}})["data"]["activeTargets"]
    }


def test_torch_serves_a_tiny_model(mesh: ComposeMesh) -> None:
    folder = COMPOSE / "models" / "tiny"
    mesh.profiles = ["torch"]
    mesh.env["KVMESH_ENGINE_MODEL"] = "/models/tiny"
    try:
        make_tiny_model(folder)
        folder.chmod(0o755)
        mesh.compose("build", "torch", timeout=3600)
        mesh.up(worker=0)
        assert mesh.chat()["usage"]["completion_tokens"] == 8
    finally:
        shutil.rmtree(folder, ignore_errors=True)
