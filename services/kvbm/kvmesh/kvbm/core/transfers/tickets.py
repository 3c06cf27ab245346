"""Tickets: the copies that a worker writes or reads."""

from collections import deque
from dataclasses import dataclass, field

from kvmesh.kvbm.core.blocks.block import Copy
from kvmesh.kvbm.core.blocks.load_cost import EngineSpeed
from kvmesh.kvbm.core.blocks.prompt_blocks import PromptBlocks
from kvmesh.kvbm.core.transfers.in_progress import RequestKey
from kvmesh.kvbm.core.transfers.mesh_claims import PeerSource


@dataclass(slots=True, eq=False)
class WriteTicket:
    """Staged copies that a worker fills `since` then with blocks of a request, if that is known."""

    number: int
    attachment: int
    copies: list[Copy]
    since: float
    request: str | None = None


@dataclass(slots=True, eq=False)
class ReadTicket:
    """Blocks of a prompt, up to `end`, on their way to a worker.

    The worker has the blocks before `next_index`; those in `ready` follow, then those that are
    `loading` into the arena. `awaited` is the digest of the first block that is not ready. The
    ticket waits for blocks that others compute until `wait_s` after its `last_progress`. During a
    lookup beyond this node, `peer` is the node that the lookup queries, if any. `request` is set
    if the worker computes the missing blocks. The worker knows the number of an `issued` ticket.
    The ticket was `started` at that time, for the blocks from `first` on, and the first blocks were
    given at `given_at`. The worker computes while it loads if it `overlaps` both.
    """

    number: int
    attachment: int
    prompt: PromptBlocks
    request: RequestKey | None
    engine: EngineSpeed
    next_index: int
    end: int
    wait_s: float
    last_progress: float
    ready: list[Copy] = field(default_factory=list)
    loading: deque[Copy] = field(default_factory=deque)
    given: list[Copy] = field(default_factory=list)
    sources: dict[int, int] = field(default_factory=dict)
    awaited: bytes | None = None
    wait_counted: bool = False
    issued: bool = False
    lookup_pending: bool = False
    peer: PeerSource | None = None
    parked_until: float | None = None
    given_at: float | None = None
    overlaps: bool = False
    started: float = field(init=False)
    first: int = field(init=False)

    def __post_init__(self) -> None:
        self.started, self.first = self.last_progress, self.next_index

    @property
    def loading_end(self) -> int:
        """Index of the first block that is neither ready nor loading."""
        return self.next_index + len(self.ready) + len(self.loading)

    @property
    def pending(self) -> int:
        """Number of blocks after those that are ready; one more while a lookup is pending."""
        return self.end - self.next_index - len(self.ready) + self.lookup_pending

    def timed_out(self, now: float) -> bool:
        """True if the ticket made no progress for `wait_s`."""
        return now - self.last_progress > self.wait_s

    def outwaited(self, now: float) -> bool:
        """True if the worker could have computed all blocks up to `end` since the start."""
        tokens = (self.end - self.first) * self.prompt.space.layout.block_size
        return 0 < tokens < self.engine.compute_tps * (now - self.started)

    def paid(self, now: float) -> bool:
        """True if the worker loaded the given blocks by now in less time than computing takes."""
        tokens = len(self.given) * self.prompt.space.layout.block_size
        return (
            self.given_at is not None and self.engine.compute_tps * (now - self.given_at) < tokens
        )

    def due(self, now: float) -> bool:
        """True if the reply to the parked request is due."""
        if self.parked_until is None:
            return False
        return bool(self.ready) or not self.pending or now >= self.parked_until

    def copies(self) -> list[Copy]:
        """All copies that the ticket uses."""
        return [*self.given, *self.ready, *self.loading]
