"""Accounts of what agents do to their prompts, on a mesh with two frontends."""

import json
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientConnectionError
from support.frontend import MODEL, Client, client_session
from support.mesh import Mesh
from support.nats import NatsServer, free_port
from support.wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = " ".join(f"word{number}" for number in range(60))
NUMBERS = count()
THOUGHT = "It may be in the file, so I read that."
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.txt", "lines": 5.0}}\n</tool_call>'
SCRIPT = [
    {"match": "Call a tool", "text": f"<think>\n{THOUGHT}\n</think>\n\nI read it.\n{CALL}"},
    {"match": "Think first", "text": f"<think>\n{THOUGHT}\n</think>\n\nIt is in a.txt, in line 5."},
]
READ = {"type": "function", "function": {"name": "read", "description": TEXT, "parameters": {}}}
Turns = list[dict[str, Any]]


class Agents:
    """Agents that send requests to the frontends in turn."""

    def __init__(self, mesh: Mesh, urls: Sequence[str]) -> None:
        self.mesh = mesh
        self._urls = urls
        self.last = ""

    async def ask(
        self, messages: Turns, session: str | None = None, frontend: int = 0, **fields: Any
    ) -> dict[str, Any]:
        """Send a request; return its account, and append the message of the answer."""
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": 200,
            "nvext": {"extra_fields": ["cache"]},
            **fields,
        }
        headers = {"User-Agent": "QwenCode/0.24.4"}
        if session is not None:
            headers["x-session-id"] = session
        async with client_session() as client:
            sender = Client(self._urls[frontend], client)
            status, answer = await sender.post("/v1/chat/completions", body, **headers)
        assert status == 200, answer
        self.last = answer["id"]
        messages.append(answer["choices"][0]["message"])
        account: dict[str, Any] = answer["nvext"]["cache"]["account"]
        return account

    async def explained(self, *arguments: str, has: Sequence[str]) -> str:
        """The output of `kvmesh explain` once it contains these texts."""
        output = await eventually(partial(self._explain, arguments, has), what=f"{has} in explain")
        return output or ""

    async def _explain(self, arguments: Sequence[str], has: Sequence[str]) -> str | None:
        flat = " ".join((await self.mesh.command("explain", *arguments)).stdout.split())
        return flat if all(text in flat for text in has) else None

    def logs(self) -> str:
        names = ("frontend-0.log", "frontend-1.log")
        return "".join((self.mesh.folder / name).read_text() for name in names)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agents(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Agents]:
    folder: Path = tmp_path_factory.mktemp("mesh")
    script = folder / "script.jsonl"
    script.write_text("".join(json.dumps(entry) + "\n" for entry in SCRIPT))
    # frontends that show answers as they were generated would leave nothing to account for
    env = {
        "KVMESH_MOCK_SPEEDUP": "50",
        "KVMESH_MOCK_SCRIPT": str(script),
        "KVMESH_FRONTEND_ANSWERS_BYTES": "0",
    }
    mesh, port = Mesh(nats_server.url, folder, env), free_port()
    mesh.start_all(workers=1)
    mesh.start("frontend", "frontend-1", KVMESH_FRONTEND_PORT=str(port))
    await mesh.ready()
    found = Agents(mesh, (mesh.url, f"http://127.0.0.1:{port}"))

    async def serves() -> bool:
        async with client_session() as client:
            body = {"model": MODEL, "messages": user("Hi"), "max_tokens": 1}
            path = "/v1/chat/completions"
            try:
                status, _ = await Client(f"http://127.0.0.1:{port}", client).post(path, body)
            except ClientConnectionError:  # it does not listen yet
                return False
            return status == 200

    await eventually(serves, what="the second frontend serves the model")
    yield found
    mesh.stop()


def user(text: str) -> Turns:
    return [{"role": "user", "content": text}]


def system(text: str) -> Turns:
    return [{"role": "system", "content": text}]


def reasons(account: dict[str, Any]) -> set[str]:
    return {loss["reason"] for loss in account["lost"]}


async def test_thinking_that_is_not_returned_is_no_moving_prompt(agents: Agents) -> None:
    session = f"drops {next(NUMBERS)}"
    messages = [*system(f"Be brief, {session}. {TEXT}"), *user("Think first.")]
    await agents.ask(messages, session)
    for _ in range(4):
        for name in ("reasoning", "reasoning_content"):
            messages[-1].pop(name, None)
        messages += user("Think first, again.")
        account = await agents.ask(messages, session)
        assert reasons(account) == {"thinking_not_returned"}
        assert (account["change"]["part"], account["change"]["way"]) == ("thinking", "not_returned")
    has = ["the client did not return the thinking of the last answer", "conversation"]
    await agents.explained(agents.last, has=has)
    assert "changes its prompt every turn" not in agents.logs()


async def test_a_call_with_other_arguments_is_named(agents: Agents) -> None:
    session = f"rewrites {next(NUMBERS)}"
    messages = [*system(f"Be brief, {session}. {TEXT}"), *user("Call a tool.")]
    await agents.ask(messages, session, tools=[READ])
    (call,) = messages[-1]["tool_calls"]
    call["function"]["arguments"] = '{"path": "a.txt", "lines": 5}'
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "Nothing."})
    account = await agents.ask(messages, session, tools=[READ])
    assert reasons(account) == {"call_rewritten"}
    has = ["the client returned tool call read with other arguments"]
    await agents.explained(agents.last, has=has)


@pytest.mark.parametrize("frontend", [0, 1])
async def test_a_side_request_is_another_conversation(agents: Agents, frontend: int) -> None:
    session = f"titled {next(NUMBERS)}"
    messages = [*system(f"Be brief, {session}. {TEXT}"), *user(f"Begin {session}. {TEXT}")]
    await agents.ask(messages, session, tools=[READ], max_tokens=9)
    begun = agents.last
    title = [*system("Write a title."), messages[1]]
    assert (await agents.ask(title, session, max_tokens=9))["previous"] is None
    messages += user("Go on.")
    account = await agents.ask(messages, session, frontend, tools=[READ], max_tokens=9)
    if frontend == 0:
        assert (account["previous"], account["change"]) == (begun, None)
    messages[0]["content"] = f"Be long, {session}. {TEXT}"
    messages += user("And on.")
    await agents.ask(messages, session, frontend, tools=[READ], max_tokens=9)
    await agents.explained(agents.last, has=["system prompt changed at character 3"])


async def test_a_session_without_a_name_is_recognised_on_every_frontend(agents: Agents) -> None:
    number = next(NUMBERS)
    messages = [*system(f"Be brief. {TEXT}"), *user(f"Unnamed {number}. {TEXT}")]
    turns = []
    for frontend in (0, 1, 0):
        await agents.ask(messages, None, frontend, tools=[READ], max_tokens=9)
        turns.append(agents.last)
        messages += user("Go on.")
    outcome = await agents.explained(turns[0], has=["session qwen-code "])
    name = outcome.split("session qwen-code ")[1].split()[0].rstrip(",")
    has = [*turns, f"session qwen-code {name}: 3 requests"]
    await agents.explained("--session", f"qwen-code {name}", has=has)
    memory = [*system("Extract memories."), *messages[1:], *user("Extract.")]
    await agents.ask(memory, None, tools=[], max_tokens=9)
    side = await agents.explained(agents.last, has=["session qwen-code "])
    assert f"qwen-code {name}" not in side
