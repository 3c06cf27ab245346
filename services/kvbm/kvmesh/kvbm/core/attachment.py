"""Attached workers: their layouts, tickets and known prompts."""

from collections import Counter
from dataclasses import dataclass, field

from kvmesh.blocks.overlapped_load import SLOWEST
from kvmesh.bus.messages import Attach, Fetch, KvLayout, Offer, encode
from kvmesh.kvbm.core.blocks.block import ARENA, Space
from kvmesh.kvbm.core.blocks.load_cost import UNMEASURED, EngineSpeed, LoadDoubt
from kvmesh.kvbm.core.blocks.prompt_blocks import PromptBlocks
from kvmesh.kvbm.core.blocks.slab_allocator import PAGE
from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.kvbm.core.blocks.write_pace import MOST_RATIO, WritePace, is_slow
from kvmesh.prompt_delta.blocks import BlockHashes, BlockPromptCache

MAX_PROMPT_BLOCKS = 1 << 19  # of 32 bytes each


@dataclass(slots=True)
class AttachedWorker:
    """An attached worker: the lock file that it holds, its open tickets, its speeds so far."""

    number: int
    instance: str
    space: Space
    lock: str
    tickets: set[int] = field(default_factory=set)
    prompts: BlockPromptCache = field(default_factory=lambda: BlockPromptCache(MAX_PROMPT_BLOCKS))
    doubt: LoadDoubt = field(default_factory=LoadDoubt)
    pace: WritePace = field(default_factory=WritePace)
    engine: EngineSpeed = UNMEASURED
    slowest: float = MOST_RATIO

    def speed(self, message: Fetch, now: float) -> EngineSpeed:
        """The speeds that a message reports; before the first load, that of writes stands in."""
        load_bps = message.load_bps or self.pace.bps
        self.slowest = SLOWEST if message.overlaps else MOST_RATIO
        self.engine = self.doubt.speed(message.compute_tps, load_bps, now)
        return self.engine

    @property
    def loads_fast(self) -> bool:
        """True if loads were measured to take less than `slowest` times as long as computing."""
        bps = self.engine.load_bps
        return bps > 0 and not is_slow(self.space, self.engine, bps, self.slowest)

    def prompt(self, message: Offer | Fetch) -> PromptBlocks | None:
        """The complete prompt that a message describes; None if its base is unknown.

        Raises ValueError if its parts do not match.
        """
        rest = BlockHashes(message.digests, message.sequence_hashes, message.local)
        whole = self.prompts.complete(message.base, message.shared, rest)
        if whole is None:
            return None
        prompt = PromptBlocks.of(message, whole, self.space)
        self.prompts.store(whole, message.base)
        return prompt


class Attachments:
    """Attached workers by number, and the models and layouts seen so far."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.workers: dict[int, AttachedWorker] = {}
        self.models: list[str] = []
        self._spaces: dict[bytes, Space] = {}

    def add(self, message: Attach, number: int) -> AttachedWorker:
        """Attach a worker; raises TooSmall if its blocks do not fit into the arena."""
        space = self.add_space(message.model, message.layout)
        worker = self.workers[number] = AttachedWorker(
            number, message.instance, space, message.lock
        )
        return worker

    def most_written(self, worker: AttachedWorker, now: float) -> int | None:
        """The most blocks that a worker may write now; None if there is no limit.

        There is one if the worker writes slowly and no worker of its space loads fast.
        """
        if any(other.loads_fast for other in self.workers.values() if other.space is worker.space):
            return None
        return worker.pace.most_blocks(worker.space, worker.engine, worker.slowest, now)

    @property
    def layout_count(self) -> int:
        """Number of layouts that were ever attached or restored."""
        return len(self._spaces)

    @property
    def layouts_in_use(self) -> dict[str, list[str]]:
        """Summaries of the layouts of all attached workers, by model; of parts, the lead's."""
        spaces = {worker.space for worker in self.workers.values() if worker.space.is_lead}
        models = sorted({space.model for space in spaces})
        return {m: sorted(s.summary for s in spaces if s.model == m) for m in models}

    @property
    def max_blocks(self) -> list[int]:
        """Upper bound of the blocks in each tier, over all layouts; a block has all its parts."""
        sizes: Counter[tuple[str, str, str, int]] = Counter()
        for number, space in enumerate(self._spaces.values()):
            layout = space.layout
            alone = number if layout.parts == 1 else -1
            sizes[space.model, layout.weights, layout.engine, alone] += space.slot_bytes
        return self._store.max_blocks(min(sizes.values(), default=PAGE))

    def space(self, model: str, layout: KvLayout) -> Space | None:
        """The known space of a model and layout."""
        return self._spaces.get(encode((model, layout)))

    def add_space(self, model: str, layout: KvLayout) -> Space:
        """The space of a model and layout; raises TooSmall."""
        known = self.space(model, layout)
        if known is not None:
            return known
        rank = self.models.index(model) if model in self.models else len(self.models)
        space = Space(rank, model, layout)
        self._store.tiers[ARENA].check(space.slot_bytes)
        if rank == len(self.models):
            self.models.append(model)
        self._spaces[encode((model, layout))] = space
        return space
