"""What `kvmesh up` settles before it starts, and what it says when it has."""

import asyncio
import io
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console
from support.up import alive
from support.wait import eventually

from kvmesh.bus.messages import Load
from kvmesh.cli.credentials.server import ServerFiles
from kvmesh.cli.credentials.server import server_config as secured_config
from kvmesh.cli.local import with_local_mesh
from kvmesh.cli.supervisor import ready
from kvmesh.cli.supervisor.errors import UpError
from kvmesh.cli.supervisor.nats import server_config, server_environ
from kvmesh.cli.supervisor.plan import Spec
from kvmesh.cli.supervisor.process import Supervised
from kvmesh.cli.supervisor.resources import claim
from kvmesh.cli.supervisor.table import describe, render
from kvmesh.settings import Flag, Settings, load
from kvmesh.settings.load import Place
from kvmesh.settings.schema import StreamSettings

ROOT = Path(__file__).parents[3]


def settings(folder: Path, **flags: str) -> Settings:
    places: dict[Place, Flag] = {("up", "state_dir"): Flag("", str(folder))}
    for name, text in {"up__nats_port": "0", "frontend__port": "0", **flags}.items():
        section, key = name.split("__")
        places[section, key] = Flag(name, text)
    return load(None, {}, places)


@contextmanager
def taken() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_free_ports_are_found_and_differ(tmp_path: Path) -> None:
    with ExitStack() as held:
        claimed = claim(settings(tmp_path), held)
    assert claimed.nats.url.startswith("nats://127.0.0.1:")
    assert claimed.frontend.port not in (0, int(claimed.nats.url.rpartition(":")[2]))


