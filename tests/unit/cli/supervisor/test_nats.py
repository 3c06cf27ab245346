"""Configuration of the embedded NATS server."""

import os
from pathlib import Path

import pytest

from kvmesh.cli.credentials.server import Server, ServerFiles
from kvmesh.cli.credentials.server import server_config as secured_config
from kvmesh.cli.supervisor.errors import UpError
from kvmesh.cli.supervisor.nats import server_config, server_environ, server_path
from kvmesh.settings.schema import StreamSettings

ROOT = Path(__file__).parents[4]


def test_the_server_limits_cover_the_streams(tmp_path: Path) -> None:
    config = server_config(4333, "t", tmp_path / 'a "b"', StreamSettings(kv_bytes=1 << 40))
    assert "listen: 127.0.0.1:4333\n" in config
    assert r"a \"b\"" in config
    limits = [int(line.split(": ")[1]) for line in config.splitlines() if "max_file" in line]
    assert limits[0] > 1 << 40


def test_the_server_syncs_every_second_and_bounds_its_garbage(tmp_path: Path) -> None:
    streams = StreamSettings(seq_bytes=1 << 30)
    server = ServerFiles("kvmesh", Server("a", 4222), "0.0.0.0", tmp_path, tmp_path, streams)
    for config in (server_config(4333, "t", tmp_path, streams), secured_config(server, ())):
        assert "  sync_interval: 1s\n" in config
    assert "sync_interval: 1s }" in (ROOT / "docs" / "deployment.md").read_text()
    assert int(server_environ(streams, {})["GOMEMLIMIT"]) > 2 << 30
    assert server_environ(streams, {"GOMEMLIMIT": "1GiB"})["GOMEMLIMIT"] == "1GiB"


def test_the_server_is_found_by_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.access(server_path(), os.X_OK)
    monkeypatch.setattr("kvmesh.cli.supervisor.nats.PACKAGE", "no-such-package")
    with pytest.raises(UpError, match="install the no-such-package package"):
        server_path()
