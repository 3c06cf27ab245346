"""The HTTP endpoint of metrics and health."""

import socket

import aiohttp
import msgspec
import pytest
from support.nats import free_port

from kvmesh.runtime.status_http import serve_metrics
from kvmesh.runtime.warnings import Warnings
from kvmesh.settings import load


async def test_metrics_listen_on_the_loopback_by_default() -> None:
    port = free_port()
    settings = msgspec.structs.replace(load(None, {}, {}).worker, metrics_port=port)
    runner = await serve_metrics(settings, lambda: True, Warnings())
    assert runner is not None
    try:
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{port}/metrics") as answer,
        ):
            assert answer.status == 200
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=1)
    finally:
        await runner.cleanup()
