"""Life cycle of a service process: connect, prepare the streams, run until stopped, close."""

import asyncio
import faulthandler
import gc
import logging
import os
import resource
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib.metadata import version
from time import monotonic, time
from typing import Any, TypeVar

import uvloop
from msgspec.structs import asdict
from prometheus_client import REGISTRY

from kvmesh._native import Watchdog
from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.errors import (
    BusError,
    BusTimeout,
    BusUnavailable,
    CredentialsUnusable,
    JetStreamUnavailable,
    NotPermitted,
    ServerUnfit,
    cause,
)
from kvmesh.bus.faults import REFUSED
from kvmesh.bus.messages import Instance, Role
from kvmesh.bus.metrics import BusCollector
from kvmesh.bus.permissions import User
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.bus.streams.keeper import keeper_of
from kvmesh.bus.streams.preparation import prepare_streams, why_not_ready
from kvmesh.bus.subjects import api_of
from kvmesh.bus.ticks import next_tick
from kvmesh.runtime import logs, memory
from kvmesh.runtime.warnings import Warnings
from kvmesh.settings.live import with_own_sections
from kvmesh.settings.schema import NatsSettings, Settings, StreamSettings
from kvmesh.tracing.process import ProcessTracing, TracingUnavailable, open_tracing

log = logging.getLogger(__name__)
DEFAULT_URL = "nats://127.0.0.1:4222"
VERSION = version("kvmesh")
T = TypeVar("T")
SHOW_S = 1.0
QUICK_S = 1.0  # for NATS to be reached, at an ordinary start
CHECKS = 10


async def watch_loop(timeout_s: float) -> None:
    """Until cancelled, abort the process if this loop does not run for about `timeout_s`.

    The stacks of all threads go to standard error. A process stopped by SIGSTOP or by a sleeping
    machine does not count as hanging.
    """
    step = timeout_s / CHECKS
    watchdog = Watchdog(step, CHECKS)
    try:
        while True:
            watchdog.tick()
            await next_tick(step / 2)
    finally:
        watchdog.stop()


class StartError(Exception):
    """A service cannot start; the message names the reason and the remedy.

    `permanent`: a restart with the same settings fails again.
    """

    def __init__(self, message: str, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


class Service:
    """The context of a service's main coroutine: bus, settings, identity, tasks.

    `entered` is the monotonic time at which the process began to run the service. A second signal
    sets `hurry` and a third one ends the process; the second does if there is no such event.
    """

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        name: str,
        entered: float | None = None,
        stopping: asyncio.Event | None = None,
    ) -> None:
        self.entered = monotonic() if entered is None else entered
        self.bus = bus
        self.settings = with_own_sections(settings)
        self.limits = stream_limits(settings.streams)
        self.name = name
        self.instance = f"{name}-{secrets.token_hex(4)}"
        self.stopping = bus.stopping = stopping or asyncio.Event()
        self.hurry: asyncio.Event | None = None
        self.failed = False
        self.warnings = Warnings()
        bus.faults.observe(self.warnings.update)
        bus.on_lost.append(self.stop_failed)
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a task until the service closes; if it fails, the service stops with status 1."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        log.error("task %s failed; stopping", task.get_name(), exc_info=task.exception())
        self.stop_failed()

    def stop_failed(self) -> None:
        """Stop with status 1, so that a supervisor starts the process again."""
        self.failed = True
        self.stopping.set()

    def start_watchdog(self) -> None:
        """From now on, abort the process if its event loop hangs; a start may block it longer."""
        self.spawn(watch_loop(self.settings.process.hang_timeout_s), "watchdog")
        memory.give_back()  # what the start needed

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2)
        await self.bus.close()


Main = Callable[[Service], Awaitable[None]]
Check = Callable[[Settings], None]
Meanwhile = Callable[[Settings], Coroutine[Any, Any, None]]


def run_service(
    role: str,
    name: str,
    settings: Settings,
    main: Main,
    check: Check | None = None,
    meanwhile: Meanwhile | None = None,
) -> int:
    """Run `main` as a process until SIGTERM or SIGINT; returns the exit status.

    `check` raises StartError for wrong settings, before the process waits for NATS. `meanwhile`
    runs while it waits longer than QUICK_S. The status is 2, as for a wrong command line, if a
    restart would fail again.
    """
    name = name or f"{role}-{os.uname().nodename}-{os.getpid()}"
    logs.configure(settings.log, name)
    faulthandler.enable()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    _permit_files()
    try:
        if check is not None:
            check(settings)
        return uvloop.run(_run(role, name, settings, main, meanwhile))
    except StartError as error:
        log.error("%s", error)
        return 2 if error.permanent else 1
    except (BusUnavailable, NotPermitted) as error:
        log.error("%s", error)
        return 2 if isinstance(error, CredentialsUnusable) else 1
    except (BusTimeout, JetStreamUnavailable) as error:  # a supervisor's restart heals it
        log.error("JetStream does not serve this process: %s", why_not_ready(error))
        return 1
    except BusError as error:
        log.error("%s stops: %s", role, cause(error))
        return 1
    except KeyboardInterrupt:
        return 130


