"""Operator mode as `kvmesh secure --jwt` writes it: replaced, removed and expired credentials."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.secured import SecuredServer
from support.wait import eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.errors import BusUnavailable
from kvmesh.bus.permissions import Permissions
from kvmesh.cli.credentials.tokens import NatsKey, Scope, credentials_file, user_token

pytestmark = pytest.mark.asyncio(loop_scope="module")
DAY_S = 86_400


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    server = SecuredServer(tmp_path_factory.mktemp("secured"), "--jwt", "--workers", "a,b")
    server.start()
    yield server
    server.stop()


async def enters(options: BusOptions) -> bool:
    try:
        bus = await Bus.connect(options, "own", timeout=None)
    except BusUnavailable as error:
        return not error.denied
    await bus.close()
    return True


def reload(server: SecuredServer) -> None:
    """Run the command again, and have the server read what it has written."""
    (server.store / "nats.conf").write_text(server.config())
    server.reload()


async def test_a_replaced_user_enters_with_its_new_credentials_alone(
    server: SecuredServer, tmp_path: Path
) -> None:
    own = server.folder / "worker.a"
    shutil.copy(own / "user.creds", tmp_path / "old.creds")
    former = replace(server.options("worker.a"), credentials=str(tmp_path / "old.creds"))
    assert await enters(former)
    shutil.rmtree(own)
    reload(server)

    async def shut_out() -> bool:
        return not await enters(replace(server.options("worker.a"), credentials=former.credentials))

    await eventually(shut_out)
    assert await enters(server.options("worker.a"))
    assert await enters(server.options("worker.b"))


async def test_a_second_run_with_nothing_new_renews_and_disturbs_nobody(
    server: SecuredServer,
) -> None:
    before = (server.folder / "worker.b" / "user.creds").read_text()
    async with server.connected("worker.b") as bus:
        connected_at = bus.connected_at

        def renewed() -> bool:  # a token has the second of its issue
            reload(server)
            return (server.folder / "worker.b" / "user.creds").read_text() != before

        await eventually(renewed)
        await bus.js.account_info()
        assert bus.connected_at == connected_at


async def test_expired_credentials_are_rejected(server: SecuredServer, tmp_path: Path) -> None:
    authority = server.folder / "authority"
    own = NatsKey.of((server.folder / "observer" / "nkey.seed").read_text())
    account = NatsKey.of((authority / "account.seed").read_text()).public
    key = NatsKey.of((authority / "scopes" / "observer.seed").read_text())
    scope = Scope("observer", key, Permissions((), ()))
    for days, valid in ((1, False), (3, True), (0, True)):
        token = user_token(scope, own.public, account, int(time.time()) - 2 * DAY_S, days)
        file = tmp_path / "made.creds"
        file.write_text(credentials_file(token, own))
        assert await enters(replace(server.options("observer"), credentials=str(file))) is valid
