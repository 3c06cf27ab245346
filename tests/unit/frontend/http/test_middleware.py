"""The middleware of every route."""

import gc
import weakref
from typing import Any
from unittest.mock import Mock

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from kvmesh.frontend.auth.accounts import Accounts, Key
from kvmesh.frontend.auth.admission import Admission
from kvmesh.frontend.http.middleware import CALLER, RequestMiddleware


class Active:
    """A running request, which writes to the client's."""

    def __init__(self, http: web.Request) -> None:
        self.http = http


async def test_an_answered_request_leaves_no_garbage_cycle() -> None:
    gone: list[weakref.ref[Active]] = []

    async def handler(http: web.Request) -> web.StreamResponse:
        active: Any = Active(http)
        gone.append(weakref.ref(active))
        http[CALLER].active = active
        return web.Response()

    authenticator = Mock()
    authenticator.account.return_value = None
    middleware = RequestMiddleware(
        authenticator, Admission(8), Mock(behind_s=0.0), frozenset(), {}, None, None
    )
    app = web.Application(middlewares=[web.middleware(middleware)])
    app.router.add_get("/", handler)
    async with TestClient(TestServer(app)) as client:
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):  # the connection keeps its last request until the next one
                await (await client.get("/")).read()
            assert gone[0]() is None
        finally:
            gc.enable()


async def test_a_key_that_changes_its_class_while_a_request_runs_leaves_the_former_one() -> None:
    accounts = Accounts()

    def replace(fair_class: str) -> None:
        accounts.replace([Key(sha256="0", name="key", fair_class=fair_class)], 0.0)

    async def handler(http: web.Request) -> web.StreamResponse:
        replace("later")
        return web.Response()

    replace("former")
    authenticator, admission = Mock(), Admission(1)
    authenticator.account.return_value = next(iter(accounts))
    middleware = RequestMiddleware(
        authenticator, admission, Mock(behind_s=0.0), frozenset(), {}, None, None
    )
    app = web.Application(middlewares=[web.middleware(middleware)])
    app.router.add_get("/", handler)
    async with TestClient(TestServer(app)) as client:
        for _ in range(3):
            replace("former")
            assert (await client.get("/")).status == 200
