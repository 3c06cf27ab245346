"""The middleware of every route."""

import gc
import weakref
from typing import Any
from unittest.mock import Mock

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

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
