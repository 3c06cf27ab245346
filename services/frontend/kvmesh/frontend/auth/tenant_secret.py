"""The mesh's secret for tenant tags: configured, or created by the first frontend."""

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Role
from kvmesh.bus.storage.buckets import write_once_bucket
from kvmesh.bus.storage.shared_secret import keep_secret, parse_secret, shared_secret
from kvmesh.frontend.namespaces import KEY_BYTES, TenantNamespaces


async def tenant_secret(bus: Bus, configured: str | None) -> bytes:
    """The mesh's secret, created if there is none. Raises SecretUnusable."""
    if configured is not None:
        return parse_secret(configured, KEY_BYTES, "frontend.tenant_secret")
    bucket, key = bus.subjects.secrets_bucket, bus.subjects.tenants_key
    write_once_bucket(bus, bucket)
    return await shared_secret(bus, bucket, key, KEY_BYTES, Role.FRONTEND)


async def share_tenant_secret(bus: Bus, configured: str | None, tenants: TenantNamespaces) -> None:
    """Give `tenants` the mesh's secret, and keep that stored. Raises SecretUnusable."""
    secret = await tenant_secret(bus, configured)
    tenants.set_secret(secret)
    if configured is None:
        bucket, key = bus.subjects.secrets_bucket, bus.subjects.tenants_key
        keep_secret(bus, bucket, key, secret, tenants.set_secret)
