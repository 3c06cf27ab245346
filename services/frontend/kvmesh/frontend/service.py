"""The frontend process: an HTTP server and a client of the mesh."""

import asyncio
import logging
import random
import sys
import time
from functools import partial

from aiohttp import HttpVersion11, hdrs, web
from msgspec.structs import replace
from prometheus_client import REGISTRY

from kvmesh.bus.discovery.changed_settings import ChangedSettingsReader
from kvmesh.bus.discovery.directory import Directory, routable
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.discovery.settled import publish_settled
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import Instance, Role, StepOutput
from kvmesh.bus.storage.buckets import expiring_bucket
from kvmesh.bus.storage.shared_secret import SecretUnusable
from kvmesh.bus.streams.keeper import keeper_of, remake
from kvmesh.bus.ticks import next_tick
from kvmesh.frontend import metrics, prefork
from kvmesh.frontend.aliases.reader import AliasReader
from kvmesh.frontend.answers.store import AnswerStore
from kvmesh.frontend.auth.admission import Admission
from kvmesh.frontend.auth.authenticator import Authenticator, KeysError
from kvmesh.frontend.auth.shared_limits import SharedLimits
from kvmesh.frontend.auth.tenant_secret import LABEL, other_secrets, share_tenant_secret
from kvmesh.frontend.batches.runner import BatchRunner
from kvmesh.frontend.batches.store import BatchStore
from kvmesh.frontend.dispatch.dispatcher import Dispatcher
from kvmesh.frontend.dispatch.images.client import ImageClient
from kvmesh.frontend.dispatch.liveness import LivenessMonitor
from kvmesh.frontend.dispatch.route_client import RouteClient
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.frontend.dispatch.token_inbox import TokenInbox, step_decoder
from kvmesh.frontend.dispatch.work_client import WorkClient
from kvmesh.frontend.generation.active_request import RequestRunner
from kvmesh.frontend.generation.cache_expectations import CacheExpectations
from kvmesh.frontend.http.access_log import configure as configure_access_log
from kvmesh.frontend.http.cache.api import CacheApi
from kvmesh.frontend.http.dynamo.metrics import DynamoMetrics
from kvmesh.frontend.http.generate import Dependencies
from kvmesh.frontend.http.responses.background import BackgroundResponses
from kvmesh.frontend.http.responses.store import ResponseStore
from kvmesh.frontend.http.responses.websocket import Sockets
from kvmesh.frontend.http.routes import application
from kvmesh.frontend.http.server import Runner, listen
from kvmesh.frontend.http.sse import StreamSupervisor
from kvmesh.frontend.metrics import ServedCollector, tenants
from kvmesh.frontend.models import ModelRegistry
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.frontend.no_bus import answer_without_bus
from kvmesh.frontend.preprocess.images.loader import ImageLoader
from kvmesh.frontend.preprocess.preprocessor import Preprocessor
from kvmesh.frontend.sessions.shadows import ShadowTraffic
from kvmesh.frontend.wake.idle_models import IdleModelReader
from kvmesh.frontend.wake.waker import Waker
from kvmesh.runtime.line_writer import LineWriter
from kvmesh.runtime.logs import TextFormatter
from kvmesh.runtime.service import VERSION, Service, StartError
from kvmesh.runtime.status_http import serve_metrics
from kvmesh.runtime.warnings import publish_warnings
from kvmesh.settings.live import LiveSection
from kvmesh.settings.schema import FrontendSettings

log = logging.getLogger(__name__)
CHECK_S = 1.0
CLOSE_LOG_S = 1.0
RECORDS_S = 60.0  # between two deletions of what killed workers left
TELL_S = 0.5
QUIET_S, LOOK_S = 0.25, 0.02  # without a request on any connection, before all are closed
SWITCHING = 101  # status of a WebSocket's opening
GRACE_S = 3.0  # for final error frames, after `drain_timeout_s`
LOADING_S = 10.0  # a model that takes longer loads while requests for others are served
SWITCH_S = 0.001  # after which a tokenizing thread yields the GIL to the event loop
MAX_HEADER = 64 << 10  # harnesses put JSON into headers
LOOPBACK = ("127.0.0.1", "::1", "localhost")
KEYS_VARIABLE = "with compose: KVMESH_KEYS_FILE"
meanwhile = answer_without_bus  # while the start waits for NATS


