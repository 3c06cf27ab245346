"""Client for control commands to the processes that hold a model's blocks."""

import asyncio
from collections.abc import Iterable
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import (
    Control,
    ControlReply,
    Instance,
    MessageDecoder,
    NotCleared,
    Role,
)

TIMEOUT_S = 3.0
EFFECT_S = 12.0  # longer than an engine takes for a command, which replies after its effect
_replies = MessageDecoder(ControlReply)


class InstanceReply(Struct, frozen=True):
    """One process's reply; `blocks` counts the blocks in its tiers that the command affected.

    `not_cleared` is that of the `ControlReply`, after a `Clear`.
    """

    instance: str
    name: str
    role: str
    node: str
    ok: bool
    blocks: int
    reason: str
    not_cleared: list[NotCleared] = []


class ControlClient:
    """Sends commands: workers hold tier G1 of their model, kvbms the lower tiers of their node."""

    def __init__(self, bus: Bus, directory: Directory) -> None:
        self._bus = bus
        self._directory = directory

    def holders_of(self, models: Iterable[str]) -> list[Instance]:
        """The cards of the processes that hold blocks of any of `models`."""
        wanted = set(models)
        return [card for card in self._directory.instances if wanted & held_models(card)]

    @property
    def frontends(self) -> list[Instance]:
        """The cards of all frontends."""
        return [card for card in self._directory.instances if card.role is Role.FRONTEND]

    async def broadcast(self, cards: Iterable[Instance], command: Control) -> list[InstanceReply]:
        """Send a command to all; a failure to get a reply becomes a reply with the reason."""
        return list(await asyncio.gather(*(self._send(card, command) for card in cards)))

    async def request(
        self, instance: str, command: Control, timeout_s: float = TIMEOUT_S
    ) -> ControlReply:
        """Send a command; a failure to get its reply becomes a reply with the reason."""
        subject = self._bus.subjects.ctl(instance)
        try:
            return await self._bus.request(subject, command, _replies, timeout_s)
        except BusError as error:
            return ControlReply(False, cause(error))

    def post(self, cards: Iterable[Instance], command: Control) -> None:
        """Send without waiting for replies; a lost command costs capacity only, and is logged."""
        for card in cards:
            self._bus.post(self._bus.subjects.ctl(card.instance), command)

    async def _send(self, card: Instance, command: Control) -> InstanceReply:
        reply = await self.request(card.instance, command, EFFECT_S)
        identity = (card.instance, card.name, card.role.value, card.node)
        return InstanceReply(*identity, reply.ok, reply.blocks, reply.reason, reply.not_cleared)


def held_models(card: Instance) -> set[str]:
    """Models of which a process holds blocks."""
    if card.role is Role.WORKER and card.model is not None:
        return {card.model.name}
    if card.role is Role.KVBM and card.store is not None:
        return set(card.store.models)
    return set()


def summary(replies: Iterable[InstanceReply]) -> dict[str, Any]:
    """JSON of a broadcast: the total of blocks, and one merged reply of each process.

    `ok`: the command has its effect on every process.
    """
    merged = merge(replies)
    instances = [asdict(reply) for reply in merged]
    for instance in instances:
        del instance["not_cleared"]
    blocks = sum(reply.blocks for reply in merged)
    return {"ok": all(reply.ok for reply in merged), "blocks": blocks, "instances": instances}


def merge(replies: Iterable[InstanceReply]) -> list[InstanceReply]:
    """One reply of each process to several commands."""
    by_instance: dict[str, InstanceReply] = {}
    for reply in replies:
        before = by_instance.get(reply.instance)
        by_instance[reply.instance] = reply if before is None else _merged(before, reply)
    return list(by_instance.values())


def _merged(one: InstanceReply, other: InstanceReply) -> InstanceReply:
    return replace(
        one,
        ok=one.ok and other.ok,
        blocks=one.blocks + other.blocks,
        reason=one.reason or other.reason,
        not_cleared=_union(one.not_cleared, other.not_cleared),
    )


def _union(one: list[NotCleared], other: list[NotCleared]) -> list[NotCleared]:
    by_tier = {each.tier: each for each in (*other, *one)}
    return [by_tier[tier] for tier in sorted(by_tier)]
