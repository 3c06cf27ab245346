"""The mesh's secret for tenant tags: configured, or created by the first frontend."""

from functools import partial

from nats.js.api import DiscardPolicy, StorageType, StreamConfig
from nats.js.errors import APIError

from kvmesh.bus.client import Bus
from kvmesh.bus.shared_secret import parse_secret, shared_secret
from kvmesh.bus.streams import STREAM_EXISTS
from kvmesh.frontend.namespaces import KEY_BYTES


async def tenant_secret(bus: Bus, configured: str | None) -> bytes:
    """The mesh's secret, created if there is none. Raises SecretUnusable."""
    if configured is not None:
        return parse_secret(configured, KEY_BYTES, "frontend.tenant_secret")
    bucket = bus.subjects.secrets_bucket
    make = partial(_make, bus, bucket)
    return await shared_secret(bus, bucket, bus.subjects.tenants_key, KEY_BYTES, make)


async def _make(bus: Bus, bucket: str) -> None:
    """Create a write-once bucket: the server rejects a second value of a key."""
    stream = StreamConfig(
        name=f"KV_{bucket}",
        subjects=[f"$KV.{bucket}.>"],
        deny_delete=True,
        deny_purge=True,
        discard=DiscardPolicy.NEW,
        discard_new_per_subject=True,
        max_msgs_per_subject=1,
        num_replicas=bus.options.replicas,
        storage=StorageType.FILE,
    )
    try:
        await bus.js.add_stream(stream)
    except APIError as error:
        if error.err_code != STREAM_EXISTS:
            raise
