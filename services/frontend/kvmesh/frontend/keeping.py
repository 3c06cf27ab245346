"""All that moves, keeps and drops cached blocks by request of a caller, put together."""

from aiohttp import web

from kvmesh.bus.discovery import Directory
from kvmesh.bus.messages import Instance
from kvmesh.frontend.asking import Asking
from kvmesh.frontend.caches import Caches
from kvmesh.frontend.doors import Doors
from kvmesh.frontend.gate import Gate
from kvmesh.frontend.holders import Holders, held
from kvmesh.frontend.models import ModelRegistry
from kvmesh.frontend.pin_store import PinStore
from kvmesh.frontend.pins import Pins
from kvmesh.frontend.prefetch import Prefetching
from kvmesh.frontend.prepare import Preparer
from kvmesh.frontend.session_prompts import SessionPrompts
from kvmesh.frontend.targets import Targets
from kvmesh.frontend.tracking import Tracker
from kvmesh.frontend.turns import Turns
from kvmesh.runtime.service import Service


class Keeping:
    """`turns` is told of every request; `routes` are the endpoints."""

    def __init__(
        self,
        service: Service,
        registry: ModelRegistry,
        preparer: Preparer,
        directory: Directory,
        asking: Asking,
        tracker: Tracker,
        gate: Gate,
    ) -> None:
        settings = service.settings.frontend
        holders = Holders(service.bus, directory)
        self._service = service
        self._sessions = SessionPrompts(service.bus, settings.session_prompts_bytes)
        targets = Targets(registry, preparer, self._sessions)
        self._doors = Doors(gate, settings)
        self._prefetching = Prefetching(asking, targets, holders, tracker)
        self._pins = Pins(targets, holders, PinStore(service.bus))
        self._caches = Caches(registry, holders)
        self._told: set[str] | None = None
        self.turns = Turns(self._sessions, holders, preparer, settings.speculative_tokens)

    async def open(self, present: list[Instance]) -> None:
        """Those who are `present` have been told the pins when these were made."""
        self._told = {card.instance for card in present}
        await self._sessions.open()
        self._service.spawn(self.turns.run(), "turns")

    async def close(self) -> None:
        await self.turns.close()

    def joined(self, card: Instance) -> None:
        if self._told is not None and card.instance not in self._told and held(card):
            self._told.add(card.instance)
            self._service.spawn(self._pins.repeat(card), f"pins for {card.instance}")

    def left(self, card: Instance) -> None:
        if self._told is not None:
            self._told.discard(card.instance)

    @property
    def routes(self) -> list[web.RouteDef]:
        """All of them need the scope "cache"."""
        paths = [
            (web.post, "/v1/prefetch", self._prefetching.start),
            (web.delete, "/v1/prefetch/{id}", self._prefetching.cancel),
            (web.post, "/v1/cache/pins", self._pins.create),
            (web.get, "/v1/cache/pins", self._pins.list_own),
            (web.delete, "/v1/cache/pins", self._pins.delete_by_body),
            (web.delete, "/v1/cache/pins/{id}", self._pins.delete),
            (web.post, "/v1/cache/clear", self._caches.clear),
            (web.post, "/v1/sessions/release", self._caches.release),
        ]
        handler = self._doors.handler
        return [make(path, handler("cache", action)) for make, path, action in paths]
