"""The oracle process: follows requests, and answers planners' questions about candidate fleets."""

import asyncio
import logging
import time
from datetime import UTC, datetime, timedelta

import msgspec

from kvmesh.bus.client import Reply
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.discovery.ping import answer_pings
from kvmesh.bus.messages import (
    FleetAnswer,
    FleetQuestion,
    Instance,
    MessageDecoder,
    Role,
    RouteEvent,
    batch_classes,
)
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.oracle import metrics
from kvmesh.oracle.evaluation import QuestionError, check_question
from kvmesh.oracle.process import SimulationProcess
from kvmesh.oracle.window import RequestWindow
from kvmesh.router.config import check_settings
from kvmesh.router.errors import RouterConfigError
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.runtime.service import VERSION, Service, StartError
from kvmesh.runtime.status_http import serve_metrics
from kvmesh.runtime.warnings import publish_warnings
from kvmesh.settings.schema import Settings

log = logging.getLogger(__name__)
REPLAY_S = 30.0
QUEUE = "oracles"
_routes: MessageDecoder[RouteEvent] = MessageDecoder(RouteEvent)
_questions = MessageDecoder(FleetQuestion)


class OracleService:
    """One oracle. It answers one question at a time, and refuses others meanwhile."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._settings = settings = service.settings.oracle
        self._window = RequestWindow(settings.window_s, settings.window_bytes)
        self._process = SimulationProcess(service.settings.router)
        self._answering = BackgroundTasks()
        self._lease = Lease(service.bus, self._card(), service.limits, rejoins=True)
        since = datetime.now(UTC) - timedelta(seconds=settings.window_s)
        subjects = service.bus.subjects
        self._routes = StreamReader(
            service.bus,
            subjects.route_stream,
            subjects.route_all,
            self._on_route,
            Start(time=since),
        )
        self.ready = False

    def _card(self) -> Instance:
        return Instance(
            instance=self._service.instance,
            role=Role.ORACLE,
            name=self._service.name,
            version=VERSION,
            started=time.time(),
            unpacks=True,
        )

    async def run(self) -> None:
        """Answer until the service is stopped."""
        service = self._service
        http = await serve_metrics(
            service.settings.process,
            self._settings.metrics_port,
            lambda: self.ready,
            service.warnings,
        )
        await self._lease.open()
        try:
            await self._open()
            self.ready = True
            service.spawn(publish_warnings(lambda: self._lease, service.warnings), "warnings")
            service.start_watchdog()
            await service.stopping.wait()
        finally:
            await self._answering.close()
            await self._process.close()
            await self._routes.close()
            await self._lease.close()
            if http is not None:
                await http.cleanup()

    async def _open(self) -> None:
        bus = self._service.bus
        await answer_pings(bus, self._service.instance)
        await self._process.start()
        await self._routes.open()
        try:
            async with asyncio.timeout(REPLAY_S):
                await self._routes.caught_up.wait()
        except TimeoutError:
            log.warning("answering before the stream is replayed: the replay takes too long")
        await bus.serve(
            bus.subjects.oracle, _questions, self._on_question, QUEUE, self._on_malformed
        )
        await bus.flush()  # the server then knows the subscription
        log.info("answering questions about candidate fleets, with %d requests", len(self._window))

    def _on_route(self, message: StreamMessage) -> None:
        try:
            event = _routes.decode(message.data)
        except msgspec.MsgspecError as error:
            log.warning("ignored a malformed decision at %d: %s", message.seq, error)
            return
        self._window.add(event, time.time())
        metrics.window.set(len(self._window))

    def _on_question(self, question: FleetQuestion, reply: Reply) -> None:
        try:
            check_question(question)
        except QuestionError as error:
            metrics.answers.labels("error").inc()
            reply(FleetAnswer(error=str(error)))
            return
        if len(self._answering):
            metrics.answers.labels("busy").inc()
            reply(FleetAnswer(error="busy with another question"))
            return
        self._answering.start(self._answer(question, reply), "answer")

    async def _answer(self, question: FleetQuestion, reply: Reply) -> None:
        began = time.monotonic()
        promised = {promise.request_class for promise in question.promises}
        batch = batch_classes(self._service.settings.router.batch_classes) - promised
        captured = self._window.requests(question.model, question.since, batch)
        found = await self._process.answer(question, captured)
        reply(found)
        metrics.answers.labels("error" if found.error else "simulated").inc()
        if found.error:
            log.info("no answer about %s: %s", question.model, found.error)
            return
        metrics.fleets.inc(len(found.candidates))
        metrics.seconds.observe(time.monotonic() - began)
        log.info(
            "simulated %d of %d fleets of %s on %d of %d requests in %.1f s",
            len(found.candidates), len(question.fleets), question.model, found.requests,
            len(captured), found.seconds,
        )  # fmt: skip

    @staticmethod
    def _on_malformed(reason: str) -> FleetAnswer:
        metrics.answers.labels("error").inc()
        return FleetAnswer(error=f"malformed question: {reason}")


def check(settings: Settings) -> None:
    """Raise StartError for settings with which no simulation runs."""
    try:
        check_settings(settings.router)
    except RouterConfigError as error:
        raise StartError(str(error), permanent=True) from error


async def main(service: Service) -> None:
    """Run an oracle until the service stops."""
    await OracleService(service).run()
