"""One conversation through every API and way of sending: the engine sees no difference.

The first run, by chat completions as a whole, is what all others are compared with.
"""

import asyncio
import json
import secrets
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Content, Json
from support.frontend import MODEL, Client, client_session
from support.mesh import Mesh
from support.nats import NatsServer
from support.tap import Tap
from support.wait import PATIENCE_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
SYSTEM = "You are a careful agent who reads files. " * 6
QUESTIONS = ("How many lines has the file? " * 6 + "Read it.", "And how many words, then?")
RESULTS = ("one\ntwo\nthree", "nothing")
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL: Json = {"name": "read", "description": "Reads a file."}
# As models write them: with blanks before the first, and JSON in more than one form.
CALLS = (
    '{"name": "read", "arguments": {"path": "a.txt"}}',
    '{"arguments":{"path":"caf\\u00e9.txt"},"name":"read"}',
)
SCRIPT = [
    {"match": "words, then", "text": "Three words.\n\nNo more."},
    {"match": "one\\ntwo", "text": "<think>\nI count them.\n</think>\n\nIt has three lines."},
    {
        "match": "Read it",
        "text": "<think>\nI must read.\n</think>\n\nI look.   "
        + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in CALLS),
    },
]
END = ("response.completed", "response.incomplete", "response.failed", "error")


@dataclass(frozen=True)
class Asked:
    """A text of a person, or with `call` the result of that call."""

    text: str
    call: str = ""


History = list[Asked | Content]


@dataclass
class Stage:
    """The mesh, what its engine is sent, and the open WebSocket of a run."""

    client: Client
    tap: Tap

    @property
    def session(self) -> aiohttp.ClientSession:
        return self.client.session


@dataclass
class Surface:
    """One way of sending; each run of a conversation has its own."""

    stage: Stage
    stream: bool
    headers: dict[str, str]

    async def ask(self, history: History) -> Content:
        raise NotImplementedError

    async def close(self) -> None:
        """The run is over."""


class ByChat(Surface):
    async def ask(self, history: History) -> Content:
        messages: list[Json] = [{"role": "system", "content": SYSTEM}]
        for each in history:
            if isinstance(each, Content):
                calls = [
                    {
                        "id": name,
                        "type": "function",
                        "function": {"name": call[0], "arguments": json.dumps(call[1])},
                    }
                    for name, call in zip(each.call_ids, each.calls, strict=True)
                ]
                answer: Json = {"role": "assistant", "content": each.text or None}
                answer |= {"reasoning_content": each.thinking} if each.thinking else {}
                messages.append(answer | ({"tool_calls": calls} if calls else {}))
            elif each.call:
                messages.append({"role": "tool", "tool_call_id": each.call, "content": each.text})
            else:
                messages.append({"role": "user", "content": each.text})
        tools = [{"type": "function", "function": TOOL | {"parameters": PARAMETERS}}]
        body: Json = {"model": MODEL, "messages": messages, "tools": tools, "stream": self.stream}
        return await CHAT.send(self.stage.client, body, **self.headers)


class ByMessages(Surface):
    async def ask(self, history: History) -> Content:
        messages: list[Json] = []
        for each in history:
            if isinstance(each, Content):
                blocks: list[Json] = []
                if each.thinking:
                    blocks.append({"type": "thinking", "thinking": each.thinking, "signature": ""})
                if each.text:
                    blocks.append({"type": "text", "text": each.text})
                for name, call in zip(each.call_ids, each.calls, strict=True):
                    use = {"type": "tool_use", "id": name, "name": call[0], "input": call[1]}
                    blocks.append(use)
                messages.append({"role": "assistant", "content": blocks})
            elif each.call:
                result = {"type": "tool_result", "tool_use_id": each.call, "content": each.text}
                messages.append({"role": "user", "content": [result]})
            else:
                messages.append({"role": "user", "content": each.text})
        tools = [TOOL | {"input_schema": PARAMETERS}]
        body: Json = {"model": MODEL, "messages": messages, "tools": tools, "system": SYSTEM}
        body |= {"max_tokens": 500, "stream": self.stream}
        return await MESSAGES.send(self.stage.client, body, **self.headers)


