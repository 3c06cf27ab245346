"""Everyone who holds a model's blocks, and commands to all of them."""

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery import Directory
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import Control, ControlReply, Instance, Role

TIMEOUT_S = 3.0
_replies = msgspec.msgpack.Decoder(ControlReply)


class InstanceReply(Struct, frozen=True):
    """What one process answered: `blocks` is how many a command concerned in its tiers."""

    instance: str
    name: str
    role: str
    node: str
    ok: bool
    blocks: int
    reason: str


class ControlClient:
    """Workers hold tier 0 of their model, block managers the tiers below for all of their node."""

    def __init__(self, bus: Bus, directory: Directory) -> None:
        self._bus = bus
        self._directory = directory

    def of(self, models: Iterable[str]) -> list[Instance]:
        wanted = set(models)
        return [card for card in self._directory.instances if wanted & held(card)]

    async def tell(self, cards: Iterable[Instance], command: Control) -> list[InstanceReply]:
        """All answers; who does not answer in time is told of, not waited for."""
        return list(await asyncio.gather(*(self._tell(card, command) for card in cards)))

    async def ask(self, instance: str, command: Control) -> ControlReply:
        subject = self._bus.subjects.ctl(instance)
        try:
            return await self._bus.request(subject, command, _replies, TIMEOUT_S)
        except BusError as error:
            return ControlReply(False, cause(error))

    def post(self, cards: Iterable[Instance], command: Control) -> None:
        """Send without waiting for answers; a loss is logged, since it costs room at most."""
        for card in cards:
            self._bus.post(self._bus.subjects.ctl(card.instance), command)

    async def _tell(self, card: Instance, command: Control) -> InstanceReply:
        reply = await self.ask(card.instance, command)
        role = card.role.value
        where = (card.instance, card.name, role, card.node)
        return InstanceReply(*where, reply.ok, reply.blocks, reply.reason)


def held(card: Instance) -> set[str]:
    """Models of which a process holds blocks."""
    if card.role is Role.WORKER and card.model is not None:
        return {card.model.name}
    if card.role is Role.KVBM and card.store is not None:
        return set(card.store.models)
    return set()


def summed(told: Iterable[InstanceReply]) -> dict[str, Any]:
    """For an answer: how many blocks in all, and what each process said to all it was told."""
    by_instance: dict[str, InstanceReply] = {}
    for said in told:
        before = by_instance.get(said.instance)
        by_instance[said.instance] = said if before is None else _both(before, said)
    instances = [asdict(said) for said in by_instance.values()]
    return {"blocks": sum(said["blocks"] for said in instances), "instances": instances}


def _both(one: InstanceReply, other: InstanceReply) -> InstanceReply:
    return replace(
        one,
        ok=one.ok and other.ok,
        blocks=one.blocks + other.blocks,
        reason=one.reason or other.reason,
    )
