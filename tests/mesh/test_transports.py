"""TLS and websockets between a process and NATS, and servers of older versions."""

import datetime
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.nats import NatsServer, free_port
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.errors import BusUnavailable
from kvmesh.bus.messages import MessageDecoder
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.bus.streams.reader import Start, StreamReader
from kvmesh.bus.streams.server_check import old_version
from kvmesh.cli.credentials.authority import Authority

SMALL = StreamLimits(kv_bytes=2 << 20, route_bytes=1 << 20, seq_bytes=1 << 20)
ECHO = MessageDecoder(bytes)


class Files:
    """Certificates of an authority, a server and a client."""

    def __init__(self, folder: Path) -> None:
        now = datetime.datetime.now(datetime.UTC)
        authority = Authority.create("test", now)
        self.folder = folder
        self.ca = self._write("ca.pem", authority.pair.certificate)
        for name, hosts in (("server", ["localhost", "127.0.0.1"]), ("client", [])):
            pair = authority.issue(name, hosts, now, 1)
            self._write(f"{name}.pem", pair.certificate)
            self._write(f"{name}.key", pair.key)

    def _write(self, name: str, content: bytes) -> Path:
        (self.folder / name).write_bytes(content)
        return self.folder / name

    def tls(self, *others: str) -> str:
        lines = (
            f'cert_file: "{self.folder / "server.pem"}"',
            f'key_file: "{self.folder / "server.key"}"',
            f'ca_file: "{self.ca}"',
            *others,
        )
        return "tls {\n" + "\n".join(lines) + "\n}"

    def of_client(self, options: BusOptions) -> BusOptions:
        cert, key = self.folder / "client.pem", self.folder / "client.key"
        return replace(options, tls_cert=cert, tls_key=key)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    yield server
    server.stop()


@asynccontextmanager
async def connected(options: BusOptions) -> AsyncIterator[Bus]:
    bus = await Bus.connect(options, "test", PATIENCE_S)
    try:
        yield bus
    finally:
        await bus.close()


async def serves(bus: Bus) -> None:
    """Requests, a stream and a reader work."""
    await bus.serve("echo", ECHO, lambda data, reply: reply(data))
    assert await bus.request("echo", b"1", ECHO, PATIENCE_S) == b"1"
    await ensure_streams(bus, SMALL)
    read: list[bytes] = []
    stream, subject = bus.subjects.kv_stream, bus.subjects.kv_all
    reader = StreamReader(bus, stream, subject, lambda message: read.append(message.data), Start())
    await reader.open()
    await bus.store(bus.subjects.kv("m", "w"), b"stored", PATIENCE_S)
    await eventually(lambda: b"stored" in read)
    await reader.close()


async def test_a_server_that_begins_with_the_handshake(server: NatsServer, files: Files) -> None:
    server.settings = files.tls("handshake_first: true")
    server.start()
    options = BusOptions(url=server.url, tls_ca=files.ca)
    with pytest.raises(BusUnavailable, match=r"sends nothing: .* set nats\.tls_handshake_first"):
        await Bus.connect(options, "test", timeout=PATIENCE_S, once=True)
    async with connected(replace(options, tls_handshake_first=True)) as bus:
        await serves(bus)


async def test_a_server_that_greets_before_the_handshake_is_told_from_one_that_does_not(
    server: NatsServer, files: Files
) -> None:
    server.settings = files.tls()
    server.start()
    options = BusOptions(url=server.url, tls_ca=files.ca, tls_handshake_first=True)
    with pytest.raises(BusUnavailable, match=r"unset nats\.tls_handshake_first"):
        await Bus.connect(options, "test", timeout=PATIENCE_S, once=True)


async def test_certificates_are_asked_for_and_mapped_by_name(
    server: NatsServer, files: Files
) -> None:
    server.settings = files.tls("verify_and_map: true") + (
        "\naccounts { A { jetstream: enabled, users: [{ user: 'CN=other' }] } }"
    )
    server.start()
    options = BusOptions(url=server.url, tls_ca=files.ca)
    with pytest.raises(BusUnavailable, match=r"certificate: set nats\.tls_cert and nats\.tls_key"):
        await Bus.connect(options, "test", timeout=PATIENCE_S, once=True)
    with pytest.raises(BusUnavailable, match=r"maps the certificate of nats\.tls_cert to no user"):
        await Bus.connect(files.of_client(options), "test", timeout=PATIENCE_S, once=True)


async def test_renewed_certificates_are_read_at_the_next_connection(
    server: NatsServer, files: Files
) -> None:
    server.settings = files.tls("verify: true")
    server.start()
    options = files.of_client(BusOptions(url=server.url, tls_ca=files.ca))
    async with connected(options) as bus:
        Files(files.folder)  # of another authority
        server.restart()
        await eventually(lambda: bus.counts.reconnects == 1)
        await serves(bus)


# nats-py gives aiohttp its limit in a form that will go
@pytest.mark.filterwarnings("ignore:parameter .timeout. of type .float. is deprecated")
@pytest.mark.parametrize("tls", [False, True])
async def test_websockets_serve_and_reconnect(server: NatsServer, files: Files, tls: bool) -> None:
    port = free_port()
    own = files.tls() if tls else "no_tls: true"
    server.settings = f"websocket {{ listen: '127.0.0.1:{port}'\n{own}\n}}"
    server.start()
    scheme = "wss" if tls else "ws"
    options = BusOptions(url=f"{scheme}://127.0.0.1:{port}", tls_ca=files.ca if tls else None)
    async with connected(options) as bus:
        await serves(bus)
        server.restart()
        await eventually(lambda: bus.counts.reconnects == 1)
        assert await bus.request("echo", b"2", ECHO, PATIENCE_S) == b"2"


async def test_an_older_server_is_warned_of(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server.start()
    async with connected(BusOptions(url=server.url)) as bus:
        assert old_version(bus) == ""
        monkeypatch.setattr(Bus, "server_version", "2.11.11")
        assert old_version(bus) == (
            "nats-server 2.11.11 is older than 2.12, the oldest that kvmesh is tested with"
        )
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
