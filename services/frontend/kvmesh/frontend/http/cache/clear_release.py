"""Endpoints that drop what is cached: of a tenant, of a model, of sessions that are over."""

import asyncio
import logging
from collections.abc import Iterable
from itertools import chain
from typing import Any

from kvmesh.bus.messages import Clear, Instance, ModelCard, Release, Role
from kvmesh.frontend.apis.cache_body import ClearBody, clear_decoder, release_decoder
from kvmesh.frontend.dispatch.control_client import ControlClient, summary
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.http.endpoint import EndpointCall
from kvmesh.frontend.models import ModelRegistry
from kvmesh.frontend.namespaces import TenantNamespaces, scoped

log = logging.getLogger(__name__)


class ClearReleaseEndpoints:
    """Handlers of /v1/cache/clear and /v1/sessions/release."""

    def __init__(
        self, registry: ModelRegistry, holders: ControlClient, tenants: TenantNamespaces
    ) -> None:
        self._registry = registry
        self._tenants = tenants
        self._holders = holders

    async def clear(self, visit: EndpointCall) -> dict[str, Any]:
        """Blocks in use stay. A tenant's blocks are dropped, or all with the scope for it."""
        parsed = visit.decoded(clear_decoder)
        if visit.account is not None:
            visit.account.allow(parsed.model)
            if parsed.all_tenants:
                visit.account.require("admin")
        model, adapter = self._registry.resolve(parsed.model)
        if parsed.all_tenants and adapter:
            reason = f"`all_tenants`: not of an adapter, only of {model.card.name} as a whole."
            raise InvalidRequest(reason, "model")
        cards = [c for c in self._holders.holders_of([model.card.name]) if _concerned(c, parsed)]
        own = self._salts(model.card, adapter, visit.tenant)
        tenant = "" if parsed.all_tenants else visit.tenant
        seeds = [None] if parsed.all_tenants else own
        commands = [Clear(seed, parsed.tiers, model.card.name, tenant) for seed in seeds]
        told = await asyncio.gather(*(self._holders.broadcast(cards, each) for each in commands))
        answer = summary(chain.from_iterable(told))
        _note(visit, parsed, answer["blocks"], len(cards))
        return {"object": "cache.clear", "model": parsed.model, **answer}

    async def release(self, visit: EndpointCall) -> dict[str, Any]:
        """Sessions that nobody knows are released as well."""
        parsed = visit.decoded(release_decoder)
        successor = parsed.successor
        command = Release(
            sessions=[scoped(visit.tenant, name) for name in parsed.sessions],
            reason=parsed.reason,
            successor=None if successor is None else scoped(visit.tenant, successor),
        )
        told = await self._holders.broadcast(self._holders.holders_of(self._models(visit)), command)
        return {"object": "session.release", "sessions": len(parsed.sessions), **summary(told)}

    def _salts(self, card: ModelCard, adapter: str | None, tenant: str) -> list[int]:
        """Those of an adapter, or of the model and all of its adapters."""
        adapters = [adapter] if adapter else ["", *card.adapters]
        return [self._tenants.salt(card.name, name, tenant) for name in adapters]

    def _models(self, visit: EndpointCall) -> Iterable[str]:
        names = [model.card.name for model in self._registry.models]
        account = visit.account
        return names if account is None else [name for name in names if account.allows(name)]


def _note(visit: EndpointCall, parsed: ClearBody, blocks: int, holders: int) -> None:
    """Say who has dropped what."""
    who = f"the key {visit.account.key.name}" if visit.account is not None else "without a key"
    whose = "of all tenants" if parsed.all_tenants else f"of tenant {visit.tenant!r}"
    tiers = ", ".join(map(str, parsed.tiers)) or "all"
    what = f"{blocks} blocks of {parsed.model} {whose}, tiers: {tiers}"
    log.info("%s: cleared %s, at %d holders", who, what, holders)


def _concerned(card: Instance, parsed: ClearBody) -> bool:
    """Whether a process has any of the tiers."""
    if not parsed.tiers:
        return True
    if card.role is not Role.WORKER:
        return any(parsed.tiers)
    below = card.capacity.tier_blocks if card.capacity is not None else []
    return 0 in parsed.tiers or any(tier in parsed.tiers for tier, n in enumerate(below, 1) if n)
