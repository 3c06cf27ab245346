"""Answers that clients return in other words: the next prompt carries the generated tokens."""

import json
import secrets
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from support.frontend import MODEL, Client, client_session
from support.mesh import Mesh
from support.nats import NatsServer, free_port
from support.wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, Any]
BLOCK = 16
THOUGHT = "The file has to be read before I can say anything about it. " * 8
CALL = '{"arguments":{"path":"caf\\u00e9.txt","offset":1e1},"name":"read"}'
SCRIPT = [
    {"match": "the file says", "text": "Done."},
    {
        "match": "Read it",
        "text": f"<think>\n{THOUGHT}\n</think>\n\n\n\nLet me see.   <tool_call>{CALL}</tool_call>",
    },
]
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "offset": {"type": "integer"},
        "limit": {"type": "integer", "default": 2000},
    },
}
REWRITTEN = {"limit": 2000, "offset": 10, "path": "café.txt"}
EDITED = {"offset": 11, "path": "café.txt"}


@dataclass
class Turn:
    """A conversation's turn through one API: its call's id, and what the engine has computed."""

    question: str
    call: str = ""
    prompt: int = 0
    output: int = 0
    cached: int = 0

    @property
    def whole(self) -> int:
        """Tokens in whole blocks of the prompt and the answer, but for those that end it."""
        return (self.prompt + self.output - 2) // BLOCK * BLOCK


@dataclass
class Conversations:
    """Turns of one API against any frontend of the mesh."""

    api: str
    tenant: str = field(default_factory=lambda: f"t{secrets.token_hex(4)}")

    async def first(self, url: str, **headers: str) -> Turn:
        turn = Turn(f"Task {secrets.token_hex(8)}. Look at all of this. " * 10 + "Read it.")
        answer = await self._post(url, [], turn, headers)
        turn.call = self._call(answer)
        return turn

    async def second(
        self, url: str, first: Turn, arguments: Json, text: str = "", **headers: str
    ) -> Turn:
        """The next turn, whose client returns the answer with these arguments and this text."""
        turn = Turn(first.question)
        await self._post(url, self._back(first, arguments, text), turn, headers)
        return turn

    async def _post(self, url: str, rest: list[Json], turn: Turn, headers: Json) -> Json:
        question = {"role": "user", "content": turn.question}
        tool: Json = {"name": "read", "description": "Reads."}
        paths = {"chat": "chat/completions"}
        body: Json = {"model": MODEL, "messages": [question, *rest]}
        if self.api == "chat":
            body["tools"] = [{"type": "function", "function": tool | {"parameters": SCHEMA}}]
        elif self.api == "messages":
            body |= {"tools": [tool | {"input_schema": SCHEMA}], "max_tokens": 900}
        else:
            listed = tool | {"type": "function", "parameters": SCHEMA}
            body = {"model": MODEL, "input": [question, *rest], "tools": [listed], "store": False}
        async with client_session() as session:
            client = Client(url, session)
            path = f"/v1/{paths.get(self.api, self.api)}"
            sent = {"X-Tenant-Id": self.tenant, **headers}
            status, answer = await client.post(path, body, **sent)
        assert status == 200, answer
        usage = answer["usage"]
        if self.api == "messages":
            turn.cached = usage["cache_read_input_tokens"]
            created = usage["cache_creation_input_tokens"]
            turn.prompt = usage["input_tokens"] + created + turn.cached
            turn.output = usage["output_tokens"]
        elif self.api == "chat":
            turn.cached = usage["prompt_tokens_details"]["cached_tokens"]
            turn.prompt, turn.output = usage["prompt_tokens"], usage["completion_tokens"]
        else:
            turn.cached = usage["input_tokens_details"]["cached_tokens"]
            turn.prompt, turn.output = usage["input_tokens"], usage["output_tokens"]
        found: Json = answer
        return found

    def _call(self, answer: Json) -> str:
        if self.api == "chat":
            return str(answer["choices"][0]["message"]["tool_calls"][0]["id"])
        if self.api == "messages":
            return str(next(b["id"] for b in answer["content"] if b["type"] == "tool_use"))
        return str(next(i["call_id"] for i in answer["output"] if i["type"] == "function_call"))

    def _back(self, first: Turn, arguments: Json, text: str) -> list[Json]:
        name, said, call = "read", "the file says hello", first.call
        written = json.dumps(arguments, indent=1)
        if self.api == "chat":
            function = {"name": name, "arguments": written}
            calls = [{"id": call, "type": "function", "function": function}]
            answer: Json = {"role": "assistant", "content": text or None, "tool_calls": calls}
            return [answer, {"role": "tool", "tool_call_id": call, "content": said}]
        if self.api == "messages":
            use = {"type": "tool_use", "id": call, "name": name, "input": arguments}
            texts = [{"type": "text", "text": text}] if text else []
            result = {"type": "tool_result", "tool_use_id": call, "content": said}
            return [
                {"role": "assistant", "content": [*texts, use]},
                {"role": "user", "content": [result]},
            ]
        texts = [{"role": "assistant", "content": text}] if text else []
        item = {"type": "function_call", "call_id": call, "name": name, "arguments": written}
        return [*texts, item, {"type": "function_call_output", "call_id": call, "output": said}]


