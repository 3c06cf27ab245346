"""`kvmesh up` end to end: a mesh that serves, heals, stops in order and leaves nothing behind."""

import asyncio
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from support import forks
from support.nats import SERVER, NatsServer, free_port
from support.up import Up, alive
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.errors import BusUnavailable
from kvmesh.demo import model_dir

START = ("nats", "indexer-0", "router-0", "worker-0", "worker-1", "frontend-0")
Factory = Callable[..., Up]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A mesh of two workers for the tests that leave it healthy."""
    up = Up(tmp_path_factory.mktemp("up"), "--workers", "2")
    up.start()
    yield up
    up.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Factory]:
    """Start meshes that are stopped at the end of the test."""
    started: list[Up] = []

    def start(*arguments: str) -> Up:
        up = Up(tmp_path, *arguments)
        started.append(up)
        up.start()
        return up

    yield start
    for up in started:
        up.close()


async def test_it_prints_its_address_and_serves_there(shared: Up) -> None:
    await shared.ready()
    assert f"OPENAI_BASE_URL={shared.url}/v1" in shared.output
    assert f"ANTHROPIC_BASE_URL={shared.url}" in shared.output
    assert set(shared.children()) == set(START)
    events = await asyncio.to_thread(shared.complete)
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["object"] == "chat.completion.chunk"


async def test_the_example_command_works(shared: Up) -> None:
    await shared.ready()
    at = next(n for n, line in enumerate(shared.lines) if "curl -N" in line)
    command = "\n".join(shared.lines[at : at + 2])
    tried = await asyncio.to_thread(
        subprocess.run, command, shell=True, capture_output=True, text=True, timeout=60, check=True
    )
    assert tried.stdout.rstrip().endswith("data: [DONE]")


async def test_without_keys_it_prints_a_working_command_to_create_one(make: Factory) -> None:
    up = make("--workers", "1", "--frontend-keys-bucket")
    await up.ready()
    assert "set KEY to" not in up.output
    (notice,) = (line for line in up.lines if "no API keys yet: export KEY=" in line)
    at = next(n for n, line in enumerate(up.lines) if "curl -N" in line)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path}

    def shell(command: str) -> str:
        run = partial(subprocess.run, shell=True, capture_output=True, text=True, check=True)
        return str(run(command, timeout=PATIENCE_S, env=environ).stdout).rstrip()

    make_one = notice.split("yet: ")[1].replace("NAME", "mine")
    environ["KEY"] = await asyncio.to_thread(shell, f'{make_one}; echo "$KEY"')

    async def answered() -> bool:  # frontends follow within a second
        answer = await asyncio.to_thread(shell, "\n".join(up.lines[at : at + 2]))
        return answer.endswith("data: [DONE]")

    await eventually(answered)


async def test_with_keys_the_example_command_uses_one_and_works(
    make: Factory, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"sk-one").hexdigest()
    keys.write_text(f'[[key]]\nname = "team"\nsha256 = "{digest}"\n')
    up = make("--workers", "1", "--frontend-keys-file", str(keys))
    await up.ready()
    assert "kvmesh serves kvmesh-demo" in up.output
    assert "OPENAI_API_KEY=$KEY" in up.output
    at = next(n for n, line in enumerate(up.lines) if "curl -N" in line)
    command = "KEY=sk-one; " + "\n".join(up.lines[at : at + 2])
    tried = await asyncio.to_thread(
        subprocess.run, command, shell=True, capture_output=True, text=True, timeout=60, check=True
    )
    assert tried.stdout.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize("name", START)
async def test_a_killed_process_comes_back_and_the_mesh_serves(shared: Up, name: str) -> None:
    await shared.ready()
    await eventually(lambda: set(shared.children()) == set(START))
    old = shared.children()[name]
    os.kill(old, signal.SIGKILL)
    await eventually(lambda: shared.children().get(name, old) != old, what=f"{name} is back")
    assert f"{name} was killed by SIGKILL; restarting" in shared.output
    await eventually(lambda: asyncio.to_thread(shared.serves), what="serves again")


async def test_without_its_fork_server_it_starts_programs(shared: Up) -> None:
    await shared.ready()
    server = next(iter(shared.unnamed()))
    os.kill(server, signal.SIGKILL)
    old = shared.children()["router-0"]
    os.kill(old, signal.SIGKILL)
    await eventually(lambda: shared.children().get("router-0", old) != old, what="it is back")
    assert server not in shared.unnamed()
    await eventually(lambda: asyncio.to_thread(shared.serves), what="serves again")


def successor(up: Up, name: str, pid: int) -> int:
    """The pid of the process after that of `pid`, 0 before it starts."""
    found = up.children().get(name, pid)
    return found if found != pid else 0


async def test_kills_during_the_start_do_not_end_a_mesh_that_serves(make: Factory) -> None:
    up = make("--workers", "2")
    await eventually(lambda: "worker-1" in up.children(), 120.0)
    os.kill(pid := up.children()["worker-1"], signal.SIGSTOP)

    async def served() -> bool:
        try:
            return await asyncio.to_thread(up.serves)
        except AssertionError:
            return False

    await eventually(served, 120.0)
    assert " ready after " not in up.output
    for _ in range(4):
        os.kill(pid, signal.SIGKILL)
        pid = await eventually(partial(successor, up, "worker-1", pid))
    await up.ready()
    assert up.output.count("worker-1 was killed by SIGKILL; restarting") == 4
    assert await asyncio.to_thread(up.serves)


async def test_a_worker_that_would_be_refused_again_stays_down(
    make: Factory, tmp_path: Path
) -> None:
    folder = tmp_path / "kvmesh-demo"
    shutil.copytree(model_dir(), folder)
    up = make("--workers", "2", "--model", str(folder))
    await up.ready()
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 1}))
    os.kill(up.children()["worker-1"], signal.SIGKILL)
    refused = "worker-1 exited with status 2; not restarted, since it rejects its settings"
    await eventually(lambda: refused in up.output)
    assert "worker-1: config.json " in up.output
    assert set(up.children()) == {*START} - {"worker-1"}
    assert await asyncio.to_thread(up.serves)
    up.signal(signal.SIGTERM)
    assert await up.ended() == 0


async def test_an_interrupt_stops_everything_and_a_second_start_serves(make: Factory) -> None:
    up = make("--workers", "1")
    await up.ready()
    for _ in range(2):
        children = up.children()
        assert len(children) == 5
        up.signal(signal.SIGINT)
        assert await up.ended() == 0
        assert up.lines[-1].endswith("stopped")
        assert [name for name, pid in children.items() if alive(pid)] == []
        up.lines.clear()
        up.start()
        await up.ready()
    assert await asyncio.to_thread(up.serves)


async def test_a_second_interrupt_stops_at_once(make: Factory) -> None:
    up = make("--workers", "1")
    await up.ready()
    children = up.children()
    os.kill(children["frontend-0"], signal.SIGSTOP)
    up.signal(signal.SIGTERM)
    await eventually(lambda: "stopping" in up.output)
    up.signal(signal.SIGTERM)
    assert await up.ended() == 0
    assert not any(alive(pid) for pid in children.values())


async def test_processes_that_do_not_stop_in_time_are_killed(make: Factory) -> None:
    up = make("--workers", "1", "--stop-timeout-s", "0.5")
    await up.ready()
    children = up.children()
    os.kill(children["worker-0"], signal.SIGSTOP)
    up.signal(signal.SIGTERM)
    assert await up.ended() == 0
    assert "did not stop within 0.5 s: killed" in up.output
    assert not any(alive(pid) for pid in children.values())


async def test_a_killed_supervisor_leaves_no_orphan(make: Factory) -> None:
    up = make("--workers", "1")
    await up.ready()
    children = up.children()
    up.signal(signal.SIGKILL)
    await up.ended()
    await eventually(lambda: not any(alive(pid) for pid in children.values()))


@pytest.mark.parametrize("flag", ["--port", "--nats-port"])
async def test_a_taken_port_is_reported_with_its_flag(make: Factory, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        up = make(flag, str(number))
        assert await up.ended() == 1
    assert f":{number}" in up.output
    assert up.output.endswith(f"choose another with {flag}")


async def test_a_state_directory_in_use_is_refused(make: Factory) -> None:
    first = make("--workers", "1")
    await first.ready()
    second = make()
    assert await second.ended() == 1
    assert "--state-dir" in second.output
    assert await asyncio.to_thread(first.serves)


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model folder in the current one whose tokenizer cannot be read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tokenizer.json").write_text("{")


@pytest.mark.parametrize(
    ("options", "process", "reason"),
    [
        (["--model", "damaged"], "worker-0", "cannot read the tokenizer in damaged"),
        (["--frontend-keys-file", "none.toml"], "frontend-0", "none.toml: No such file"),
        (["--kvbm", "--kvbm-key-file", __file__], "kvbm-0", "kvbm.key must be"),
    ],
)
async def test_a_setting_that_a_process_refuses_ends_the_start(
    damaged: None, make: Factory, options: list[str], process: str, reason: str
) -> None:
    up = make("--workers", "1", *options)
    assert await up.ended(60) == 1
    assert f"kvmesh up: {process} exited with status 2" in up.output
    assert up.output.count(reason) == 2
    assert reason in up.output.splitlines()[-1]  # the cause is said last, too


async def test_a_model_that_is_nowhere_ends_the_start(make: Factory) -> None:
    up = make("--workers", "1", "--model", "nothing")
    assert await up.ended(60) == 1
    assert "kvmesh up: worker-0 exited with status 1" in up.output
    assert "nothing is no folder, and cannot come from the mesh" in up.output


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("worker --engine openai", "the openai engine needs a model"),
        ("worker --model damaged", "cannot read the tokenizer in damaged"),
        ("worker --labels fast", "label 'fast' is not of the form key=value"),
        ("worker --engine torch --torch-device toaster", "unknown device 'toaster'"),
        ("router --policy fastest", "[router] policy: 'fastest' is none of"),
        ("indexer --shard 5", "shard 5 of 1"),
        ("frontend --host 0.0.0.0", "refusing to serve everyone"),
        ("kvbm --retention tool=x", "'tool=x' is not KIND=PRIORITY"),
        ("kvbm --remote-url store", "'store' is not a redis://"),
        ("kvbm --disk-path damaged/tokenizer.json", "set kvbm.disk_path"),
        (f"kvbm --host-bytes {1 << 60}", "kvbm.host_bytes is"),
    ],
)
@pytest.mark.usefixtures("damaged")
def test_a_process_refuses_a_setting_for_good(
    nats_server: NatsServer, command: str, reason: str
) -> None:
    env = {**os.environ, "KVMESH_NATS_URL": nats_server.url, "KVMESH_NATS_NAMESPACE": "refused"}
    done = forks.run(command.split(), env, PATIENCE_S)
    assert done.returncode == 2
    assert (done.stdout + done.stderr).count(reason) == 1


async def test_a_slow_start_reports_the_missing_processes(make: Factory) -> None:
    up = make("--workers", "1", "--ready-timeout-s", "0.001")
    assert await up.ended() == 1
    assert "kvmesh up: not ready within 0.001 s; missing: frontend-0" in up.output


@pytest.fixture
def plain_nats(tmp_path: Path) -> Iterator[str]:
    """A server without JetStream; yields its URL."""
    port = free_port()
    with (tmp_path / "nats.log").open("wb") as log:
        server = subprocess.Popen([SERVER, "-a", "127.0.0.1", "-p", str(port)], stderr=log)
    yield f"nats://127.0.0.1:{port}"
    server.terminate()
    server.wait(PATIENCE_S)


async def test_a_nats_server_without_jetstream_is_a_clear_error(
    make: Factory, plain_nats: str
) -> None:
    up = make("--workers", "1", "--nats", plain_nats)
    assert await up.ended() == 1
    assert "the NATS server runs without JetStream: add jetstream {" in up.output


async def test_an_absent_nats_server_is_a_clear_error(make: Factory) -> None:
    up = make("--nats", f"nats://127.0.0.1:{free_port()}")
    assert await up.ended() == 1
    assert "(set its URL with --nats or KVMESH_NATS_URL)" in up.output


async def test_a_given_nats_server_is_used(make: Factory, nats_server: NatsServer) -> None:
    up = make("--workers", "1", "--nats", nats_server.url, "--nats-namespace", "given")
    await up.ready()
    assert "nats" not in up.children()
    assert await asyncio.to_thread(up.serves)
    assert f"NATS             {nats_server.url}" in up.output


async def test_states_outlive_a_restart_unless_reset(make: Factory) -> None:
    async def decisions(up: Up) -> int:
        report = await asyncio.to_thread(up.command, "status", "--json")
        assert report.returncode == 0, report.stderr
        streams = json.loads(report.stdout)["streams"]
        return next(s["messages"] for s in streams if s["name"].endswith("route"))  # type: ignore[no-any-return]

    first = make("--workers", "1")
    await first.ready()
    assert await asyncio.to_thread(first.serves)
    first.signal(signal.SIGTERM)
    await first.ended()
    second = make("--workers", "1")
    await second.ready()
    assert await decisions(second) > 0
    second.signal(signal.SIGTERM)
    await second.ended()
    third = make("--workers", "1", "--reset-states")
    await third.ready()
    assert await decisions(third) == 0


async def test_the_embedded_nats_server_requires_the_token(shared: Up) -> None:
    await shared.ready()
    token = shared.token_file.read_text().strip()
    with pytest.raises(BusUnavailable, match=r"requires credentials: set nats\.user"):
        await Bus.connect(BusOptions(url=shared.nats_url), "stranger", timeout=5)
    bus = await Bus.connect(shared.options, "test")
    await bus.close()
    assert token not in shared.output
    assert not any(token in line for line in command_lines(shared))


def command_lines(up: Up) -> list[str]:
    pids = (up.pid, *up.children().values())
    return [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]


async def test_the_printed_status_command_works(shared: Up, tmp_path: Path) -> None:
    await shared.ready()
    line = next(line for line in shared.lines if "Look inside" in line)
    command = line.split("kvmesh ")[1]
    done = await asyncio.to_thread(forks.run, shlex.split(command), os.environ)
    assert "worker-1" in done.stdout, done.stderr
    env = {**os.environ, "KVMESH_UP_STATE_DIR": str(shared.folder / "state")}
    found = await asyncio.to_thread(forks.run, ["status"], env)
    assert "worker-1" in found.stdout, found.stderr


async def test_as_json_every_line_is_an_object(make: Factory) -> None:
    up = make("--workers", "1", "--log-format", "json")
    await up.ready()
    up.signal(signal.SIGTERM)
    await up.ended()
    services = {json.loads(line)["service"] for line in up.lines}
    assert {"up", "worker-0", "frontend-0", "router-0"} <= services


async def test_a_slow_start_is_told_and_succeeds(make: Factory) -> None:
    slow = ("--mock-prepare-s", "10", "--mock-startup-s", "12", "--ready-timeout-s", "18")
    up = make("--workers", "1", *slow)
    await up.ready()
    assert re.search(r"waiting for (.*, )?worker-0 \(weights for \d+s of \d+s\)", up.output)


async def test_a_start_without_progress_names_its_phase_and_the_option(make: Factory) -> None:
    up = make("--workers", "1", "--mock-startup-s", "600", "--ready-timeout-s", "6")
    assert await up.ended() == 1
    assert re.search(r"not ready within 6 s; missing: (.*, )?worker-0 \(weights for ", up.output)
    assert "up.ready_timeout_s (--ready-timeout-s) sets it" in up.output


async def test_a_worker_that_restarts_is_told_while_it_loads(make: Factory) -> None:
    up = make("--workers", "1", "--mock-startup-s", "11")
    await up.ready()
    told = len(up.lines)
    os.kill(up.children()["worker-0"], signal.SIGKILL)
    await eventually(lambda: "waiting for worker-0 (weights for" in "\n".join(up.lines[told:]))
