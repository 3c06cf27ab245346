"""What a kvbm owns outside its process: the directory with the arena, and perhaps a disk."""

import asyncio
import logging
import os
from contextlib import ExitStack

from kvmesh.kvbm.tiers.arena import Arena, ArenaError
from kvmesh.kvbm.tiers.disk_file import DiskFile
from kvmesh.kvbm.tiers.node_directory import NodeDirectory, default_directory, reclaim
from kvmesh.kvbm.tiers.remote.factory import open_store
from kvmesh.kvbm.tiers.remote.interface import RemoteStore
from kvmesh.settings.schema import KvbmSettings

log = logging.getLogger(__name__)
UNMAPPED_S = 30.0
RETRY_S = 1.0


def node_name(settings: KvbmSettings) -> str:
    """The node whose workers it serves."""
    return settings.node or os.uname().nodename


class Storage:
    """Claims all of it, or raises KvbmError or RemoteError; `close` gives it back.

    The remote store is closed by its user.
    """

    def __init__(
        self,
        directory: NodeDirectory,
        arena: Arena,
        disk: DiskFile | None,
        remote: RemoteStore | None,
    ) -> None:
        self.directory = directory
        self.arena = arena
        self.disk = disk
        self.remote = remote
        self._claims = ExitStack()

    @classmethod
    async def claim(cls, settings: KvbmSettings, namespace: str) -> "Storage":
        with ExitStack() as claims:
            directory = await asyncio.to_thread(_directory, settings, namespace)
            claims.callback(directory.close)
            arena = await _arena(directory, settings.host_bytes)
            claims.callback(arena.close)
            disk = None
            if settings.disk_path is not None:
                if settings.disk_bytes < settings.host_bytes:
                    log.warning(
                        "kvbm.disk_bytes is less than kvbm.host_bytes: it holds little more"
                    )
                arguments = (settings.disk_path, settings.disk_bytes, settings.disk_free_bytes)
                disk = await asyncio.to_thread(DiskFile, *arguments)
                claims.callback(disk.close)
            storage = cls(directory, arena, disk, _remote(settings, namespace))
            storage._claims = claims.pop_all()
        return storage

    def close(self) -> None:
        self._claims.close()


def _directory(settings: KvbmSettings, namespace: str) -> NodeDirectory:
    if settings.directory is not None:
        return NodeDirectory(settings.directory)
    directory = NodeDirectory(default_directory(namespace, node_name(settings)), is_default=True)
    reclaim()
    return directory


def _remote(settings: KvbmSettings, namespace: str) -> RemoteStore | None:
    if not settings.remote_url:
        return None
    return open_store(
        settings.remote_url,
        namespace,
        settings.remote_lease_s,
        settings.remote_timeout_s,
        settings.remote_bytes,
        settings.remote_group,
    )


async def _arena(directory: NodeDirectory, size: int) -> Arena:
    """A new arena; after a crash, once the workers have let go of the one before."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + (UNMAPPED_S if directory.recovered else 0)
    told = False
    while True:
        try:
            return await asyncio.to_thread(Arena, directory.path, size)
        except ArenaError as error:
            if loop.time() >= deadline:
                raise
            if not told:
                log.info("waiting for workers to unmap the last arena: %s", error)
            told = True
            await asyncio.sleep(RETRY_S)
