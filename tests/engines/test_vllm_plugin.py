"""The plugin in vLLM's own server, without a mesh: hints by the OpenAI SDK, pins, outcomes."""

import json
from collections.abc import AsyncIterator
from math import nan
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from support.vllm import SIZE
from support.vllm_server import VllmServer, vllm_server

from kvmesh.bus.messages import Pin, encode

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
FLAGS = ["--kv-transfer-config", '{"kv_connector":"KvmeshRetentionConnector","kv_role":"kv_both"}']
PLUGINS = {"VLLM_PLUGINS": "kvmesh"}
KEY = "secret"
LONG = "Hello " * 80
LENGTH = 10 * SIZE
HIT = LENGTH - SIZE  # vLLM computes the last block of a cached prompt again


class Caller:
    """The SDK and the plugin's paths of a server."""

    def __init__(self, server: VllmServer, http: aiohttp.ClientSession) -> None:
        self.server = server
        self.sdk = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY)
        self._http = http

    async def complete(self, first: int, hint: Any = None, **more: Any) -> Any:
        """Complete a prompt of LENGTH tokens; `hint` is a text, or what JSON encodes."""
        text = hint if isinstance(hint, str) else json.dumps(hint)
        prompt = [(first * 101 + 13 * i) % 8000 for i in range(LENGTH)]
        return await self.sdk.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=2,
            extra_body={"vllm_xargs": hint and {"kvmesh": text}, **more},
        )

    async def cached(self, first: int, **more: Any) -> int:
        usage = (await self.complete(first, **more)).usage
        details = usage.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0

    async def flood(self) -> None:
        for number in range(12):
            await self.complete(500 + number)

    async def post(self, path: str, body: Any = None, data: bytes | None = None) -> int:
        headers = {"Authorization": f"Bearer {KEY}"}
        url = self.server.url + path
        async with self._http.post(url, json=body, data=data, headers=headers) as response:
            return response.status

    async def call(
        self, method: str, path: str, body: Any = None, key: str = KEY
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{self.server.url}/v1/kvmesh/retention{path}"
        async with self._http.request(method, url, json=body, headers=headers) as response:
            return response.status, await response.json()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def caller(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Caller]:
    folder = tmp_path_factory.mktemp("server")
    arguments = [*FLAGS, "--max-model-len", "1024", "--api-key", KEY]
    arguments += ["--enable-prompt-tokens-details"]
    with vllm_server(tiny_model, folder, *arguments, blocks=65, env=PLUGINS) as server:
        await server.ready()
        async with aiohttp.ClientSession() as http:
            yield Caller(server, http)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def empty(caller: Caller) -> None:
    assert (await caller.call("POST", "/clear", {}))[0] == 200


async def test_a_marked_prompt_survives_others_and_tells_its_outcome(caller: Caller) -> None:
    plain = await caller.complete(1)
    assert getattr(plain, "kv_transfer_params", None) is None
    marked = await caller.complete(2, {"cache_control": {"ttl": "5m"}})
    assert marked.kv_transfer_params["kvmesh"] == {
        "retention": [
            {"start": 0, "end": None, "priority": 75, "duration_s": 300.0, "outcome": "honoured"}
        ]
    }
    await caller.flood()
    assert await caller.cached(1) == 0
    assert await caller.cached(2) == HIT


async def test_ranges_have_their_own_priorities(caller: Caller) -> None:
    ranges = [{"start": 0, "end": 5 * SIZE, "priority": 80}]
    done = await caller.complete(3, {"retention": ranges})
    (told,) = done.kv_transfer_params["kvmesh"]["retention"]
    assert (told["end"], told["outcome"]) == (5 * SIZE, "honoured")
    await caller.flood()
    assert await caller.cached(3) == 5 * SIZE


async def test_an_answer_is_retained_with_the_prompt_before_it(caller: Caller) -> None:
    plan = {"decode": {"priority": 60, "duration_s": 60}}
    done = await caller.complete(3, {"retention": plan})
    assert done.kv_transfer_params["kvmesh"]["decode"]["outcome"] == "honoured"
    await caller.flood()
    assert await caller.cached(3) == HIT


async def test_a_prompt_is_pinned_until_it_is_unpinned(caller: Caller) -> None:
    done = await caller.complete(4, {"pin": {"id": "system", "ttl": "1h"}})
    assert done.kv_transfer_params["kvmesh"]["pinned_blocks"] == 10
    await caller.flood()
    assert await caller.cached(4) == HIT
    assert (await caller.call("GET", ""))[1]["ranks"][0]["pins"] == 1
    assert await caller.call("POST", "/unpin", {"id": "system"}) == (200, {"blocks": 10})
    await caller.flood()
    assert await caller.cached(4) == 0


async def test_a_released_session_gives_up_its_blocks(caller: Caller) -> None:
    await caller.complete(5, {"cache_control": {}}, session_id="s")  # vLLM's own session id
    await caller.complete(6, {"session": "t", "cache_control": {}})
    assert await caller.call("POST", "/release", {"sessions": ["s"]}) == (200, {"blocks": 10})
    assert (await caller.cached(5), await caller.cached(6)) == (0, HIT)
    await caller.complete(7, {"session": "u", "final": True, "cache_control": {}})
    await caller.complete(8)
    assert await caller.cached(7) == 0


async def test_a_stream_is_asked_for_its_outcome_by_its_id(caller: Caller) -> None:
    stream = await caller.sdk.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": LONG}],
        max_tokens=2,
        stream=True,
        extra_body={"vllm_xargs": {"kvmesh": json.dumps({"cache_control": {"ttl": "1h"}})}},
    )
    (name,) = {chunk.id async for chunk in stream}
    status, report = await caller.call("GET", f"/outcomes/{name}")
    assert (status, report["retention"][0]["outcome"]) == (200, "honoured")
    assert (await caller.call("GET", "/outcomes/other"))[0] == 404


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "Hello " * 80}], "max_tokens": 2},
        ),
        ("/v1/responses", {"input": "Hello " * 80, "max_output_tokens": 2}),
    ],
)
async def test_other_apis_take_hints(caller: Caller, path: str, fields: dict[str, Any]) -> None:
    hint = json.dumps({"cache_control": {}})
    body = {"model": "tiny", "vllm_xargs": {"kvmesh": hint}, **fields}
    assert await caller.post(path, body) == 200
    assert (await caller.call("GET", ""))[1]["ranks"][0]["charged_blocks"] > 0


