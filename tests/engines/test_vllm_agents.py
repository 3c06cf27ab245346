"""Two vLLMs behind a mesh that serves agents: siblings, bursts, turns rendered anew, reports."""

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.delays import SCHEDULER, delayed
from support.frontend import client_session
from support.mesh import Mesh, scrape
from support.nats import NatsServer, free_port
from support.vllm import SIZE
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import (
    Decision,
    MessageDecoder,
    Outcome,
    RouteEvent,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
START_S = 400
BLOCKS = 160
TOKEN_S = 0.004  # agents rest only where computing all that an engine holds takes over 6 s
WORKERS = ("worker-0", "worker-1")
ROUTER_PORT = free_port()
ARGS = f"enforce_eager=true,num_gpu_blocks_override={BLOCKS},max_model_len=4096,dtype=float32"
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the shell of the project and return what it prints.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
THOUGHTS = "{%- if thoughts -%}"
FIRST = "{%- set first = 0 -%}"
LAST_QUESTION = """\
{%- set ns = namespace(asked=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.asked = loop.index0 -%}{%- endif -%}
{%- endfor -%}
"""


@pytest.fixture(scope="module")
def thinker(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, whose template drops the thinking of a turn once the user writes again."""
    folder: Path = tmp_path_factory.mktemp("models") / "thinker"
    shutil.copytree(tiny_model, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    template = config["chat_template"]
    assert template.count(THOUGHTS) == template.count(FIRST) == 1
    later = THOUGHTS.replace("thoughts", "thoughts and loop.index0 + first > ns.asked")
    template = template.replace(THOUGHTS, later).replace(FIRST, LAST_QUESTION + FIRST)
    path.write_text(json.dumps(config | {"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def mesh(
    nats_server: NatsServer, thinker: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mesh]:
    env = {
        "KVMESH_WORKER_ENGINE": "vllm",
        "KVMESH_WORKER_MODEL": str(thinker),
        "KVMESH_WORKER_BLOCK_SIZE": str(SIZE),
        "KVMESH_VLLM_ARGS": f"{ARGS},scheduler_cls={SCHEDULER}",
        **delayed(0.005, TOKEN_S),
    }
    made = Mesh(nats_server.url, tmp_path_factory.mktemp("mesh"), env)
    made.start("indexer", "indexer-0")
    made.start("router", "router-0", KVMESH_ROUTER_METRICS_PORT=str(ROUTER_PORT))
    for name in WORKERS:
        made.start("worker", name)
    made.start("frontend", "frontend-0")
    yield made
    made.stop()


class Client:
    """Requests to the mesh, and what the mesh and the engines say about them."""

    def __init__(self, mesh: Mesh, http: aiohttp.ClientSession) -> None:
        self.mesh = mesh
        self._http = http

    async def post(self, path: str, body: dict[str, Any], session: str = "") -> dict[str, Any]:
        headers = {"x-kvmesh-session-id": session} if session else {}
        async with self._http.post(self.mesh.url + path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return dict(await answer.json())

    async def complete(self, prompt: str, session: str = "", **fields: object) -> dict[str, Any]:
        body = {"model": "thinker", "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
        return await self.post("/v1/completions", body, session)

    async def chat(self, messages: list[Any], session: str, **fields: object) -> dict[str, Any]:
        body = {"model": "thinker", "messages": messages, "temperature": 0, **fields}
        return await self.post("/v1/chat/completions", body, session)

    async def say(self, *arguments: str) -> str:
        """The output of a command, without line breaks."""
        done = await self.mesh.command(*arguments)
        return " ".join((done.stdout + done.stderr).split())

    async def explained(self, request: str, *phrases: str) -> str:
        """The explanation of a request, once it has these phrases."""

        async def found() -> str:
            text = await self.say("explain", request)
            missing = [phrase for phrase in phrases if phrase not in text]
            assert not missing, (missing, text)
            return text

        return await eventually(found, what="the explanation")

    @staticmethod
    def router_metric(name: str) -> float:
        return scrape(ROUTER_PORT).get(f"kvmesh_router_{name}", 0.0)

    def computed(self) -> Counter[str]:
        """Prompt tokens that each vLLM has computed, by its own metrics."""
        found: Counter[str] = Counter()
        for name in WORKERS:
            for sample, value in scrape(self.mesh.worker_ports[name]).items():
                metric = sample.partition("{")[0]
                sign = {"vllm:prompt_tokens_total": 1, "vllm:prompt_tokens_cached_total": -1}
                found[name] += int(sign.get(metric, 0) * value)
        return found


async def ready_client(mesh: Mesh, http: aiohttp.ClientSession) -> Client:
    """A client once both vLLMs serve."""
    await mesh.ready(START_S)
    await eventually(lambda: mesh.live_workers() == 2, timeout=START_S, what="both serve")
    return Client(mesh, http)


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_siblings_compute_their_prefix_once_on_each_vllm(mesh: Mesh) -> None:
    """Ten requests share a new prefix; those sent to the rank that computes it wait for it."""
    async with client_session() as http:
        client = await ready_client(mesh, http)
        warm = [client.complete(f"{n} shows the speed of an engine. " * 90) for n in range(2)]
        await asyncio.gather(*warm)
        before = client.computed()
        prefix = "They all begin with this long instruction for a team of agents. " * 120
        answers = await asyncio.gather(
            *(client.complete(f"{prefix}Number {n} has a task of its own.") for n in range(10))
        )
        tokens = answers[0]["usage"]["prompt_tokens"]
        assert tokens > 1500
        own = 10 * 2 * SIZE  # of all siblings, with the parts of blocks
        computed = client.computed() - before
        assert max(computed.values()) < tokens + own, computed
        waits = " ".join([await client.explained(a["id"], "first token after") for a in answers])
        assert "of that" in waits
        assert "for request cmpl-" in waits


async def test_a_turn_without_its_thinking_is_computed_before_the_next_message(mesh: Mesh) -> None:
    """Nobody asks for it: the first answers are trials. vLLM finds the whole turn cached."""
    async with client_session() as http:
        client = await ready_client(mesh, http)
        say = "The test failed in line seven, so I changed it. " * 3
        schema = {"type": "object", "properties": {"a": {"enum": [say]}}, "required": ["a"]}
        form = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Please fix the test."}]
        for step in range(3):
            called = {"name": "bash", "arguments": json.dumps({"command": f"cat file{step}"})}
            call = {"id": f"call{step}", "type": "function", "function": called}
            thought = f"I think about step {step} and look at another file. " * 8
            messages += [
                {"role": "assistant", "content": "", "reasoning": thought, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"call{step}", "content": f"Line {step}. " * 60},
            ]
        before = sum(client.computed().values())
        fields = {"tools": [TOOL], "tool_choice": "none"}
        first = await client.chat(messages, "s", response_format=form, max_tokens=400, **fields)
        assert first["choices"][0]["finish_reason"] == "stop"
        messages += [first["choices"][0]["message"], {"role": "user", "content": "And the docs?"}]
        body = {"model": "thinker", "messages": messages, **fields}
        tokens = (await client.post("/v1/tokenize", body))["count"]
        ahead = before + first["usage"]["prompt_tokens"] + 0.7 * tokens
        await eventually(lambda: sum(client.computed().values()) > ahead, what="the turn, again")
        second = await client.chat(messages, "s", max_tokens=4, **fields)
        assert cached(second) > 0.6 * tokens
        await client.explained(second["id"], f"computed ahead after {first['id']}: ")


async def test_a_burst_is_sent_in_turn(mesh: Mesh) -> None:
    """vLLM gets a prompt when it has little left to compute: the router holds the others."""
    async with client_session() as http:
        client = await ready_client(mesh, http)
        bus = await Bus.connect(mesh.options, "test")
        decisions: list[Decision] = []

        async def record(event: Decision | Outcome) -> None:
            if isinstance(event, Decision):
                decisions.append(event)

        decoder: MessageDecoder[RouteEvent] = MessageDecoder(RouteEvent)
        await bus.subscribe(bus.subjects.route("thinker"), decoder, record)
        texts = [f"{n} is the subject of this long text of one of many. " * 100 for n in range(6)]
        answers = await asyncio.gather(*map(client.complete, texts))
        await eventually(lambda: len(decisions) == len(texts), what="all decisions")
        await bus.close()
        assert {decision.request for decision in decisions} == {each["id"] for each in answers}
        assert {decision.chosen.worker for decision in decisions} == set(WORKERS)
        shortest_s = answers[0]["usage"]["prompt_tokens"] * TOKEN_S
        # the router sends the next prompt while vLLM computes the last steps of one
        assert sum(decision.wait_s > shortest_s / 4 for decision in decisions) >= 2


async def test_agents_rest_while_contexts_exceed_the_memory(mesh: Mesh) -> None:
    """Eight contexts on two vLLMs that hold three each; those that rest resume in the end."""
    async with client_session() as http:
        client = await ready_client(mesh, http)
        some_rest, ids = asyncio.Event(), []

        async def work(agent: str) -> None:
            text = f"{agent} works on a task of its own and reads a long file. " * 90
            turn = 0
            while not some_rest.is_set():
                turn += 1
                text += f" The tool says {turn}."
                ids.append((await client.complete(text, agent))["id"])

        def resting() -> bool:
            found = client.router_metric('agents{model="thinker",state="resting"}')
            return found > 0

        agents = [asyncio.create_task(work(f"agent-{n}")) for n in range(8)]
        await eventually(resting, timeout=180, what="an agent rests")
        some_rest.set()
        await asyncio.gather(*agents)
        explained = [await client.say("explain", request) for request in ids[-8:]]
        assert any("for a place among the active agents" in text for text in explained)
