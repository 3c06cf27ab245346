"""Use of the blocks that were restored to the arena ahead of a return."""

from typing import Literal, TypeAlias

TRIAL_BLOCKS = 64
MEMORY_BLOCKS = 512.0
LEAST_READ = 0.5
ENOUGH_READ = 0.6
RestoreMode: TypeAlias = Literal["trial", "on", "off"]


class RestoredUse:
    """Bytes that were restored, those of them read, and those that left the arena unread.

    Restoring is a trial until TRIAL_BLOCKS have been read or lost. Then it is on until less than
    LEAST_READ of the last about MEMORY_BLOCKS were read, and off until ENOUGH_READ of them are.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.read_bytes = 0
        self.lost_bytes = 0
        self.unread = 0  # blocks
        self._ended = 0
        self._pays = True
        self._read = 0.0
        self._lost = 0.0

    @property
    def mode(self) -> RestoreMode:
        if self._ended < TRIAL_BLOCKS:
            return "trial"
        return "on" if self._pays else "off"

    def start(self, size: int) -> None:
        """Count a block of `size` bytes whose restore has started."""
        self.bytes += size
        self.unread += 1

    def end(self, size: int, read: bool) -> None:
        """Count a block that was read first, or lost unread."""
        self.unread -= 1
        self._ended += 1
        fade = 1.0 - 1.0 / MEMORY_BLOCKS
        self._read = fade * self._read + read
        self._lost = fade * self._lost + (not read)
        least = LEAST_READ if self._pays else ENOUGH_READ
        if self._ended >= TRIAL_BLOCKS:
            self._pays = self._read >= least * (self._read + self._lost)
        if read:
            self.read_bytes += size
        else:
            self.lost_bytes += size
