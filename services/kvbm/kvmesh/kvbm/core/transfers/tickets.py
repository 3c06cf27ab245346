"""What a worker uses: copies that it writes, and copies that it reads."""

from collections import deque
from dataclasses import dataclass, field

from kvmesh.kvbm.core.blocks.block import Copy
from kvmesh.kvbm.core.blocks.load_cost import EngineSpeed
from kvmesh.kvbm.core.transfers.in_progress import Computer
from kvmesh.kvbm.core.transfers.mesh_claims import PeerSource
from kvmesh.kvbm.core.transfers.prompt_blocks import PromptBlocks


@dataclass(slots=True, eq=False)
class WriteTicket:
    """Staged copies that a worker fills."""

    number: int
    attachment: int
    copies: list[Copy]


@dataclass(slots=True, eq=False)
class ReadTicket:
    """A prompt's blocks on their way to a worker.

    It gets those before `end`: the first `next` have been given to it or were its own, then come
    those in `ready`, then those `ahead`, which are on their way to the arena. `blocked` is the
    digest that it waits for, `patience_s` how long it does while somebody else makes it. While it
    is `looking` for more beyond this node, `further` is the node that is asked, if it is one.
    """

    number: int
    attachment: int
    prompt: PromptBlocks
    computer: Computer | None
    engine: EngineSpeed
    next: int
    end: int
    patience_s: float
    moved: float
    ready: list[Copy] = field(default_factory=list)
    ahead: deque[Copy] = field(default_factory=deque)
    given: list[Copy] = field(default_factory=list)
    sources: dict[int, int] = field(default_factory=dict)
    blocked: bytes | None = None
    waited: bool = False
    known: bool = False
    looking: bool = False
    further: PeerSource | None = None
    parked: float | None = None

    @property
    def reached(self) -> int:
        """The first block that is not even on its way."""
        return self.next + len(self.ready) + len(self.ahead)

    @property
    def pending(self) -> int:
        """Blocks that will come after those that are ready; one more while a lookup runs."""
        return self.end - self.next - len(self.ready) + self.looking

    def due(self, now: float) -> bool:
        """A request for more of it waits, and should be answered."""
        if self.parked is None:
            return False
        return bool(self.ready) or not self.pending or now >= self.parked

    def copies(self) -> list[Copy]:
        """All that it uses."""
        return [*self.given, *self.ready, *self.ahead]
