"""Caches and placement of a whole mesh through every API: what usage reports is what was done."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from support.apis import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Api,
    Content,
    every_api,
    streamed,
)
from support.frontend import MODEL, Client, client_session
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import (
    Decision,
    MessageDecoder,
    OverlapQuery,
    OverlapReply,
    SeqBatch,
    SeqFree,
)
from kvmesh.cli.explain import find_events, own_id
from kvmesh.observer.prefetch_uses import PrefetchUses

pytestmark = pytest.mark.asyncio(loop_scope="module")
JSON_TYPE = {"Content-Type": "application/json"}
BLOCK = 16
WORKERS = ("worker-0", "worker-1")
THOUGHT = "The files have to be read before I can say anything about them. " * 6
ANSWER = "I have read all files, and this is what they contain. " * 6
Json = dict[str, Any]


def unique(words: str = "Read the files and tell me all about them. ") -> str:
    """A text of about 300 tokens with a unique prefix."""
    return f"Task {secrets.token_hex(8)}. " + words * 30


def cachable(content: Content) -> int:
    """Prompt tokens that a repeated prompt finds cached: engines compute the last token."""
    return (content.prompt - 1) // BLOCK * BLOCK


@dataclass
class Stage:
    """A mesh of two mock workers with a host tier; `instances` by name."""

    client: Client
    bus: Bus
    freed: list[SeqFree]
    instances: dict[str, str]

    async def send(self, api: Api, body: Json, **headers: str) -> Content:
        """Send a request; check that `cached` of its response agrees with the cache report.

        Returns once the end of the request is published: until then it counts as load.
        """
        nvext = {"extra_fields": ["worker_id", "cache"], **body.get("nvext", {})}
        content = await api.send(self.client, {**body, "nvext": nvext}, **headers)
        await eventually(
            lambda: [event for event in self.freed if event.request.startswith(content.id)],
            what="the request's end is published",
        )
        cache = (content.nvext or {})["cache"]
        assert cache["cached_tokens"] == sum(cache["tiers"]) == content.cached
        assert cache["prompt_tokens"] == content.prompt
        return content

    async def call(self, path: str, body: Json, method: str = "POST", **headers: str) -> Any:
        """The answer of a cache endpoint."""
        data = msgspec.json.encode({"model": MODEL, **body})
        url = self.client.url + path
        headers = {**JSON_TYPE, **headers}
        async with self.client.session.request(method, url, data=data, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            return await reply.json()

    async def explains(self, request: str, prefetch: str, used: int) -> None:
        """`kvmesh explain` shows that the request used `used` tokens of the prefetch."""
        prefetch = own_id(prefetch)

        async def shown() -> bool:
            uses = PrefetchUses()
            events = await find_events(self.bus, prefetch, None, uses)
            of_request = uses.of_request(request)
            return (
                [event.request for event in events] == [prefetch]
                and [use.prefetch.request for use in of_request] == [prefetch]
                and of_request[0].used_tokens == used
            )

        await eventually(shown, what="the decisions and the outcome")

    async def indexed(self, prefetch: str) -> bool:
        """True once the index knows the blocks of a prefetched prompt."""
        for decision in await find_events(self.bus, own_id(prefetch), None):
            if isinstance(decision, Decision):
                query, index = (
                    OverlapQuery([decision.sequence_hashes]),
                    self.bus.subjects.index(MODEL),
                )
                found = await self.bus.request(index, query, MessageDecoder(OverlapReply), 10)
                return any(found.rows)
        return False


def worker(content: Content) -> str:
    return str((content.nvext or {})["worker_id"]["instance"])


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entry = {"match": "Think first", "text": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"}
    file = tmp_path_factory.mktemp("script") / "script.jsonl"
    file.write_text(json.dumps(entry) + "\n")
    return file


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory, script: Path
) -> AsyncIterator[Stage]:
    env = {
        "KVMESH_MOCK_SPEEDUP": "50",
        "KVMESH_MOCK_HOST_BLOCKS": "4096",
        "KVMESH_MOCK_SCRIPT": str(script),
        "KVMESH_ROUTER_SEED": "0",
    }
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("caching"), env)
    mesh.start("indexer", "indexer-0")
    mesh.start("router", "router-0")
    for name, zone in zip(WORKERS, ("north", "south"), strict=True):
        mesh.start("worker", name, KVMESH_WORKER_LABELS=f"zone={zone}")
    mesh.start("frontend", "frontend-0")
    await mesh.ready()
    bus = await Bus.connect(mesh.options, "test")
    freed: list[SeqFree] = []

    async def gather(batch: SeqBatch) -> None:
        freed.extend(event for event in batch.events if isinstance(event, SeqFree))

    await bus.subscribe(bus.subjects.seq(MODEL), MessageDecoder(SeqBatch), gather)
    async with client_session() as session:
        client = Client(mesh.url, session)

        async def found() -> dict[str, str]:
            body = {"model": MODEL, "sessions": ["none"]}
            _, answer = await client.post("/v1/sessions/release", body, **JSON_TYPE)
            names = {entry["name"]: entry["instance"] for entry in answer["instances"]}
            return names if set(names) == set(WORKERS) else {}

        instances = await eventually(found, what="both workers are known to the frontend")
        for instance in instances.values():
            await eventually(partial(is_placed, client, instance), what="the router places on both")
        yield Stage(client, bus, freed, instances)
    mesh.stop()
    await bus.close()


async def is_placed(client: Client, instance: str) -> bool:
    body = CHAT.body("Hi", 1, nvext={"backend_instance_id": instance})
    return (await client.post(CHAT.path, body))[0] == 200


# --- usage ---


@every_api
@streamed
async def test_usage_reports_the_cached_prefix(stage: Stage, api: Api, stream: bool) -> None:
    text = unique()
    first = await stage.send(api, api.body(text, 4, stream=stream))
    again = await stage.send(api, api.body(text, 4, stream=stream))
    longer = await stage.send(api, api.body(text + "And then?", 4, stream=stream))
    assert first.cached == 0
    assert again.cached == cachable(first) > 0
    assert (again.prompt, again.output) == (first.prompt, first.output)
    assert 0 < longer.cached <= first.prompt
    assert worker(first) == worker(again) == worker(longer)
    assert again.text == first.text


@pytest.mark.parametrize("api", [CHAT, MESSAGES, RESPONSES], ids=lambda api: api.name)
async def test_a_prompt_of_one_api_is_cached_for_the_others(stage: Stage, api: Api) -> None:
    text = unique()
    first = await stage.send(api, api.body(text, 4))
    for other in (CHAT, MESSAGES, RESPONSES):
        found = await stage.send(other, other.body(text, 4))
        assert (found.prompt, found.cached) == (first.prompt, cachable(first))
    prompt = await stage.call("/v1/tokenize", CHAT.body(text))
    found = await stage.send(COMPLETIONS, COMPLETIONS.body("", 4, prompt=prompt["tokens"]))
    assert (found.prompt, found.cached) == (first.prompt, cachable(first))


# --- placement ---


def conversation(api: Api, text: str, answers: list[str]) -> Json:
    """A request of a conversation whose earlier answers are `answers`."""
    if api is COMPLETIONS:
        return api.body(text + "".join(f"{answer} Go on. " for answer in answers), 4)
    messages: list[Json] = [{"role": "user", "content": text}]
    for answer in answers:
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "Go on."},
        ]
    field = "input" if api is RESPONSES else "messages"
    return api.body("", 4, **{field: messages})


@every_api
async def test_every_turn_goes_to_the_worker_of_the_first(stage: Stage, api: Api) -> None:
    for instance in stage.instances.values():
        text, answers = unique(), list[str]()
        nvext = {"backend_instance_id": instance}
        first = await stage.send(api, {**conversation(api, text, answers), "nvext": nvext})
        cached = [first.cached]
        answers.append(first.text)
        for _ in range(3):
            content = await stage.send(api, conversation(api, text, answers))
            assert worker(content) == instance
            answers.append(content.text)
            cached.append(content.cached)
        assert cached[0] == 0 < cached[1]
        assert cached == sorted(cached)


@every_api
async def test_constraints_outweigh_the_cache(stage: Stage, api: Api) -> None:
    text = unique()
    home = worker(await stage.send(api, api.body(text, 4)))
    (away,) = set(stage.instances.values()) - {home}
    for constraint in (
        {"backend_instance_id": away},
        {"routing_constraints": {"exclude": [home]}},
        {"routing_constraints": {"allow": [away]}},
    ):
        content = await stage.send(api, api.body(text, 4, nvext=constraint))
        assert worker(content) == away
    back = await stage.send(api, api.body(text, 4, nvext={"backend_instance_id": home}))
    assert (worker(back), back.cached) == (home, cachable(back))


@every_api
async def test_labels_select_workers(stage: Stage, api: Api) -> None:
    for name, zone in zip(WORKERS, ("north", "south"), strict=True):
        nvext = {"routing_constraints": {"labels": {"zone": zone}}}
        content = await stage.send(api, api.body(unique(), 4, nvext=nvext))
        assert worker(content) == stage.instances[name]


@every_api
@pytest.mark.parametrize(
    "constraint",
    [
        {"routing_constraints": {"labels": {"zone": "west"}}},
        {"routing_constraints": {"allow": ["nowhere-1"]}},
        {"routing_constraints": {"exclude": list(WORKERS)}},
    ],
    ids=["labels", "allow", "exclude"],
)
async def test_unmet_constraints_are_refused_before_the_deadline(
    stage: Stage, api: Api, constraint: Json
) -> None:
    if "exclude" in constraint.get("routing_constraints", {}):
        constraint = {"routing_constraints": {"exclude": list(stage.instances.values())}}
    body = api.body("Hi", 4, nvext=constraint)
    response = await stage.client.stream(api.path, body)
    assert response.status == 503
    assert "retry-after" in response.headers
    assert (await response.json())["error"]["message"]


@every_api
async def test_an_instance_that_does_not_exist_is_an_error_of_the_request(
    stage: Stage, api: Api
) -> None:
    body = api.body("Hi", 4, nvext={"backend_instance_id": "nowhere-1"})
    response = await stage.client.stream(api.path, body)
    assert response.status == 400
    assert "nowhere-1" in (await response.json())["error"]["message"]


# --- cache endpoints ---


@every_api
async def test_after_clear_nothing_of_the_tenant_is_cached(stage: Stage, api: Api) -> None:
    text = unique()
    mine, other = {"X-Tenant-Id": f"m{api.name}"}, {"X-Tenant-Id": f"o{api.name}"}
    for headers in (mine, other):
        await stage.send(api, api.body(text, 4), **headers)
    cleared = await stage.call("/v1/cache/clear", {}, **mine)
    assert cleared["blocks"] > 0
    assert (await stage.send(api, api.body(text, 4), **mine)).cached == 0
    kept = await stage.send(api, api.body(text, 4), **other)
    assert kept.cached == cachable(kept)


@every_api
async def test_a_released_session_is_not_cached(stage: Stage, api: Api) -> None:
    text, name = unique(), secrets.token_hex(4)
    session = {"x-kvmesh-session-id": name}
    await stage.send(api, api.body(text, 4), **session)
    again = await stage.send(api, api.body(text, 4), **session)
    assert again.cached == cachable(again)
    released = await stage.call("/v1/sessions/release", {"sessions": [name]})
    assert released["blocks"] > 0
    assert (await stage.send(api, api.body(text, 4), **session)).cached == 0


@every_api
async def test_the_last_request_of_a_session_releases_it(stage: Stage, api: Api) -> None:
    text = unique()
    session = {"x-kvmesh-session-id": secrets.token_hex(4)}
    await stage.send(api, api.body(text, 4), **session)
    final = {**session, "x-kvmesh-session-final": "true"}
    last = await stage.send(api, api.body(text, 4), **final)
    assert last.cached == cachable(last)

    async def released() -> bool:
        return (await stage.send(api, api.body(text, 4), **final)).cached == 0

    await eventually(released, what="the session is released")


@every_api
async def test_a_pinned_prompt_outlives_its_session(stage: Stage, api: Api) -> None:
    text, name = unique(), secrets.token_hex(4)
    session = {"x-kvmesh-session-id": name}
    await stage.send(api, api.body(text, 4), **session)
    pin = await stage.call("/v1/cache/pins", {"session": name, "ttl": "10m"})
    assert pin["affected"] == pin["requested"] > 0
    await stage.call("/v1/sessions/release", {"sessions": [name]})
    pinned = await stage.send(api, api.body(text, 4))
    assert pinned.cached == cachable(pinned)
    deleted = await stage.call(f"/v1/cache/pins/{pin['id']}", {}, "DELETE")
    assert deleted["affected"] == pin["requested"]


@every_api
async def test_a_prefetched_prompt_is_cached_in_the_engine(stage: Stage, api: Api) -> None:
    tenant = {"X-Tenant-Id": f"p{api.name}"}
    body = api.body(unique(), 4)
    sent = {key: value for key, value in body.items() if key not in (api.limit, "store")}
    if api is MESSAGES:
        sent["api"] = "messages"
    fetched = await stage.call("/v1/prefetch", {**sent, "compute": 4096}, **tenant)
    assert fetched["overlap"] == [0, 0, 0, 0]

    async def done() -> bool:
        pin = await stage.call("/v1/cache/pins", {**sent, "ttl": 60, "priority": 35}, **tenant)
        return bool(pin["affected"] >= pin["requested"] - 1)

    await eventually(done, what="the prompt is computed")
    await eventually(partial(stage.indexed, fetched["id"]), what="the index knows it")
    content = await stage.send(api, body, **tenant)
    assert worker(content) == fetched["instance"]
    assert content.prompt == fetched["tokens"]
    assert content.cached == cachable(content)
    cache = (content.nvext or {})["cache"]
    assert cache["tiers"][0] == content.cached
    await stage.explains(content.id, fetched["id"], content.cached)


# --- sessions ---


@pytest.mark.parametrize("api", [CHAT, MESSAGES], ids=lambda api: api.name)
async def test_speculative_prefill_raises_what_the_next_turn_finds_cached(
    stage: Stage, api: Api
) -> None:
    async def caches_the_answer(hint: bool) -> bool:
        """True if the second turn, whose prompt lacks the first's thinking, finds more than that.

        Without speculation it finds at most the prompt of the first turn.
        """
        earlier: list[Json] = [
            {"role": "user", "content": unique()},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Think first."},
        ]
        nvext = {"agent_hints": {"speculative_prefill": hint}}
        body = api.body("", 900, messages=earlier, nvext=nvext)
        first = await stage.send(api, body, **agent)
        assert (first.thinking.strip(), first.text.strip()) == (THOUGHT.strip(), ANSWER.strip())
        answer = {"role": "assistant", "content": first.text}
        await asyncio.sleep(0.3)
        later = [*earlier, answer, {"role": "user", "content": "Thank you."}]
        second = await stage.send(api, api.body("", 4, messages=later), **agent)
        return second.cached >= first.prompt + 3 * BLOCK

    agent = {"user-agent": {CHAT: "goose/1", MESSAGES: "zed/1"}[api]}  # judged by its own answers
    hinted, unhinted = partial(caches_the_answer, True), partial(caches_the_answer, False)
    await eventually(hinted, what="the next turn's prompt is prefilled")
    await eventually(unhinted, what="it is prefilled without a hint, since that paid")


HEAD = "You are an agent that writes software for others, and does so with care. " * 3
FUNCTION = {"name": "run", "description": "Runs a command. " * 9}
TOOL = {
    CHAT: {"type": "function", "function": FUNCTION},
    MESSAGES: {**FUNCTION, "input_schema": {"type": "object"}},
}


def agent_body(api: Api, system: str, turns: list[str], **fields: Any) -> Json:
    """A request of an agent whose first, third, … turns are the user's."""
    messages = [
        {"role": "assistant" if number % 2 else "user", "content": turn}
        for number, turn in enumerate(turns)
    ]
    if api is MESSAGES:
        return api.body("", 4, system=system, messages=messages, **fields)
    return api.body("", 4, messages=[{"role": "system", "content": system}, *messages], **fields)


