"""Gathers the state of a mesh: instances and their load, idle models, streams and buckets."""

import asyncio
import logging
import time

import msgspec
from msgspec import Struct

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.jetstream import StreamInfo
from kvmesh.bus.discovery.cards import DATED
from kvmesh.bus.discovery.compatibility import misfits, namesakes
from kvmesh.bus.discovery.directory import Directory, routable
from kvmesh.bus.discovery.failed_starts import failed_starts
from kvmesh.bus.discovery.worker_reports import follow_loads, follow_starts
from kvmesh.bus.errors import NotFound, NotPermitted
from kvmesh.bus.messages import (
    FailedStart,
    IdleModel,
    Instance,
    Load,
    MessageDecoder,
    RankSpeed,
    Role,
    Starting,
    WorkerState,
)
from kvmesh.bus.storage.buckets import read_bucket
from kvmesh.bus.streams.configuration import mesh_streams
from kvmesh.bus.subjects import name_of
from kvmesh.cli.models.aliases import AliasUse, used_aliases
from kvmesh.cli.status.speeds import rank_speeds
from kvmesh.planner.leadership import seniority
from kvmesh.runtime.service import stream_limits
from kvmesh.settings import Settings

log = logging.getLogger(__name__)
LOAD_S = 1.2
ALIASES_S = 3.0  # for the requests of the last minutes, of which a busy mesh has very many
START_S = 1.1  # a worker that starts tells its phase every second
MOST_STARTING = 10_000
_idle_models = MessageDecoder(IdleModel)


class InstanceReport(Struct, kw_only=True):
    """One instance: card, age in seconds, and load per rank of a worker.

    `speed` per rank relative to the median one, where routers have measured it.

    `eligible`: it accepts requests; `reason` is set for a worker incompatible with the others of
    its model. `leads`: it is the planner that decides, the one with the oldest lease.
    """

    card: Instance
    age_s: float
    load: list[Load]
    eligible: bool = True
    reason: str = ""
    leads: bool = False
    speed: list[RankSpeed] = []


class StartingReport(Struct, kw_only=True):
    """A worker that has not joined yet; `age_s` of its process, and since the present phase."""

    worker: Starting
    age_s: float
    phase_s: float


class FailedStartReport(Struct, kw_only=True):
    """The latest start of a worker, which failed `age_s` ago; it has not joined since."""

    start: FailedStart
    age_s: float


class IdleModelReport(Struct, kw_only=True):
    """A model without workers, of which the planner starts one on demand; `age_s` of its entry."""

    name: str
    planner: str
    age_s: float


class InstanceWarning(Struct, kw_only=True):
    """A warning about an instance, by itself or derived from its card."""

    instance: str
    text: str


class ReaderReport(Struct, kw_only=True):
    """A consumer of a stream: owner and number of unread messages."""

    name: str
    owner: str
    lag: int


class StreamReport(Struct, kw_only=True):
    """A stream; sizes in messages and bytes."""

    name: str
    messages: int
    bytes: int
    first: int
    last: int
    readers: list[ReaderReport]


class BucketReport(Struct, kw_only=True):
    """A key-value (`kv`) or object (`object`) bucket."""

    name: str
    kind: str
    messages: int
    bytes: int


class MeshReport(Struct, kw_only=True):
    """The report of `kvmesh status`."""

    nats: str
    server: str
    namespace: str
    time: float
    instances: list[InstanceReport]
    streams: list[StreamReport]
    buckets: list[BucketReport]
    warnings: list[InstanceWarning] = []
    idle_models: list[IdleModelReport] = []
    starting: list[StartingReport] = []
    failed_starts: list[FailedStartReport] = []
    aliases: list[AliasUse] = []


async def gather(bus: Bus, settings: Settings) -> MeshReport:
    """Gather the report; raises NotFound if the namespace has no mesh."""
    loads: dict[str, dict[int, Load]] = {}

    def on_load(load: Load) -> None:
        loads.setdefault(load.instance, {})[load.rank] = load

    starts: dict[str, Starting] = {}

    def on_start(worker: Starting) -> None:
        if worker.instance in starts or len(starts) < MOST_STARTING:
            starts[worker.instance] = worker

    begun = time.monotonic()
    await follow_loads(bus, on_load)
    await follow_starts(bus, on_start)
    directory = Directory(bus, stream_limits(settings.streams))
    await directory.open()
    infos = await mesh_streams(bus)
    streams = [await _stream(bus, info) for info in infos if _bucket_kind(info) is None]
    await _wait_for_loads(loads, directory)
    await asyncio.sleep(begun + START_S - time.monotonic())
    cards = sorted(directory.instances, key=lambda card: (card.role, card.name, card.started))
    await directory.close()
    incompatible = misfits(cards)
    speeds = await rank_speeds(bus, cards)
    planners = [card for card in cards if card.role is Role.PLANNER and routable(card)]
    leader = min(planners, key=seniority).instance if planners else ""
    return MeshReport(
        nats=bus.server,
        server=bus.server_version,
        namespace=bus.options.namespace,
        time=time.time(),
        instances=[
            _instance_report(
                card,
                loads.get(card.instance, {}),
                incompatible.get(card.instance, ""),
                card.instance == leader,
                speeds.get(card.instance, {}),
            )
            for card in cards
        ],
        streams=streams,
        buckets=[_bucket(info) for info in infos if _bucket_kind(info) is not None],
        warnings=_warnings(cards, incompatible),
        idle_models=await _idle(bus, _running(cards)),
        starting=_starting(starts, cards),
        failed_starts=await _failed(bus, cards),
        aliases=await _aliases(bus),
    )


