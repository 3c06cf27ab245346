"""Switches of role: reasons to refuse, order and deadlines."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from support.wait import eventually

from kvmesh.bus.messages import Capacity, Serve
from kvmesh.worker import roles
from kvmesh.worker.engine import EngineError, EngineInfo, Unsupported
from kvmesh.worker.roles import RoleSwitch, role_problem

Role = Literal["aggregated", "prefill", "decode"]


def info(supports_handoff: bool = False, needs_handoff: bool = False) -> EngineInfo:
    return EngineInfo(
        name="e",
        version="",
        context=16,
        block_size=16,
        capacity=Capacity(blocks=1, max_sequences=1, max_batched_tokens=1),
        supports_handoff=supports_handoff,
        needs_handoff=needs_handoff,
    )


@dataclass
class Switchable:
    """An engine that gets ready for a role once `gate` is set; `error` is raised then."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    prepared: list[str] = field(default_factory=list)

    async def switch_role(self, serves: str) -> None:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.prepared.append(serves)


class Card:
    """The worker's card; `leaving` is the reason why it cannot change."""

    def __init__(self) -> None:
        self.published: list[str] = []
        self.leaving = ""

    async def publish(self, serves: str) -> str:
        if not self.leaving:
            self.published.append(serves)
        return self.leaving


def switch(engine: Any, card: Card, **fields: bool) -> RoleSwitch:
    made = RoleSwitch(engine, "aggregated", card.publish)
    made.open(info(**{"supports_handoff": True, **fields}))
    return made


@pytest.mark.parametrize(
    ("fields", "possible"),
    [
        ({}, {"aggregated"}),
        ({"supports_handoff": True}, {"aggregated", "prefill", "decode"}),
        ({"supports_handoff": True, "needs_handoff": True}, {"decode"}),
    ],
)
def test_an_engine_serves_the_roles_that_its_handoffs_allow(
    fields: dict[str, bool], possible: set[str]
) -> None:
    every = ("aggregated", "prefill", "decode")
    assert {role for role in every if not role_problem(info(**fields), role)} == possible


async def test_the_engine_is_ready_before_the_card_changes() -> None:
    engine, card = Switchable(), Card()
    made = switch(engine, card)
    pending = asyncio.create_task(made.execute(Serve(serves="prefill")))
    await asyncio.sleep(0)
    assert card.published == []
    engine.gate.set()
    assert (await pending).ok
    assert (engine.prepared, card.published) == (["prefill"], ["prefill"])
    assert (await made.execute(Serve(serves="prefill"))).ok
    assert (engine.prepared, card.published) == (["prefill"], ["prefill"]), "it serves that already"


async def test_commands_are_executed_in_their_order() -> None:
    engine, card = Switchable(), Card()
    made = switch(engine, card)
    wanted: list[Role] = ["prefill", "aggregated", "decode"]
    pending = [asyncio.create_task(made.execute(Serve(serves=role))) for role in wanted]
    await asyncio.sleep(0)
    engine.gate.set()
    assert all(reply.ok for reply in await asyncio.gather(*pending))
    assert card.published == wanted


async def test_what_cannot_be_done_is_refused_with_the_reason() -> None:
    card = Card()
    starting = RoleSwitch(Switchable(), "aggregated", card.publish)  # type: ignore[arg-type]
    engine = Switchable()
    engine.gate.set()
    cases = [
        (starting, "the worker is starting"),
        (switch(engine, card, supports_handoff=False), "the e engine, as configured, cannot serve"),
        (switch(engine, card, needs_handoff=True), "computes no prompts"),
        (switch(object(), card), "unsupported: the e engine changes its role only with a restart"),
    ]
    for made, reason in cases:
        reply = await made.execute(Serve(serves="prefill"))
        assert (reply.ok, reason in reply.reason) == (False, True), reply
    made = switch(engine, card)
    for error in (Unsupported("its kv_role"), EngineError("no transfer")):
        engine.error = error
        reply = await made.execute(Serve(serves="prefill"))
        assert (reply.ok, str(error) in reply.reason) == (False, True)
    engine.error, card.leaving = None, "this worker is leaving"
    assert (await made.execute(Serve(serves="prefill"))).reason == "this worker is leaving"
    assert card.published == []
    card.leaving = ""
    assert (await made.execute(Serve(serves="prefill"))).ok, "a refusal changes nothing"


async def test_an_engine_that_does_not_get_ready_keeps_its_role(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roles, "COMMAND_S", 0.05)
    engine, card = Switchable(), Card()
    made = switch(engine, card)
    first = asyncio.create_task(made.execute(Serve(serves="prefill")))
    second = asyncio.create_task(made.execute(Serve(serves="decode")))
    await eventually(lambda: first.done() and second.done())
    assert "did not get ready within" in (await first).reason
    assert not (await second).ok
    assert card.published == []