@pytest.mark.parametrize("api", [CHAT, MESSAGES], ids=lambda api: api.name)
@pytest.mark.parametrize("side", ["title", "hook", "no tools", "another task"])
async def test_side_requests_cost_a_session_s_conversation_nothing(
    stage: Stage, api: Api, side: str
) -> None:
    """Harnesses send titles, hooks and summaries under the session of the main conversation."""
    mark = secrets.token_hex(6)
    head, task = f"{mark} {HEAD}", unique()
    session = {"x-kvmesh-session-id": secrets.token_hex(4)}
    tools = {"tools": [TOOL[api]]} if side == "no tools" else {}
    system, turns = head + unique("Follow the rules of the house. "), [task]
    first = await stage.send(api, agent_body(api, system, turns, **tools), **session)
    other = {"no tools": [task, "Well.", unique("Sum this up. ")], "another task": [unique()]}
    asides = other.get(side, ["What is this about? " * 9])
    of_side = f"{head}Write a {side}." if side in ("title", "hook") else system
    for _ in range(3):
        aside = await stage.send(api, agent_body(api, of_side, asides), **session)
        assert worker(aside) == worker(first)
        asides += [aside.text or "Well.", "And what else? " * 9]
    turns += [first.text or "Well.", "Go on."]
    second = await stage.send(api, agent_body(api, system, turns, **tools), **session)
    assert second.cached > first.prompt - 2 * BLOCK


