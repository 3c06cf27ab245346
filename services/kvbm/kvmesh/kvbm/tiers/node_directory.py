"""The directory that a node's kvbm shares with its workers: whose it is, and who lives.

The kvbm holds an exclusive lock on one file in it, each worker one on a file of its own. The kernel
lets go of a lock when its holder dies, so what the dead have left can be told and removed.
"""

import errno
import fcntl
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from kvmesh.blocks.arena import WORKER_LOCKS
from kvmesh.kvbm.core.errors import InUse, KvbmError
from kvmesh.kvbm.tiers.arena import PREFIX

log = logging.getLogger(__name__)
MEMORY = Path("/dev/shm")
LOCK = "kvbm.lock"
PATIENCE_S = 1.0
RETRY_S = 0.02
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class DirectoryError(KvbmError):
    """The directory cannot be used; the message says where, why, and what to change."""


class DirectoryTaken(DirectoryError, InUse):
    """Another kvbm lives there."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"another kvbm uses {path}: one per node, or set kvbm.node and kvbm.directory"
        )
        self.path = path


class NodeDirectory:
    """The directory of one node's kvbm, made if need be, locked until `close`.

    Raises DirectoryError; blocks for PATIENCE_S at most. `recovered`: another kvbm has died here,
    whose arena is removed now, but takes memory for as long as a worker maps it. What was made
    here is removed by `close`, unless a worker still lives.
    """

    def __init__(self, path: Path, is_default: bool = False) -> None:
        self.path = path
        self._is_ours = is_default or not os.path.exists(path)
        self._lock = _locked_at_last(path)
        self.recovered = bool(_clear(path))

    def is_held(self, lock: str) -> bool:
        """Whether the worker whose lock file this is lives; one that is gone leaves no file."""
        return _is_held(self.path / lock)

    def close(self) -> None:
        """Leave; nothing stays but what living workers hold."""
        _clear(self.path)
        _remove(self.path, self._is_ours)
        os.close(self._lock)


def default_directory(namespace: str, node: str) -> Path:
    """Where a node's arena is unless the settings say otherwise."""
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in node)
    return MEMORY / f"{_own()}{namespace}-{safe}"


def reclaim() -> None:
    """Remove the default directories of this user in which nobody lives any more."""
    for path in MEMORY.glob(f"{_own()}*"):
        with suppress(DirectoryError, OSError):
            _reclaim(path)


def _reclaim(path: Path) -> None:
    lock = _locked(path)
    try:
        if not any(map(_is_held, path.glob(WORKER_LOCKS))):
            _clear(path)
            _remove(path, whole=True)
            log.info("removed what a dead process has left in %s", path)
    finally:
        os.close(lock)


def _own() -> str:
    return f"kvmesh-{os.getuid()}-"


def _locked_at_last(path: Path) -> int:
    """The lock; who reclaims what is left here holds it for a moment."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            return _locked(path)
        except DirectoryTaken:
            if time.monotonic() > deadline:
                raise
        except OSError as error:
            raise DirectoryError(
                f"cannot use {path}: {error.strerror}; set kvbm.directory"
            ) from error
        time.sleep(RETRY_S)


def _locked(path: Path) -> int:
    """The lock of a directory; raises Taken if somebody else holds it or has just removed it."""
    try:
        owner = path.lstat().st_uid  # of a link itself: another user may have put it there
        if owner != os.getuid():
            raise DirectoryError(f"{path} belongs to user {owner}; set kvbm.directory")
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        raise DirectoryTaken(path) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    raise DirectoryTaken(path)


def _remove(path: Path, whole: bool) -> None:
    """Remove the lock, which is held, and if told the directory, unless something else is in it."""
    with suppress(OSError):
        (path / LOCK).unlink()
        if whole:
            path.rmdir()


def _clear(path: Path) -> list[Path]:
    """Remove what the dead have left in a directory that is locked; returns the arenas."""
    arenas = list(path.glob(f"{PREFIX}*"))
    for arena in arenas:
        arena.unlink(missing_ok=True)
    for lock in path.glob(WORKER_LOCKS):
        _is_held(lock)
    return arenas


def _is_held(path: Path) -> bool:
    """Whether the holder of a lock lives; the file of one that is gone is removed.

    He does if that cannot be seen for want of descriptors: he may be writing to the arena.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return error.errno in EXHAUSTED
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    path.unlink(missing_ok=True)
    return False
