"""Credentials that expire, are revoked or unusable; URLs with users; limits of accounts."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import nkeys
import pytest
from support import forks
from support.jwts import Keys, Operator
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.connection import direct_client
from kvmesh.bus.errors import BusError, BusUnavailable, CredentialsUnusable, MessageTooLarge
from kvmesh.bus.messages import MessageDecoder
from kvmesh.settings.secret_file import read_secret

LIVES_S = 3.0
ECHO = MessageDecoder(bytes)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    yield server
    server.stop()


@asynccontextmanager
async def connected(options: BusOptions) -> AsyncIterator[Bus]:
    bus = await Bus.connect(options, "test")
    try:
        yield bus
    finally:
        await bus.close()


def creds(server: NatsServer, file: Path) -> BusOptions:
    return BusOptions(url=server.url, credentials=str(file))


async def works(bus: Bus) -> bool:
    """True if the connection is up and subscriptions are in place."""
    try:
        await bus.js.account_info()
    except BusError:
        return False
    return True


async def test_a_renewed_file_serves_the_login_after_an_expiry(
    server: NatsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    operator, file = Operator(), tmp_path / "user.creds"
    server.settings = operator.config()
    server.start()
    user = operator.creds(file, time.time() + LIVES_S)
    async with connected(creds(server, file)) as bus:
        lost: list[bool] = []
        bus.on_lost.append(lambda: lost.append(True))
        operator.creds(file, time.time() + 3600, user)
        await eventually(lambda: bus.counts.reconnects == 1)
        await eventually(lambda: works(bus))
        assert not lost
    assert "reconnecting: user authentication expired" in caplog.text


async def test_a_revoked_user_logs_in_again_once_reissued(
    server: NatsServer, tmp_path: Path
) -> None:
    operator, file = Operator(), tmp_path / "user.creds"
    server.settings = operator.config()
    server.start()
    user = operator.creds(file)
    async with connected(creds(server, file)) as bus:
        operator.revoked = {user.public: int(time.time()) + 1}
        server.settings = operator.config()
        server.reload()
        await eventually(lambda: not bus.connected)
        operator.creds(file)  # another user
        await eventually(lambda: bus.counts.reconnects == 1)
        assert await works(bus)


async def test_a_login_that_stays_refused_ends_with_its_reason(
    server: NatsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(direct_client, "REFUSED_S", 0.5)
    operator, file = Operator(), tmp_path / "user.creds"
    server.settings = operator.config()
    server.start()
    expires = int(time.time() + LIVES_S)
    operator.creds(file, expires)
    async with connected(creds(server, file)) as bus:
        lost = asyncio.Event()
        bus.on_lost.append(lost.set)
        await asyncio.wait_for(lost.wait(), PATIENCE_S)
    end = next(r.getMessage() for r in caplog.records if r.levelname == "ERROR")
    assert end.startswith("NATS closed the connection permanently: ")
    assert f"its JWT expired at {time.strftime('%Y')}" in end
    await eventually(lambda: time.time() > expires + 1)  # servers count whole seconds
    with pytest.raises(BusUnavailable, match=rf"rejects nats\.credentials \({file}\): its JWT exp"):
        await Bus.connect(creds(server, file), "test")


async def test_changed_passwords_are_read_from_their_file_again(
    server: NatsServer, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("one\n")
    server.settings = "authorization { user: mesh, password: one }"
    server.start()
    options = BusOptions(url=server.url, user="mesh", password=read_secret(file))
    async with connected(options) as bus:
        file.write_text("two\n")
        server.settings = "authorization { user: mesh, password: two }"
        server.reload()
        await eventually(lambda: bus.counts.reconnects == 1)
        await eventually(lambda: works(bus))


async def test_a_user_in_one_url_serves_every_server(tmp_path: Path) -> None:
    """The second server is discovered, by its advertisement in the cluster."""
    first, second = NatsServer(tmp_path / "a"), NatsServer(tmp_path / "b")
    routes = [server.port + 1 for server in (first, second)]
    for number, server in enumerate((first, second)):
        server.jetstream = None
        server.settings = (
            "authorization { user: mesh, password: 'p@ss' }\n"
            f"cluster {{ name: c, listen: 127.0.0.1:{routes[number]},"
            f" routes: ['nats://127.0.0.1:{routes[1 - number]}'] }}"
        )
        server.start()
    url = first.url.replace("://", "://mesh:p%40ss@")
    async with connected(BusOptions(url=url)) as bus:
        await eventually(lambda: bus.client.discovered_servers)
        first.kill()
        await eventually(lambda: bus.connected and bus.server == f"127.0.0.1:{second.port}")
    second.stop()


ACCOUNT = (
    "accounts {{ A {{ jetstream: enabled, limits {{ {} }},"
    " users: [{{ user: a, password: a }}] }} }}"
)


async def test_the_limit_of_an_account_is_known_at_the_login(server: NatsServer) -> None:
    server.settings = ACCOUNT.format("max_payload: 65536")
    server.start()
    async with connected(BusOptions(url=server.url, user="a", password="a")) as bus:
        assert bus.max_payload == 65536
        with pytest.raises(MessageTooLarge, match="max_payload of the NATS account or user, 65536"):
            await bus.request("large", bytes(70_000), ECHO, PATIENCE_S)
        headers = {"Large": "x" * 1000}
        with pytest.raises(MessageTooLarge):
            await bus.store("large", bytes(65_000), PATIENCE_S, headers)
        assert bus.connected
        assert bus.counts.reconnects == 0


@pytest.mark.parametrize("owner", ["account", "user", "server"])
async def test_a_limit_that_changes_while_connected_fails_one_message(
    server: NatsServer, tmp_path: Path, owner: str
) -> None:
    operator, file = Operator(), tmp_path / "user.creds"
    server.settings = operator.config()
    server.start()
    user = operator.creds(file)
    async with connected(creds(server, file)) as bus:
        await bus.serve("echo", ECHO, lambda data, reply: reply(data))
        assert await bus.request("echo", bytes(100_000), ECHO, PATIENCE_S)
        before = bus.max_payload
        if owner == "server":
            server.max_payload = "64KB"
        else:
            operator.limits = {"payload": 65536} if owner == "account" else {}
            operator.creds(file, user=user, payload=65536 if owner == "user" else -1)
        server.settings = operator.config()
        server.reload()
        await eventually(
            lambda: "Reloaded server config" in (server.store / "nats.log").read_text()
        )
        if owner == "user":  # a login tells the limits of a user
            await bus.client.force_reconnect()
            await eventually(lambda: bus.counts.reconnects == 1)
        with pytest.raises(MessageTooLarge, match="65536"):
            await bus.request("echo", bytes(100_000), ECHO, PATIENCE_S)
        await eventually(lambda: works(bus))
        assert bus.max_payload == 65536
        assert await bus.request("echo", bytes(10_000), ECHO, PATIENCE_S)
        assert before > 65536


async def test_a_raised_limit_is_learnt_from_a_message_that_exceeds_the_former(
    server: NatsServer,
) -> None:
    server.settings = ACCOUNT.format("max_payload: 65536")
    server.start()
    async with connected(BusOptions(url=server.url, user="a", password="a")) as bus:
        await bus.serve("echo", ECHO, lambda data, reply: reply(data))
        server.settings = ACCOUNT.format("max_payload: 131072")
        server.reload()
        await eventually(lambda: "Reloaded: accounts" in (server.store / "nats.log").read_text())
        with pytest.raises(MessageTooLarge):
            await bus.request("echo", bytes(100_000), ECHO, PATIENCE_S)
        await eventually(lambda: bus.max_payload == 131072)
        assert await bus.request("echo", bytes(100_000), ECHO, PATIENCE_S)
        assert bus.counts.reconnects == 0


UNUSABLE = {
    "empty": "",
    "text": "not a credentials file\n",
    "without a seed": "-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n",
    "of one section": "-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n",
    "of an account": (
        "-----BEGIN NATS USER JWT-----\n{account}\n------END NATS USER JWT------\n"
        "-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    ),
    "of another user": (
        "-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n"
        "-----BEGIN USER NKEY SEED-----\n{other}\n------END USER NKEY SEED------\n"
    ),
    "with a damaged JWT": (
        "-----BEGIN NATS USER JWT-----\na.b.c\n------END NATS USER JWT------\n"
        "-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
async def test_an_unusable_file_of_credentials_is_named(tmp_path: Path, kind: str) -> None:
    user, other = Keys(nkeys.PREFIX_BYTE_USER), Keys(nkeys.PREFIX_BYTE_USER)
    account = Keys(nkeys.PREFIX_BYTE_ACCOUNT)
    file = tmp_path / "user.creds"
    text = UNUSABLE[kind].format(
        jwt=account.jwt(user.public, "u", {"type": "user"}),
        account=account.jwt(account.public, "a", {"type": "account"}),
        seed=user.seed.decode(),
        other=other.seed.decode(),
    )
    file.write_text(text)
    with pytest.raises(CredentialsUnusable, match=rf"^nats\.credentials: {file}"):
        await Bus.connect(BusOptions(credentials=str(file)), "test")


async def test_lines_of_credentials_may_end_as_on_windows(
    server: NatsServer, tmp_path: Path
) -> None:
    operator, file = Operator(), tmp_path / "user.creds"
    server.settings = operator.config()
    server.start()
    operator.creds(file)
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    async with connected(creds(server, file)) as bus:
        assert await works(bus)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (BusOptions(credentials="{folder}"), r"nats\.credentials: cannot read {folder}: Is a dir"),
        (BusOptions(credentials="{binary}"), r"nats\.credentials: {binary} is not a .creds file"),
        (BusOptions(nkey_seed="SAABC"), r"nats\.nkey_seed: not the seed of a user's nkey"),
        (BusOptions(tls_ca=Path("{text}")), r"nats\.tls_ca: {text} is no PEM file"),
        (BusOptions(tls_ca=Path("{folder}")), r"nats\.tls_ca: cannot read {folder}: Is a dir"),
        (BusOptions(tls_cert=Path("{cert}")), r"nats\.tls_cert: {cert} holds no key: set nats\.tl"),
        (BusOptions(tls_key=Path("{text}")), r"nats\.tls_key is set without nats\.tls_cert"),
    ],
)
async def test_an_unusable_file_is_one_line_that_names_its_setting(
    tmp_path: Path, options: BusOptions, complaint: str
) -> None:
    files = {name: tmp_path / name for name in ("folder", "text", "binary", "cert")}
    files["folder"].mkdir()
    files["text"].write_text("plain\n")
    files["binary"].write_bytes(b"\xff\xfe\x00")
    files["cert"].write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    named = {
        name: type(value)(str(value).format(**files))
        for name in ("credentials", "nkey_seed", "tls_ca", "tls_cert", "tls_key")
        if (value := getattr(options, name)) is not None
    }
    with pytest.raises(CredentialsUnusable, match=complaint.format(**files)):
        await Bus.connect(replace(options, **named), "test")


async def test_commands_and_services_report_unusable_credentials_in_one_line(
    tmp_path: Path,
) -> None:
    file = tmp_path / "user.creds"
    file.touch()
    flags = ("--nats-credentials", str(file), "--nats", "nats://127.0.0.1:1")
    for command, status in (("doctor", 1), ("worker", 2), ("up", 1)):
        done = await asyncio.to_thread(forks.run, (command, *flags), os.environ, PATIENCE_S)
        lines = (done.stdout if command == "doctor" else done.stderr).splitlines()
        assert done.returncode == status
        assert len(lines) == 1
        assert f"nats.credentials: {file} is empty" in lines[0]
