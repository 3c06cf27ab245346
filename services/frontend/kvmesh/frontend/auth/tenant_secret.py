"""The mesh's secret for tenant tags: configured, or created by the first frontend."""

from functools import partial

from kvmesh.bus.client import Bus
from kvmesh.bus.storage.buckets import make_write_once_bucket
from kvmesh.bus.storage.shared_secret import parse_secret, shared_secret
from kvmesh.frontend.namespaces import KEY_BYTES


async def tenant_secret(bus: Bus, configured: str | None) -> bytes:
    """The mesh's secret, created if there is none. Raises SecretUnusable."""
    if configured is not None:
        return parse_secret(configured, KEY_BYTES, "frontend.tenant_secret")
    bucket = bus.subjects.secrets_bucket
    make = partial(make_write_once_bucket, bus, bucket)
    return await shared_secret(bus, bucket, bus.subjects.tenants_key, KEY_BYTES, make)
