"""KV events of vLLM and SGLang as they are published, converted to neutral cache events.

A payload is the msgpack of `[time, [events], data-parallel rank]`. Events are maps with their
`type`, or arrays that begin with it. Fields differ between engines and versions, so most are
optional here: a request's cache salt is one of vLLM's `extra_keys` and SGLang's `cache_salt`.

Of vLLM's fields, `session_id` is not read, since the index knows blocks and not sessions, nor is
`ownership`, which names one of several offloading tiers. With a draft model an engine hashes a
block with tokens after it, so that a prompt which ends at a block, or differs right after it, has
one block less in the engine than in the index: SGLang publishes pairs of neighbouring tokens, vLLM
`lookahead_token_ids`.

vLLM's events of lower tiers have no `extra_keys`. Once a block has had keys there, of an image or
others, a block of a lower tier is known by its hash alone: its tokens could be those of an image.

An `AllBlocksCleared` with a `medium`, which kvmesh's connector publishes, is of that medium alone.
Without one it is of device and host memory, and of a disk that the engine uses like memory: files
that outlive the engine are told without `locality`, or as remote.
"""

from collections import deque
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct
from msgspec.structs import replace

from kvmesh._native import folded_hashes, packed_tokens, xxh3
from kvmesh.bus.messages import MessageDecoder
from kvmesh.worker.adapters.kv_events.cache_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    fold_hash,
    medium_tier,
)
from kvmesh.worker.adapters.kv_events.images import has_image, image_key, with_image_tokens
from kvmesh.worker.adapters.kv_events.salts import returned_salt

