"""The kvbm process: block manager of one node, from start to shutdown."""

from prometheus_client import REGISTRY

from kvmesh.blocks.digests import KEY_BYTES
from kvmesh.bus.errors import BusError, BusUnavailable
from kvmesh.bus.messages import Role
from kvmesh.bus.storage.shared_secret import (
    SecretUnusable,
    keep_secret,
    parse_secret,
    shared_secret,
)
from kvmesh.kvbm.core.config import manager_config
from kvmesh.kvbm.core.errors import InUse, KvbmError
from kvmesh.kvbm.core.manager import Manager
from kvmesh.kvbm.metrics import ManagerCollector
from kvmesh.kvbm.node import KvbmNode
from kvmesh.kvbm.tiers.remote.interface import RemoteError
from kvmesh.kvbm.tiers.storage import Storage
from kvmesh.retention.token_ranges import RetentionError
from kvmesh.runtime.service import Service, StartError
from kvmesh.runtime.status_http import serve_metrics


async def main(service: Service) -> None:
    """Serve the blocks of a node until the service is stopping."""
    settings = service.settings.kvbm
    try:
        manager = Manager(manager_config(settings), service.instance)
        key = await _key(service, settings.key)
        storage = await Storage.open(settings, service.bus.options.namespace)
    except SecretUnusable as error:
        raise StartError(f"kvbm: {error}", permanent=error.configured) from error
    except InUse as error:
        raise StartError(f"kvbm: {error}") from error
    except (KvbmError, RemoteError, RetentionError) as error:
        raise StartError(f"kvbm: {error}", permanent=True) from error
    try:
        await _serve(service, KvbmNode(service, manager, storage, key))
    finally:
        storage.close()


async def _key(service: Service, configured: str | None) -> bytes:
    """The key of the mesh's block digests; raises SecretUnusable."""
    if configured:
        return parse_secret(configured, KEY_BYTES, "kvbm.key")
    bus = service.bus
    bucket, name = bus.subjects.kvbm_bucket, bus.subjects.identity_key
    key = await shared_secret(bus, bucket, name, KEY_BYTES, Role.KVBM)
    # blocks have digests under the former key: only a new start can use another one
    keep_secret(bus, bucket, name, key, lambda _: service.stop_failed())
    return key


async def _serve(service: Service, node: KvbmNode) -> None:
    collector = ManagerCollector(node.manager, node.worker_server, node.compatibility)
    REGISTRY.register(collector)
    settings = service.settings.kvbm
    metrics = await serve_metrics(
        service.settings.process, settings.metrics_port, lambda: node.ready, service.warnings
    )
    try:
        await node.open()
        service.start_watchdog()
        await service.stopping.wait()
        await node.close()
    except KvbmError as error:
        raise StartError(f"kvbm: {error}", permanent=True) from error
    except (BusError, OSError, TimeoutError) as error:
        raise BusUnavailable(service.bus.options.url, error) from error
    finally:
        await node.close_tiers()
        REGISTRY.unregister(collector)
        if metrics is not None:
            await metrics.cleanup()
