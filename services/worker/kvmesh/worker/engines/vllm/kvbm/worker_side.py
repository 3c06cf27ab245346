"""The half of the connector in a worker of vLLM: copies blocks from the arena, and aside."""

from typing import NamedTuple

from torch import Tensor

from kvmesh.worker.adapters.copies.block_copies import BlockCopies, Span, row_bytes
from kvmesh.worker.engines.vllm.kvbm.parts import KvParts
from kvmesh.worker.engines.vllm.kvbm.scheduler_side import BlockLoad, BlockSave, GroupLoad
from kvmesh.worker.engines.vllm.kvbm.staging import RowStaging, StagedRows
from kvmesh.worker.engines.vllm.kvbm.stats import KvmeshConnectorStats, StepMeter
from kvmesh.worker.engines.vllm.kvbm.writer import WorkerBridge


class _Loading(NamedTuple):
    """A load in progress: bytes and copies by group. It keeps the arena's memory."""

    request: str
    copies: list[tuple[int, Span]]
    host: Tensor

    @property
    def ended(self) -> bool:
        return all(copy.ended for _, copy in self.copies)


class WorkerSide:
    """Loads and saves the blocks of one tensor parallel rank; `staging` has memory for each group.

    vLLM calls all methods in one thread, between the computations of two steps.
    """

    def __init__(
        self,
        bridge: WorkerBridge,
        parts: KvParts,
        rank: int,
        caches: list[list[Tensor]],
        copies: BlockCopies,
        staging: list[RowStaging],
    ) -> None:
        self.bridge = bridge
        self._caches = caches
        self._copies = copies
        self._staging = staging
        self._shard = rank // parts.replicas
        self._writes = parts.writes(rank)
        self._reports = rank == 0  # one decision: all ranks are about as fast
        self._meter = StepMeter()
        self._loading: list[_Loading] = []
        self._failed: set[str] = set()

    def begin_step(self, finished: set[str]) -> None:
        """Begin a step, after which nothing of the `finished` requests is saved."""
        if finished and self._writes:
            self.bridge.forget_prompts(finished)
        self._copies.begin_step()

    def load(self, load: BlockLoad) -> None:
        """Begin to fill the blocks of a request."""
        host = self.bridge.arena(load.arena) if load.groups else None
        if host is None:
            self._failed.add(load.request)
            return
        groups = zip(load.groups, self._caches, strict=True)
        copies = [self._load_group(group, caches, host) for group, caches in groups]
        self._loading.append(_Loading(load.request, copies, host))

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended since the last call, and those of them that failed."""
        loading, self._loading = self._loading, []
        failed, self._failed = self._failed, set()
        received = set(failed)
        for load in loading:
            if load.ended:
                received.add(load.request)
                for size, copy in load.copies:
                    self._meter.copied(size, copy.seconds)
            else:
                self._loading.append(load)
        return received, failed

    def save(self, saves: list[BlockSave], prefill_tokens: int) -> None:
        """Copy blocks aside for write-through; the step computed `prefill_tokens`."""
        self._meter.computed(prefill_tokens, self._copies.end_step())
        staged = []
        for save in saves if self._writes else []:
            self.bridge.extend_prompt(save.request, save.origin, save.tokens)
            count = max(len(group.blocks) for group in save.groups)
            rows = self._take_rows(save) if self.bridge.has_capacity(count) else []
            if rows:
                staged.append((save, rows))
            else:
                self.bridge.count_skipped(count)
        if staged:
            self._copy_aside(staged)
        for save, rows in staged:
            firsts = [group.first for group in save.groups]
            self.bridge.write_through(save.request, list(zip(firsts, rows, strict=True)))

    def take_stats(self) -> KvmeshConnectorStats | None:
        return self._meter.take(*self.bridge.counts) if self._reports else None

    def _load_group(self, load: GroupLoad, caches: list[Tensor], host: Tensor) -> tuple[int, Span]:
        """Begin to fill the blocks of one group; return the number of bytes, and the copy."""
        copy = self._copies.fill(caches, load.blocks, host, load.offsets[self._shard])
        return row_bytes(caches) * len(load.blocks), copy

    def _take_rows(self, save: BlockSave) -> list[StagedRows]:
        """Rows for the blocks of all groups; none if there are not enough for one of them."""
        taken: list[StagedRows] = []
        for group, staging in zip(save.groups, self._staging, strict=True):
            rows = staging.take(len(group.blocks))
            if rows is None:
                for others in taken:
                    others.release()
                return []
            taken.append(rows)
        return taken

    def _copy_aside(self, staged: list[tuple[BlockSave, list[StagedRows]]]) -> None:
        """Begin to copy the blocks of all saves to their rows, group by group."""
        for number, (caches, staging) in enumerate(zip(self._caches, self._staging, strict=True)):
            blocks = [block for save, _ in staged for block in save.groups[number].blocks]
            offsets = [offset for _, rows in staged for offset in rows[number].offsets]
            copy = self._copies.gather(caches, blocks, staging.memory, offsets)
            for _, rows in staged:
                rows[number].copied = copy


def grouped_caches(caches: dict[str, Tensor], parts: KvParts, blocks: int) -> list[list[Tensor]]:
    """The KV of each group's layers, as views [blocks, heads, tokens, ...], whatever the strides.

    Raises ValueError if a block has another size than its layout says.
    """
    grouped = []
    for group in parts.groups:
        views = [_by_block(caches[name], blocks) for name in group.layers]
        held = sum(view[0].numel() * view.element_size() for view in views)
        missing = group.layout.block_bytes - held
        if not 0 <= missing <= group.padding:
            raise ValueError(
                f"the block manager cannot store the KV of {group.layers[0]}: "
                f"a block has {held} bytes, not {group.layout.block_bytes}"
            )
        grouped.append(views)
    return grouped


def _by_block(cache: Tensor, blocks: int) -> Tensor:
    """A view by blocks of the scheduler, which a kernel may divide into several of its own."""
    rows = cache.shape[0]
    if rows == blocks:
        return cache
    if cache.dim() < 3 or rows % blocks:
        raise ValueError(f"the KV of {blocks} blocks has the shape {list(cache.shape)}")
    return cache.view(blocks, rows // blocks, *cache.shape[1:]).transpose(1, 2)