class FrontendService:
    """Builds and connects the parts of one frontend."""

    def __init__(self, service: Service) -> None:
        settings = service.settings.frontend
        self._service = service
        self._settings = settings
        self._lines = LineWriter(sys.stdout.fileno())
        self._frontends: set[str] = set()  # their instances
        self.registry = ModelRegistry(service.bus, service.spawn, service.instance)
        self.idle_models = IdleModelReader(service.bus, self.registry.listed, self.registry.removed)
        self.aliases = AliasReader(service.bus, self.registry.aliases)
        self.waker = Waker(service.bus, service.instance, self.registry, settings.max_waking)
        self.directory = Directory(service.bus, service.limits, self._joined, self._left)
        self._admission = Admission(settings.max_in_flight)
        self.changed_settings = ChangedSettingsReader(
            service.bus, "frontend", LiveSection("frontend", settings), self._take_settings
        )
        self.inbox = TokenInbox()
        self.events = SequenceEventPublisher(service.bus, service.instance, self.directory)
        self.routes = RouteClient(service.bus, self.events)
        images = ImageClient(
            service.bus, self.directory, self.waker, lambda: settings.wake_timeout_s
        )
        workers = WorkClient(service.bus, self.inbox, self.directory, images)
        self.monitor = LivenessMonitor(service.bus, workers, self.events, settings.stall_timeout_s)
        self.dispatcher = Dispatcher(
            service.instance,
            workers,
            self.monitor,
            self.routes,
            self.events,
            self.waker,
            settings,
            service.settings.router,
        )
        self.expectations = CacheExpectations()
        local = settings.host in LOOPBACK
        self._tenants = TenantNamespaces()
        self.authenticator = Authenticator(
            service.bus, settings.keys_file, settings.keys_bucket, local, self._tenants
        )
        self.shared_limits = SharedLimits(
            service.bus, service.instance, self.authenticator.accounts
        )
        self.stream_supervisor = StreamSupervisor(settings.keepalive_s, settings.slow_reader_s)
        self.answers = AnswerStore(
            service.bus,
            settings.answers_bytes,
            settings.stored_answers_bytes,
            settings.stored_answers_ttl_s,
        )
        self.responses = ResponseStore(
            service.bus,
            settings.responses_ttl_s,
            settings.responses_bytes,
            settings.responses_tenant_share,
        )
        self.background = BackgroundResponses(
            service.instance, self.responses, self.stream_supervisor, self._is_live
        )
        self.sockets = Sockets(settings.websocket_bytes)
        names = service.bus.subjects
        for name in (names.keys_bucket, names.catalog_bucket):
            expiring_bucket(service.bus, name, ttl_s=0.0, max_bytes=-1)
        remake(service.bus, f"OBJ_{names.model_store_bucket}")
        self.preprocessor = Preprocessor(
            settings.prepare_cache_bytes, self._tenants, self.answers, settings.share_prefixes
        )
        self.preprocessor.images = loader = ImageLoader(
            settings, self.preprocessor.threads, images.measure, images.max_file
        )
        images.data = loader.data
        self.batches = BatchRunner(
            service.instance,
            BatchStore(service.bus, settings),
            self.preprocessor.threads,
            settings.batch_in_flight,
            self.registry.served_among,
            self._is_live,
            lambda: not self.missing(),
        )
        self.cache_api = CacheApi(
            service,
            self.registry,
            self.preprocessor,
            self.directory,
            self.routes,
            self.events,
            self.authenticator,
            self._tenants,
        )

    def _take_settings(self) -> None:
        """Hand changed settings to the parts that do not look at them at each use."""
        self._admission.limit = self._settings.max_in_flight
        self.monitor.stall_timeout = self._settings.stall_timeout_s
        self.stream_supervisor.slow_reader_s = self._settings.slow_reader_s

    def _receive(self, output: StepOutput) -> None:
        for stream in self.inbox.receive(output):
            self.monitor.on_gap(stream)

    def _is_live(self, instance: str) -> bool:
        return instance in self._frontends

    def _joined(self, card: Instance) -> None:
        if card.role is Role.FRONTEND:
            self._frontends.add(card.instance)
        self.registry.joined(card)
        self.cache_api.joined(card)
        self.routes.joined(card)

    def _left(self, card: Instance) -> None:
        self._frontends.discard(card.instance)
        self.registry.left(card)
        self.cache_api.left(card)
        self.routes.left(card)
        if card.role is Role.WORKER:
            self.monitor.worker_left(card)
        if card.role is Role.FRONTEND:
            self.authenticator.accounts.remove_frontend(card.instance)
            self.batches.look()

    def missing(self) -> list[str]:
        """Reasons why this frontend is not ready: roles that the mesh lacks, "nats", "permissions",
        "stopping"."""
        if self._service.stopping.is_set():
            return ["stopping"]
        bus = self._service.bus
        if not bus.connected:
            return ["nats"]
        if self._service.warnings.refused:
            return ["permissions"]
        roles = {card.role for card in self.directory.instances if routable(card)}
        needed = (Role.ROUTER,) if self.registry.has_idle else (Role.ROUTER, Role.WORKER)
        missing = [role.value for role in needed if role not in roles]
        if not missing and not self.registry.models:
            missing.append("model")
        return missing

    async def open(self) -> None:
        service = self._service
        subjects = service.bus.subjects
        await keeper_of(service.bus).make_missing()  # the buckets that parts have declared
        try:
            configured = self._settings.tenant_secret
            await share_tenant_secret(service.bus, configured, self._tenants)
        except SecretUnusable as error:
            raise StartError(str(error), permanent=error.configured) from error
        await service.bus.subscribe(subjects.out(service.instance), step_decoder, self._receive)
        try:
            await self.authenticator.open()
        except KeysError as error:
            reason = f"cannot read the API keys of frontend.keys_file ({KEYS_VARIABLE}): {error}"
            raise StartError(reason, permanent=True) from error
        await self.routes.open()
        if self.authenticator.requires_keys:
            await self.shared_limits.open()
            service.spawn(self.shared_limits.run(), "shared limits")
        await self.directory.open()
        self.registry.adopt_settled()
        await self.idle_models.open()
        await self.aliases.open()
        await self.changed_settings.open()
        await self.cache_api.open(self.directory.instances)
        service.spawn(self.authenticator.run(), "keys")
        service.spawn(self.events.run(), "sequence events")
        service.spawn(self.routes.run(), "route queries")
        service.spawn(self.waker.run(), "waker")
        service.spawn(self.monitor.run(), "monitor")
        service.spawn(self.stream_supervisor.run(), "streams")
        service.spawn(self._check_expectations(), "expectations")
        service.spawn(self._delete_left_records(), "records of workers that are gone")

    async def _check_expectations(self) -> None:
        while True:
            self.expectations.retain({card.instance for card in self.directory.instances})
            self._service.warnings.update("missed_hits", self.expectations.wrong())
            self._service.warnings.update("chat_template", self.registry.template_faults)
            others = other_secrets(self.directory.instances, self._tenants.fingerprint)
            self._service.warnings.update("tenant_secret", others)
            metrics.answers_bytes.set(self.answers.size)
            await next_tick(CHECK_S)

    async def _delete_left_records(self) -> None:
        while True:
            # at random times: then one frontend deletes them, and the others see it
            await asyncio.sleep(random.uniform(RECORDS_S / 2, RECORDS_S))
            try:
                await self.directory.delete_left_records()
            except BusError as error:
                log.debug("records of workers that are gone stay for now: %s", cause(error))

    @property
    def labels(self) -> dict[str, str]:
        """The labels of this frontend's card."""
        return {LABEL: self._tenants.fingerprint, **self.changed_settings.labels}

    async def keep_labels(self, lease: Lease) -> None:
        """Have the present labels on the card; raises BusError."""
        if lease.card.labels != self.labels:
            await lease.update(replace(lease.card, labels=self.labels))

    async def _end_connection(self, http: web.Request, response: web.StreamResponse) -> None:
        """Have clients send nothing more on a connection that is about to close."""
        if http.version < HttpVersion11 and response.content_length is None:
            response.force_close()  # nothing else marks the end; aiohttp goes by the request alone
        if self._service.stopping.is_set() and response.status != SWITCHING:
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"  # the headers are made already

    async def drain(self, _: web.Application) -> None:
        """Fail the requests that still run, after `finish`."""
        await self.dispatcher.drain(0.0)
        self.routes.stop()

    async def finish(self, runner: Runner) -> None:
        """Serve open connections until none has a request, for `drain_timeout_s` at most.

        A client that reads the end of an answer may send its next request at once, on the same
        connection: a response that begins from now on tells it to open another one.
        """
        await runner.stop_listening()
        self.sockets.drain()
        await self.batches.stop()  # other frontends go on with them
        clock, hurry = asyncio.get_running_loop().time, self._service.hurry
        used = clock()
        deadline = used + self._settings.drain_timeout_s
        while clock() < deadline and not (hurry is not None and hurry.is_set()):
            if runner.busy:
                used = clock()
            elif clock() - used > QUIET_S:
                break
            await asyncio.sleep(LOOK_S)
        await self.background.stop()  # other frontends continue these responses

    async def close(self) -> None:
        await self.cache_api.close()
        await self.answers.close()
        self.events.flush()
        await self.idle_models.close()
        await self.aliases.close()
        await self.changed_settings.close()
        await self.directory.close()
        await asyncio.to_thread(self._lines.close, CLOSE_LOG_S)

    def application(self) -> web.Application:
        settings = self._settings
        runner = RequestRunner(self.dispatcher, self.events, self.expectations)
        parts = Dependencies(
            settings,
            self.registry,
            self.preprocessor,
            runner,
            self.stream_supervisor,
            self.responses,
            self.authenticator,
            self.cache_api.session_hooks,
            self.routes.arrivals,
            self._service.bus.promptness,
            self._admission,
            self.background,
            self.batches,
            ShadowTraffic(self.registry, self.preprocessor, runner),
            self._service.bus,
            self.cache_api.prefetcher,
        )
        name = self._service.name
        form = settings.access_log
        form = self._service.settings.log.format if form == "auto" else form
        access_log = configure_access_log(form, name, TextFormatter(name), self._lines)
        more, warnings = self.cache_api.routes, self._service.warnings
        app = application(parts, self, more, warnings, self.sockets, access_log)
        app.on_response_prepare.append(self._end_connection)
        app.on_shutdown.append(self.drain)
        app.on_cleanup.append(lambda _: parts.shadows.close())
        return app


