"""Accounts of prompts on a live mesh: why a turn was not cached, on the answer and in `explain`."""

import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.frontend import MODEL, Client, client_session
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = " ".join(f"word{number}" for number in range(150))  # about 24 blocks
BLOCKS = 120
NUMBERS = count()
TEAMS = {"ann": "red", "bob": "blue"}
Turns = list[dict[str, str]]


class Agents:
    """Sessions of one test on a mesh that all share; each turn returns the account of its prompt.

    A test that runs again has other prompts and sessions.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.last = ""
        self._number = next(NUMBERS)

    def named(self, session: str) -> str:
        """The name that the mesh knows a session by."""
        return f"{session} {self._number}"

    async def turn(
        self,
        session: str | None,
        messages: Turns,
        *,
        key: str = "ann",
        system: str | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Send a turn, append the answer to `messages`, and return the account."""
        if system is None:
            system = f"Be brief in test {self._number}. {TEXT}"
        body = {
            "model": MODEL,
            "messages": [{"role": "system", "content": system}, *messages],
            "max_tokens": 4,
            "nvext": {"extra_fields": ["cache", "worker_id"]},
            **fields,
        }
        headers = {"Authorization": f"Bearer {key}"}
        if session is not None:
            headers["x-session-id"] = self.named(session)
        async with client_session() as session_of_one:
            client = Client(self.mesh.url, session_of_one)
            status, answer = await client.post("/v1/chat/completions", body, **headers)
        assert status == 200, answer
        messages.append(answer["choices"][0]["message"])
        messages.append({"role": "user", "content": "Go on."})
        cache: dict[str, Any] = answer["nvext"]["cache"]
        account: dict[str, Any] = cache["account"]
        reused, lost = sum(account["reused"].values()), sum(x["tokens"] for x in account["lost"])
        assert reused == cache["cached_tokens"]
        assert reused + lost + account["new"] == cache["prompt_tokens"]
        self.last = answer["id"]
        return account

    async def explained(self, *arguments: str, has: Sequence[str]) -> str:
        """The output of `kvmesh explain` once it contains these texts."""
        output = await eventually(partial(self._explain, arguments, has), what=f"{has} in explain")
        return output or ""

    async def _explain(self, arguments: Sequence[str], has: Sequence[str]) -> str | None:
        output = (await self.mesh.command("explain", *arguments)).stdout
        flat = " ".join(output.split())
        return output if all(text in flat for text in has) else None


def question(text: str = "The question is this.") -> Turns:
    """Turns that begin with a question that was never asked before."""
    return [{"role": "user", "content": f"{text} It is number {next(NUMBERS)}."}]


