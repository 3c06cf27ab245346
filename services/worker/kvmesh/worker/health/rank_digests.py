"""Digests of a rank's blocks, by which indexers check their view of it."""

from kvmesh.bus.messages import Cleared, ControlReply, KvEvent, Stored
from kvmesh.index.fingerprints import Fingerprints, HashRun, digest, fingerprints
from kvmesh.worker.engine import Engine


class RankDigests:
    """Has the engine dump a rank, and takes the dump's events instead of publishing them.

    So a digest needs no other ability of an engine, and shows what a dump would show. For engines
    that report events, that is the worker's ledger of them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._captured: list[KvEvent] | None = None

    def capture(self, events: list[KvEvent]) -> bool:
        """True if these events are the dump for a digest, which must not be published."""
        if self._captured is None or not events or events[0] != Cleared():
            return False
        self._captured = events
        return True

    def blocks(self, rank: int) -> Fingerprints:
        """The fingerprints of the blocks of a rank; other events meanwhile are published."""
        self._captured = []
        try:
            self._engine.dump(rank)
            found = [event for event in self._captured if isinstance(event, Stored)]
        finally:
            self._captured = None
        return fingerprints(HashRun(event.tier, event.engine, event.local) for event in found)


def digest_reply(
    blocks: Fingerprints, next_event: int | None, listed: bool, max_payload: int
) -> ControlReply:
    """The reply to a `Dump` with `digest`; fingerprints only if they fit into half a message."""
    packed = blocks.astype("<u8").tobytes() if listed else b""
    return ControlReply(
        True,
        blocks=len(blocks),
        digest=digest(blocks),
        next_event=next_event,
        fingerprints=packed if len(packed) <= max_payload // 2 else b"",
    )
