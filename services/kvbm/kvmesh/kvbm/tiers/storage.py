"""Resources of a kvbm outside its process: directory, arena, disk file and remote store."""

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
    """Name of the node whose workers the kvbm serves."""
    return settings.node or os.uname().nodename


class Storage:
    """The opened resources; `close` releases all but the remote store, which its user closes."""

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
        self._resources = ExitStack()

    @classmethod
    async def open(cls, settings: KvbmSettings, namespace: str) -> "Storage":
        """Open all resources; raises KvbmError or RemoteError."""
        with ExitStack() as resources:
            directory = await asyncio.to_thread(_directory, settings, namespace)
            resources.callback(directory.close)
            arena = await _arena(directory, settings.host_bytes)
            resources.callback(arena.close)
            disk = None
            if settings.disk_path is not None:
                if settings.disk_bytes < settings.host_bytes:
                    log.warning(
                        "kvbm.disk_bytes is less than kvbm.host_bytes: the disk adds little"
                    )
                arguments = (settings.disk_path, settings.disk_bytes, settings.disk_free_bytes)
                disk = await asyncio.to_thread(DiskFile, *arguments)
                resources.callback(disk.close)
            storage = cls(directory, arena, disk, _remote(settings, namespace))
            storage._resources = resources.pop_all()
        return storage

    def close(self) -> None:
        self._resources.close()


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
    """A new arena; after a crash, waits until the workers have unmapped the previous one."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + (UNMAPPED_S if directory.recovered else 0)
    logged = False
    while True:
        try:
            return await asyncio.to_thread(Arena, directory.path, size)
        except ArenaError as error:
            if loop.time() >= deadline:
                raise
            if not logged:
                log.info("waiting for workers to unmap the last arena: %s", error)
            logged = True
            await asyncio.sleep(RETRY_S)
