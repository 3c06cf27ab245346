"""Processes of multiprocessing come from fork servers, and behave as spawned ones."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forked_processes import AHEAD, SPAWN, tell, tell_of_child
from support.wait import PATIENCE_S

from kvmesh.worker.engines.vllm.fork_servers.environments import changed, difference, fingerprint
from kvmesh.worker.engines.vllm.fork_servers.servers import RECORD, ForkServers
from kvmesh.worker.engines.vllm.stopped_processes import any_stopped


class Spawned:
    """A process, and what it has told."""

    def __init__(self, target: Any = tell) -> None:
        self.channel, there = SPAWN.Pipe()
        self.process = SPAWN.Process(target=target, args=(there,), name="made")
        self.process.start()
        there.close()
        assert self.channel.poll(PATIENCE_S)
        self.told = self.channel.recv()

    def end(self, code: int = 0) -> int | None:
        self.channel.send(code)
        self.process.join(PATIENCE_S)
        return self.process.exitcode


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServers]:
    """Servers of a start whose processes have its own environment."""
    record(tmp_path, "[{}]")
    servers = ForkServers(tmp_path, (AHEAD,))
    servers.start()
    with servers.used():
        yield servers
    servers.close()


def record(cache: Path, text: str) -> None:
    (cache / RECORD).parent.mkdir()
    (cache / RECORD).write_text(text)


def first_start(cache: Path) -> None:
    servers = ForkServers(cache, (AHEAD,))
    servers.start()
    with servers.used():
        made = Spawned()
        assert not forked(made)
        assert not made.told["ahead"]
        assert made.end() == 0
    servers.remember()
    servers.close()


def forked(made: Spawned) -> bool:
    return bool(made.told["pid"] != made.process.pid)


def test_the_first_start_records_the_environments_of_the_next_one(tmp_path: Path) -> None:
    servers = ForkServers(tmp_path, (AHEAD,))
    servers.start()
    with servers.used():
        os.environ["VLLM_SOME_OPTION"], os.environ["OTHER"] = "x", "y"
        try:
            made = Spawned()
        finally:
            del os.environ["VLLM_SOME_OPTION"], os.environ["OTHER"]
        assert not forked(made)
        assert made.end() == 0
    servers.remember()
    servers.close()
    assert json.loads((tmp_path / RECORD).read_text()) == [{"VLLM_SOME_OPTION": "x"}]


def test_a_process_comes_from_a_server(servers: ForkServers) -> None:
    os.environ["VALUE"] = "of this moment"
    try:
        made = Spawned()
    finally:
        del os.environ["VALUE"]
    assert forked(made)
    assert made.told["value"] == "of this moment"
    assert made.told["name"] == "made"
    assert made.told["folder"] == os.getcwd()
    assert made.told["ahead"]
    assert made.end(3) == 3


def test_processes_of_processes_come_from_servers_too(servers: ForkServers) -> None:
    made = Spawned(tell_of_child)
    assert forked(made)
    assert made.told["parent"] not in (os.getpid(), made.told["of"])
    assert made.end() == 0


def test_many_processes_come_from_one_server(servers: ForkServers) -> None:
    made = [Spawned() for _ in range(4)]
    assert all(map(forked, made))
    assert [each.end(number) for number, each in enumerate(made)] == list(range(4))


def test_another_environment_is_not_forked(servers: ForkServers) -> None:
    os.environ["OMP_NUM_THREADS"] = "7"
    try:
        made = Spawned()
    finally:
        del os.environ["OMP_NUM_THREADS"]
    assert not forked(made)
    assert made.end() == 0


def test_a_signal_reaches_the_process_and_its_end_is_seen(servers: ForkServers) -> None:
    made = Spawned()
    made.process.terminate()
    made.process.join(PATIENCE_S)
    assert made.process.exitcode == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_death_of_the_process_is_seen(servers: ForkServers, number: signal.Signals) -> None:
    made = Spawned()
    os.kill(made.told["pid"], number)
    made.process.join(PATIENCE_S)
    assert made.process.exitcode == -number


def test_a_killed_launcher_takes_the_process_with_it(servers: ForkServers) -> None:
    made = Spawned()
    made.process.kill()
    with pytest.raises(EOFError):
        made.channel.recv()


def test_a_killed_server_takes_its_processes_with_it(servers: ForkServers) -> None:
    made = Spawned()
    os.kill(made.told["parent"], signal.SIGKILL)
    made.process.join(PATIENCE_S)
    assert made.process.exitcode
    later = Spawned()
    assert not forked(later)
    assert later.end() == 0


def test_a_stopped_process_is_seen_as_stopped(servers: ForkServers) -> None:
    made = Spawned()
    assert made.process.pid is not None
    os.kill(made.told["pid"], signal.SIGSTOP)
    until(lambda: any_stopped([made.process.pid or 0]))
    os.kill(made.told["pid"], signal.SIGCONT)
    until(lambda: not any_stopped([made.process.pid or 0]))
    assert made.end() == 0


def test_servers_end_after_their_last_process(servers: ForkServers) -> None:
    made = Spawned()
    server = made.told["parent"]
    [process] = servers._servers
    assert process.pid == server
    assert process.stdin is not None
    process.stdin.close()
    assert made.end() == 0
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("text", ["", "[1]", "{", "[]", '[{"VLLM_A": 3}]'])
def test_a_malformed_record_costs_only_the_speed(tmp_path: Path, text: str) -> None:
    record(tmp_path, text)
    first_start(tmp_path)
    assert json.loads((tmp_path / RECORD).read_text()) == [{}]


def test_a_record_changes_no_other_variables(tmp_path: Path) -> None:
    record(tmp_path, json.dumps([{"PATH": "/nowhere"}]))
    servers = ForkServers(tmp_path, (AHEAD,))
    servers.start()
    with servers.used():
        made = Spawned()
        assert forked(made)
        assert made.end() == 0
    servers.close()


def test_a_server_whose_imports_fail_still_forks(tmp_path: Path) -> None:
    record(tmp_path, "[{}]")
    servers = ForkServers(tmp_path, ("no_such_module",))
    servers.start()
    with servers.used():
        made = Spawned()
        assert made.end() == 0
    servers.close()


def test_differences_rebuild_the_decisive_part() -> None:
    base = {"VLLM_A": "1", "VLLM_B": "2", "HOME": "/"}
    given = {"VLLM_A": "1", "LD_PRELOAD": "x.so", "VLLM_NIXL_PORT": "77", "HOME": "/elsewhere"}
    changes = difference(given, base)
    assert changes == {"LD_PRELOAD": "x.so", "VLLM_B": None}
    assert fingerprint(changed(base, changes)) == fingerprint(given)
    assert fingerprint(base) != fingerprint(given)


def until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
