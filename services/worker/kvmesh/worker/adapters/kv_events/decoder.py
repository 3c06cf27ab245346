"""KV events of vLLM and SGLang as they are published, converted to neutral cache events.

A payload is the msgpack of `[time, [events], data-parallel rank]`. Events are maps with their
`type`, or arrays that begin with it. Fields differ between engines and versions, so most are
optional here: a request's cache salt is one of vLLM's `extra_keys` and SGLang's `cache_salt`.

Of vLLM's fields, `session_id` is not read, since the index knows blocks and not sessions, nor is
`ownership`, which names one of several offloading tiers. With a draft model an engine hashes a
block with tokens after it, so that a prompt which ends at a block, or differs right after it, has
one block less in the engine than in the index: SGLang publishes pairs of neighbouring tokens, vLLM
`lookahead_token_ids`.

An `AllBlocksCleared` with a `medium`, which kvmesh's connector publishes, is of that medium alone.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from kvmesh._native import xxh3
from kvmesh.bus.messages import MessageDecoder
from kvmesh.worker.adapters.kv_events.cache_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    fold_hash,
    fold_hashes,
    medium_tier,
)
from kvmesh.worker.adapters.kv_events.salts import returned_salt

REMOTE = 3  # the tier
EARLY_EVENTS = 8_192
# limits of what the index can know of an engine
DRAFT = "draft"
WINDOWS = "windows"
CLEARED = (AllCleared(0), AllCleared(1))  # an engine's files outlive its memory
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_FIELDS = {
    "BlockStored": (*_STORED, "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": ("medium",),
}
_WHOLE_PREFIX = {None, "full_attention", "mla_attention", "sink_full_attention", "unknown"}
_DECODER = MessageDecoder()
_MALFORMED = (AttributeError, TypeError, ValueError)
_Raw = dict[str, Any]


class EventDecoder:
    """Decodes payloads into neutral events.

    A hybrid model has a cache for each of several groups of layers: one stands for all. It is the
    first that caches whole prefixes, and where none does, the first of all: its blocks of the
    latest window still tell which worker has a conversation. `limits` names the modes met in which
    the index cannot have what the engine finds: DRAFT (see above), and WINDOWS, where the engine
    looks at some of a prompt's blocks only, or at those of other groups, too.
    """

    def __init__(self) -> None:
        self._group: int | None = None
        self._is_whole = False  # the group caches whole prefixes
        self._early = deque[_Raw](maxlen=EARLY_EVENTS)  # before the group is chosen
        self.limits: set[str] = set()

    def decode(self, payload: bytes) -> list[CacheEvent]:
        """The events of one message, without unknown kinds; raises ValueError if malformed."""
        try:
            raws = [*self._early, *(_named(raw) for raw in _DECODER.decode(payload)[1])]
            self._early.clear()
            found: list[CacheEvent] = []
            if not self._is_whole and self._choose_group(raws):
                found.append(AllCleared())
            for raw in raws:
                group = raw.get("group_idx")
                if group is None or group == self._group:
                    found += self._event(raw)
                elif self._group is None:
                    self._early.append(raw)
                else:
                    self.limits.add(WINDOWS)
            return found
        except (msgspec.MsgspecError, LookupError, ArithmeticError, *_MALFORMED) as error:
            raise ValueError(f"malformed KV event: {error!r}") from error

    def _event(self, raw: _Raw) -> Iterable[CacheEvent]:
        kind = raw["type"]
        if kind == "BlockStored":
            if raw.get("lookahead_token_ids") or _has_pairs(raw["token_ids"]):
                self.limits.add(DRAFT)
            return (_stored(raw),)
        if kind == "BlockRemoved":
            return (_removed(raw),)
        if kind == "AllBlocksCleared":
            self._early.clear()
            return (AllCleared(_tier(raw)),) if raw.get("medium") else CLEARED
        return ()

    def _choose_group(self, raws: list[_Raw]) -> bool:
        """Choose among the groups of these events; True if another one has been in use."""
        before = self._group
        for raw in raws:
            group = raw.get("group_idx")
            if raw["type"] == "BlockStored" and group is not None and raw.get("token_ids"):
                if raw.get("kv_cache_spec_kind") in _WHOLE_PREFIX:
                    self._group, self._is_whole = group, True
                    break
                if self._group is None:
                    self._group = group
                    self.limits.add(WINDOWS)
        return before is not None and before != self._group


def _named(raw: Any) -> _Raw:
    if isinstance(raw, dict):
        return raw
    kind, *values = raw
    return {"type": kind, **dict(zip(_FIELDS.get(kind, ()), values, strict=False))}


def _stored(event: _Raw) -> BlocksStored:
    parent, adapter = event.get("parent_block_hash"), event.get("lora_name")
    size = event["block_size"]
    if type(size) is not int or size < 0 or not isinstance(adapter, str | None):
        raise ValueError(f"block_size {size!r}, lora_name {adapter!r}")
    salt, extras = _keys(event, parent is None, adapter)
    return BlocksStored(
        fold_hashes(event["block_hashes"]),
        None if parent is None else fold_hash(parent),
        _tokens(event["token_ids"]),
        size,
        _tier(event),
        salt,
        adapter,
        extras,
    )


def _removed(event: _Raw) -> BlocksRemoved:
    hashes = fold_hashes(event["block_hashes"])
    return BlocksRemoved(hashes, _tier(event), event.get("reason"), event.get("request"))


def _tokens(ids: list[Any]) -> bytes:
    """Packed tokens; with a draft model SGLang's blocks are of pairs of neighbours."""
    if _has_pairs(ids):
        ids = [first for first, _ in ids]
    return array("I", ids).tobytes()


def _has_pairs(ids: list[Any]) -> bool:
    return bool(ids) and isinstance(ids[0], list)


def _tier(event: _Raw) -> int:
    """The tier of an event's blocks; those that vLLM offloads to another node are remote."""
    medium = event.get("medium")
    if event.get("locality") == "REMOTE":
        return REMOTE
    return 0 if medium == "GPU" else medium_tier(medium)


def _keys(event: _Raw, is_root: bool, adapter: str | None) -> tuple[int | None, tuple[int, ...]]:
    """The mesh's salt of a first block, and a number for all other keys of each block."""
    by_block = event.get("extra_keys")
    if key := event.get("cache_salt"):  # SGLang's, in the events of all blocks of the prompt
        by_block = [[key]] if is_root else None
    if not by_block or not any(by_block):
        return None, ()
    salt: int | None = None
    extras: list[int] = []
    names = (adapter, event.get("lora_id"))
    for number, keys in enumerate(by_block):
        if not keys:
            continue
        others = [key for key in keys if key not in names]
        if not number and is_root:
            for key in others:
                if isinstance(key, str) and (found := returned_salt(key)) is not None:
                    salt, others = found, [other for other in others if other != key]
                    break
        if others:
            extras = extras or [0] * len(event["block_hashes"])
            extras[number] = xxh3(msgspec.msgpack.encode(others)) or 1
    return salt, tuple(extras)
