"""Comparison of the index's blocks of a rank with those of its worker, at one event id."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from kvmesh.bus.messages import ControlReply, IndexCheck
from kvmesh.index.fingerprints import Fingerprints, HashRun, digest, fingerprints, unpack
from kvmesh.index.interface import OverlapSegment

Segments: TypeAlias = Sequence[OverlapSegment]


class Checkpoint(NamedTuple):
    """`taken` is called with the rank's blocks once all events below `event_id` are applied.

    It is called with None if the rank becomes unknown first.
    """

    event_id: int
    taken: Callable[[Segments | None], None]


def indexed_blocks(segments: Segments) -> Fingerprints:
    """The fingerprints of the blocks that the index has."""
    return fingerprints(HashRun(s.tier, s.engine, s.local) for s in segments)


def compare(blocks: Fingerprints, worker: ControlReply) -> IndexCheck:
    """The result for blocks of the index, and the worker's reply to a `Dump` with `digest`."""
    held, indexed = worker.blocks, len(blocks)
    if digest(blocks) == worker.digest and indexed == held:
        return IndexCheck(result="equal", held=held, indexed=indexed, missing=0, extra=0)
    if not worker.fingerprints and held:
        return IndexCheck(result="differs", held=held, indexed=indexed)
    listed = unpack(worker.fingerprints)
    return IndexCheck(
        result="differs",
        held=held,
        indexed=indexed,
        missing=len(np.setdiff1d(listed, blocks)),
        extra=len(np.setdiff1d(blocks, listed)),
    )


def describe(check: IndexCheck) -> str:
    """One sentence's end: how the index differs, and the events that explain it."""
    if check.missing is None or check.extra is None:
        return f"it has {check.indexed:,} blocks, the worker {check.held:,}, not all the same"
    parts = []
    if check.missing:
        parts.append(f"lacks {check.missing:,} of {check.held:,} blocks (store events were lost)")
    if check.extra:
        parts.append(f"has {check.extra:,} that are gone (remove events were lost)")
    return "it " + " and ".join(parts)
