"""The port of metrics and probes of a service."""

import socket

import aiohttp
import pytest
from support.nats import free_port

from kvmesh.runtime.http import serve_metrics
from kvmesh.settings import load


async def test_metrics_are_for_this_machine_unless_told_otherwise() -> None:
    port = free_port()
    runner = await serve_metrics(load(None, {}, {}).worker.metrics_host, port, lambda: True)
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
