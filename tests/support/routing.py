"""Worker cards, prompts and overlaps for the router's tests."""

import struct
from collections.abc import Mapping
from typing import Any

from kvmesh.bus.messages import (
    Capacity,
    Hints,
    Instance,
    ModelCard,
    Placement,
    RankKey,
    Role,
    RouteRequest,
    SeqWait,
)
from kvmesh.router.scoring.overlaps import Overlaps

BLOCK = 16


def worker(name: str, **changes: Any) -> Instance:
    """A worker card of model "m", named and with the instance id `name`, with some fields set."""
    capacity = Capacity(
        blocks=1024,
        max_sequences=64,
        max_batched_tokens=changes.pop("step", 8192),
        dp_ranks=changes.pop("ranks", 1),
    )
    model = ModelCard(
        name="m",
        context=8192,
        block_size=changes.pop("block_size", BLOCK),
        files="",
        adapters=changes.pop("adapters", []),
    )
    fields: dict[str, Any] = {
        "instance": name,
        "role": Role.WORKER,
        "name": name,
        "version": "0",
        "started": 0.0,
        "model": model,
        "capacity": capacity,
    }
    return Instance(**(fields | changes))


def sequence(*blocks: int) -> bytes:
    """Packed sequence hashes; like real ones, a hash covers all blocks before it."""
    chained, packed = 0, []
    for block in blocks:
        chained = hash((chained, block)) & (2**64 - 1)
        packed.append(chained)
    return struct.pack(f"<{len(packed)}Q", *packed)


def request(name: str, blocks: bytes, tokens: int | None = None, **changes: Any) -> RouteRequest:
    """A route request for model "m"; its prompt has whole blocks unless `tokens` is given."""
    fields: dict[str, Any] = {
        "request": name,
        "model": "m",
        "sequence_hashes": blocks,
        "tokens": len(blocks) // 8 * BLOCK if tokens is None else tokens,
        "max_tokens": 16,
        "deadline_s": 10.0,
    }
    return RouteRequest(**(fields | changes))


def entry(name: str, **changes: Any) -> SeqWait:
    """A queue entry of router "r", with some fields set."""
    fields: dict[str, Any] = {
        "request": name, "router": "r", "lane": "", "tier": 0, "fair_class": "", "key": 0.0,
        "cost": 100, "arrived": 0.0, "deadline": 60.0,
    }  # fmt: skip
    return SeqWait(**(fields | changes))


def overlaps(held: Mapping[str, tuple[int, ...]], rank: int = 0) -> Overlaps:
    """The index's reply when `held[instance]` blocks are in tiers 1, 2, … of its rank."""
    ranks = [RankKey(instance, rank) for instance in held]
    rows = b"".join(
        struct.pack("<5I", number, *[*blocks, 0, 0, 0, 0][:4])
        for number, blocks in enumerate(held.values())
    )
    return Overlaps(ranks, rows)


__all__ = ["BLOCK", "Hints", "Placement", "entry", "overlaps", "request", "sequence", "worker"]