async def test_a_cache_salt_is_cleared_by_itself(caller: Caller) -> None:
    await caller.complete(9, {"cache_control": {}}, cache_salt="a")
    await caller.complete(9, {"cache_control": {}}, cache_salt="b")
    status, reply = await caller.call("POST", "/clear", {"cache_salt": "a"})
    assert (status, reply) == (200, {"blocks": 10})
    assert await caller.cached(9, cache_salt="a") == 0
    assert await caller.cached(9, cache_salt="b") == HIT


@pytest.mark.parametrize(
    "hint",
    [
        "{",
        "[]",
        '{"ttl": "5m"}',
        '{"cache_control": {"ttl": "five minutes"}}',
        '{"retention": [{"start": 8, "end": 8}]}',
        '{"pin": {}}',
    ],
)
async def test_a_malformed_hint_is_told_and_harms_nothing(caller: Caller, hint: str) -> None:
    done = await caller.complete(10, hint)
    assert done.choices[0].finish_reason == "length"
    assert done.kv_transfer_params["kvmesh"]["error"].startswith("malformed: ")


async def test_a_forged_origin_of_a_mesh_claims_nothing(caller: Caller) -> None:
    forgeries: list[Any] = [{"request": "r", "salt": -1}, {"salt": []}, []]
    for forged in forgeries:
        done = await caller.complete(11, kv_transfer_params={"kvmesh": forged})
        assert done.choices[0].finish_reason == "length"
    status, state = await caller.call("GET", "")
    assert (status, state["ranks"][0]["charged_blocks"]) == (200, 0)


async def test_paths_need_the_servers_key_and_valid_bodies(caller: Caller) -> None:
    assert (await caller.call("GET", "", key="wrong"))[0] == 401
    for hashes, ttl_s in ((b"1", 1.0), (bytes(8), nan), (bytes(8), -1.0)):
        pin = encode(Pin(id="p", sequence_hashes=hashes, ttl_s=ttl_s))
        assert await caller.post("/v1/kvmesh/retention/command", data=pin) == 400
    status, reply = await caller.call("POST", "/release", {"session": "s"})
    assert (status, reply["error"]["type"]) == (400, "BadRequestError")


async def test_without_the_connector_the_server_says_so(tiny_model: Path, tmp_path: Path) -> None:
    with vllm_server(tiny_model, tmp_path, "--max-model-len", "512", env=PLUGINS) as server:
        await server.ready()
        async with aiohttp.ClientSession() as http:
            caller = Caller(server, http)
            await caller.complete(1, {"cache_control": {}})
            status, reply = await caller.call("GET", "")
            assert status == 501
            assert "KvmeshRetentionConnector" in reply["error"]["message"]
        assert "retention has no effect" in server.log.read_text()


async def test_retention_does_not_count_as_an_external_cache(caller: Caller) -> None:
    await caller.complete(4)
    url = f"{caller.server.url}/metrics"
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        lines = (await response.text()).splitlines()
    found = [line for line in lines if line.startswith("vllm:external_prefix_cache_queries_total")]
    assert [line.split()[-1] for line in found] == ["0.0"]
