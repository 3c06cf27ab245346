"""`docker compose up` as its docs have it: starts, scaling, kills, rolls, stops and commands."""

import re
import time
from collections.abc import Iterator

import pytest
from support.compose import COMPOSE
from support.containers import ComposeMesh, until
from support.docker import Docker

README = COMPOSE.parent / "README.md"
LOOKS = re.findall(r"^\| `kvmesh ([^`]+)` \|", README.read_text(), re.MULTILINE)
ENDLESS = ("tail",)  # it shows what comes
HARMED = ("worker", "router", "frontend", "indexer", "kvbm", "nats", "dashboard")


@pytest.fixture(scope="module")
def running(docker: Docker) -> Iterator[ComposeMesh]:
    """A mesh of four workers, and two of what a roll would interrupt."""
    mesh = ComposeMesh(docker, {"KVMESH_ALLOW_ANONYMOUS": "true"})
    mesh.remove()
    try:
        mesh.up("--build", worker=4)
        yield mesh
    finally:
        mesh.remove()


def test_a_first_start_logs_no_violation_and_no_missing_stream(running: ComposeMesh) -> None:
    log = running.logs()
    assert "Violation" not in log
    assert "is missing" not in re.sub(r".*waiting for a frontend to create.*", "", log)
    assert "Traceback" not in log


def test_it_answers(running: ComposeMesh) -> None:
    assert running.chat()["usage"]["completion_tokens"] == 8
    assert running.ask(url="http://127.0.0.1:8090/health")["status"] == "ok"


def test_containers_are_confined(running: ComposeMesh) -> None:
    for container in running.containers():
        name = container["Name"]
        if container["Service"] == "credentials":
            continue
        status = running.docker.run("docker", "exec", name, "cat", "/proc/self/status").stdout
        assert re.search(r"^Uid:\s+10001\s+10001", status, re.MULTILINE), name
        assert re.search(r"^Gid:\s+10001\s+10001", status, re.MULTILINE), name
        assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE), name
        assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE), name
        script = "touch /x 2> /dev/null || touch ~/x 2> /dev/null || ls /credentials /run/kvmesh"
        found = running.docker.run("docker", "exec", name, "sh", "-c", script, check=False).stdout
        assert "authority" not in found, name
        published = {p["URL"] for p in container["Publishers"] or () if p["PublishedPort"]}
        assert published <= {"127.0.0.1"}, name


def test_another_up_recreates_nothing(running: ComposeMesh) -> None:
    before = running.ids()
    running.up("--build")
    assert running.ids() == before
    running.up()
    assert running.ids() == before


def test_scaling_recreates_nothing(running: ComposeMesh) -> None:
    before = running.ids()
    running.up(worker=5, router=2, frontend=2, indexer=2)
    after = running.ids()
    assert before.items() <= after.items()
    assert len(after) == len(before) + 4
    until(lambda: running.kvmesh("status").count("frontend-") >= 2)
    assert running.kvmesh("status").count("worker-") >= 5


@pytest.mark.parametrize("look", LOOKS)
def test_the_commands_of_the_readme_reach_the_mesh(running: ComposeMesh, look: str) -> None:
    answer = running.chat("-H", "x-session-id: looked-at")
    words = look.replace("REQUEST_ID", answer["id"]).replace("…", "kv,round-robin").split()
    words = ["looked-at" if word in ("NAME", "SESSION") else word for word in words]
    if words[0] in ENDLESS:
        with running.following(*words) as shown_so_far:
            until(lambda: running.chat() and "worker-" in shown_so_far())
            assert '{"time"' not in shown_so_far()
        return
    if words[0] == "top":
        words.append("--once")
    if words[0] == "replay":
        words += ["--limit", "5", "--speed", "50"]
    # without a planner, `plan` says so with status 1
    shown = running.kvmesh(*words, check=words[0] != "plan")
    assert shown.strip()
    assert "Traceback" not in shown
    assert "permit" not in shown
    assert '{"time"' not in shown, "text, not JSON, is for a terminal"


def test_an_observer_looks_and_changes_nothing(running: ComposeMesh) -> None:
    assert "worker-" in running.kvmesh("status", user="observer")
    assert "not permit" in running.kvmesh("keys", "list", user="observer", check=False)


def restarts(mesh: ComposeMesh, name: str) -> int:
    """The number of times that Docker has started a container's process again."""
    return int(mesh.docker.run("docker", "inspect", "-f", "{{.RestartCount}}", name).stdout)


@pytest.mark.parametrize("service", HARMED)
def test_a_killed_process_costs_no_request(running: ComposeMesh, service: str) -> None:
    """The processes of one container die; its streams, if it is a frontend, are broken off."""
    (name, *_) = running.names(service)
    with running.traffic() as seen:
        before = restarts(running, name)
        kill = "kill -9 -1"  # all that its user has, not the init of the container
        running.docker.run("docker", "exec", name, "bash", "-c", kill, check=False)
        until(lambda: restarts(running, name) > before)
        running.wait_healthy()
    print(service, seen)
    assert seen["sent"] > 5
    allowed = 4 if service == "frontend" else 0
    assert seen["failed"] <= allowed, seen


@pytest.mark.parametrize("service", [name for name in HARMED if name != "nats"])
def test_a_roll_replica_by_replica_costs_no_request(running: ComposeMesh, service: str) -> None:
    with running.traffic() as seen:
        for name in running.names(service)[:2]:
            running.docker.run("docker", "restart", name)
            running.wait_healthy()
    print(service, seen)
    assert seen["failed"] == 0, seen


def test_the_only_router_and_frontend_may_restart(running: ComposeMesh) -> None:
    running.up(router=1, frontend=1)
    for service in ("router", "frontend"):
        with running.traffic() as seen:
            running.docker.run("docker", "restart", *running.names(service))
            running.wait_healthy()
        print(service, seen)
        assert seen["failed"] == 0, seen


def test_state_outlives_all_containers(running: ComposeMesh) -> None:
    running.kvmesh("keys", "add", "kept")
    running.compose("down", "--timeout=80")
    running.up()
    until(lambda: "kept" in running.kvmesh("keys", "list", check=False))
    running.compose("restart")
    running.wait_healthy()
    assert running.chat()["usage"]["completion_tokens"] == 8


def test_stops_are_clean(running: ComposeMesh) -> None:
    began = time.monotonic()
    running.compose("stop")
    assert time.monotonic() - began < 60
    codes = {c["Name"]: c["ExitCode"] for c in running.containers()}
    assert set(codes.values()) == {0}, codes