@dataclass
class Stage:
    """A mesh with four frontends: two that share answers, one that keeps its own, one without."""

    mesh: Mesh
    other: str
    alone: str
    off: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("answers")
    script = folder / "script.jsonl"
    script.write_text("".join(json.dumps(entry) + "\n" for entry in SCRIPT))
    env = {"KVMESH_MOCK_SPEEDUP": "50", "KVMESH_MOCK_SCRIPT": str(script)}
    mesh = Mesh(nats_server.url, folder, env)
    mesh.start_all(workers=1)
    urls = []
    for name, settings in (
        ("other", {}),
        ("alone", {"KVMESH_FRONTEND_STORED_ANSWERS_BYTES": "0"}),
        ("off", {"KVMESH_FRONTEND_ANSWERS_BYTES": "0"}),
    ):
        port = str(free_port())
        mesh.start("frontend", f"frontend-{name}", KVMESH_FRONTEND_PORT=port, **settings)
        urls.append(f"http://127.0.0.1:{port}")
    await mesh.ready()
    for url in urls:
        await serves(url)
    yield Stage(mesh, *urls)
    mesh.stop()


async def serves(url: str) -> None:
    async def ready() -> bool:
        async with client_session() as session, session.get(f"{url}/health") as response:
            return response.status == 200

    await eventually(_patient(ready), what="the frontend is ready")


def _patient(ready: Any) -> Any:
    async def tried() -> bool:
        try:
            return bool(await ready())
        except OSError:
            return False

    return tried


@pytest.fixture(params=["chat", "messages", "responses"])
def talk(request: pytest.FixtureRequest) -> Conversations:
    return Conversations(request.param)


@pytest.mark.parametrize("text", ["", "Let me see."])
async def test_a_rewritten_answer_is_cached_whole(
    stage: Stage, talk: Conversations, text: str
) -> None:
    first = await talk.first(stage.mesh.url)
    second = await talk.second(stage.mesh.url, first, REWRITTEN, text)
    assert second.cached >= first.whole
    assert second.prompt > first.prompt + first.output


async def test_an_edited_answer_is_shown_as_sent(stage: Stage, talk: Conversations) -> None:
    first = await talk.first(stage.mesh.url)
    second = await talk.second(stage.mesh.url, first, EDITED)
    assert second.cached < first.whole
    assert second.prompt < first.prompt + first.output


async def test_another_frontend_finds_the_answer(stage: Stage, talk: Conversations) -> None:
    async def found() -> bool:  # it is stored in the background
        first = await talk.first(stage.mesh.url)
        return (await talk.second(stage.other, first, REWRITTEN)).cached >= first.whole

    await eventually(found, what="the other frontend shows the answer as it was generated")


async def test_a_restarted_frontend_finds_the_answer(stage: Stage) -> None:
    talk = Conversations("chat")
    first = await talk.first(stage.other)
    stage.mesh.kill("frontend-other", signal.SIGTERM)
    stage.mesh.restart("frontend-other")
    await serves(stage.other)
    second = await talk.second(stage.other, first, REWRITTEN)
    assert second.cached >= first.whole


async def test_tenants_get_nothing_of_each_other_s_answers(
    stage: Stage, talk: Conversations
) -> None:
    first = await talk.first(stage.mesh.url)
    stranger = Conversations(talk.api)
    for url in (stage.mesh.url, stage.other):
        second = await stranger.second(url, first, REWRITTEN)
        assert second.prompt < first.prompt + first.output
    assert (await talk.second(stage.mesh.url, first, REWRITTEN)).cached >= first.whole


async def test_without_memory_for_answers_they_are_shown_as_sent(stage: Stage) -> None:
    talk = Conversations("chat")
    for url in (stage.off, stage.mesh.url):
        first = await talk.first(url)
        second = await talk.second(stage.off, first, REWRITTEN)
        assert second.prompt < first.prompt + first.output


async def test_without_storage_a_frontend_knows_its_own_answers(stage: Stage) -> None:
    talk = Conversations("chat")
    first = await talk.first(stage.alone)
    assert (await talk.second(stage.alone, first, REWRITTEN)).cached >= first.whole
    for before, after in ((stage.alone, stage.other), (stage.other, stage.alone)):
        first = await talk.first(before)
        second = await talk.second(after, first, REWRITTEN)
        assert second.prompt < first.prompt + first.output


async def test_restored_answers_are_counted(stage: Stage) -> None:
    def counted(returned: str) -> float:
        sample = f'kvmesh_frontend_restored_answers_total{{model="{MODEL}",returned="{returned}"}}'
        return stage.mesh.metrics().get(sample, 0.0)

    talk = Conversations("chat")
    before = {word: counted(word) for word in ("rewritten", "edited")}
    first = await talk.first(stage.mesh.url)
    await talk.second(stage.mesh.url, first, REWRITTEN)
    await talk.second(stage.mesh.url, first, EDITED)
    assert {word: counted(word) - before[word] for word in before} == {"rewritten": 1, "edited": 1}
    assert stage.mesh.metric("kvmesh_frontend_answers_bytes") >= 0
