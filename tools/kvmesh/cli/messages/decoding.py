"""Decodes messages by the kind of their subject, and converts them for JSON."""

import struct
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.bus.messages import (
    CheckIndex,
    ClaimAnnouncement,
    Control,
    Dump,
    ExpectReturns,
    Instance,
    KeepTraces,
    KvBatch,
    KvbmRequest,
    LimitUse,
    Load,
    MessageDecoder,
    OverlapQuery,
    Ping,
    RouteEvent,
    RouteRequest,
    ScalingDecision,
    SeqBatch,
    SessionQuery,
    ShowLearned,
    ShowReturns,
    ShowSpeeds,
    Starting,
    StepOutput,
    TakeAdapter,
    ToolEvent,
    Wake,
    WeightQuery,
    Work,
)
from kvmesh.frontend.namespaces import SEPARATOR, own_name

STREAMED = ("kv", "route", "seq", "scaling")
REQUESTS = (
    *("index", "indexer", "router", "work", "ctl", "ask", "dump", "ping", "kvbm", "sessions"),
    *("weights", "adapters"),
)
HASHES = frozenset({"conversation", "parent", "previous", "salt"})
TOKENS = frozenset({"messages", "tokens", "tool_hashes"})
CLASSES = frozenset({"fair_class"})  # a tenant's name and a class within it
_decoders: dict[str, MessageDecoder[Any]] = {
    "kv": MessageDecoder(KvBatch),
    "route": MessageDecoder(RouteEvent),
    "seq": MessageDecoder(SeqBatch),
    "scaling": MessageDecoder(ScalingDecision),
    "index": MessageDecoder(OverlapQuery),
    "indexer": MessageDecoder(OverlapQuery),
    "router": MessageDecoder(RouteRequest),
    "work": MessageDecoder(Work),
    "out": MessageDecoder(StepOutput),
    "ctl": MessageDecoder(Control),
    "returns": MessageDecoder(ExpectReturns),
    "adapters": MessageDecoder(TakeAdapter),
    "ask": MessageDecoder(CheckIndex | ShowLearned | ShowReturns | ShowSpeeds),
    "dump": MessageDecoder(Dump),
    "ping": MessageDecoder(Ping),
    "kvbm": MessageDecoder(KvbmRequest),
    "computing": MessageDecoder(ClaimAnnouncement),
    "sessions": MessageDecoder(SessionQuery),
    "limits": MessageDecoder(LimitUse),
    "traces": MessageDecoder(KeepTraces),
    "load": MessageDecoder(Load),
    "starting": MessageDecoder(Starting),
    "wake": MessageDecoder(Wake),
    "weights": MessageDecoder(WeightQuery),
    "tool": MessageDecoder(ToolEvent),
    "instances": MessageDecoder(Instance),
}
KINDS = frozenset(_decoders)
_anything = MessageDecoder()


class Undecodable(Struct, frozen=True):
    """Placeholder for a message that does not decode as its subject's kind."""

    error: str
    size: int


def decode(kind: str, data: bytes) -> object:
    """The message; plain values for an unknown kind; Undecodable if invalid."""
    try:
        return _decoders.get(kind, _anything).decode(data)
    except msgspec.MsgspecError as error:
        return Undecodable(str(error), len(data))


def plain(value: object, field: str = "") -> object:
    """`value` for JSON with named fields; hashes in hexadecimal, since JSON numbers lose bits.

    Names come without the tags of tenants, as callers know them.
    """
    if isinstance(value, Struct):
        names = value.__struct_fields__
        fields = {name: plain(getattr(value, name), name) for name in names}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, bytes):
        return unpack_tokens(value) if field in TOKENS else [hexadecimal(h) for h in hashes(value)]
    if isinstance(value, dict):
        return {str(key): plain(item, field) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, field) for item in value]
    if isinstance(value, str) and SEPARATOR in value:
        return value.replace(SEPARATOR, "/") if field in CLASSES else own_name(value)
    if isinstance(value, int) and field in HASHES:
        return hexadecimal(value)
    return value


def hashes(packed: bytes) -> tuple[int, ...]:
    """Packed little-endian uint64 as integers."""
    return struct.unpack(f"<{len(packed) // 8}Q", packed[: len(packed) // 8 * 8])


def unpack_tokens(packed: bytes) -> list[int]:
    """Packed little-endian uint32 as integers."""
    return list(struct.unpack(f"<{len(packed) // 4}I", packed[: len(packed) // 4 * 4]))


def hexadecimal(value: int) -> str:
    """A 64-bit hash as 16 digits."""
    return f"{value & 0xFFFFFFFFFFFFFFFF:016x}"