async def _aliases(bus: Bus) -> list[AliasUse]:
    try:
        async with asyncio.timeout(ALIASES_S):
            return await used_aliases(bus)
    except TimeoutError:
        log.warning("too many requests to compare aliases here: `kvmesh model alias` reads them")
    except (NotFound, NotPermitted) as error:
        log.debug("cannot read the aliases: %s", error)
    return []


def _starting(starts: dict[str, Starting], cards: list[Instance]) -> list[StartingReport]:
    """Those of the workers that have not joined."""
    joined, now = {card.instance for card in cards}, time.time()
    return [
        StartingReport(
            worker=worker,
            age_s=max(0.0, now - worker.started),
            phase_s=max(0.0, now - worker.since),
        )
        for _, worker in sorted(starts.items())
        if worker.instance not in joined
    ]


async def _failed(bus: Bus, cards: list[Instance]) -> list[FailedStartReport]:
    """The failed starts of workers that have not joined since."""
    try:
        found = await failed_starts(bus)
    except NotPermitted:  # the user is of an older version
        return []
    joined, now = {card.name for card in cards if card.role in DATED}, time.time()
    return [
        FailedStartReport(start=each, age_s=max(0.0, now - each.failed))
        for each in found
        if name_of(each.instance) not in joined
    ]


def _running(cards: list[Instance]) -> set[str]:
    """The models that some worker can decode."""
    serving = (card for card in cards if routable(card) and card.serves != "prefill")
    return {card.model.name for card in serving if card.model is not None}


async def _idle(bus: Bus, running: set[str]) -> list[IdleModelReport]:
    """The idle models, except those `running`."""
    try:
        entries = await read_bucket(bus, bus.subjects.plan_bucket, "idle.*")
    except (NotFound, NotPermitted):  # the bucket or the user is of an older version
        return []
    found = []
    for key, value in sorted(entries.items()):
        try:
            entry = _idle_models.decode(value)
        except msgspec.MsgspecError as error:
            log.warning("ignored an unreadable idle model at %s: %s", key, error)
            continue
        age_s = max(0.0, time.time() - entry.since)
        if entry.card.name not in running:
            found.append(IdleModelReport(name=entry.card.name, planner=entry.planner, age_s=age_s))
    return found


def _warnings(cards: list[Instance], incompatible: dict[str, str]) -> list[InstanceWarning]:
    """Warnings derived from the cards, then those of the instances themselves."""
    found = [
        InstanceWarning(
            instance=card.instance, text=f"{incompatible[card.instance]}; it gets no requests"
        )
        for card in cards
        if card.instance in incompatible
    ]
    for card in cards:
        duplicates = ", ".join(namesakes(card, cards))
        if duplicates and not card.draining:
            found.append(
                InstanceWarning(instance=card.instance, text=f"{duplicates} has the same name")
            )
        found += [InstanceWarning(instance=card.instance, text=text) for text in card.warnings]
    return found


async def _wait_for_loads(loads: dict[str, dict[int, Load]], directory: Directory) -> None:
    workers = {card.instance for card in directory.instances if card.role is Role.WORKER}
    deadline = time.monotonic() + LOAD_S
    while not workers <= loads.keys() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)


def _instance_report(
    card: Instance,
    loads: dict[int, Load],
    reason: str,
    leads: bool,
    speeds: dict[int, RankSpeed],
) -> InstanceReport:
    return InstanceReport(
        card=card,
        age_s=max(0.0, time.time() - card.started),
        load=[loads[rank] for rank in sorted(loads)],
        eligible=not reason and routable(card) and card.state is not WorkerState.STANDBY,
        reason=reason,
        leads=leads,
        speed=[speeds[rank] for rank in sorted(speeds)],
    )


def _bucket_kind(info: StreamInfo) -> str | None:
    prefix = (info.config.name or "").partition("_")[0]
    return {"KV": "kv", "OBJ": "object"}.get(prefix)


def _bucket(info: StreamInfo) -> BucketReport:
    return BucketReport(
        name=(info.config.name or "").partition("_")[2],
        kind=_bucket_kind(info) or "",
        messages=info.state.messages,
        bytes=info.state.bytes,
    )


async def _stream(bus: Bus, info: StreamInfo) -> StreamReport:
    name = info.config.name or ""
    readers = [
        ReaderReport(name=c.name, owner=c.config.description or "", lag=c.num_pending or 0)
        for c in await bus.js.consumers_info(name)
    ]
    return StreamReport(
        name=name,
        messages=info.state.messages,
        bytes=info.state.bytes,
        first=info.state.first_seq,
        last=info.state.last_seq,
        readers=sorted(readers, key=lambda reader: reader.owner),
    )