DISK, REMOTE = 2, 3  # tiers
EARLY_EVENTS = 8_192
# limits of what the index can know of an engine
DRAFT = "draft"
WINDOWS = "windows"
CLEARED = (AllCleared(0), AllCleared(1, maybe=True))
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_FIELDS = {
    "BlockStored": (*_STORED, "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": ("medium",),
}
_RAW_FIELDS = ("block_hashes", "token_ids")
_WHOLE_PREFIX = {"full_attention", "mla_attention", "sink_full_attention", "unknown"}
_NO_ITEMS = b"\x90"
_NO_EVENT = ValueError("neither a map with a type nor an array that begins with one")
_MALFORMED = (
    *(AttributeError, TypeError, ValueError, LookupError, ArithmeticError),
    msgspec.MsgspecError,
)


class EngineEvent(Struct, gc=False):
    """An event of any kind; the native core reads hashes and tokens out of MessagePack."""

    type: Any = None
    block_hashes: Raw = Raw()
    parent_block_hash: Any = UNSET  # not None, which begins a prompt
    token_ids: Raw = Raw()
    block_size: Any = None
    lora_id: Any = None
    medium: Any = None
    lora_name: Any = None
    extra_keys: Any = None
    cache_salt: Any = None
    group_idx: Any = None
    kv_cache_spec_kind: Any = None
    locality: Any = None
    lookahead_token_ids: Any = None
    reason: Any = None
    request: Any = None


class MalformedEvents(ValueError):
    """Events of a message cannot be read; `others` are those that can."""

    def __init__(self, cause: Exception, others: list[CacheEvent]) -> None:
        super().__init__(f"malformed KV event: {cause!r}")
        self.others = others


# An event is a map, or an array that begins with its type. An exception costs more than an event,
# so other values are read and told apart afterwards.
_Item: TypeAlias = EngineEvent | list[Raw] | str | bool | int | float | None


class EngineBatch(Struct, array_like=True, gc=False):
    time: Any
    events: list[_Item]


class RawBatch(Struct, array_like=True, gc=False):
    time: Any
    events: list[Raw]


_BATCH: MessageDecoder[EngineBatch] = MessageDecoder(EngineBatch)
_RAW_BATCH: MessageDecoder[RawBatch] = MessageDecoder(RawBatch)
_EVENT: MessageDecoder[_Item] = MessageDecoder(_Item)
_ANY = MessageDecoder()


class EventDecoder:
    """Decodes payloads into neutral events.

    A hybrid model has a cache for each of several groups of layers: one stands for all. It is the
    first that caches whole prefixes, and where none does, the first of all: its blocks of the
    latest window still tell which worker has a conversation. `limits` names the modes met in which
    the index cannot have what the engine finds: DRAFT (see above), and WINDOWS, where the engine
    looks at some of a prompt's blocks only, or at those of other groups, too. `has_keys`:
    blocks have had keys beside those of adapters and salts.
    """

    def __init__(self, has_keys: bool = False) -> None:
        self.has_keys = has_keys
        self._group: int | None = None
        self._is_whole = False  # the group caches whole prefixes
        self._early = deque[EngineEvent](maxlen=EARLY_EVENTS)  # before the group is chosen
        self._cleared: tuple[AllCleared, ...] = CLEARED
        self.limits: set[str] = set()

    def decode(self, payload: bytes) -> list[CacheEvent]:
        """The events of one message, without unknown kinds; raises MalformedEvents."""
        found: list[CacheEvent] = []
        faults: list[Exception] = []
        raws = _events_of(payload, faults)
        self._note_draft(raws)
        if not self._is_whole and self._choose_group(raws):
            found.append(AllCleared())
        if self._early and self._group is not None:
            raws = [*self._early, *raws]
            self._early.clear()
        before: EngineEvent | None = None
        for raw in raws:
            group = raw.group_idx
            if group is None or group == self._group:
                try:
                    self._add(found, raw, before)
                    before = raw
                except _MALFORMED as error:
                    faults.append(error)
            elif self._group is None:
                if raw.type in ("BlockStored", "BlockRemoved"):
                    self._early.append(raw)
            else:
                self.limits.add(WINDOWS)
        if faults:
            raise MalformedEvents(faults[0], found)
        return found

    def _add(self, found: list[CacheEvent], raw: EngineEvent, before: EngineEvent | None) -> None:
        """Append the event; blocks removed alike join, since vLLM publishes an event for each."""
        if raw.type == "BlockStored":
            stored = _stored(raw)
            if raw.extra_keys:
                self.has_keys = self.has_keys or bool(stored.extras) or has_image(raw.extra_keys)
            elif self.has_keys and stored.tier:
                stored = replace(stored, tokens=b"")
            found.append(stored)
            if raw.locality == "LOCAL" and stored.tier == DISK:
                self._cleared = (*CLEARED, AllCleared(DISK, maybe=True))
        elif raw.type == "BlockRemoved":
            hashes = folded_hashes(raw.block_hashes)
            last = found[-1] if before is not None and _removed_alike(before, raw) else None
            if isinstance(last, BlocksRemoved):
                last.hashes.extend(hashes)
            else:
                tier = _tier(raw)
                source = _source(raw, tier)
                found.append(BlocksRemoved(hashes, tier, raw.reason, raw.request, source))
        elif raw.type == "AllBlocksCleared":
            self._early.clear()
            found += (AllCleared(_tier(raw)),) if raw.medium else self._cleared

    def _note_draft(self, raws: list[EngineEvent]) -> None:
        """Note by the first stored blocks that the engine has a draft model."""
        if DRAFT not in self.limits:
            stored = next((raw for raw in raws if raw.type == "BlockStored"), None)
            if stored is not None and (stored.lookahead_token_ids or _has_pairs(stored.token_ids)):
                self.limits.add(DRAFT)

    def _choose_group(self, raws: list[EngineEvent]) -> bool:
        """Choose among the groups of these events; True if another one has been in use."""
        before = self._group
        for raw in raws:
            group = raw.group_idx
            if raw.type == "BlockStored" and group is not None and _has_items(raw.token_ids):
                kind = raw.kv_cache_spec_kind
                if kind is None or (isinstance(kind, str) and kind in _WHOLE_PREFIX):
                    self._group, self._is_whole = group, True
                    break
                if self._group is None:
                    self._group = group
                    self.limits.add(WINDOWS)
        return before is not None and before != self._group


def _events_of(payload: bytes, faults: list[Exception]) -> list[EngineEvent]:
    """The events of a message; appends the faults of those that cannot be read."""
    try:
        items = _BATCH.decode(payload).events
    except _MALFORMED:
        items = _one_by_one(payload, faults)
    found: list[EngineEvent] = []
    for item in items:
        raw = item if type(item) is EngineEvent else _named(item, faults)
        if raw is not None and type(raw.type) is str:
            found.append(raw)
        else:
            faults.append(_NO_EVENT)
    return found


def _one_by_one(payload: bytes, faults: list[Exception]) -> list[_Item]:
    found: list[_Item] = []
    try:
        raws = _RAW_BATCH.decode(payload).events
    except _MALFORMED as error:
        faults.append(error)
        return found
    for raw in raws:
        try:
            found.append(_EVENT.decode(raw))
        except _MALFORMED as error:
            faults.append(error)
    return found


def _named(item: _Item, faults: list[Exception]) -> EngineEvent | None:
    """The event of an array, which appends its fault if there is one; None of other values."""
    if not (isinstance(item, list) and item):
        return None
    kind, *values = item
    try:
        event = EngineEvent(_ANY.decode(kind))
        for name, value in zip(_FIELDS.get(event.type, ()), values, strict=False):
            setattr(event, name, value if name in _RAW_FIELDS else _ANY.decode(value))
    except _MALFORMED as error:
        faults.append(error)
        return None
    return event


def _has_items(raw: Raw) -> bool:
    return bytes(memoryview(raw)[:1]) not in (b"", _NO_ITEMS)


def _has_pairs(ids: Raw) -> bool:
    """True if the first token id is an array, as of a pair."""
    start = bytes(memoryview(ids)[:6])
    header = {0xDC: 3, 0xDD: 5}.get(start[0], 1) if start else 0
    return len(start) > header > 0 and start[header] & 0xF0 == 0x90


def _stored(event: EngineEvent) -> BlocksStored:
    parent, adapter, size = event.parent_block_hash, event.lora_name, event.block_size
    if type(size) is not int or size < 0 or not (adapter is None or type(adapter) is str):
        raise ValueError(f"block_size {size!r}, lora_name {adapter!r}")
    if parent is UNSET:
        raise ValueError("no parent_block_hash")
    hashes = folded_hashes(event.block_hashes)
    salt, extras = _keys(event, parent is None, adapter, len(hashes))
    tier = _tier(event)
    tokens = packed_tokens(event.token_ids)
    if tokens and event.extra_keys:
        tokens = with_image_tokens(tokens, size, event.extra_keys[: len(hashes)])
    return BlocksStored(
        hashes,
        None if parent is None else fold_hash(parent),
        tokens,
        size,
        tier,
        salt,
        adapter,
        extras,
        _source(event, tier),
    )


def _tier(event: EngineEvent) -> int:
    """The tier of an event's blocks; those that vLLM offloads to another node are remote."""
    if event.locality == "REMOTE":
        return REMOTE
    return 0 if event.medium == "GPU" else medium_tier(event.medium)


def _removed_alike(one: EngineEvent, other: EngineEvent) -> bool:
    return all(
        (
            one.type == other.type,
            one.medium == other.medium,
            one.reason == other.reason,
            one.request == other.request,
            one.locality == other.locality,
        )
    )


def _source(event: EngineEvent, tier: int) -> str:
    """The store of a lower tier: engines spell the media of their own in capitals.

    Connectors of others beside them (Mooncake, LMCache) do not.
    """
    return event.medium if tier and isinstance(event.medium, str) and event.medium.islower() else ""


def _keys(
    event: EngineEvent, is_root: bool, adapter: str | None, blocks: int
) -> tuple[int | None, tuple[int, ...]]:
    """The mesh's salt of a first block, and a number for all other keys of each block."""
    by_block = event.extra_keys
    if key := event.cache_salt:  # SGLang's, in the events of all blocks of the prompt
        by_block = [[key]] if is_root else None
    if not by_block or not any(by_block):
        if adapter is None and event.lora_id is not None:  # vLLM before it named adapters
            return None, (xxh3(msgspec.msgpack.encode(event.lora_id)) or 1,) * blocks
        return None, ()
    salt: int | None = None
    extras: list[int] = []
    names = (adapter, event.lora_id)
    for number, keys in enumerate(by_block):
        if not keys:
            continue
        if not isinstance(keys, list):
            raise ValueError(f"extra_keys of a block: {keys!r}")
        # the adapter comes first: a client may have given its name as a salt, too
        others = list(keys[1:] if keys[0] in names else keys)
        others = [other for other in others if image_key(other) is None]
        if not number and is_root:
            for key in others:
                if isinstance(key, str) and (found := returned_salt(key)) is not None:
                    salt, others = found, [other for other in others if other != key]
                    break
        if others:
            extras = extras or [0] * blocks
            extras[number] = xxh3(msgspec.msgpack.encode(others)) or 1
    return salt, tuple(extras)
