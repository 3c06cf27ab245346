"""The cache API: prefetch, pins, clear, release, tools; and the session hooks of every request."""

from collections.abc import Iterator
from itertools import islice
from time import monotonic, time
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from kvmesh.bus.client import Bus, returning
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import (
    Instance,
    LearnedReport,
    LearnerReport,
    MessageDecoder,
    Role,
    ShowLearned,
)
from kvmesh.frontend import metrics
from kvmesh.frontend.apis.base import decode
from kvmesh.frontend.apis.cache.body import (
    clear_decoder,
    pin_decoder,
    prefetch_decoder,
    release_decoder,
    unpin_decoder,
)
from kvmesh.frontend.apis.cache.tool_events import (
    ClaudeCodeHook,
    ToolBodies,
    check_session,
    hook_body,
    hook_decoder,
    hook_session,
    tool_decoder,
    tool_events,
)
from kvmesh.frontend.auth.accounts import Scope
from kvmesh.frontend.auth.authenticator import Authenticator
from kvmesh.frontend.dispatch.control_client import ControlClient, held_models
from kvmesh.frontend.dispatch.route_client import RouteClient
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.frontend.http.cache.clear_release import ClearReleaseEndpoints
from kvmesh.frontend.http.cache.pin_store import PinStore
from kvmesh.frontend.http.cache.pins import PinEndpoints
from kvmesh.frontend.http.cache.prefetch import PrefetchEndpoint, Prefetcher
from kvmesh.frontend.http.cache.prompt_resolver import PromptResolver
from kvmesh.frontend.http.endpoint import Action, EndpointCall, EndpointFactory
from kvmesh.frontend.http.middleware import Handler
from kvmesh.frontend.models import ModelRegistry
from kvmesh.frontend.namespaces import TenantNamespaces, scoped
from kvmesh.frontend.preprocess.preprocessor import Preprocessor
from kvmesh.frontend.sessions.hooks import SessionHooks
from kvmesh.frontend.sessions.last_prompts import LastPrompts
from kvmesh.frontend.sessions.speculation_gate import SpeculationGate
from kvmesh.runtime.service import Service

MAX_LEARNERS = 256  # of a report
_questions = MessageDecoder(ShowLearned)
T = TypeVar("T")


class ToolEventEndpoints:
    """Handlers of /v1/sessions/{id}/tools and /v1/hooks/claude-code.

    Routers get the events. An event changes nothing but their forecast of the session's return, so
    a session that nobody knows is no error.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def report(self, call: EndpointCall[ToolBodies]) -> dict[str, Any]:
        """Publish events of a session of the caller's tenant."""
        session = call.path_id
        count = self._publish(call.caller.tenant, session, call.parsed)
        return {"object": "session.tools", "session": session, "events": count}

    async def hook(self, call: EndpointCall[ClaudeCodeHook]) -> dict[str, Any]:
        """Publish the event of a hook; the empty answer has no effect on Claude Code."""
        body = hook_body(call.parsed)
        if body is not None:
            self._publish(call.caller.tenant, hook_session(call.parsed), body)
        return {}

    def _publish(self, tenant: str, session: str, bodies: ToolBodies) -> int:
        check_session(session)
        events = tool_events(bodies, scoped(tenant, session), time())
        for event in events:
            self._bus.post(self._bus.subjects.tool(event.session), event)
            metrics.tool_events.labels(event.event).inc()
        return len(events)


