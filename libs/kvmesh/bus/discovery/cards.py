"""Reading of the bucket of instances: cards, and since when the server has those of workers.

A worker's own word on its age decides nothing: the oldest worker defines its model, so a false
`started` would shut out the others. Beside its lease, each worker has a *record*: an empty value
that it stores once, before its first card. The server's time of this message is its age. To store
it again makes a worker younger, and the server's permissions bind it to its own keys.
"""

import logging
from collections import Counter
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Instance, MessageDecoder, Role
from kvmesh.bus.storage.buckets import OPERATION, read_messages
from kvmesh.bus.streams.reader import StreamMessage
from kvmesh.bus.subjects import FAILED, Subjects, name_of, stored_on

log = logging.getLogger(__name__)
RECORD = "=since"  # suffix of a record's key; no instance has it
GONE_S = 600.0  # without a lease, after which a record may go: no instance starts twice
FAILED_S = 3600.0  # for which a failed start is told
MOST_LEFT = 16  # records without leases of one name; instances of one name follow each other
DATED = frozenset((Role.WORKER, Role.PARKED))  # whose age is that of their record
MAX_BYTES = 512 << 10  # of a card
MARKER = "Nats-Marker-Reason"  # header of the message by which the server says that a key expired
STORE_S = 5.0
_card_decoder = MessageDecoder(Instance)


class MisplacedCard(ValueError):
    """A card under the key of another instance: a process may write only its own key."""


def decode_card(subjects: Subjects, key: str, data: bytes) -> Instance:
    """The card at `key`; raises MsgspecError, or MisplacedCard if it names another instance."""
    if len(data) > MAX_BYTES:
        raise msgspec.ValidationError(f"{len(data)} bytes, more than {MAX_BYTES}")
    card = _card_decoder.decode(data)
    if key != subjects.lease_key(card.role, card.instance) or name_of(card.instance) != card.name:
        raise MisplacedCard(f"{card.role} {card.name}, instance {card.instance}")
    return card


class WorkerAges:
    """The server's Unix times of workers' records, by the key of the lease.

    A worker of an earlier release has no record: the time of the first of its renewals that was
    read counts, which makes it younger than it is. Killed workers leave their records behind:
    `left` names those that nobody needs any more.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._recorded: set[str] = set()
        self._without_lease: dict[str, float] = {}  # records, by the time of the lease's end

    def record(
        self, key: str, stored: float, headers: Mapping[str, str] | None, now: float = 0.0
    ) -> None:
        """Take a message at the key of a record, without the suffix.

        The record of a present worker still holds once it has expired.
        """
        if headers and (OPERATION in headers or MARKER in headers):
            if self._without_lease.pop(key, None) is not None:
                self._recorded.discard(key)
                self._since.pop(key, None)
            return
        if key not in self._since:
            self._without_lease[key] = now  # the card follows
        self._since[key] = stored
        self._recorded.add(key)

    def dated(self, key: str, card: Instance, stored: float) -> Instance:
        """A card that was stored at `stored`, with the age that its server knows."""
        if card.role not in DATED:
            return card
        self._without_lease.pop(key, None)
        return replace(card, started=self._since.setdefault(key, stored))

    def ended(self, key: str, now: float) -> None:
        """The lease has ended; its record holds, since only the lease may be lost."""
        if key in self._recorded:
            self._without_lease[key] = now
        else:
            self._since.pop(key, None)

    def is_left(self, key: str) -> bool:
        """True if a record is there whose worker has no lease."""
        return key in self._without_lease

    def left(self, now: float) -> list[str]:
        """Keys of records whose lease ended GONE_S ago, or before the MOST_LEFT last of its name.

        The first to end comes first.
        """
        ended = sorted(self._without_lease, key=self._without_lease.__getitem__)
        of_name = Counter(key.rpartition(".")[0] for key in ended)
        found = []
        for key in ended:
            name = key.rpartition(".")[0]
            if now - self._without_lease[key] > GONE_S or of_name[name] > MOST_LEFT:
                found.append(key)
                of_name[name] -= 1
        return found


async def keep(bus: Bus, key: str, data: bytes) -> None:
    """Store a value in the bucket of instances that does not end with the leases; raises BusError.

    A server ends what is older than a lease, unless its time to live is this one: a longer time
    counts for nothing.
    """
    await bus.store(
        stored_on(bus.subjects.instances_bucket, key), data, STORE_S, {"Nats-TTL": "never"}
    )


async def read_cards(bus: Bus, *roles: Role) -> list[Instance]:
    """The present cards of these roles, without unreadable ones; raises BusError."""
    ages, found = WorkerAges(), dict[str, tuple[bytes, float]]()

    def add(key: str, message: StreamMessage) -> None:
        if key.partition(".")[0] not in roles:
            return
        if key.endswith(RECORD):
            ages.record(key.removesuffix(RECORD), message.time, message.headers)
        elif key.endswith(FAILED):
            return
        elif message.data:  # a deleted key has none
            found[key] = (message.data, message.time)
        else:
            found.pop(key, None)

    # one reading of all costs the server less than one of each role
    keys = f"{roles[0]}.>" if len(roles) == 1 else ">"
    await read_messages(bus, bus.subjects.instances_bucket, keys, add)
    cards: list[Instance] = []
    for key, (data, stored) in found.items():
        try:
            cards.append(ages.dated(key, decode_card(bus.subjects, key, data), stored))
        except (msgspec.MsgspecError, MisplacedCard) as error:  # routers report it
            log.debug("ignored a card at %s: %s", key, error)
    return cards
