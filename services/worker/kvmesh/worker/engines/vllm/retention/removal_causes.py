"""Causes of the removals that vLLM's block pool publishes: a reason, and the request in need."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved

from kvmesh.bus.messages import EVICTED
from kvmesh.worker.adapters.request_origin import OriginError, request_origin

EMIT = "_emit_block_removed_events"


class CausedRemoval(BlockRemoved, tag="BlockRemoved"):  # type: ignore[misc, call-arg]  # no types
    """vLLM's event with the fields of the mesh's `Removed`; other readers ignore them."""

    reason: str | None = None
    request: str | None = None


class RemovalCauses:
    """The cause of the removals that happen now.

    `reason_of` returns the reason of one block by its hash, if it is another than `reason`.
    `request` is the mesh's id of the request that they are for; without it, `allocating` is the
    request of vLLM that gets blocks, None if it is not known.
    """

    def __init__(self, pool: Any, reason_of: Callable[[Any], str | None]) -> None:
        self.reason = EVICTED
        self.request: str | None = None
        self.allocating: Any = None
        self._pool = pool
        self._reason_of = reason_of
        emit = getattr(pool, EMIT, None)
        if emit is None:  # of a vLLM that publishes them otherwise: as without causes
            return

        def emit_with_causes(block_hashes: Sequence[Any]) -> None:
            before = len(pool.kv_event_queue)
            emit(block_hashes)
            self._annotate(before, block_hashes)

        setattr(pool, EMIT, emit_with_causes)

    def _annotate(self, first: int, block_hashes: Sequence[Any]) -> None:
        """Replace the events from index `first` on, one per block, by events with a cause."""
        events = self._pool.kv_event_queue
        if len(events) - first != len(block_hashes):
            return
        request = self._request()
        for index, block_hash in enumerate(block_hashes, first):
            plain, reason = events[index], self._reason_of(block_hash) or self.reason
            if type(plain) is BlockRemoved:
                fields = {name: getattr(plain, name) for name in plain.__struct_fields__}
                events[index] = CausedRemoval(**fields, reason=reason, request=request)

    def _request(self) -> str | None:
        """The mesh's id of the request that the removals are for."""
        request = self.allocating
        if self.request is not None or request is None:
            return self.request
        try:
            origin = request_origin(request)
        except OriginError:
            origin = None
        return str(request.request_id) if origin is None else origin.request
