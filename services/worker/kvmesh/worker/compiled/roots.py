"""Folders of compiled code on this node's disk, one per environment, in bounded space."""

import logging
import os
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from kvmesh.weights.locks import FileLock
from kvmesh.weights.stored_copy import disk_bytes
from kvmesh.worker.compiled.errors import CompileCacheError

log = logging.getLogger(__name__)
USE_LOCK, STATE, FILES, NEW = "use.lock", "state", "files", "new"
REMOVED = ".removed-"
MAX_REFUSED = 8
SHARE_S = 1.0
POLL_S = 0.05


class RootState(Struct, frozen=True, omit_defaults=True):
    """Notes about a root.

    `starting`: an engine was started with it and has not reported that it runs. `archive` is the
    digest of the archive that it was unpacked from; those in `refused` have not worked.
    """

    starting: bool = False
    archive: str = ""
    refused: list[str] = []


class CompileCacheRoot:
    """The root of one environment, in use until `close`; nobody removes it before.

    `files` is the folder for the engine. `alone`: no other process uses the root yet, and it may
    be filled until `begin`.
    """

    def __init__(self, folder: Path, lock: FileLock, alone: bool) -> None:
        self._folder = folder
        self._lock = lock
        self.files = folder / FILES
        self.alone = alone
        self.state = _read_state(folder)

    def recover(self) -> None:
        """Remove what an engine was started with that never ran; only if `alone`."""
        shutil.rmtree(self._folder / NEW, ignore_errors=True)
        state = self.state
        if not state.starting:
            return
        log.warning("the last engine with the compile cache %s did not start: removed", self.files)
        shutil.rmtree(self.files, ignore_errors=True)
        refused = [*state.refused, state.archive] if state.archive else state.refused
        self._write(RootState(refused=refused[-MAX_REFUSED:]))

    def scratch(self) -> Path:
        """The path for a new folder that `fill` moves into place; only if `alone`."""
        path = self._folder / NEW
        shutil.rmtree(path, ignore_errors=True)
        return path

    def fill(self, archive: str) -> None:
        """Make the folder `scratch` the files, as unpacked from the archive with this digest."""
        shutil.rmtree(self.files, ignore_errors=True)
        try:
            (self._folder / NEW).rename(self.files)
        except OSError as error:
            raise CompileCacheError(f"cannot fill {self.files}: {error.strerror}") from error
        self._write(msgspec.structs.replace(self.state, archive=archive))

    def begin(self) -> bool:
        """An engine starts with it; False if another process has removed the root."""
        self.alone = False
        deadline = time.monotonic() + SHARE_S
        while not self._lock.share():  # another process looks if it is free
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        try:
            self.files.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise CompileCacheError(f"cannot use {self.files}: {error.strerror}") from error
        self._write(msgspec.structs.replace(self.state, starting=True))
        return True

    def succeed(self, archive: str = "") -> None:
        """The engine runs, or was not at fault; `archive` describes the files now, if given."""
        archive = archive or self.state.archive
        self._write(msgspec.structs.replace(self.state, starting=False, archive=archive))

    def close(self) -> None:
        self._lock.close()

    def _write(self, state: RootState) -> None:
        new = self._folder / f"{STATE}.{os.getpid()}"
        try:
            new.write_bytes(msgspec.json.encode(state))
            new.rename(self._folder / STATE)
        except OSError as error:
            raise CompileCacheError(f"cannot write to {self._folder}: {error.strerror}") from error
        self.state = state


class CompileCacheRoots:
    """All roots below `directory`, in about `max_bytes`."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """Create the directory; raises CompileCacheError unless only this user can write to it."""
        self._directory = directory
        self._max_bytes = max_bytes
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = directory.lstat()
        except OSError as error:
            raise CompileCacheError(f"cannot use {directory}: {error.strerror}") from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise CompileCacheError(f"{directory} is not a directory of this user")
        if stat.S_IMODE(found.st_mode) & 0o022:
            raise CompileCacheError(f"other users may write to {directory}: its mode must be 700")

    def open(self, environment: str, patience_s: float) -> CompileCacheRoot:
        """Use the root of an environment; waits while another process fills it.

        Raises CompileCacheError, also after `patience_s` seconds.
        """
        folder, deadline = self._directory / environment, time.monotonic() + patience_s
        while True:
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                lock = FileLock(folder / USE_LOCK)
            except FileNotFoundError:  # removed by another process since
                time.sleep(POLL_S)
                continue
            except OSError as error:
                raise CompileCacheError(f"cannot use {folder}: {error.strerror}") from error
            alone = lock.take()
            if alone or lock.share():
                with suppress(OSError):
                    os.utime(folder / USE_LOCK)
                return CompileCacheRoot(folder, lock, alone)
            lock.close()
            if time.monotonic() > deadline:
                raise CompileCacheError(f"another process has kept {folder} for {patience_s:g} s")
            time.sleep(POLL_S)

    def evict(self) -> None:
        """Remove roots that nobody uses, the least recently used first, until the rest fits."""
        for removed in self._directory.glob(f"{REMOVED}*"):
            shutil.rmtree(removed, ignore_errors=True)
        roots = sorted(self._directory.glob(f"[0-9a-f]*/{USE_LOCK}"), key=_used_at)
        sizes = {lock.parent: disk_bytes(lock.parent) for lock in roots}
        total = sum(sizes.values())
        for folder, size in sizes.items():
            if total <= self._max_bytes:
                return
            if self._remove(folder):
                total -= size

    def _remove(self, folder: Path) -> bool:
        hidden = folder.with_name(f"{REMOVED}{folder.name}-{os.getpid()}")
        try:
            with FileLock(folder / USE_LOCK) as lock:
                if not lock.take():
                    return False
                folder.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            log.warning("cannot remove the compile cache %s: %s", folder, error)
            return False
        return True


def _read_state(folder: Path) -> RootState:
    try:
        return msgspec.json.decode((folder / STATE).read_bytes(), type=RootState)
    except FileNotFoundError:
        return RootState()
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("%s has an unreadable state and starts anew: %s", folder, error)
        return RootState(starting=True)


def _used_at(lock: Path) -> float:
    with suppress(OSError):
        return lock.stat().st_mtime
    return 0.0
