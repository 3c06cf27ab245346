"""The HTTP endpoint of metrics and health."""

import asyncio
import gzip
import logging
import math
import socket
from typing import Any

import aiohttp
import pytest
from aiohttp.compression_utils import ZLibDecompressor
from aiohttp.test_utils import make_mocked_request
from prometheus_client import REGISTRY, Gauge, Histogram
from support.nats import free_port
from support.refusals import POST, REFUSED, answer_after
from support.wait import PATIENCE_S

from kvmesh.runtime.http import connection
from kvmesh.runtime.http.connection import MAX_DISCARDED
from kvmesh.runtime.status_http import render_metrics, serve_metrics
from kvmesh.runtime.warnings import Warnings
from kvmesh.settings.schema import ProcessSettings


async def test_metrics_listen_on_the_loopback_by_default() -> None:
    port = free_port()
    runner = await serve_metrics(ProcessSettings(), port, lambda: True, Warnings())
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


async def test_exemplars_and_no_created_series_are_in_openmetrics() -> None:
    times = Histogram("kvmesh_test_seconds", "Times in a test")
    port = free_port()
    runner = await serve_metrics(ProcessSettings(), port, lambda: True, Warnings())
    assert runner is not None
    try:
        times.observe(0.1, {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"})
        times.observe(0.1)
        async with aiohttp.ClientSession() as http:

            async def scrape(accept: str) -> str:
                url, headers = f"http://127.0.0.1:{port}/metrics", {"Accept": accept}
                async with http.get(url, headers=headers) as answer:
                    return await answer.text()

            open_metrics = await scrape("application/openmetrics-text; version=1.0.0")
            plain = await scrape("text/plain")
        exemplar = '# {trace_id="4bf92f3577b34da6a3ce929d0e0e4736"} 0.1'
        assert open_metrics.count(exemplar) == 1
        assert open_metrics.endswith("# EOF\n")
        assert exemplar not in plain
        assert "kvmesh_test_seconds_count 2.0" in plain
        assert "_created" not in plain + open_metrics
    finally:
        REGISTRY.unregister(times)
        await runner.cleanup()


async def test_a_gauge_without_a_finite_value_is_left_out() -> None:
    values = Gauge("kvmesh_test_values", "Values in a test", ["of"])
    for name, value in (("a", 1.0), ("b", math.inf), ("c", math.nan)):
        values.labels(name).set(value)
    try:
        for accept in ("text/plain", "application/openmetrics-text; version=1.0.0"):
            request = make_mocked_request("GET", "/metrics", headers={"Accept": accept})
            body = render_metrics(request).body
            assert isinstance(body, bytes)
            shown = [line for line in body.decode().splitlines() if "test_values{" in line]
            assert shown == ['kvmesh_test_values{of="a"} 1.0']
    finally:
        REGISTRY.unregister(values)


async def test_a_body_that_nobody_reads_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = ZLibDecompressor.decompress_sync

    def counted(*arguments: Any, **options: Any) -> bytes:
        part = decode(*arguments, **options)
        decoded.append(len(part))
        return part

    monkeypatch.setattr(ZLibDecompressor, "decompress_sync", counted)
    port = free_port()
    runner = await serve_metrics(ProcessSettings(), port, lambda: True, Warnings())
    assert runner is not None
    try:
        async with aiohttp.ClientSession(headers={"Content-Encoding": "gzip"}) as http:
            for path, status in (("/metrics", 405), ("/health", 405), ("/nowhere", 404)):
                url, body = f"http://127.0.0.1:{port}{path}", gzip.compress(b" " * (1 << 20))
                async with http.post(url, data=body) as answer:
                    assert answer.status == status
        assert decoded == []
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("head", "rest", "times"), REFUSED)
async def test_a_refused_request_is_answered_and_its_rest_bounded(
    head: bytes, rest: bytes, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    runner = await serve_metrics(ProcessSettings(), port, lambda: True, Warnings())
    assert runner is not None
    try:
        answer, sent = await asyncio.wait_for(answer_after(port, head, rest, times), PATIENCE_S)
    finally:
        await runner.cleanup()
    assert answer.partition(b" ")[2][:1] == b"4"
    assert sent < MAX_DISCARDED + (32 << 20)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_a_client_that_sends_no_more_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "DISCARD_S", 0.05)
    port = free_port()
    runner = await serve_metrics(ProcessSettings(), port, lambda: True, Warnings())
    assert runner is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(POST + b"Content-Length: 100000\r\n\r\n")
    try:
        assert b" 404 " in await asyncio.wait_for(reader.read(), PATIENCE_S)
    finally:
        writer.close()
        await runner.cleanup()
