"""The check of a server by its first answers about JetStream."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.bus.errors import JetStreamUnavailable, ServerUnfit
from kvmesh.bus.streams import server_check
from kvmesh.bus.streams.server_check import check_server


def bus_whose_account_has_jetstream(after: int) -> Any:
    """A bus of an account that JetStream serves from so many questions on."""
    asked = 0

    async def account_info() -> Any:
        nonlocal asked
        asked += 1
        if asked <= after:
            raise JetStreamUnavailable("no responders", 503, None)
        return SimpleNamespace(domain="hub")

    return SimpleNamespace(
        max_payload=8 << 20,
        is_clustered=False,
        js=SimpleNamespace(account_info=account_info, is_own=True),
        client=SimpleNamespace(server_has_jetstream=True),
    )


async def test_an_account_may_get_jetstream_a_moment_after_it_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_check, "ENABLING_S", 60.0)
    monkeypatch.setattr(server_check, "PAUSE_S", 0.0)
    assert await check_server(bus_whose_account_has_jetstream(after=3)) == "hub"


async def test_an_account_without_jetstream_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_check, "ENABLING_S", 0.0)
    with pytest.raises(ServerUnfit, match="the NATS account has no JetStream"):
        await check_server(bus_whose_account_has_jetstream(after=100))