class CacheApi:
    """Wires the endpoints of the cache; `session_hooks` are those of every request.

    `prefetcher` loads prompts ahead.
    """

    def __init__(
        self,
        service: Service,
        registry: ModelRegistry,
        preprocessor: Preprocessor,
        directory: Directory,
        route_client: RouteClient,
        events: SequenceEventPublisher,
        authenticator: Authenticator,
        tenants: TenantNamespaces,
    ) -> None:
        settings = service.settings.frontend
        control = ControlClient(service.bus, directory)
        self._service = service
        self._directory = directory
        self._sessions = LastPrompts(
            service.bus, settings.session_prompts_bytes, lambda: len(control.frontends) < 2
        )
        prompts = PromptResolver(registry, preprocessor, self._sessions, authenticator, tenants)
        self._endpoints = EndpointFactory(settings, preprocessor.threads, preprocessor.turns)
        self.prefetcher = Prefetcher(route_client, control, events)
        self._prefetch = PrefetchEndpoint(self.prefetcher, prompts)
        self._pins = PinEndpoints(prompts, control, PinStore(service.bus))
        self._clear_release = ClearReleaseEndpoints(registry, control, tenants)
        self._tools = ToolEventEndpoints(service.bus)
        self._joined_at: dict[str, float] | None = None  # by instance; None before `open`
        self._gate = SpeculationGate(settings.speculative_prefill)
        self.session_hooks = SessionHooks(
            self._sessions,
            control,
            preprocessor,
            self._gate,
            settings.speculative_tokens,
        )

    async def open(self, present: list[Instance]) -> None:
        """Start; instances in `present` are not sent the existing pins, as they received them."""
        self._joined_at = {card.instance: 0.0 for card in present}
        await self._sessions.open()
        self._service.spawn(self.session_hooks.run(), "session hooks")
        bus, instance = self._service.bus, self._service.instance
        await bus.serve(bus.subjects.ask(instance), _questions, returning(self._learned))

    def learned(self) -> Iterator[LearnerReport]:
        """The reports of everything that learns in this frontend."""
        for model in sorted(self._gate.models):
            yield from self._gate.report(model)

    def _learned(self, question: ShowLearned) -> LearnedReport:
        return LearnedReport(list(islice(self.learned(), MAX_LEARNERS)))

    async def close(self) -> None:
        await self.session_hooks.close()

    def joined(self, card: Instance) -> None:
        if (
            self._joined_at is not None
            and card.instance not in self._joined_at
            and held_models(card)
        ):
            self._joined_at[card.instance] = monotonic()
            if self._is_oldest():
                self._send_pins(card)

    def _is_oldest(self) -> bool:
        """True if this is the oldest frontend, which sends the pins to new instances."""
        others = (card for card in self._directory.instances if card.role is Role.FRONTEND)
        oldest = min(others, key=lambda card: (card.started, card.instance), default=None)
        return oldest is None or oldest.instance == self._service.instance

    def _send_pins(self, card: Instance) -> None:
        self._service.spawn(self._pins.send_all(card), f"pins for {card.instance}")

    def left(self, card: Instance) -> None:
        """Send the pins to recent instances if their sender, the oldest frontend, may have left."""
        if self._joined_at is None:
            return
        self._joined_at.pop(card.instance, None)
        if card.role is Role.FRONTEND and self._is_oldest():
            since = monotonic() - 2 * self._service.limits.lease_s
            for newcomer in self._directory.instances:
                if self._joined_at.get(newcomer.instance, 0.0) > since:
                    self._send_pins(newcomer)

    @property
    def routes(self) -> list[web.RouteDef]:
        """Routes of the endpoints; all but the reports on tools require the scope "cache"."""
        pins, prefetch, tools = self._pins, self._prefetch, self._tools
        return [
            web.post("/v1/prefetch", self._with_body(prefetch_decoder, prefetch.start)),
            web.delete("/v1/prefetch/{id:[^/]+}", self._without_body(prefetch.cancel)),
            web.post("/v1/cache/pins", self._with_body(pin_decoder, pins.create)),
            web.get("/v1/cache/pins", self._without_body(pins.list_own)),
            web.delete("/v1/cache/pins", self._with_body(unpin_decoder, pins.delete_by_body)),
            web.delete("/v1/cache/pins/{id:[^/]+}", self._without_body(pins.delete)),
            web.post("/v1/cache/clear", self._with_body(clear_decoder, self._clear_release.clear)),
            web.post(
                "/v1/sessions/release",
                self._with_body(release_decoder, self._clear_release.release),
            ),
            web.post(
                "/v1/sessions/{id:.+}/tools", self._with_body(tool_decoder, tools.report, None)
            ),
            web.post("/v1/hooks/claude-code", self._with_body(hook_decoder, tools.hook, None)),
        ]

    def _with_body(
        self, decoder: msgspec.json.Decoder[T], act: Action[T], scope: Scope | None = "cache"
    ) -> Handler:
        return self._endpoints.with_body(lambda body, *_: decode(decoder, body), act, scope)

    def _without_body(self, act: Action[None]) -> Handler:
        return self._endpoints.without_body(act, "cache")
