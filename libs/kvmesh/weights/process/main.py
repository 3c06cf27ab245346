"""Main program of a weights process: `python -m kvmesh.weights.process.main`."""

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from math import inf
from typing import BinaryIO

import msgspec
import uvloop
from msgspec import Struct
from msgspec.structs import replace

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.faults import REFUSED
from kvmesh.bus.permissions import User
from kvmesh.bus.streams.keeper import keeper_of
from kvmesh.runtime import logs
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.runtime.service import bus_options
from kvmesh.settings import Settings, load
from kvmesh.transfer import SendingPace, TransferError, Transport
from kvmesh.weights.errors import WeightsError
from kvmesh.weights.frames import (
    CopyOffered,
    CopyWanted,
    CopyWithdrawn,
    EngineRuns,
    ParentMessage,
    ServingReport,
    SubjectsRefused,
    WeightsCounts,
    WeightsJob,
    decode_parent_message,
    frame,
    read_frame,
)
from kvmesh.weights.models.former import remove_regularly
from kvmesh.weights.process.copies import CopyTaker
from kvmesh.weights.process.offers import Offers
from kvmesh.weights.process.other_copies import OtherCopies
from kvmesh.weights.process.own_files import OwnFiles

log = logging.getLogger(__name__)
NICE = 10  # a tenth of a core on a busy machine, to answer and to take what the engine needs
LOWER_EFFORT = 0x04  # IP type of service: the code point of RFC 8622
COUNTS_S = 1.0
SWEEP_S = 60.0
TOLERANCE = 0.05  # of the times between tokens: how much longer they may become
SHARE = 1 / 16  # of the highest rate, which always flows
LEAST_RATE = 1e6
SLOWER, FASTER = 0.6, 1.2
WEIGHT = 0.4  # of a new window in a mean
WINDOWS = 2  # with the present rate before it changes
MIN_GAPS = 8  # between tokens that a window must have
PROBE_S = 2.0  # between windows with little sending, which show the times without it
KV_S = 0.5  # after a report of KV transfers, unless another one follows
EXPIRES_S = 1.5  # after which a worker that reports nothing serves nobody
FORGET = 0.98  # of the highest rate, per window without a bound


class ServingGuard:
    """Compares the times between tokens with and without sending, and bounds the rate by them.

    While KV blocks are transferred, weights get a small share of the network.
    """

    def __init__(self) -> None:
        self._allowed = inf
        self._peak = 0.0
        self._quiet = self._loud = 0.0  # times between tokens with little and with much sending
        self._noise = 0.0  # of the former, as a share: what differs without sending, too
        self._windows = 0
        self._sent = 0
        self._at = self._heard_at = self._probed_at = self._kv_until = -inf
        self._probing = False

    def report(self, report: ServingReport, sent: int, now: float) -> None:
        """Take in what the worker has served; `sent` counts the bytes of weights so far."""
        self._kv_until = now + KV_S if report.transfers else min(self._kv_until, now)
        if report.gaps < MIN_GAPS:
            return
        rate = (sent - self._sent) / max(now - self._at, 1e-3)
        fresh, shared = now - self._heard_at > EXPIRES_S, self._kv_until > self._at
        self._heard_at = self._at = now
        self._sent = sent
        if fresh or shared:  # the window began long ago, or KV blocks had the network
            return
        self._peak = max(self._peak * (FORGET if self._allowed == inf else 1.0), rate)
        if self._probing or rate < self._least / 2:
            if self._quiet:
                self._noise = _mean(self._noise, abs(report.slow_s / self._quiet - 1))
            self._quiet = _mean(self._quiet, report.slow_s)
            self._probing = False
            self._probed_at = now
            return
        self._loud = _mean(self._loud, report.slow_s)
        self._windows += 1
        if self._windows >= WINDOWS and self._quiet:
            self._change(rate)
        self._probing = not self._quiet or now - self._probed_at > PROBE_S

    def rate(self, now: float) -> float:
        """Bytes/s that may be sent now; 0: no bound."""
        if now < self._kv_until:
            return self._least
        if now - self._heard_at > EXPIRES_S:
            return 0.0
        allowed = self._least if self._probing else max(self._allowed, self._least)
        return 0.0 if allowed == inf else allowed

    @property
    def _least(self) -> float:
        return max(self._peak * SHARE, LEAST_RATE)

    def _change(self, rate: float) -> None:
        tolerance = max(TOLERANCE, self._noise)
        if self._loud > self._quiet * (1 + tolerance):
            self._allowed = max(min(self._allowed, rate) * SLOWER, self._least)
        elif self._allowed < inf and self._loud < self._quiet * (1 + tolerance / 2):
            self._allowed *= FASTER
            if self._allowed > 2 * self._peak:
                self._allowed = inf
        else:
            return
        self._loud, self._windows = 0.0, 0


def _mean(before: float, value: float) -> float:
    return before + WEIGHT * (value - before) if before else value