def _permit_files() -> None:
    """Raise this process's limit of open files, often 1,024, to the most that it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system may permit fewer than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _run(
    role: str, name: str, settings: Settings, main: Main, meanwhile: Meanwhile | None
) -> int:
    entered, signals = monotonic(), _Signals()
    stopping = signals.stopping
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.received)
    async with _running(meanwhile, settings):
        connecting = Bus.connect(bus_options(settings.nats), name, timeout=None)
        bus = await _unless_stopped(connecting, stopping)
    if bus is None:
        return 0
    needs = bus.needs(User(role), name)
    bus.refusals.need(needs.publish)
    service = signals.service = Service(bus, settings, name, entered, stopping)
    figures = BusCollector(bus)
    REGISTRY.register(figures)
    tracing = None
    try:
        await bus.refusals.compare(needs)
        service.spawn(bus.refusals.watch(needs), "permissions")
        tracing = await _open_tracing(role, service)
        needed = (f"publish {bus.js.prefix}.", f"subscribe {bus.options.inbox_prefix}.")
        async with _told_refused(service, role, meanwhile, needed):
            await _prepare(service)
        keeper = keeper_of(bus)
        service.spawn(keeper.run(service.warnings.update, role == "frontend"), "streams")
        if not service.stopping.is_set():
            await main(service)
    except (BusError, StartError) as error:
        if stopping.is_set() and not service.failed:
            log.info("stopped during its start: %s", cause(error))
            return 0
        refused = bus.faults.texts(REFUSED)
        if not refused:
            raise
        permanent = isinstance(error, StartError) and error.permanent
        reason = cause(error)
        if "does not permit" not in reason:  # a reader or a reply that is refused: a timeout
            reason = f"{reason}: {'; '.join(refused)}"
        if not permanent and not service.failed:
            log.error("starting again once NATS permits it: %s", reason)
            async with _told_refused(service, role, meanwhile):
                while bus.faults.texts(REFUSED) and not stopping.is_set():
                    await next_tick(SHOW_S, stopping)
            if stopping.is_set():
                return 0
        raise StartError(reason, permanent) from error
    finally:
        if tracing is not None:
            await tracing.close()
        await service.close()
        REGISTRY.unregister(figures)
    return 1 if service.failed else 0


@asynccontextmanager
async def _told_refused(
    service: Service, role: str, meanwhile: Meanwhile | None, needed: tuple[str, ...] = ("",)
) -> AsyncIterator[None]:
    """While the block runs, tell what NATS refuses to a process that cannot start.

    It can without subjects that do not begin as those `needed`.
    """
    telling = _tell_refused(service, role, meanwhile, needed)
    showing = asyncio.create_task(telling, name="refused start")
    try:
        yield
    finally:
        showing.cancel()
        await asyncio.wait([showing])


async def _tell_refused(
    service: Service, role: str, meanwhile: Meanwhile | None, needed: tuple[str, ...]
) -> None:
    """Once NATS refuses such a subject, have a card and serve /health, until cancelled."""
    from kvmesh.runtime.status_http import serve_metrics

    bus, settings = service.bus, service.settings
    while not any(about.startswith(needed) for about in bus.faults.about(REFUSED)):
        await next_tick(SHOW_S)
    card = Instance(
        instance=service.instance,
        role=Role(role),
        name=service.name,
        version=VERSION,
        started=time(),
    )
    lease, port = Lease(bus, card, service.limits), getattr(settings, role).metrics_port
    with suppress(StartError):  # `main` says that the port is taken
        async with _running(meanwhile, settings), AsyncExitStack() as stack:
            http = await serve_metrics(settings.process, port, lambda: False, service.warnings)
            if http is not None:
                stack.push_async_callback(http.cleanup)
            while True:
                try:
                    await lease.open()
                    stack.push_async_callback(lease.close)
                    await asyncio.Event().wait()
                except BusError as error:
                    log.debug("no card tells what NATS refuses: %s", cause(error))
                    await next_tick(SHOW_S)


@asynccontextmanager
async def _running(meanwhile: Meanwhile | None, settings: Settings) -> AsyncIterator[None]:
    """Run `meanwhile` while the block runs, from QUICK_S on."""

    async def wait() -> None:
        await asyncio.sleep(QUICK_S)
        if meanwhile is not None:
            await meanwhile(settings)

    waiting = asyncio.create_task(wait(), name="meanwhile")
    try:
        yield
    finally:
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting


async def _open_tracing(role: str, service: Service) -> ProcessTracing | None:
    try:
        return await open_tracing(
            service.bus, service.settings.tracing, f"kvmesh-{role}", service.instance, VERSION
        )
    except TracingUnavailable as error:
        raise StartError(str(error), permanent=True) from error


async def _prepare(service: Service) -> None:
    """Return once the streams exist, or the service is to stop."""
    preparing = prepare_streams(service.bus, service.limits)
    try:
        for difference in await _unless_stopped(preparing, service.stopping) or ():
            log.warning("%s; `kvmesh config streams apply` changes it", difference)
    except ServerUnfit as error:
        raise StartError(str(error)) from error


async def _unless_stopped(work: Coroutine[Any, Any, T], stopping: asyncio.Event) -> T | None:
    """The result of `work`, or None if the process is to stop before."""
    working = asyncio.create_task(work)
    stopped = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
    return None if working.cancelled() else working.result()


class _Signals:
    """The effects of SIGTERM and SIGINT, from before the process has connected."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.service: Service | None = None

    def received(self) -> None:
        hurry = self.service.hurry if self.service is not None else None
        if not self.stopping.is_set():
            self.stopping.set()
        elif hurry is not None and not hurry.is_set():
            log.warning("second signal: no longer waiting for running requests")
            hurry.set()
        else:
            log.warning("signalled again: stopping immediately")
            sys.stderr.flush()
            os._exit(130)


def bus_options(nats: NatsSettings) -> BusOptions:
    """The bus options of the settings."""
    given = asdict(nats)
    domain = given.pop("domain")
    given["api_prefix"] = nats.api_prefix or api_of(domain)
    return BusOptions(**{**given, "url": nats.url or DEFAULT_URL})


def stream_limits(streams: StreamSettings) -> StreamLimits:
    """The stream limits of the settings."""
    return StreamLimits(**asdict(streams))
