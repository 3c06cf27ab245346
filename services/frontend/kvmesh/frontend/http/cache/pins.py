"""Endpoints of pins: prefixes whose blocks all workers and kvbms retain for a time."""

import logging
import time
from itertools import takewhile
from typing import Any

from kvmesh.bus.messages import Instance, Pin, Unpin, owner
from kvmesh.frontend.apis.cache.body import PinBody, UnpinBody
from kvmesh.frontend.dispatch.control_client import (
    ControlClient,
    InstanceReply,
    held_models,
    summary,
)
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.http.cache.pin_store import PinHead, PinStore, StoredPin
from kvmesh.frontend.http.cache.prompt_resolver import PromptResolver, ResolvedPrompt
from kvmesh.frontend.http.endpoint import EndpointCall
from kvmesh.frontend.namespaces import scoped
from kvmesh.hashing import HASH_BYTES

log = logging.getLogger(__name__)
MAX_PINS = 1000  # per owner
MAX_BYTES = 32 << 20  # of hashes of all pins of an owner


class PinEndpoints:
    """Handlers of /v1/cache/pins; sends stored pins to instances that join later."""

    def __init__(self, prompts: PromptResolver, control: ControlClient, store: PinStore) -> None:
        self._prompts = prompts
        self._control = control
        self._store = store

    async def create(self, call: EndpointCall[PinBody]) -> dict[str, Any]:
        target = await self._prompts.resolve(call)
        now = time.time()
        pin = _pin(call.parsed, target, now)
        await self._store_pin(pin, now)
        replies = await self._control.broadcast(
            self._control.holders_of([pin.model]), _command(pin, now)
        )
        return {**_view(pin.head), "requested": target.blocks, **_affected(replies)}

    async def _store_pin(self, pin: StoredPin, now: float) -> None:
        """Store the pin, replacing one of the same id; raises ApiError (429) beyond the limits."""
        old = await self._store.get(pin.tenant, pin.id, now)
        if old is None:
            await self._check_number(pin, now)
        elif old.model != pin.model:
            await self._unpin(old)
        await self._store.put(pin)
        if old is None:
            try:
                await self._check_number(pin, now)
            except ApiError:
                await self._store.delete(pin)
                raise

    async def _check_number(self, pin: StoredPin, now: float) -> None:
        """Raises ApiError (429) if an owner has too many pins before this one.

        Checked again after a pin is stored: the order in the bucket decides between those that are
        stored at once.
        """
        found = await self._store.list_owner(owner(pin.tenant), now)
        others = list(takewhile(lambda head: head != pin.head, found))
        size = sum(other.bytes for other in others) + len(pin.sequence_hashes)
        if len(others) >= MAX_PINS or size > MAX_BYTES:
            reason = f"More than {MAX_PINS} pins or {MAX_BYTES >> 20} MiB of hashes are pinned."
            raise ApiError("rate_limit", reason, code="too_many_pins")

    async def list_own(self, call: EndpointCall[None]) -> dict[str, Any]:
        pins = await self._store.list_tenant(call.caller.tenant, time.time())
        return {"object": "list", "data": [_view(pin) for pin in pins], "has_more": False}

    async def delete(self, call: EndpointCall[None]) -> dict[str, Any]:
        return await self._delete(call.caller.tenant, call.path_id)

    async def delete_by_body(self, call: EndpointCall[UnpinBody]) -> dict[str, Any]:
        if call.parsed.id is not None:
            return await self._delete(call.caller.tenant, call.parsed.id)
        target = await self._prompts.resolve(call)
        return await self._delete(target.tenant, _id_of(target))

    async def _delete(self, tenant: str, pin_id: str) -> dict[str, Any]:
        pin = await self._store.get(tenant, pin_id, time.time())
        if pin is None:
            raise ApiError("not_found", f"Pin `{pin_id}` not found.")
        await self._store.delete(pin)
        replies = await self._unpin(pin)
        return {"id": pin_id, "object": "cache.pin", "deleted": True, **_affected(replies)}

    async def _unpin(self, pin: StoredPin) -> list[InstanceReply]:
        command = Unpin(scoped(pin.tenant, pin.id))
        return await self._control.broadcast(self._control.holders_of([pin.model]), command)

    async def send_all(self, card: Instance) -> None:
        """Send the pins of an instance's models to it."""
        try:
            now = time.time()
            pins = [
                pin for pin in await self._store.list_all(now) if pin.model in held_models(card)
            ]
        except ApiError as error:
            log.warning("pins not sent to %s: %s", card.instance, error)
            return
        for pin in pins:
            self._control.post([card], _command(pin, now))


def _pin(parsed: PinBody, target: ResolvedPrompt, now: float) -> StoredPin:
    target.require_full_block()
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
    """Id of a prefix: the sequence hash of its last block."""
    return f"pin_{target.prompt.sequence_hashes[-HASH_BYTES:].hex()}"


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


def _affected(replies: list[InstanceReply]) -> dict[str, Any]:
    """The pinned blocks that instances hold now, in all and by instance."""
    total = summary(replies)
    return {"ok": total["ok"], "affected": total["blocks"], "instances": total["instances"]}
