"""The directory that a node's kvbm shares with its workers, and the locks of its users.

The kvbm holds an exclusive lock on one file, each worker on a file of its own. The kernel releases
a lock when its holder dies, so files of dead processes are detected and removed.
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
    """The directory is unusable; the message names path, cause and remedy."""


class DirectoryTaken(DirectoryError, InUse):
    """Another kvbm uses the directory."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"another kvbm uses {path}: one per node, or set kvbm.node and kvbm.directory"
        )
        self.path = path


class NodeDirectory:
    """The directory of one node's kvbm, created if missing, locked until `close`.

    Blocks for at most PATIENCE_S; raises DirectoryError. `recovered` is set if another kvbm died
    here: its arena is removed, but takes memory while a worker maps it. `close` removes a
    directory that was created here, unless a worker is still alive.
    """

    def __init__(self, path: Path, is_default: bool = False) -> None:
        self.path = path
        self._created = is_default or not os.path.exists(path)
        self._lock = _lock_within_patience(path)
        self.recovered = bool(_clear(path))

    def is_held(self, lock: str) -> bool:
        """True if the worker with this lock file is alive; the file of a dead one is removed."""
        return _is_held(self.path / lock)

    def close(self) -> None:
        """Remove everything that no living worker holds, and release the lock."""
        _clear(self.path)
        _remove(self.path, self._created)
        os.close(self._lock)


def default_directory(namespace: str, node: str) -> Path:
    """The directory of a node's arena unless configured otherwise."""
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in node)
    return MEMORY / f"{_own()}{namespace}-{safe}"


def reclaim() -> None:
    """Remove this user's default directories without living processes."""
    for path in MEMORY.glob(f"{_own()}*"):
        with suppress(DirectoryError, OSError):
            lock = _locked(path)
            try:
                if not any(map(_is_held, path.glob(WORKER_LOCKS))):
                    _clear(path)
                    _remove(path, with_directory=True)
                    log.info("removed files of a dead process in %s", path)
            finally:
                os.close(lock)


def _own() -> str:
    return f"kvmesh-{os.getuid()}-"


def _lock_within_patience(path: Path) -> int:
    """Lock a directory; another kvbm that reclaims it holds the lock briefly."""
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
    """Lock a directory; raises DirectoryTaken if it is locked or was just removed."""
    try:
        owner = path.lstat().st_uid  # of a link itself: another user may have created it
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


def _remove(path: Path, with_directory: bool) -> None:
    """Remove the held lock file, and optionally the directory if it is empty."""
    with suppress(OSError):
        (path / LOCK).unlink()
        if with_directory:
            path.rmdir()


def _clear(path: Path) -> list[Path]:
    """Remove files of dead processes in a locked directory; return the removed arenas."""
    arenas = list(path.glob(f"{PREFIX}*"))
    for arena in arenas:
        arena.unlink(missing_ok=True)
    for lock in path.glob(WORKER_LOCKS):
        _is_held(lock)
    return arenas


def _is_held(path: Path) -> bool:
    """True if the holder of a lock is alive; the file of a dead one is removed.

    Also True if the check fails for lack of descriptors or memory: the holder may still write.
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
