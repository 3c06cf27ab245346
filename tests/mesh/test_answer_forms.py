"""Calls and schemas that a request asks for, of a model that always thinks, over every API."""

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from support import apis
from support.frontend import MODEL, Client, client_session
from support.mesh import Mesh
from support.nats import NatsServer
from unit.frontend.apis.answers import APIS
from unit.frontend.preprocess.test_answer_form import (
    CHOICES,
    NAMES,
    PARAMETERS,
    SCHEMA,
    TEXTS,
    body,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
PARSERS = [("hermes", "deepseek_r1"), ("pythonic", "kimi_k25")]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PARSERS, ids="-".join)
async def client(
    nats_server: NatsServer,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Client]:
    tool, reasoning = request.param
    env = {
        "KVMESH_MOCK_SPEEDUP": "50",
        "KVMESH_WORKER_TOOL_PARSER": tool,
        "KVMESH_WORKER_REASONING_PARSER": reasoning,
    }
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("forms"), env)
    mesh.start_all(workers=1)
    await mesh.ready()
    async with client_session() as session:
        yield Client(mesh.url, session)
    mesh.stop()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", ["chat", "messages", "responses"])
async def test_an_answer_has_the_form_that_its_request_asks_for(
    client: Client, name: str, stream: bool
) -> None:
    api = next(each for each in APIS if each.name == name)
    reading = next(each for each in apis.APIS if each.name == name)
    for choice, text in itertools.product(CHOICES, TEXTS):
        if name == "messages" and ("allowed" in choice or text == "object"):
            continue
        sent: dict[str, Any] = body(api, choice, text, stream)
        sent |= {"model": MODEL, reading.limit: 400}
        content = await reading.send(client, sent)
        allowed = set() if choice == "none" else NAMES.get(choice, set(PARAMETERS))
        assert {called for called, _ in content.calls} <= allowed
        for called, arguments in content.calls:
            if "required" in choice or choice == "named":
                jsonschema.validate(arguments, PARAMETERS[called])
        if "required" in choice or choice == "named":
            assert content.calls, (choice, text, content)
            assert not content.text.strip()
        elif text != "free":
            assert bool(content.calls) != bool(content.text.strip()), (choice, text, content)
            if content.text.strip():
                schema = SCHEMA if text == "schema" else {"type": "object"}
                jsonschema.validate(json.loads(content.text), schema)
