"""`kvmesh tail` and `kvmesh status` beside a running mesh."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio
from support import forks
from support.nats import NatsServer, free_port
from support.up import Up
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import Cancel, SeqBatch, encode
from kvmesh.cli.messages.merging import MAX_WAITING


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    up = Up(tmp_path_factory.mktemp("up"), "--workers", "2")
    up.start()
    yield up
    up.close()


@pytest_asyncio.fixture
async def mesh(started: Up) -> Up:
    await started.ready()
    return started


class Command:
    """A `kvmesh` subcommand that runs while the test does."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        reader, writer = os.pipe()
        with open(writer, "wb") as output:
            self.process = forks.start(arguments, env, output, output)
        self.lines: list[str] = []
        self.headers: list[str] = []
        self.reading = asyncio.create_task(asyncio.to_thread(self._read, reader))

    def _read(self, reader: int) -> None:
        with open(reader) as output:
            for text in output:
                line = text.rstrip("\n")
                is_header = re.match("kvmesh tail: (following|replaying) ", line)
                (self.headers if is_header else self.lines).append(line)

    def lines_with(self, *parts: str) -> list[str]:
        return [line for line in self.lines if all(part in line for part in parts)]

    async def stop(self) -> None:
        self.process.terminate()
        await self.ended()

    async def ended(self) -> int:
        """Wait for the end, and for all lines; returns the exit status."""
        status = await asyncio.to_thread(self.process.wait, PATIENCE_S)
        await self.reading
        return status


Run = Callable[..., Coroutine[Any, Any, Command]]


@pytest_asyncio.fixture
async def run(started: Up) -> AsyncIterator[Run]:
    env = {**os.environ, "KVMESH_UP_STATE_DIR": str(started.token_file.parent)}
    commands: list[Command] = []

    async def start(*arguments: str) -> Command:
        commands.append(Command(arguments, env))
        return commands[-1]

    yield start
    for command in commands:
        await command.stop()


async def test_the_tail_shows_a_request_from_decision_to_end(mesh: Up, run: Run) -> None:
    tail = await run("tail", "--nats", mesh.nats_url)
    await eventually(lambda: tail.lines_with("instances", "worker-0"))
    events = await asyncio.to_thread(mesh.complete, 40, "Tell me of rivers. " * 20)
    request = json.loads(events[0])["id"]
    await eventually(lambda: tail.lines_with(f"{request} ✓"))
    assert tail.lines_with("route", request, "→ worker-", "kv: cost", "2 candidates")
    assert tail.lines_with("seq", f"add {request}")
    assert tail.lines_with("seq", f"prefilled {request}")
    assert tail.lines_with("seq", f"free {request}")
    await eventually(lambda: tail.lines_with("kv ", "kvmesh-demo worker-", "+"))


async def test_an_idle_tail_says_that_it_listens(mesh: Up, run: Run) -> None:
    tail = await run("tail", "scaling", "limits", "--nats", mesh.nats_url)
    await eventually(lambda: tail.headers)
    (header,) = tail.headers
    assert header.startswith("kvmesh tail: following scaling limits of mesh kvmesh on NATS at ")
    assert re.search(r" since \d\d:\d\d:\d\d, until Ctrl-C$", header)
    assert tail.lines == []


