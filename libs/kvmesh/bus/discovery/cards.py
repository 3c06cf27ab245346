"""Reading of the bucket of instances: cards, and since when the server has those of workers.

A worker's own word on its age decides nothing: the oldest worker defines its model, so a false
`started` would shut out the others. Beside its lease, each worker has a *record*: an empty value
that it stores once, before its first card. The server's time of this message is its age. To store
it again makes a worker younger, and the server's permissions bind it to its own keys.
"""

import logging
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Instance, MessageDecoder, Role
from kvmesh.bus.storage.buckets import OPERATION, read_messages
from kvmesh.bus.streams.reader import StreamMessage
from kvmesh.bus.subjects import FAILED, Subjects, name_of

log = logging.getLogger(__name__)
RECORD = "=since"  # suffix of a record's key; no instance has it
RECORD_TTL_S = 30 * 86_400.0  # of a killed worker's record; a worker that stops deletes its own
DATED = frozenset((Role.WORKER, Role.PARKED))  # whose age is that of their record
MARKER = "Nats-Marker-Reason"  # header of the message by which the server says that a key expired
_card_decoder = MessageDecoder(Instance)


class MisplacedCard(ValueError):
    """A card under the key of another instance: a process may write only its own key."""


def decode_card(subjects: Subjects, key: str, data: bytes) -> Instance:
    """The card at `key`; raises MsgspecError, or MisplacedCard if it names another instance."""
    card = _card_decoder.decode(data)
    if key != subjects.lease_key(card.role, card.instance) or name_of(card.instance) != card.name:
        raise MisplacedCard(f"{card.role} {card.name}, instance {card.instance}")
    return card


class WorkerAges:
    """The server's Unix times of workers' records, by the key of the lease.

    A worker of an earlier release has no record: the time of the first of its renewals that was
    read counts, which makes it younger than it is.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def record(self, key: str, stored: float, headers: Mapping[str, str] | None) -> None:
        """Take a message at the key of a record, without the suffix; an expired one still holds."""
        if not headers or not (OPERATION in headers or MARKER in headers):
            self._since[key] = stored

    def dated(self, key: str, card: Instance, stored: float) -> Instance:
        """A card that was stored at `stored`, with the age that its server knows."""
        if card.role not in DATED:
            return card
        return replace(card, started=self._since.setdefault(key, stored))

    def forget(self, key: str) -> None:
        """The lease has ended."""
        self._since.pop(key, None)


async def read_cards(bus: Bus, *roles: Role) -> list[Instance]:
    """The present cards of these roles, without unreadable ones; raises BusError."""
    ages, found = WorkerAges(), dict[str, tuple[bytes, float]]()

    def add(key: str, message: StreamMessage) -> None:
        if key.endswith(RECORD):
            ages.record(key.removesuffix(RECORD), message.time, message.headers)
        elif key.endswith(FAILED):
            return
        elif message.data:  # a deleted key has none
            found[key] = (message.data, message.time)
        else:
            found.pop(key, None)

    for role in roles:
        await read_messages(bus, bus.subjects.instances_bucket, f"{role}.>", add)
    cards: list[Instance] = []
    for key, (data, stored) in found.items():
        try:
            cards.append(ages.dated(key, decode_card(bus.subjects, key, data), stored))
        except (msgspec.MsgspecError, MisplacedCard) as error:  # routers report it
            log.debug("ignored a card at %s: %s", key, error)
    return cards
