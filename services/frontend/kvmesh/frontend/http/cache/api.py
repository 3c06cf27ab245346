"""All that moves, keeps and drops cached blocks by request of a caller, put together."""

from time import monotonic

from aiohttp import web

from kvmesh.bus.discovery import Directory
from kvmesh.bus.messages import Instance, Role
from kvmesh.frontend.auth.authenticator import Authenticator
from kvmesh.frontend.dispatch.control_client import ControlClient, held_models
from kvmesh.frontend.dispatch.route_client import RouteClient
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.frontend.http.cache.clear_release import ClearReleaseEndpoints
from kvmesh.frontend.http.cache.pin_store import PinStore
from kvmesh.frontend.http.cache.pins import PinEndpoints
from kvmesh.frontend.http.cache.prefetch import PrefetchEndpoint
from kvmesh.frontend.http.cache.prompt_resolver import PromptResolver
from kvmesh.frontend.http.endpoint import ScopedEndpoints
from kvmesh.frontend.models import ModelRegistry
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.frontend.preprocess.preprocessor import Preprocessor
from kvmesh.frontend.sessions.hooks import SessionHooks
from kvmesh.frontend.sessions.last_prompts import LastPrompts
from kvmesh.runtime.service import Service


class CacheApi:
    """`turns` is told of every request; `routes` are the endpoints."""

    def __init__(
        self,
        service: Service,
        registry: ModelRegistry,
        preparer: Preprocessor,
        directory: Directory,
        asking: RouteClient,
        tracker: SequenceEventPublisher,
        gate: Authenticator,
        tenants: TenantNamespaces,
    ) -> None:
        settings = service.settings.frontend
        holders = ControlClient(service.bus, directory)
        self._service = service
        self._directory = directory
        self._sessions = LastPrompts(service.bus, settings.session_prompts_bytes)
        targets = PromptResolver(registry, preparer, self._sessions, gate, tenants)
        self._doors = ScopedEndpoints(settings, preparer.threads)
        self._prefetching = PrefetchEndpoint(asking, targets, holders, tracker)
        self._pins = PinEndpoints(targets, holders, PinStore(service.bus))
        self._caches = ClearReleaseEndpoints(registry, holders, tenants)
        self._told: dict[str, float] | None = None  # who is there, and when it has joined
        self.turns = SessionHooks(self._sessions, holders, preparer, settings.speculative_tokens)

    async def open(self, present: list[Instance]) -> None:
        """Those who are `present` have been told the pins when these were made."""
        self._told = {card.instance: 0.0 for card in present}
        await self._sessions.open()
        self._service.spawn(self.turns.run(), "turns")

    async def close(self) -> None:
        await self.turns.close()

    def joined(self, card: Instance) -> None:
        if self._told is not None and card.instance not in self._told and held_models(card):
            self._told[card.instance] = monotonic()
            if self._repeats():
                self._repeat(card)

    def _repeats(self) -> bool:
        """Whether it is for this frontend to tell newcomers: the oldest one does."""
        others = (card for card in self._directory.instances if card.role is Role.FRONTEND)
        oldest = min(others, key=lambda card: (card.started, card.instance), default=None)
        return oldest is None or oldest.instance == self._service.instance

    def _repeat(self, card: Instance) -> None:
        self._service.spawn(self._pins.repeat(card), f"pins for {card.instance}")

    def left(self, card: Instance) -> None:
        """The successor of an oldest frontend tells those whom that one may not have told."""
        if self._told is None:
            return
        self._told.pop(card.instance, None)
        if card.role is Role.FRONTEND and self._repeats():
            since = monotonic() - 2 * self._service.limits.lease_s
            for newcomer in self._directory.instances:
                if self._told.get(newcomer.instance, 0.0) > since:
                    self._repeat(newcomer)

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