class WeightsProcess:
    """Everything that a weights process does for one worker."""

    def __init__(self, job: WeightsJob, settings: Settings, sink: BinaryIO) -> None:
        self._job = job
        self._settings = settings
        self._sink = sink
        self._guard = ServingGuard()
        self._pace = SendingPace(settings.weights.upload_bytes_per_s, self._guard.rate)
        self._runs = asyncio.Event()
        self._others: OtherCopies | None = None
        self._early: list[CopyWanted | CopyOffered | CopyWithdrawn] = []  # while there is no NATS
        self._counts = WeightsCounts()

    def handle(self, message: ParentMessage) -> None:
        """Carry out a message of the parent."""
        if isinstance(message, EngineRuns):
            self._runs.set()
        elif isinstance(message, ServingReport):
            self._guard.report(message, self._pace.sent, asyncio.get_running_loop().time())
        elif isinstance(message, CopyWanted | CopyOffered | CopyWithdrawn):
            if self._others is None:
                self._early.append(message)
            else:
                self._others.handle(message)

    async def run(self) -> None:
        """Take weights, then offer them, until cancelled."""
        weights, transfer = self._settings.weights, self._settings.transfer
        bus = await Bus.connect(
            bus_options(self._settings.nats), f"{self._job.name} weights", timeout=None
        )
        bus.refusals.need(bus.needs(User.WORKER, self._job.name).publish)
        bus.faults.observe(self._on_faults)
        options = replace(transfer, via="tcp", port=weights.port)
        transport = await Transport.open(options, self._pace, LOWER_EFFORT)
        if transfer.via == "nixl":
            await transport.use_nixl()
        offers = Offers(bus, transport, self._job.instance, self._job.node)
        own = OwnFiles(self._job, offers, self.send)
        taker = CopyTaker(self._job, weights, bus, offers, own, self.send, transport)
        self._others = others = OtherCopies(
            bus, self._job.instance, weights, offers, self.send, transport
        )
        while self._early:
            others.handle(self._early.pop(0))
        background = BackgroundTasks()
        reporting = asyncio.create_task(self._report(taker))
        background.start(keeper_of(bus).run(lambda _, __: None, tells=False), "manifests")
        background.start(remove_regularly(bus, self._job.instance), "removal of former manifests")
        if transfer.via == "auto":
            background.start(_add_nixl(transport, offers), "start of NIXL")
        try:
            await taker.run()
            await self._runs.wait()
            await taker.engine_runs()
            await asyncio.Event().wait()
        finally:
            reporting.cancel()
            self._others = None
            await background.close()
            await others.close()
            await taker.close()
            await offers.close()
            await transport.close()
            await bus.close()

    def send(self, event: Struct) -> None:
        """Tell the parent; one that listens no more is ending."""
        with suppress(OSError, ValueError):
            self._sink.write(frame(event))
            self._sink.flush()

    def _on_faults(self, kind: str, found: Mapping[str, str]) -> None:
        if kind == REFUSED:
            self.send(SubjectsRefused(dict(found)))

    async def _report(self, taker: CopyTaker) -> None:
        """Send changed counts, and remove what other processes left."""
        swept_at = time.monotonic()
        while True:
            await asyncio.sleep(COUNTS_S)
            counts = replace(taker.counts(), sent=self._pace.sent)
            if counts != self._counts:
                self._counts = counts
                self.send(counts)
            if time.monotonic() - swept_at > SWEEP_S:
                swept_at = time.monotonic()
                await taker.sweep()


def main() -> None:
    """Serve the parent on standard input and output until it closes them, then exit."""
    os.nice(NICE)
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not end up among the frames
    first = read_frame(source)
    if first is None:
        return
    job = decode_parent_message(first)
    if not isinstance(job, WeightsJob):
        raise SystemExit("the first message is not a job")
    settings = load(None, job.env, {})
    logs.configure(settings.log, f"{job.name} weights")
    status = uvloop.run(_main(WeightsProcess(job, settings, sink), source))
    logging.shutdown()
    os._exit(status)  # a thread that hangs in a disk must not delay the end


async def _add_nixl(transport: Transport, offers: Offers) -> None:
    """Use NIXL once it has started, which takes seconds; TCP is used meanwhile."""
    if find_spec("nixl") is None:
        return
    try:
        await transport.use_nixl()
    except TransferError as error:
        log.info("weights move over TCP: %s", error)
        return
    await offers.nixl_runs()


async def _main(weights: WeightsProcess, source: BinaryIO) -> int:
    running = asyncio.create_task(weights.run())
    loop = asyncio.get_running_loop()
    threading.Thread(target=_listen, args=(source, loop, weights, running), daemon=True).start()
    try:
        await running
    except asyncio.CancelledError:
        return 0
    except (BusError, WeightsError, TransferError, OSError) as error:
        log.error("weights are not shared: %s", cause(error))
        return 1
    return 0


def _listen(
    source: BinaryIO,
    loop: asyncio.AbstractEventLoop,
    weights: WeightsProcess,
    running: "asyncio.Task[None]",
) -> None:
    """Pass on the parent's messages, and end with it."""
    with suppress(RuntimeError):  # the loop has ended
        try:
            while (body := read_frame(source)) is not None:
                loop.call_soon_threadsafe(weights.handle, decode_parent_message(body))
        except (msgspec.MsgspecError, ValueError, OSError) as error:
            log.warning("the parent sends nonsense: %s", error)
        loop.call_soon_threadsafe(running.cancel)


if __name__ == "__main__":
    main()
    sys.exit()
