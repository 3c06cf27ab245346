"""Endpoints that clear the cache of a tenant or a model, and release ended sessions."""

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from itertools import chain
from typing import Any

from msgspec.structs import asdict

from kvmesh.bus.messages import Clear, Instance, NotCleared, Release, Role, adapter_name
from kvmesh.frontend.apis.cache.body import ClearBody, ReleaseBody
from kvmesh.frontend.auth.accounts import Account
from kvmesh.frontend.auth.tenant_secret import other_secrets
from kvmesh.frontend.dispatch.control_client import ControlClient, InstanceReply, merge, summary
from kvmesh.frontend.errors import InvalidRequest, Unavailable
from kvmesh.frontend.http.endpoint import EndpointCall
from kvmesh.frontend.models import ModelRegistry, ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces, scoped

log = logging.getLogger(__name__)


class ClearReleaseEndpoints:
    """Handlers of /v1/cache/clear and /v1/sessions/release."""

    def __init__(
        self, registry: ModelRegistry, control: ControlClient, tenants: TenantNamespaces
    ) -> None:
        self._registry = registry
        self._tenants = tenants
        self._control = control

    async def clear(self, call: EndpointCall[ClearBody]) -> dict[str, Any]:
        """Drop the caller's blocks, or with `all_tenants` all.

        The answer is `ok` if no later prompt finds one of them; else it says what is left, and why.
        """
        parsed, account = call.parsed, call.caller.account
        if account is not None:
            account.require_model(parsed.model)
            if parsed.all_tenants:
                account.require_scope("admin")
        elsewhere = other_secrets(self._control.frontends, self._tenants.fingerprint)
        if elsewhere and call.caller.tenant and not parsed.all_tenants:
            # what those frontends have cached for the tenant has salts that this one cannot know
            raise Unavailable(f"Cannot clear: {next(iter(elsewhere.values()))}.")
        found = self._registry.resolve_all(parsed.model)
        for model, adapter in found:
            if parsed.all_tenants and adapter:
                reason = f"`all_tenants` needs the base model {model.card.name}, not an adapter."
                raise InvalidRequest(reason, "model")
        cards: dict[str, Instance] = {}
        sending: list[Awaitable[list[InstanceReply]]] = []
        tenant = "" if parsed.all_tenants else call.caller.tenant
        for model, adapter in found:
            name = model.card.name
            holders = [c for c in self._control.holders_of([name]) if _may_have(c, parsed.tiers)]
            cards |= {card.instance: card for card in holders}
            own = self._salts(model, adapter, call.caller.tenant)
            for salt in [None] if parsed.all_tenants else own:
                command = Clear(salt, parsed.tiers, name, tenant)
                sending.append(self._control.broadcast(holders, command))
        replies = merge(chain.from_iterable(await asyncio.gather(*sending)))
        answer = summary(replies)
        for told, reply in zip(answer["instances"], replies, strict=True):
            left = reply.not_cleared or _whole(reply, cards[reply.instance], parsed.tiers)
            told["not_cleared"] = [asdict(each) for each in left]
        _log_clear(call, answer)
        return {"object": "cache.clear", "model": parsed.model, **answer}

    async def release(self, call: EndpointCall[ReleaseBody]) -> dict[str, Any]:
        """Release sessions; unknown ones count as released, too."""
        parsed, tenant = call.parsed, call.caller.tenant
        successor = parsed.successor
        command = Release(
            sessions=[scoped(tenant, name) for name in parsed.sessions],
            reason=parsed.reason,
            successor=None if successor is None else scoped(tenant, successor),
        )
        models = self._models(call.caller.account)
        replies = await self._control.broadcast(self._control.holders_of(models), command)
        return {"object": "session.release", "sessions": len(parsed.sessions), **summary(replies)}

    def _salts(self, model: ServedModel, adapter: str | None, tenant: str) -> list[int]:
        """Salts of all contents of an adapter, or of the model and all of its adapters."""
        known = model.known_adapters
        if adapter is None:
            found = ["", *known]
        else:
            name = adapter_name(adapter)
            found = [identity for identity in known if adapter_name(identity) == name]
        return [self._tenants.salt(model.card.name, identity, tenant) for identity in found]

    def _models(self, account: Account | None) -> Iterable[str]:
        names = {model.card.name for model in self._registry.models}
        if account is None:
            return names
        allowed = {name for name in names if account.allows_model(name)}
        for alias in filter(account.allows_model, self._registry.served_aliases):
            allowed |= {model.card.name for model, _ in self._registry.resolve_all(alias)}
        return allowed


def _log_clear(call: EndpointCall[ClearBody], answer: dict[str, Any]) -> None:
    parsed, account = call.parsed, call.caller.account
    left = [f"{told['name']}: {told['reason']}" for told in answer["instances"] if not told["ok"]]
    log.info(
        "key %s cleared %d blocks of %s, tenant: %s, tiers: %s, on %d instances%s",
        "none" if account is None else account.key.name,
        answer["blocks"],
        parsed.model,
        "all" if parsed.all_tenants else repr(call.caller.tenant),
        ", ".join(map(str, parsed.tiers)) or "all",
        len(answer["instances"]),
        f"; not cleared: {'; '.join(left)}" if left else "",
    )


def _may_have(card: Instance, tiers: list[int]) -> bool:
    """True if the instance may have one of the tiers; an empty list means all.

    A card does not tell the stores from which an engine loads blocks by itself.
    """
    return not tiers or card.role is Role.WORKER or any(tiers)


def _whole(reply: InstanceReply, card: Instance, tiers: list[int]) -> list[NotCleared]:
    """Every tier that the command named, of an instance without an outcome by tier."""
    if reply.ok:
        return []
    if card.role is Role.WORKER:
        own = [0, *_sized(card.capacity.tier_blocks if card.capacity is not None else [])]
    else:
        own = list(_sized(card.store.tier_blocks if card.store is not None else []))
    named = [tier for tier in own if tier in tiers] or tiers or own
    return [NotCleared(tier, reply.reason) for tier in named]


def _sized(lower: list[int]) -> Iterable[int]:
    return (tier for tier, blocks in enumerate(lower, 1) if blocks)
