"""GET and POST /busy_threshold: the loads from which workers get no requests, while it serves."""

from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta, Struct
from msgspec.structs import replace

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, NotFound
from kvmesh.bus.messages import MessageDecoder, Thresholds, encode
from kvmesh.frontend.apis.base import decode
from kvmesh.frontend.errors import ApiError, Unavailable
from kvmesh.frontend.http.endpoint import EndpointCall, EndpointFactory
from kvmesh.frontend.models import ModelRegistry

PATH = "/busy_threshold"
_stored = MessageDecoder(Thresholds)


class BusyThresholdBody(Struct):
    """Thresholds of a model, which keeps those that are missing; without any, a question."""

    model: str
    active_decode_blocks_threshold: Annotated[float, Meta(gt=0, le=1)] | None = None
    active_prefill_tokens_threshold: Annotated[int, Meta(ge=1)] | None = None
    active_prefill_tokens_threshold_frac: float | None = None


_decoder = msgspec.json.Decoder(BusyThresholdBody)


class BusyThresholdEndpoints:
    """Stores them where `kvmesh busy` does: all routers follow, and they survive restarts."""

    def __init__(self, endpoints: EndpointFactory, bus: Bus, registry: ModelRegistry) -> None:
        self._bus = bus
        self._registry = registry
        self.routes = [
            web.get(PATH, endpoints.without_body(self._list, "admin"), name="busy_thresholds"),
            web.post(
                PATH,
                endpoints.with_body(lambda body, *_: decode(_decoder, body), self._set, "admin"),
                name="busy_threshold",
            ),
        ]

    async def _list(self, _: EndpointCall[None]) -> dict[str, Any]:
        names = [model.card.name for model in self._registry.models]
        return {"thresholds": [_shown(name, await self._read(name)) for name in names]}

    async def _set(self, call: EndpointCall[BusyThresholdBody]) -> dict[str, Any]:
        wanted = call.parsed
        name = self._registry.resolve(wanted.model)[0].card.name
        if wanted.active_prefill_tokens_threshold_frac is not None:
            field = "active_prefill_tokens_threshold_frac"
            reason = f"`{field}`: not supported, use `active_prefill_tokens_threshold`."
            raise ApiError("invalid_request", reason, param=field)
        present = await self._read(name)
        share, tokens = (
            wanted.active_decode_blocks_threshold,
            wanted.active_prefill_tokens_threshold,
        )
        changed = present
        if share is not None:
            changed = replace(changed, blocks_share=share)
        if tokens is not None:
            changed = replace(changed, prefill_tokens=tokens)
        if changed != present:
            try:
                bucket = self._bus.bucket(self._bus.subjects.router_bucket)
                await bucket.put(self._bus.subjects.busy_key(name), encode(changed))
            except BusError as error:
                raise Unavailable(f"The thresholds cannot be stored now: {error}") from error
        return _shown(name, changed)

    async def _read(self, name: str) -> Thresholds:
        """The stored thresholds; none if the routers' settings apply."""
        try:
            bucket = self._bus.bucket(self._bus.subjects.router_bucket)
            entry = await bucket.get(self._bus.subjects.busy_key(name))
            return _stored.decode(entry.value or b"")
        except NotFound:
            return Thresholds()
        except (BusError, msgspec.MsgspecError) as error:
            raise Unavailable(f"The thresholds cannot be read now: {error}") from error


def _shown(model: str, thresholds: Thresholds) -> dict[str, Any]:
    return {
        "model": model,
        "active_decode_blocks_threshold": thresholds.blocks_share,
        "active_prefill_tokens_threshold": thresholds.prefill_tokens,
        "active_prefill_tokens_threshold_frac": None,
    }
