"""Errors of blocks in shared memory."""

from pathlib import Path


class BlocksError(Exception):
    """Base of the errors of this package."""


class ArenaUnusable(BlocksError):
    """The arena file cannot be mapped with the announced size."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"cannot map the arena {path}: {reason}")
        self.path = path


class LockTaken(BlocksError):
    """Another process holds this lock."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"another process holds {path}")
        self.path = path