def items(history: History) -> list[Json]:
    """The history as items of the Responses API."""
    found: list[Json] = []
    for each in history:
        if isinstance(each, Content):
            if each.thinking:
                content = [{"type": "reasoning_text", "text": each.thinking}]
                found.append({"type": "reasoning", "summary": [], "content": content})
            if each.text:
                found.append({"role": "assistant", "content": each.text})
            for name, call in zip(each.call_ids, each.calls, strict=True):
                one = {"type": "function_call", "call_id": name, "name": call[0]}
                found.append(one | {"arguments": json.dumps(call[1])})
        elif each.call:
            result = {"type": "function_call_output", "call_id": each.call, "output": each.text}
            found.append(result)
        else:
            found.append({"role": "user", "content": each.text})
    return found


def responses_body(history: History, **fields: Any) -> Json:
    tools = [TOOL | {"type": "function", "parameters": PARAMETERS}]
    body: Json = {"model": MODEL, "input": items(history), "tools": tools, "store": False}
    return body | {"instructions": SYSTEM} | fields


class ByResponses(Surface):
    async def ask(self, history: History) -> Content:
        body = responses_body(history, stream=self.stream)
        return await RESPONSES.send(self.stage.client, body, **self.headers)


@dataclass
class Continuing(Surface):
    """It sends only what is new to the server."""

    known: int = 0  # entries of the history
    previous: Json = field(default_factory=dict)

    def new(self, history: History) -> History:
        """The entries that the server does not know yet; after others of it, all of them."""
        known, self.known = self.known, len(history) + 1
        if any(isinstance(each, Content) for each in history[known:]):
            self.previous = {}  # another one has answered since
        return history[known:] if self.previous else history


class ByStored(Continuing):
    async def ask(self, history: History) -> Content:
        body = responses_body(self.new(history), stream=self.stream, store=True)
        answer = await RESPONSES.send(self.stage.client, body | self.previous, **self.headers)
        self.previous = {"previous_response_id": answer.id}
        return answer


class ByConversation(Continuing):
    async def ask(self, history: History) -> Content:
        new = self.new(history)
        if not self.previous:
            status, made = await self.stage.client.post("/v1/conversations", {}, **self.headers)
            assert status == 200
            self.previous = {"conversation": made["id"]}
        body = responses_body(new, stream=self.stream) | self.previous
        return await RESPONSES.send(self.stage.client, body, **self.headers)


@dataclass
class BySocket(Continuing):
    socket: aiohttp.ClientWebSocketResponse | None = None

    async def ask(self, history: History) -> Content:
        if self.socket is None:
            url = f"{self.stage.client.url}/v1/responses"
            self.socket = await self.stage.session.ws_connect(url, headers=self.headers)
        created = responses_body(self.new(history)) | self.previous | {"type": "response.create"}
        await self.socket.send_json(created)
        found: list[Json] = []
        async with asyncio.timeout(PATIENCE_S):
            while not found or found[-1]["type"] not in END:
                found.append(await self.socket.receive_json())
        answer = RESPONSES.streamed(found)
        answer.id = found[0]["response"]["id"]
        self.previous = {"previous_response_id": answer.id}
        return answer.decode_calls()

    async def close(self) -> None:
        if self.socket is not None:
            await self.socket.close()


@dataclass
class Turn:
    """A turn as the engine and its client saw it."""

    prompt: bytes
    generated: list[int]
    answer: Content

    @property
    def usage(self) -> tuple[int, ...]:
        answer = self.answer
        return answer.prompt, answer.cached, answer.output, answer.reasoning


KINDS: list[type[Surface]] = [
    ByChat,
    ByMessages,
    ByResponses,
    ByStored,
    ByConversation,
    BySocket,
]


