"""Processes of the version before cache accounts and traces understand today's, and the reverse."""

from typing import Any

import msgspec
import pytest
from msgspec import Struct

from kvmesh.bus import messages as m


class OlderRemoved(Struct, array_like=True, tag="removed"):
    tier: int
    engine: bytes


class OlderCleared(Struct, array_like=True, tag="cleared"):
    tier: int | None = None


class OlderQuery(Struct, array_like=True):
    prompts: list[bytes]
    salt: int | None = None


class OlderReply(Struct, array_like=True):
    ranks: list[m.RankKey]
    rows: list[bytes]
    lag: float = 0.0


class OlderDump(Struct, tag="dump"):
    rank: int


class OlderSessionQuery(Struct, omit_defaults=True):
    model: str
    session: str


class OlderOutcome(Struct, kw_only=True, tag="outcome", omit_defaults=True):
    request: str
    instance: str
    time: float
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None
    total_s: float
    finish: str


class OlderOffer(Struct, array_like=True, tag="offer"):
    attachment: int
    first: int
    digests: bytes
    sequence_hashes: bytes
    local: bytes
    salt: int
    tenant: str = ""


class OlderRouted(Struct, kw_only=True, tag="routed"):
    instance: str
    rank: int
    overlap: list[int]
    needs_handoff: bool = False


class OlderRouteRequest(Struct, kw_only=True, omit_defaults=True):
    request: str
    model: str
    sequence_hashes: bytes
    tokens: int
    max_tokens: int
    deadline_s: float
    salt: int | None = None


RANK = m.RankKey("w", 0)
ROUTE: dict[str, Any] = {
    "request": "r", "model": "m", "sequence_hashes": b"12345678", "tokens": 16, "max_tokens": 1,
    "deadline_s": 1.0, "salt": 5,
}  # fmt: skip
OUTCOME: dict[str, Any] = {
    "request": "r", "instance": "w", "time": 1.0, "cached_tokens": 1, "output_tokens": 2,
    "ttft_s": None, "total_s": 1.0, "finish": "stop",
}  # fmt: skip
REMOVAL = m.Removal(0, 1, "w", 0, 1.0, "evicted", "r")
PAIRS: list[tuple[Any, Any]] = [
    (OlderRemoved(1, b"12345678"), m.Removed(1, b"12345678", "expired", "r")),
    (OlderCleared(2), m.Cleared(2, "cleared")),
    (
        OlderOffer(1, 0, b"d" * 16, b"12345678", b"12345678", 5, "t"),
        m.Offer(
            1,
            0,
            b"d" * 16,
            b"12345678",
            b"12345678",
            5,
            "t",
            "s",
            request="r",
            conversation=1 << 63,
        ),
    ),
    (OlderQuery([b"12345678"], 5), m.OverlapQuery([b"12345678"], 5, ["00-1-2-01"])),
    (OlderRouteRequest(**ROUTE), m.RouteRequest(**ROUTE, alone=True)),
    (
        OlderQuery([b"12345678"], 5),
        m.OverlapQuery([b"12345678"], 5, [], [m.PromptBase(b"", 0, 5)]),
    ),
    (OlderReply([RANK], [b"1"], 0.5), m.OverlapReply([RANK], [b"1"], 0.5, [[REMOVAL]], 7.0)),
    (m.Chunk("r", 4, [1, 2]), m.Tokens("r", 4, [1, 2])),
    (OlderDump(3), m.Dump(3, digest=True, listed=True)),
    (OlderSessionQuery("m", "s"), m.SessionQuery("m", "s", 4, "r")),
    (OlderOutcome(**OUTCOME), m.Outcome(**OUTCOME, cache=m.CacheAccount(prompt_tokens=9))),
    (
        OlderRouted(instance="w", rank=0, overlap=[1]),
        m.Routed(instance="w", rank=0, overlap=[1], possible=m.PossibleHits(removals=[REMOVAL])),
    ),
]


@pytest.mark.parametrize(("older", "newer"), PAIRS, ids=lambda pair: type(pair).__name__)
def test_each_version_reads_the_others_messages(older: Any, newer: Any) -> None:
    names = [name for name in older.__struct_fields__ if hasattr(newer, name)]
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=type(newer))
    assert [getattr(read, name) for name in names] == [getattr(older, name) for name in names]
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(newer), type=type(older))
    assert [getattr(back, name) for name in names] == [getattr(newer, name) for name in names]
