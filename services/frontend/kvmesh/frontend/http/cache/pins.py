"""Pins: prefixes that a tenant would like to be kept for a while, on all who hold the model."""

import logging
import time
from typing import Any

from kvmesh.bus.messages import Instance, Pin, Unpin, owner
from kvmesh.frontend.apis.cache_body import PinBody, pin_decoder, unpin_decoder
from kvmesh.frontend.dispatch.control_client import ControlClient, InstanceReply, held, summed
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.http.cache.pin_store import PinHead, PinStore, StoredPin
from kvmesh.frontend.http.cache.prompt_resolver import PromptResolver, ResolvedPrompt
from kvmesh.frontend.http.endpoint import EndpointCall
from kvmesh.frontend.namespaces import scoped

log = logging.getLogger(__name__)
HASH = 8
MAX_PINS = 1000  # of one owner
MAX_BYTES = 32 << 20  # of all of them


class PinEndpoints:
    """Handlers of /v1/cache/pins; tells pins to those who join later, too."""

    def __init__(self, targets: PromptResolver, holders: ControlClient, store: PinStore) -> None:
        self._targets = targets
        self._holders = holders
        self._store = store

    async def create(self, visit: EndpointCall) -> dict[str, Any]:
        parsed = visit.decoded(pin_decoder)
        target = await self._targets.find(parsed, visit.body, visit.headers, visit.account)
        now = time.time()
        pin = _pin(parsed, target, now)
        await self._replace(pin, now)
        told = await self._holders.tell(self._holders.of([pin.model]), _command(pin, now))
        return {**_view(pin.head), "requested": target.blocks, **_affected(told)}

    async def _replace(self, pin: StoredPin, now: float) -> None:
        """Keep it in the place of an earlier one with its id."""
        old = await self._store.get(pin.tenant, pin.id, now)
        if old is None:
            others = await self._store.owned(owner(pin.tenant), now)
            size = sum(other.bytes for other in others) + len(pin.sequence_hashes)
            if len(others) >= MAX_PINS or size > MAX_BYTES:
                reason = f"More than {MAX_PINS} pins, or {MAX_BYTES >> 20} MiB of their hashes."
                raise ApiError("rate_limit", reason, code="too_many_pins")
        if old is not None and old.model != pin.model:
            await self._unpin(old)
        await self._store.put(pin)

    async def list_own(self, visit: EndpointCall) -> dict[str, Any]:
        pins = await self._store.of(visit.tenant, time.time())
        return {"object": "list", "data": [_view(pin) for pin in pins], "has_more": False}

    async def delete(self, visit: EndpointCall) -> dict[str, Any]:
        return await self._delete(visit.tenant, visit.id)

    async def delete_by_body(self, visit: EndpointCall) -> dict[str, Any]:
        parsed = visit.decoded(unpin_decoder)
        if parsed.id is not None:
            return await self._delete(visit.tenant, parsed.id)
        target = await self._targets.find(parsed, visit.body, visit.headers, visit.account)
        return await self._delete(target.tenant, _id_of(target))

    async def _delete(self, tenant: str, pin_id: str) -> dict[str, Any]:
        pin = await self._store.get(tenant, pin_id, time.time())
        if pin is None:
            raise ApiError("not_found", f"There is no pin with the id `{pin_id}`.")
        await self._store.delete(pin)
        told = await self._unpin(pin)
        return {"id": pin_id, "object": "cache.pin", "deleted": True, **_affected(told)}

    async def _unpin(self, pin: StoredPin) -> list[InstanceReply]:
        command = Unpin(scoped(pin.tenant, pin.id))
        return await self._holders.tell(self._holders.of([pin.model]), command)

    async def repeat(self, card: Instance) -> None:
        """Tell one who has joined what holds for its models."""
        try:
            now = time.time()
            pins = [pin for pin in await self._store.all(now) if pin.model in held(card)]
        except ApiError as error:
            log.warning("%s has not been told the pins: %s", card.instance, error)
            return
        for pin in pins:
            self._holders.post([card], _command(pin, now))


def _pin(parsed: PinBody, target: ResolvedPrompt, now: float) -> StoredPin:
    target.check()
    return StoredPin(
        id=parsed.id or _id_of(target),
        tenant=target.tenant,
        model=target.model.card.name,
        tokens=target.prompt.count,
        sequence_hashes=target.prompt.sequence_hashes,
        priority=parsed.priority,
        created=now,
        expires=now + parsed.ttl_s(),
    )


def _id_of(target: ResolvedPrompt) -> str:
    """The same for the same prefix: the hash of its last block stands for all of it."""
    return f"pin_{target.prompt.sequence_hashes[-HASH:].hex()}"


def _command(pin: StoredPin, now: float) -> Pin:
    return Pin(
        id=scoped(pin.tenant, pin.id),
        sequence_hashes=pin.sequence_hashes,
        ttl_s=pin.expires - now,
        priority=pin.priority,
        tenant=owner(pin.tenant),
    )


def _view(pin: PinHead) -> dict[str, Any]:
    return {
        "id": pin.id,
        "object": "cache.pin",
        "model": pin.model,
        "tokens": pin.tokens,
        "priority": pin.priority,
        "created_at": round(pin.created, 3),
        "expires_at": round(pin.expires, 3),
    }


def _affected(told: list[InstanceReply]) -> dict[str, Any]:
    """How many blocks of it each process has at present."""
    total = summed(told)
    return {"affected": total["blocks"], "instances": total["instances"]}