async def run(stage: Stage, *kinds: type[Surface], stream: bool) -> list[Turn]:
    """The whole conversation of a new tenant; each turn is sent by the next of these kinds."""
    headers = {"X-Tenant-Id": f"t{secrets.token_hex(6)}"}
    surfaces = {kind: kind(stage, stream, headers) for kind in kinds}
    history: History = [Asked(QUESTIONS[0])]
    turns: list[Turn] = []
    try:
        for number in range(3):
            before = len(stage.tap.works)
            answer = await surfaces[kinds[number % len(kinds)]].ask(list(history))
            (work,) = await eventually(partial(stage.tap.since, before))
            whole = await stage.tap.outcome(work)
            generated = stage.tap.tokens(work)
            assert len(generated) == whole.output_tokens
            turns.append(Turn(work.tokens, generated, answer))
            if answer.calls:
                results = zip(RESULTS, answer.call_ids, strict=True)
                history += [answer, *(Asked(text, call) for text, call in results)]
            else:
                history += [answer, Asked(QUESTIONS[1])]
    finally:
        for surface in surfaces.values():
            await surface.close()
    return turns


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("alike")
    script = folder / "script.jsonl"
    script.write_text("".join(json.dumps(entry) + "\n" for entry in SCRIPT))
    env = {
        "KVMESH_MOCK_SPEEDUP": "50",
        "KVMESH_MOCK_SCRIPT": str(script),
        "KVMESH_FRONTEND_SPECULATIVE_PREFILL": "off",
    }
    mesh = Mesh(nats_server.url, folder, env)
    mesh.start_all(workers=1)
    try:
        await mesh.ready()
        async with Tap().listening(mesh.options) as tap, client_session() as session:
            yield Stage(Client(mesh.url, session), tap)
    finally:
        mesh.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(stage: Stage) -> list[Turn]:
    turns = await run(stage, ByChat, stream=False)
    assert turns[0].answer.calls == [("read", {"path": p}) for p in ("a.txt", "café.txt")]
    assert [turn.answer.text for turn in turns] == [
        "I look.",
        "It has three lines.",
        "Three words.\n\nNo more.",
    ]
    assert [turn.answer.thinking for turn in turns] == ["I must read.", "I count them.", ""]
    assert [turn.answer.cached > 0 for turn in turns] == [False, True, True]
    return turns


MIXED = [
    (ByChat, BySocket, ByMessages),
    (ByMessages, ByStored, ByChat),
    (ByConversation, ByChat, ByConversation),
    (BySocket, ByMessages, BySocket),
    (ByStored, ByResponses, BySocket),
]
RUNS: list[tuple[tuple[type[Surface], ...], bool]] = [
    *(((kind,), stream) for kind in KINDS for stream in (False, True)),
    *((kinds, True) for kinds in MIXED),
]


@pytest.mark.parametrize(
    ("kinds", "stream"),
    RUNS,
    ids=["-".join(k.__name__ for k in kinds) + ("-stream" if s else "") for kinds, s in RUNS],
)
async def test_a_conversation_is_the_same_to_the_engine_and_to_its_client(
    stage: Stage, expected: list[Turn], kinds: tuple[type[Surface], ...], stream: bool
) -> None:
    for turn, wanted in zip(await run(stage, *kinds, stream=stream), expected, strict=True):
        assert stage.tap.decoded(turn.prompt) == stage.tap.decoded(wanted.prompt)
        assert turn.prompt == wanted.prompt
        assert turn.generated == wanted.generated
        assert turn.usage == wanted.usage
        assert turn.answer.text == wanted.answer.text
        assert turn.answer.thinking == wanted.answer.thinking
        assert turn.answer.calls == wanted.answer.calls


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_of_the_same_tokens_is_the_same_to_the_engine(
    stage: Stage, expected: list[Turn], stream: bool
) -> None:
    headers = {"X-Tenant-Id": f"t{secrets.token_hex(6)}"}
    for wanted in expected:
        ids = array("I", wanted.prompt).tolist()
        body: Json = {"model": MODEL, "prompt": ids, "max_tokens": 500, "stream": stream}
        answer = await COMPLETIONS.send(stage.client, body, **headers)
        assert (answer.prompt, answer.output) == (wanted.answer.prompt, wanted.answer.output)
        assert answer.cached == wanted.answer.cached