def test_a_given_server_needs_no_directory(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    with ExitStack() as held:
        claimed = claim(settings(folder, nats__url="nats://elsewhere:4222"), held)
    assert claimed.nats.url == "nats://elsewhere:4222"
    assert not folder.exists()


@pytest.mark.parametrize(
    ("option", "flag"),
    [
        ("up__nats_port", "--nats-port"),
        ("frontend__port", "--port"),
        ("up__metrics_port", "--metrics-port"),
    ],
)
def test_a_taken_port_is_named(tmp_path: Path, option: str, flag: str) -> None:
    with taken() as port, ExitStack() as held, pytest.raises(UpError, match=f"{port}.*{flag}$"):
        claim(settings(tmp_path, **{option: str(port)}), held)


def test_a_port_asked_for_twice_is_named(tmp_path: Path) -> None:
    with taken() as port:
        pass
    twice = {"up__nats_port": str(port), "frontend__port": str(port)}
    with ExitStack() as held, pytest.raises(UpError, match=f"{port} is used twice.*--port"):
        claim(settings(tmp_path, **twice), held)


def test_a_directory_serves_one_mesh_at_a_time(tmp_path: Path) -> None:
    with ExitStack() as held:
        claim(settings(tmp_path), held)
        with ExitStack() as second, pytest.raises(UpError, match="--state-dir"):
            claim(settings(tmp_path), second)
    with ExitStack() as held:
        claim(settings(tmp_path), held)


def test_an_unusable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with ExitStack() as held, pytest.raises(UpError, match="file/state"):
        claim(settings(tmp_path / "file" / "state"), held)


def test_the_server_may_hold_all_that_the_streams_may(tmp_path: Path) -> None:
    config = server_config(4333, "t", tmp_path / 'a "b"', StreamSettings(kv_bytes=1 << 40))
    assert "listen: 127.0.0.1:4333\n" in config
    assert r"a \"b\"" in config
    limits = [int(line.split(": ")[1]) for line in config.splitlines() if "max_file" in line]
    assert limits[0] > 1 << 40


def test_the_server_syncs_every_second_and_bounds_its_garbage(tmp_path: Path) -> None:
    streams = StreamSettings(seq_bytes=1 << 30)
    server = ServerFiles("kvmesh", "0.0.0.0:4222", tmp_path, tmp_path, streams)
    for config in (server_config(4333, "t", tmp_path, streams), secured_config(server, ())):
        assert "  sync_interval: 1s\n" in config
    assert "sync_interval: 1s }" in (ROOT / "docs" / "deployment.md").read_text()
    assert int(server_environ(streams, {})["GOMEMLIMIT"]) > 2 << 30
    assert server_environ(streams, {"GOMEMLIMIT": "1GiB"})["GOMEMLIMIT"] == "1GiB"


@pytest.mark.parametrize(
    ("listened", "reached"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.7", "10.0.0.7")]
)
def test_where_a_listener_is_reached(listened: str, reached: str) -> None:
    assert ready.reachable(listened) == reached


def test_the_announcement_names_every_port() -> None:
    said = ready.announcement("::1", [8000, 8001], ["demo"], "nats://h:1", "none")
    assert "OPENAI_BASE_URL=http://[::1]:8000/v1" in said
    assert "and ports 8001" in said
    assert '"model": "demo"' in said
    assert "OPENAI_API_KEY=none" in said
    assert "Bearer" not in said
    assert "no model yet" in ready.announcement("h", [1], [], "", "none")


def test_the_announcement_says_how_to_look_inside() -> None:
    file = Path("/a b/nats.token")
    said = ready.announcement("h", [1], [], "nats://127.0.0.1:4223", "none", file)
    assert "kvmesh status --nats nats://127.0.0.1:4223 --nats-token-file '/a b/nats.token'" in said


def test_the_embedded_server_has_a_token_that_other_commands_find(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with ExitStack() as held:
        claimed = claim(settings(folder), held)
        token = claimed.nats.token
        assert token is not None
        assert len(token) == 64
        for path in (folder, *folder.iterdir()):
            assert path.stat().st_mode & 0o077 == 0 or path.name == "lock"
        for url in ({}, {"nats__url": claimed.nats.url}):
            assert with_local_mesh(settings(folder, **url)).nats == replace(
                settings(folder).nats, url=claimed.nats.url, token=token
            )
        for other in ({"nats__url": "nats://elsewhere:4222"}, {"nats__user": "me"}):
            assert with_local_mesh(settings(folder, **other)) == settings(folder, **other)
    assert with_local_mesh(settings(folder)) == settings(folder)
    with ExitStack() as held:
        assert claim(settings(folder), held).nats.token == token


def rank(number: int) -> Load:
    return msgspec.convert(
        {
            **dict.fromkeys(Load.__struct_fields__, 0),
            "instance": "worker-0-a",
            "rank": number,
            "running": 2,
            "waiting": 1,
            "active_blocks": 30,
            "total_blocks": 100,
        },
        Load,
    )


def test_the_load_of_all_ranks() -> None:
    assert describe([rank(0), rank(1)]) == ("4", "2", "30%")


async def test_the_table_shows_every_process() -> None:
    process = Supervised(
        Spec("worker-0", "worker", ("true",), {}), lambda *_: None, lambda *_: None
    )
    shown = Console(file=io.StringIO(), width=80)
    now = asyncio.get_running_loop().time()
    process.record.started(now - 61, 4711)
    shown.print(render([process], None, now))
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    assert text.split() == [
        *("process", "state", "pid", "up", "restarts", "running", "waiting", "KV", "in", "use"),
        *("worker-0", "running", "4711", "1m", "0"),
    ]


async def test_a_program_that_does_not_exist_is_reported_and_retried() -> None:
    lines: list[str] = []
    ends: list[int] = []
    spec = Spec("worker-0", "worker", ("/nowhere/program",), {})
    process = Supervised(spec, lambda _, line: lines.append(line), lambda _, end: ends.append(end))
    running = asyncio.create_task(process.run())
    await eventually(lambda: len(ends) >= 2)
    await process.stop(1.0)
    await running
    assert ends[:2] == [127, 127]
    assert lines[0] == "cannot start /nowhere/program: No such file or directory"


async def test_what_a_process_started_dies_with_it() -> None:
    lines: list[str] = []
    script = "sleep 600 & echo $!; exit 3"
    spec = Spec("worker-0", "worker", ("/bin/sh", "-c", script), {})
    ends: list[int] = []
    process = Supervised(spec, lambda _, line: lines.append(line), lambda _, end: ends.append(end))
    running = asyncio.create_task(process.run())
    await eventually(lambda: ends)
    await process.stop(1.0)
    await running
    assert ends[0] == 3
    await eventually(lambda: not any(alive(int(pid)) for pid in lines))


async def test_output_is_split_into_lines_of_bounded_length() -> None:
    lines: list[str] = []
    long = "head -c 200000 /dev/zero | tr '\\0' x"
    script = f"printf 'one\\ntwo'; printf ' more\\n'; {long}; exec sleep 600"
    spec = Spec("worker-0", "worker", ("/bin/sh", "-c", script), {})
    process = Supervised(spec, lambda _, line: lines.append(line), lambda *_: None)
    running = asyncio.create_task(process.run())
    await eventually(lambda: sum(map(len, lines)) > 100_000)
    await process.stop(1.0)
    await running
    assert lines[:2] == ["one", "two more"]
    assert set("".join(lines[2:])) == {"x"}
    assert sum(map(len, lines[2:])) == 200_000
    assert process.record.pid is None
