"""Free capacity for waiting requests: of the ranks that a request or a lane may use."""

from hashlib import blake2b

import msgspec
import numpy as np
from msgspec.structs import replace

from kvmesh.bus.messages import RouteRequest, SeqWait
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.waiting.batch_lane import BatchLane
from kvmesh.router.waiting.fair_order import BATCH, FairOrder

_ENCODE = msgspec.msgpack.Encoder().encode
_ANY = RouteRequest(request="", model="", sequence_hashes=b"", tokens=0, max_tokens=0, deadline_s=0)


class FreeCapacity:
    """Compares the prefill backlog of ranks with `queue_threshold`.

    It knows the constraints of a lane from the entries that `note` was called with.
    """

    def __init__(self, core: RouterCore, batch: BatchLane, queue: FairOrder) -> None:
        self._core = core
        self._batch = batch
        self._queue = queue
        self._threshold = core.settings.queue_threshold
        self._constraints: dict[str, RouteRequest] = {"": _ANY}
        self._last_free = np.zeros(0, np.int64), 0  # slots, and the one with capacity among them

    def note(self, entry: SeqWait) -> None:
        """Remember the constraints of a lane from one of its entries."""
        if entry.placement is not None and entry.lane not in self._constraints:
            self._constraints[entry.lane] = replace(
                _ANY, placement=entry.placement, adapter=entry.adapter
            )

    def forget(self, lane: str) -> None:
        """Forget the constraints of a lane without entries."""
        if lane:
            self._constraints.pop(lane, None)

    def has(self, request: RouteRequest) -> bool:
        """True if some eligible rank is below the threshold of active prefill.

        For a batch request: if a rank has room, and no other request waits.
        """
        if self._batch.includes(request):
            return self._has_batch_room(request)
        slots = self._core.choice.eligible(request)
        cached_slots, slot = self._last_free
        if cached_slots is slots and self._below_threshold(slot):
            return True
        table = self._core.table
        limit = self._threshold * table.step_tokens.take(slots)
        load = table.loads(slots)[0]
        if (batch := self._batch.prefill(slots)) is not None:
            load = load - batch
        free = ((load <= limit) | (limit == 0)).nonzero()[0]
        if not len(free):
            return False
        self._last_free = slots, int(slots[free[0]])
        return True

    def lane_has(self, lane: str) -> bool:
        """True if the requests of a lane have capacity; False without its constraints.

        Raises RouteError if they are to be refused.
        """
        constraints = self._constraints.get(lane)
        if constraints is None:
            return False  # another replica did not publish its constraints
        if lane.startswith(BATCH):
            return self._has_batch_room(constraints)
        return self.has(constraints)

    def _has_batch_room(self, request: RouteRequest) -> bool:
        waits = bool(self._batch.others(self._queue.lanes))
        return not waits and len(self._batch.room(request)) > 0

    def _below_threshold(self, slot: int) -> bool:
        cells = self._core.table.cells
        limit = self._threshold * cells.step_tokens[slot]
        waiting = cells.prefill_tokens[slot] + cells.correction_tokens[slot]
        return max(waiting, 0.0) <= limit or not limit


def lane_of(request: RouteRequest) -> str:
    """The lane of a request: requests with the same constraints wait for each other."""
    if request.placement == _ANY.placement and request.adapter is None:
        return ""
    constraints = _ENCODE((request.placement, request.adapter))
    return blake2b(constraints, digest_size=8).hexdigest()
