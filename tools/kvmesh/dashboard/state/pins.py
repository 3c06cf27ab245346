"""Pins by tenant. Pins carry tags of tenants; sessions of requests tell their names. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from kvmesh.bus.messages import Outcome
from kvmesh.frontend.http.cache.pin_store import PinHead
from kvmesh.frontend.namespaces import SEPARATOR
from kvmesh.hashing import HASH_BYTES
from kvmesh.observer.columns import RowColumn, RowView, count_text, named_text
from kvmesh.runtime.lru import LruCache
from kvmesh.runtime.quantities import duration

MOST_TENANTS = 5_000
NOBODY = "none"  # the tag in keys of pins without tenant or part
TAG_SHOWN = 8


class TenantNames:
    """The names of tenants by their tags, as far as requests of sessions have told them."""

    def __init__(self) -> None:
        self._names: LruCache[str, str] = LruCache(MOST_TENANTS)

    def learn(self, outcome: Outcome) -> None:
        """Take the name of the tenant whose tag scopes the session of a request."""
        tag, separator, _ = outcome.session.partition(SEPARATOR)
        if separator and tag and outcome.tenant:
            self._names.put(tag.partition("/")[0], outcome.tenant)

    def name(self, tag: str) -> str:
        """The name of a tenant, or its tag if no session has told the name; empty without a tag."""
        return self._names.peek(tag) or (f"(tag {tag[:TAG_SHOWN]}…)" if tag else "")


class StoredHead(NamedTuple):
    """A pin and the tags of its tenant and of the part of that."""

    owner: str
    part: str
    head: PinHead


def stored_head(key: str, head: PinHead) -> StoredHead:
    """The pin of a key in the bucket: two tags and the digest of its id."""
    owner, _, rest = key.partition(".")
    part = rest.partition(".")[0]
    return StoredHead(owner.replace(NOBODY, ""), part.replace(NOBODY, ""), head)


class PinRow:
    """A pin as tables show it; `left_s` seconds remain."""

    def __init__(self, pin: StoredHead, names: TenantNames, now: float) -> None:
        self.tenant = names.name(pin.owner)
        self.part = f"tag {pin.part[:TAG_SHOWN]}…" if pin.part else ""
        self.id = pin.head.id
        self.model = pin.head.model
        self.tokens = pin.head.tokens
        self.blocks = pin.head.bytes // HASH_BYTES
        self.priority = pin.head.priority
        self.age_s = max(0.0, now - pin.head.created)
        self.left_s = pin.head.expires - now


def pin_rows(pins: Iterable[StoredHead], names: TenantNames, now: float) -> list[PinRow]:
    """The pins that are in force now."""
    return [PinRow(pin, names, now) for pin in pins if pin.head.expires > now]


PINS = RowView(
    "pins",
    (
        RowColumn("tenant", "tenant", named_text, number=False),
        RowColumn("id", "id", number=False),
        RowColumn("model", "model", number=False),
        RowColumn("part", "part of the tenant", number=False),
        RowColumn("tokens", "tokens", count_text),
        RowColumn("blocks", "blocks of its prompt", count_text),
        RowColumn("priority", "priority", count_text),
        RowColumn("age_s", "pinned for", duration),
        RowColumn("left_s", "remains for", duration),
    ),
    "tenant",
    False,
)
