"""What can go wrong with blocks in shared memory, each with the data that a caller needs."""

from pathlib import Path


class BlocksError(Exception):
    """Base of every error of this package."""


class ArenaUnusable(BlocksError):
    """The arena file cannot be mapped as it was described."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"cannot map the arena {path}: {reason}")
        self.path = path


class LockTaken(BlocksError):
    """Another process holds this lock."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"another process holds {path}")
        self.path = path