async def test_a_rewritten_history_supersedes_the_session_s_earlier_prompt(stage: Stage) -> None:
    """Once the session's next prompt has confirmed it."""
    start = unique()
    tails = [unique("One way to go on. "), unique("Another way to go on. ")]

    async def cached(*turns: str, **headers: str) -> Content:
        body = agent_body(CHAT, "Be brief.", [start, "Yes?", *turns])
        return await stage.send(CHAT, body, **headers)

    session = {"x-kvmesh-session-id": secrets.token_hex(4)}
    assert (await cached(tails[0], **session)).cached == 0
    changed = await cached(tails[1], **session)
    assert changed.cached > 0
    last = "Go on. " * 20
    assert (
        await cached(tails[1], changed.text, last, **session)
    ).cached > changed.prompt - 2 * BLOCK
    await cached(tails[1], changed.text, last, "Well.", last, **session)
    assert (await cached(tails[0])).cached <= changed.cached + BLOCK


async def test_a_session_that_returns_to_an_edited_history_loses_nothing(stage: Stage) -> None:
    start, session = unique(), {"x-kvmesh-session-id": secrets.token_hex(4)}
    tails = [unique("One way to go on. "), unique("Another way to go on. ")]
    turns = [[start, "Yes?", tail] for tail in tails]
    prompts = [0, 0]
    for number in (0, 1, 0, 1, 0):
        content = await stage.send(CHAT, agent_body(CHAT, "Be brief.", turns[number]), **session)
        assert content.cached > prompts[number] - 2 * BLOCK
        prompts[number] = content.prompt
        turns[number] += [content.text, "Go on. " * 20]