async def main(service: Service) -> None:
    """Serve until the service stops, then finish the running requests."""
    sys.setswitchinterval(SWITCH_S)
    prefork.check_settings(service.settings)
    frontend = FrontendService(service)
    settings = service.settings.frontend
    _check_exposure(settings, frontend.authenticator.requires_keys)
    await frontend.open()
    await frontend.registry.wait_loaded(LOADING_S)
    tenants.begin(settings.metrics_tenants)
    if settings.metrics_tenants:
        REGISTRY.register(tenants)
    served = ServedCollector(frontend.expectations.totals)
    REGISTRY.register(served)
    alias = DynamoMetrics(frontend.registry, settings.migration_limit)
    if settings.metrics_compat == "dynamo":
        REGISTRY.register(alias)
    runner = Runner(
        frontend.application(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=GRACE_S,
        keepalive_timeout=settings.idle_timeout_s,
        max_field_size=MAX_HEADER,
        max_line_size=MAX_HEADER,
    )
    await runner.setup()
    service.spawn(frontend.batches.run(), "batches")
    endpoint = await listen(runner, settings)
    card = Instance(
        instance=service.instance,
        role=Role.FRONTEND,
        name=service.name,
        version=VERSION,
        started=time.time(),
        endpoint=endpoint,
        labels=frontend.labels,
    )
    lease = Lease(service.bus, card, service.limits)
    await lease.open()
    keeper_of(service.bus).restore("the card's labels", partial(frontend.keep_labels, lease))
    service.start_watchdog()
    log.info("listening on %s", endpoint)
    others = asyncio.create_task(prefork.supervise(service), name="prefork")
    service.spawn(prefork.follow_parent(service), "parent")
    service.spawn(publish_warnings(lambda: lease, service.warnings), "warnings")
    service.spawn(publish_settled(lease, frontend.registry.settle), "settled facts")
    service.spawn(frontend.changed_settings.show(lease), "changed settings")
    status = await serve_metrics(
        service.settings.process,
        settings.metrics_port,
        lambda: not frontend.missing(),
        service.warnings,
    )
    service.hurry = asyncio.Event()
    try:
        await service.stopping.wait()
        await _tell_draining(lease)
        await asyncio.sleep(settings.linger_s)
        await frontend.finish(runner)
    finally:
        await runner.cleanup()
        await lease.close()
        if status is not None:
            await status.cleanup()
        await asyncio.wait([others])
        await frontend.close()
        REGISTRY.unregister(served)
        if settings.metrics_compat == "dynamo":
            REGISTRY.unregister(alias)
        if settings.metrics_tenants:
            REGISTRY.unregister(tenants)


async def _tell_draining(lease: Lease) -> None:
    """Show on the card that this frontend leaves, as another of its name may have joined."""
    try:
        async with asyncio.timeout(TELL_S):
            await lease.update(replace(lease.card, draining=True))
    except (BusError, TimeoutError) as error:
        log.debug("the card does not say that this frontend leaves: %s", cause(error))


def _check_exposure(settings: FrontendSettings, keys: bool) -> None:
    """Refuse to serve other machines without keys unless `allow_anonymous` is set."""
    if keys:
        return
    if settings.host in LOOPBACK:
        log.info("no API keys are configured: open to everyone on this machine")
    elif settings.allow_anonymous:
        log.warning("no API keys are configured: open to everyone who reaches %s", settings.host)
    else:
        raise StartError(
            f"refusing to serve everyone on {settings.host}: configure frontend.keys_file or"
            " frontend.keys_bucket, or set frontend.allow_anonymous"
            " (with compose: KVMESH_KEYS_FILE, KVMESH_KEYS_BUCKET, KVMESH_ALLOW_ANONYMOUS)",
            permanent=True,
        )