async def test_a_command_in_another_folder_finds_the_mesh(mesh: Up, tmp_path: Path) -> None:
    """By the user's record, with a notice; a state directory names one of several."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVMESH_")}

    async def status(*arguments: str) -> tuple[int, str, str]:
        done = await asyncio.to_thread(
            forks.run, ["status", *arguments], clean, PATIENCE_S, tmp_path
        )
        return done.returncode, done.stdout, done.stderr

    code, out, err = await status("--state-dir", str(mesh.token_file.parent))
    assert (code, err) == (0, "")
    assert "worker-1-" in out
    code, out, err = await status("--state-dir", str(tmp_path))
    assert (code, out) == (1, "")
    assert f"--state-dir {mesh.token_file.parent}" in err


async def test_the_tail_as_json_is_complete(mesh: Up, run: Run) -> None:
    tail = await run("tail", "route", "out", "load", "work", "--json", "--nats", mesh.nats_url)
    await eventually(lambda: tail.lines_with('"Load"'))
    events = await asyncio.to_thread(mesh.complete)
    request = json.loads(events[0])["id"]
    await eventually(lambda: tail.lines_with('"Outcome"', request))
    shown = [json.loads(line) for line in tail.lines if line.startswith("{")]
    kinds = {line["message"]["type"] for line in shown}
    assert {"Load", "Work", "StepOutput", "Decision", "Outcome"} <= kinds
    decision = next(s["message"] for s in shown if s["message"]["type"] == "Decision")
    assert {"chosen", "candidates", "sequence_hashes", "policy"} <= set(decision)


async def test_since_replays_the_streams_and_may_stop_at_the_present(mesh: Up, run: Run) -> None:
    events = await asyncio.to_thread(mesh.complete)
    request = json.loads(events[0])["id"]
    options = ("--since", "1h", "--no-follow", "--nats", mesh.nats_url)

    found: list[Command] = []

    async def ended() -> bool:
        tail = await run("tail", "route", "seq", *options)
        assert await tail.ended() == 0
        found[:] = [tail]
        return bool(tail.lines_with(f"{request} ✓") and tail.lines_with("seq", f"free {request}"))

    await eventually(ended)
    assert found[0].lines_with("route", request, "→")


async def test_past_messages_are_shown_in_order_of_time_before_new_ones(bus: Bus, run: Run) -> None:
    subjects = bus.subjects
    kinds = [subjects.kv("m", "w"), subjects.route("m"), subjects.seq("m")]
    draw = Random(1)
    sent = []
    for turn in range(2 * MAX_WAITING):
        # a stream may be silent for longer than of another one are kept here
        subject = kinds[0] if turn < 1.3 * MAX_WAITING else draw.choice(kinds)
        await bus.store(subject, encode(SeqBatch(f"{turn}", [])), PATIENCE_S)
        sent.append(subject)
    options = ("--nats", bus.options.url, "--nats-namespace", bus.options.namespace)
    past = await run("tail", "--since", "1h", "--no-follow", "--json", *options)
    assert await past.ended() == 0
    assert [json.loads(line)["subject"] for line in past.lines] == sent
    tail = await run("tail", "kv", "seq", "--since", "1h", "--json", *options)
    await eventually(lambda: len(tail.lines) == len([s for s in sent if s != kinds[1]]))
    for number, subject in enumerate((kinds[2], kinds[0], kinds[2]), len(tail.lines) + 1):
        await bus.store(subject, encode(SeqBatch("new", [])), PATIENCE_S)
        await eventually(lambda count=number: len(tail.lines) == count)  # type: ignore[misc]
        assert json.loads(tail.lines[-1])["subject"] == subject


async def test_a_limit_ends_the_tail(mesh: Up, run: Run) -> None:
    tail = await run("tail", "load.>", "--limit", "2", "--nats", mesh.nats_url)
    assert await tail.ended() == 0
    assert len(tail.lines) == 2


async def test_control_messages_are_shown_and_watching_requests_is_announced(
    bus: Bus, run: Run
) -> None:
    options = ("--nats", bus.options.url, "--nats-namespace", bus.options.namespace)
    tail = await run("tail", ">", *options)
    await eventually(lambda: tail.lines_with("tailing requests"))

    async def seen() -> bool:
        await bus.client.publish(bus.subjects.ctl("w-1"), encode(Cancel("q1")))
        await bus.client.publish(bus.subjects.kv("a model", "w"), b"\xc1")
        cancelled = tail.lines_with("ctl", "w-1", "cancel q1")
        return bool(cancelled and tail.lines_with("a model w", "undecodable"))

    await eventually(seen)


async def test_status_shows_members_streams_and_readers(mesh: Up, run: Run) -> None:
    await asyncio.to_thread(mesh.complete)

    async def shown() -> Command:
        status = await run("status", "--nats", mesh.nats_url, "--starts")
        assert await status.ended() == 0
        assert status.lines_with("worker-1-", "worker", "ready", "kvmesh-demo", "0 running")
        return status

    status = await eventually(shown)
    assert status.lines_with("start, in seconds", "imports", "routable", "total")  # of forks
    assert len(status.lines_with("worker-1-")) == 2
    assert status.lines_with("kvm-kvmesh-route")
    assert status.lines_with("indexer-0", "kvm-kvmesh-kv")
    assert status.lines_with("kvm-kvmesh-models", "object")


async def test_status_as_json(mesh: Up, run: Run) -> None:
    async def complete() -> bool:
        status = await run("status", "--json", "--nats", mesh.nats_url)
        assert await status.ended() == 0
        report = json.loads("\n".join(status.lines))
        streams = [stream["name"] for stream in report["streams"]]
        kinds = ("kv", "route", "scaling", "seq")
        assert sorted(streams) == [f"kvm-kvmesh-{kind}" for kind in kinds]
        members = sorted(member["card"]["name"] for member in report["instances"])
        return members == ["frontend-0", "indexer-0", "router-0", "worker-0", "worker-1"]

    await eventually(complete)


@pytest.mark.parametrize("command", ["tail", "status"])
async def test_an_absent_nats_server_is_reported(run: Run, command: str) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    shown = await run(command, "--nats", url)
    assert await shown.ended() == 1
    assert shown.lines[-1].startswith(f"kvmesh {command}: cannot use NATS at {url}: ")
    assert "Connect call failed" in shown.lines[-1]


@pytest.mark.parametrize("words", [["tail"], ["tail", "kv"], ["tail", "load"], ["status"]])
async def test_a_missing_mesh_is_reported_in_one_line(
    run: Run, words: list[str], nats_server: NatsServer, options: BusOptions
) -> None:
    command = words[0]
    place = ("--nats", nats_server.url, "--nats-namespace", options.namespace)
    shown = await run(*words, *place)
    assert await shown.ended() == 1
    (line,) = shown.lines
    assert line.startswith(
        f"kvmesh {command}: no mesh named {options.namespace} at {nats_server.url}"
    )
