"""The mesh's secret for tenant tags: configured, or created by the first frontend."""

from collections.abc import Iterable

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Instance, Role
from kvmesh.bus.storage.buckets import write_once_bucket
from kvmesh.bus.storage.shared_secret import keep_secret, parse_secret, shared_secret
from kvmesh.frontend.namespaces import KEY_BYTES, TenantNamespaces

LABEL = "tenants"  # of a frontend's card: the fingerprint of its secret


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


def other_secrets(cards: Iterable[Instance], own: str) -> dict[str, str]:
    """One line for each frontend whose secret has another fingerprint than `own`, by instance."""
    return {
        card.instance: f"frontend {card.name} has another secret of tenants than this one: they"
        " share no caches nor stored responses; set frontend.tenant_secret alike, or nowhere"
        for card in cards
        if card.role is Role.FRONTEND and card.labels.get(LABEL, own) != own
    }