def reasons(account: dict[str, Any]) -> set[str]:
    return {loss["reason"] for loss in account["lost"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    folder: Path = tmp_path_factory.mktemp("mesh")
    keys = folder / "keys.toml"
    keys.write_text("\n".join(map(_key, TEAMS)))
    env = {
        "KVMESH_FRONTEND_KEYS_FILE": str(keys),
        "KVMESH_MOCK_SPEEDUP": "50",
        "KVMESH_MOCK_BLOCKS": str(BLOCKS),
    }
    mesh = Mesh(nats_server.url, folder, env)
    mesh.start_all(workers=1)
    await mesh.ready()
    yield mesh
    mesh.stop()


@pytest.fixture
def agents(mesh: Mesh) -> Agents:
    return Agents(mesh)


def _key(name: str) -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f'[[key]]\nname = "{name}"\nsha256 = "{digest}"\ntenant = "{TEAMS[name]}"'


async def test_a_session_reuses_its_own_tokens_and_those_of_others(agents: Agents) -> None:
    first, second = question(), question("Another question.")
    assert (await agents.turn("one", first))["previous"] is None
    begun = agents.last
    account = await agents.turn("one", first)
    assert account["reused"]["own"] > 0
    assert account["previous"] == begun
    assert (account["lost"], account["change"]) == ([], None)
    shared = await agents.turn("two", second)
    assert shared["reused"]["shared"] > 0
    has = ["of other requests", f"(first {begun} (session {agents.named('one')}))"]
    await agents.explained(agents.last, has=has)


async def test_another_tenant_reuses_nothing_and_learns_nothing(agents: Agents) -> None:
    await agents.turn("one", question(), key="ann")
    account = await agents.turn("one", question(), key="bob")
    assert sum(account["reused"].values()) == 0
    assert (account["lost"], account["previous"], account["possible"]) == ([], None, 0)


async def test_an_evicted_prompt_names_the_worker_and_for_whom(agents: Agents) -> None:
    victim = question("The victim's question.")
    await agents.turn("victim", victim, system="Victim. " + TEXT)
    for number in range(5):
        await agents.turn(f"filler {number}", question(), system=f"Filler {number}. " + TEXT)
    # once the index equals the worker's blocks, it has the removals
    assert (await agents.mesh.command("doctor")).returncode == 0
    account = await agents.turn("victim", victim, system="Victim. " + TEXT)
    (loss, *_) = account["lost"]
    assert loss["reason"] == "evicted"
    assert loss["worker"] == "worker-0"
    assert "request" not in loss
    has = ["evicted as the least recently used (worker-0, engine memory", "(session "]
    await agents.explained(agents.last, has=has)


async def test_a_prompt_that_moves_every_turn_is_named(agents: Agents) -> None:
    messages, name = question(), agents.named("moving")
    account: dict[str, Any] = {}
    for minute in range(4):
        account = await agents.turn("moving", messages, system=f"It is 12:0{minute}. " + TEXT)
    assert "diverged" in reasons(account)
    change = account["change"]
    assert (change["part"], change["way"], change["turns"]) == ("system", "changed", 3)
    assert change["offset"] == len("It is 12:0")
    assert "3." in change["after"]
    has = ["system prompt changed at character 10, for the 3rd turn in a row", f"session {name}"]
    await agents.explained("--session", name, has=has)
    log = (agents.mesh.folder / "frontend-0.log").read_text()
    assert log.count(f"session {name} changes its prompt every turn, in the system prompt") == 1


async def test_a_session_that_the_caller_does_not_name_is_compared_too(agents: Agents) -> None:
    messages = question("An anonymous question.")
    await agents.turn(None, messages, system="At 1. " + TEXT)
    account = await agents.turn(None, messages, system="At 2. " + TEXT)
    assert account["change"]["part"] == "system"


async def test_a_changed_message_and_a_changed_tool_are_named(agents: Agents) -> None:
    messages = question("A long question about this and that.")
    await agents.turn("message", messages)
    messages[0]["content"] = "A long answer about this and that."
    changed = (await agents.turn("message", messages))["change"]
    assert (changed["part"], changed["index"], changed["name"]) == ("message", 0, "user")
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": name, "description": TEXT, "parameters": {}}}
        for name in ("read", "write")
    ]
    messages = question("A question with tools.")
    await agents.turn("tools", messages, tools=tools)
    tools[1]["function"]["description"] = "Writes. " + TEXT
    changed = (await agents.turn("tools", messages, tools=tools))["change"]
    assert (changed["part"], changed["index"], changed["name"]) == ("tool", 1, "write")


async def test_the_accounts_are_counted_by_class_and_reason(agents: Agents) -> None:
    await agents.turn("one", question())
    metrics = agents.mesh.metrics()
    by_class = {
        name: value
        for name, value in metrics.items()
        if name.startswith("kvmesh_frontend_prompt_cache_tokens_total{")
    }
    classes = {kind for kind in ("reused", "lost", "new") if any(kind in n for n in by_class)}
    assert classes == {"reused", "lost", "new"}
    total = metrics[f'kvmesh_frontend_prompt_tokens_total{{model="{MODEL}"}}']
    assert sum(by_class.values()) == total


async def test_anthropic_clients_get_cache_diagnostics(agents: Agents) -> None:
    import anthropic  # not when each process of the mesh tests reads this file

    client = anthropic.AsyncAnthropic(base_url=agents.mesh.url, api_key="ann", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": f"Question {next(NUMBERS)}. " + TEXT}]

    async def ask(previous: str | None, system: str) -> Any:
        answer = await client.messages.create(
            model=MODEL,
            max_tokens=4,
            system=system,
            messages=messages,
            diagnostics={"previous_message_id": previous},
        )
        messages.append({"role": "assistant", "content": answer.content})
        messages.append({"role": "user", "content": "Go on."})
        return answer

    first = await ask(None, "Be brief. " + TEXT)
    assert first.diagnostics is None
    second = await ask(first.id, "Be brief. " + TEXT)
    assert second.diagnostics is None
    third = await ask(second.id, "Be long. " + TEXT)
    reason = third.diagnostics.cache_miss_reason
    assert reason.type == "system_changed"
    assert reason.cache_missed_input_tokens > 100
    assert (reason.offset, reason.block) == (len("Be "), 0)
    unknown = await ask("msg_unknown", "Be long. " + TEXT)
    assert unknown.diagnostics.cache_miss_reason.type == "previous_message_not_found"
    messages[0]["content"] = "Another question. " + TEXT
    async with client.messages.stream(
        model=MODEL,
        max_tokens=4,
        system="Be long. " + TEXT,
        messages=messages,
        diagnostics={"previous_message_id": unknown.id},
    ) as stream:
        streamed: Any = await stream.get_final_message()
    assert streamed.diagnostics.cache_miss_reason.type == "messages_changed"
    await client.close()


async def test_explain_prints_a_session_as_json(agents: Agents) -> None:
    await agents.turn("json", question())
    output = await agents.explained("--session", agents.named("json"), "--json", has=[agents.last])
    outcome = json.loads(output.splitlines()[-1])
    cache = outcome["cache"]
    lost = sum(loss["tokens"] for loss in cache.get("losses", []))
    reused = cache.get("own", 0) + cache.get("shared", 0)
    assert reused + lost + cache.get("new", 0) == cache["prompt_tokens"]
    missing = await agents.mesh.command("explain", "--session", "nobody")
    assert missing.returncode == 1
    assert "no request of session nobody" in missing.stderr
