"""Write-through of a simulated worker's full blocks, queued and bounded as in live workers."""

from array import array
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvmesh.bus.messages import Commit, Computed, Offer, Wanted
from kvmesh.simulator.nodes.links import VirtualLink
from kvmesh.simulator.nodes.node import SimulatedNode
from kvmesh.simulator.nodes.prompts import NodePrompt
from kvmesh.worker.enginecore.block_manager import BlockManager

LANES = 2


class _Waiting(NamedTuple):
    prompt: NodePrompt
    first: int
    blocks: int


class SimulatedWriteThrough:
    """Offers the blocks of `engine` to `node` and copies those that it wants over `link`.

    `may_lock()` returns whether blocks of the engine may be locked now, and otherwise has `start`
    called as soon as they may. `on_unlock` is called after blocks were unlocked.
    """

    def __init__(
        self,
        node: SimulatedNode,
        attachment: int,
        engine: BlockManager,
        link: VirtualLink,
        may_lock: Callable[[], bool],
        on_unlock: Callable[[], None],
    ) -> None:
        self._node = node
        self._attachment = attachment
        self._engine = engine
        self._link = link
        self._may_lock = may_lock
        self._on_unlock = on_unlock
        self._limit = node.options.queue
        self._queue: OrderedDict[str, _Waiting] = OrderedDict()
        self._writing: set[str] = set()
        self._ending: set[str] = set()
        self._blocks = 0
        self.closed = False

    def put(self, request: str, prompt: NodePrompt, first: int) -> bool:
        """Queue the blocks of a request from `first` on.

        Returns False if they are skipped: pass them again with the next ones.
        """
        end = prompt.blocks
        before = self._queue.get(request)
        if before is not None:
            first = min(first, before.first)
        more = end - first - (before.blocks if before is not None else 0)
        if self._blocks + more > self._limit:
            self._node.totals.skipped_blocks += more
            return False
        self._blocks += more
        self._queue[request] = _Waiting(prompt, first, end - first)
        return True

    def end(self, request: str) -> None:
        """Report that a request computes no more blocks, once its blocks are written."""
        if request in self._queue or request in self._writing:
            self._ending.add(request)
        else:
            self._node.tell(Computed(self._attachment, request))

    def start(self) -> None:
        """Start as many writes as there are lanes."""
        while len(self._writing) < LANES and not self.closed:
            request = next((r for r in self._queue if r not in self._writing), None)
            if request is None or not self._may_lock():
                return
            waiting = self._queue.pop(request)
            self._blocks -= waiting.blocks
            self._write(request, waiting)

    def _write(self, request: str, waiting: _Waiting) -> None:
        hashes, engine = waiting.prompt.hashes, self._engine
        held = engine.lock_prefix(hashes)
        if held < len(hashes):
            engine.unlock(hashes[:held])
            self._node.totals.skipped_blocks += waiting.blocks
            self._written(request)
            return
        self._writing.add(request)
        prompt = waiting.prompt
        offer = Offer(
            attachment=self._attachment,
            first=waiting.first,
            digests=prompt.digests,
            sequence_hashes=hashes.tobytes(),
            local=prompt.local.tobytes(),
            salt=prompt.salt,
            tenant=prompt.tenant,
            session=prompt.session,
            retention=prompt.retention,
            request=request,
        )
        self._node.ask(offer, partial(self._copy, request, hashes))

    def _copy(self, request: str, hashes: "array[int]", reply: object) -> None:
        if self.closed:
            return
        if not isinstance(reply, Wanted) or not reply.ticket:
            self._finish(request, hashes)
            return
        count = len(reply.offsets) // 8
        size = count * self._node.block_bytes
        self._node.totals.from_engines += size
        ends = self._link.reserve(self._node.clock.now, size)
        self._node.clock.at(ends, partial(self._commit, request, hashes, reply.ticket, count))

    def _commit(self, request: str, hashes: "array[int]", ticket: int, count: int) -> None:
        if self.closed:
            return
        self._node.tell(Commit(self._attachment, ticket, bytes(8 * count)))
        self._finish(request, hashes)

    def _finish(self, request: str, hashes: "array[int]") -> None:
        self._engine.unlock(hashes)
        self._writing.discard(request)
        self._written(request)
        self._on_unlock()
        self.start()

    def _written(self, request: str) -> None:
        if request in self._ending and request not in self._queue:
            self._ending.discard(request)
            self._node.tell(Computed(self._attachment, request))
