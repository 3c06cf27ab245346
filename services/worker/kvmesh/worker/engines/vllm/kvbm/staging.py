"""Host memory for blocks on their way from vLLM to the arena."""

from collections import deque

import torch
from torch import Tensor

from kvmesh.worker.adapters.copies.block_copies import Span

STAGING_BYTES = 1 << 30


def staging_rows(limit: int, step: int, row_bytes: int) -> int:
    """Number of rows for up to `limit` blocks that wait to be written.

    STAGING_BYTES bound them, unless two steps save more: `step` is the most blocks of one.
    """
    return min(limit, max(2 * step, STAGING_BYTES // row_bytes))


class StagedRows:
    """Rows for the blocks of one group and one request, filled once `copied` has ended.

    `release` gives them back, in any thread and also before that.
    """

    def __init__(self, staging: "RowStaging", slots: list[int]) -> None:
        self.slots = slots
        self.copied: Span | None = None
        self._staging = staging

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def filled(self) -> bool:
        return self.copied is not None and self.copied.ended

    @property
    def offsets(self) -> list[int]:
        """Offsets of the rows in the memory of the staging."""
        return [slot * self._staging.row_bytes for slot in self.slots]

    def row(self, number: int) -> Tensor:
        size = self._staging.row_bytes
        start = self.slots[number] * size
        return self._staging.memory[start : start + size]

    def release(self) -> None:
        self._staging.give_back(self)


class RowStaging:
    """Memory for `count` rows of `row_bytes` bytes, page-locked if a device copies to it.

    The `content_bytes` of a block are followed by zeros.

    One thread takes rows. Released rows are free again when their copy has ended, since the device
    writes to them until then.
    """

    def __init__(self, count: int, row_bytes: int, content_bytes: int, page_locked: bool) -> None:
        self.row_bytes = row_bytes
        self.memory = torch.empty(count * row_bytes, dtype=torch.uint8, pin_memory=page_locked)
        self.memory.view(count, row_bytes)[:, content_bytes:] = 0
        self._free = list(range(count))
        self._returned: deque[StagedRows] = deque()

    def take(self, count: int) -> StagedRows | None:
        """The first free rows; None if there are not enough."""
        self._reclaim()
        if count > len(self._free):
            return None
        slots, self._free = self._free[:count], self._free[count:]
        return StagedRows(self, slots)

    def give_back(self, staged: StagedRows) -> None:
        self._returned.append(staged)

    def _reclaim(self) -> None:
        reclaimed = False
        for _ in range(len(self._returned)):
            staged = self._returned.popleft()
            if staged.copied is not None and not staged.copied.ended:
                self._returned.append(staged)
                continue
            self._free += staged.slots
            reclaimed = True
        if reclaimed:
            self._free.sort()  # rows in sequence are copied in one piece
