"""The connector `compose`: errors that the suite of all connectors does not cover."""

from pathlib import Path

import pytest
from support.places.scripts import ComposePlace

from kvmesh.planner.connectors.compose import ComposeConnector
from kvmesh.planner.connectors.interface import ConnectorError
from kvmesh.planner.core.pools import Pool

TIMEOUT_S = 30.0


async def test_a_service_that_the_file_lacks_is_permanent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ComposePlace(tmp_path, monkeypatch)
    pools = [Pool("east"), Pool("b", target="gone"), Pool("a", target="also")]
    connector = ComposeConnector(place.file, pools, TIMEOUT_S)
    with pytest.raises(ConnectorError, match=r"compose\.yaml has no service also, gone") as caught:
        await connector.open()
    assert caught.value.permanent
    with pytest.raises(ConnectorError, match="unknown pool north"):
        await connector.scale({"north": 1})


async def test_a_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = ComposePlace(tmp_path, monkeypatch)
    place.file.unlink()
    with pytest.raises(ConnectorError, match=r"status 14: open .*no such file"):
        await place.connector().open()


async def test_output_without_a_service_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ComposePlace(tmp_path, monkeypatch)
    place.program.write_text('#!/bin/sh\necho \'{"Name": "x"}\'\n')
    with pytest.raises(ConnectorError, match="docker compose ps printed unexpected JSON"):
        await place.connector().state()


async def test_without_docker_the_error_is_permanent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    connector = ComposeConnector(tmp_path / "compose.yaml", [Pool("a")], TIMEOUT_S)
    with pytest.raises(ConnectorError, match="cannot run docker: No such file") as caught:
        await connector.open()
    assert caught.value.permanent
