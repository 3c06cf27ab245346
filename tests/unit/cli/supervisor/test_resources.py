"""Ports, state directory and token that `kvmesh up` claims before it starts."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.nats import free_ports

from kvmesh.cli.local import find_mesh, with_local_mesh
from kvmesh.cli.supervisor.errors import UpError
from kvmesh.cli.supervisor.resources import claim
from kvmesh.settings import Flag, Settings, load
from kvmesh.settings.load import OptionKey


def settings(folder: Path, **flags: str) -> Settings:
    places: dict[OptionKey, Flag] = {("up", "state_dir"): Flag("", str(folder))}
    free = {"up__nats_port": "0", "frontend__port": "0", "dashboard__port": "0"}
    for name, text in {**free, **flags}.items():
        section, key = name.split("__")
        places[section, key] = Flag(name, text)
    return load(None, {}, places)


@contextmanager
def used_port(port: int = 0) -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        yield holder.getsockname()[1]


def test_free_ports_are_found_and_differ(tmp_path: Path) -> None:
    with ExitStack() as held:
        claimed = claim(settings(tmp_path), held)
    assert claimed.nats.url.startswith("nats://127.0.0.1:")
    ports = {claimed.frontend.port, claimed.dashboard.port}
    assert len(ports | {0, int(claimed.nats.url.rpartition(":")[2])}) == 4


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
        ("dashboard__port", "--dashboard-port or use --no-dashboard"),
        ("up__metrics_port", "--metrics-port"),
    ],
)
def test_a_used_port_is_named(tmp_path: Path, option: str, flag: str) -> None:
    with used_port() as port, ExitStack() as held, pytest.raises(UpError, match=f"{port}.*{flag}$"):
        claim(settings(tmp_path, **{option: str(port)}), held)


def test_a_port_used_twice_is_named(tmp_path: Path) -> None:
    with used_port() as port:
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


def test_the_latest_mesh_of_this_user_is_found_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("kvmesh.runtime.service.DEFAULT_URL", "nats://127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    elsewhere = load(None, {}, {})
    assert find_mesh(elsewhere) == (elsewhere, "")
    with ExitStack() as held:
        folders = [tmp_path / "one", tmp_path / "two"]
        for folder in folders:
            claimed = claim(settings(folder, nats__namespace="blue"), held)
            port = int(claimed.nats.url.rpartition(":")[2])
            held.enter_context(socket.create_server(("127.0.0.1", port)))
        found, text = find_mesh(elsewhere)
        assert (found.nats.url, found.nats.token) == (claimed.nats.url, claimed.nats.token)
        assert found.nats.namespace == "blue"
        assert str(folders[1]) in text
        assert "1 more run" in text
        for named in ({"nats__url": "nats://h:1"}, {"nats__user": "me"}):
            assert find_mesh(settings(tmp_path / "none", **named))[1] == ""
        assert find_mesh(settings(tmp_path / "none"))[1] == "", "a state directory was named"
        (tmp_path / "kvmesh").chmod(0o777)
        assert find_mesh(elsewhere) == (elsewhere, ""), "others could have written the records"
        (tmp_path / "kvmesh").chmod(0o700)
    assert find_mesh(elsewhere) == (elsewhere, ""), "none runs any more"


def test_a_planner_reserves_the_metrics_ports_of_all_its_workers(tmp_path: Path) -> None:
    chosen = {"up__frontends": "0", "up__routers": "0", "up__workers": "1", "up__max_workers": "3"}
    first = free_ports(5)  # of an indexer, a planner and three workers
    with used_port(first + 4) as port, ExitStack() as held:
        ports = {**chosen, "up__metrics_port": str(first)}
        claim(settings(tmp_path / "a", **ports), held)
        with pytest.raises(UpError, match=f":{port} .*--metrics-port$"):
            claim(settings(tmp_path / "b", **ports, up__planner="true"), held)
