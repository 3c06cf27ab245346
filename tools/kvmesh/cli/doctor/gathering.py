"""Gathers the facts of `kvmesh doctor`: each question has a deadline, and none stops others."""

import asyncio
import json
import re
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Raw

from kvmesh.bus.client import Bus, RawMessage
from kvmesh.bus.connection.api_errors import NOT_FOR_ACCOUNT
from kvmesh.bus.connection.jetstream import AccountInfo, StreamInfo, Tier
from kvmesh.bus.errors import (
    BusError,
    BusTimeout,
    Conflict,
    JetStreamError,
    JetStreamUnavailable,
    NoResponder,
    NotFound,
    NotPermitted,
    ServerUnfit,
    cause,
)
from kvmesh.bus.messages import (
    Decision,
    Instance,
    KvBatch,
    MessageDecoder,
    Outcome,
    RankEvents,
    Role,
)
from kvmesh.bus.packs import EMPTY, unpacked
from kvmesh.bus.permissions import ALL_SERVERS, USER_INFO
from kvmesh.bus.streams.altered import answered, found_stream, harm
from kvmesh.bus.streams.configuration import differences, needed_streams
from kvmesh.bus.streams.server_check import check_server
from kvmesh.cli.doctor.facts import MAPPINGS, Clock, DiskSpace, Facts, NatsServer, UsedLimit
from kvmesh.cli.doctor.http_facts import MonitoringError, monitored, open_frontends
from kvmesh.cli.planning.history import read_decisions
from kvmesh.cli.status.index_checks import check_ranks
from kvmesh.cli.status.report import gather
from kvmesh.cli.status.served import WorkerCache, events_of, read_served
from kvmesh.placement_rules.served import ServedTokens
from kvmesh.runtime.service import stream_limits
from kvmesh.settings import Settings

ASK_S = 4.0
REPORT_S = 8.0
SERVED_S = 8.0
SERVED_SINCE_S = 600.0
CREDENTIALS = ("user", "password", "token", "credentials", "nkey_seed", "tls_cert")
SERVERS_S = 0.5  # in which all servers of a cluster reply
PROBE_S = 1.0
PROBE = "Kvmesh-Probe"  # header of a message that no stream stores: the subject it was sent to
PROBES = 5  # on each subject: a mapping may move a share of the messages
RECENT = 8  # decisions and outcomes whose times are compared with the server's
MOST_CLOCKS = 64  # workers
NEVER = str(2**53)  # more messages than any stream gets
NO_LEADER = 10008  # JetStream's error code
ONE_CONNECTION = Raw(b'{"limit":1}')  # in each reply, beside their number
_routes: MessageDecoder[Decision | Outcome] = MessageDecoder(Decision | Outcome)
_batches = MessageDecoder(KvBatch)


async def gather_facts(bus: Bus, settings: Settings, monitoring: str = "") -> Facts:
    """All facts that can be had within about ASK_S, or REPORT_S where NATS is well.

    `monitoring` is the URL of the server's monitoring port; empty: it is not asked.
    """
    facts = Facts(
        namespace=bus.options.namespace,
        server=bus.server,
        version=bus.server_version,
        clustered=bus.is_clustered,
        max_payload=bus.max_payload,
        replicas=settings.nats.replicas,
        anonymous=not any(getattr(bus.options, part) for part in CREDENTIALS),
    )
    gathering = _Gathering(bus, settings, facts)
    await asyncio.gather(
        gathering.ask("the server", gathering.servers),
        gathering.ask("JetStream", gathering.fitness),
        gathering.ask("the account", gathering.uses),
        gathering.ask("streams", gathering.streams),
    )
    if facts.streams and facts.lost is not None:
        await gathering.ask(MAPPINGS, gathering.stored)
    cards = f"KV_{bus.subjects.instances_bucket}"
    if facts.streams and cards in facts.streams and "JetStream" not in facts.unanswered:
        await gathering.ask("processes", gathering.report, REPORT_S)
        await gathering.ask("clocks", gathering.clocks)
    if facts.report is not None:
        await gathering.ranks()
        await gathering.ask("what engines serve", gathering.caches, SERVED_S)
        await gathering.ask("plans", gathering.plans)
        members = facts.report.instances
        facts.frontends = await open_frontends(member.card for member in members)
    if monitoring:
        try:
            facts.monitored = await monitored(monitoring)
        except MonitoringError as error:
            facts.monitoring_fault = str(error)
    facts.disks = disks_here(settings)
    return facts


def disks_here(settings: Settings) -> list[DiskSpace]:
    """The disks of this machine that the settings name, those that exist."""
    kvbm = settings.kvbm
    places = [("nats", settings.up.state_dir, "NATS refuses messages once its disk is full")]
    if kvbm.disk_path is not None:
        effect = "the block manager stores no more blocks on disk, and drops those that it has"
        places.append(("kvbm", kvbm.disk_path, effect))
    found = []
    for owner, path, effect in places:
        with suppress(OSError):
            space = shutil.disk_usage(path)
            found.append(DiskSpace(owner, str(path.absolute()), space.free, space.total, effect))
    return found


class _Gathering:
    def __init__(self, bus: Bus, settings: Settings, facts: Facts) -> None:
        self._bus = bus
        self._settings = settings
        self._facts = facts

    async def ask(
        self, question: str, answer: Callable[[], Awaitable[None]], seconds: float = ASK_S
    ) -> None:
        """Run `answer`; a failure becomes a fact."""
        facts = self._facts
        try:
            async with asyncio.timeout(seconds):
                await answer()
        except NotPermitted:
            facts.refused.append(question)
        except (TimeoutError, BusTimeout):
            facts.unanswered[question] = f"no answer within {seconds:g} s"
        except ServerUnfit as error:
            facts.unfit = str(error)
        except JetStreamUnavailable as error:
            if error.err_code not in (None, NOT_FOR_ACCOUNT):  # else `fitness` says it
                facts.unanswered[question] = _explained(error)
        except BusError as error:
            facts.unanswered[question] = _explained(error)

    async def servers(self) -> None:
        """The servers of the cluster, if this user may ask them; then the probes of subjects."""
        found = json.loads(await self._bus.ask(USER_INFO, ASK_S))
        told = found if isinstance(found, dict) else {}
        self._facts.servers = [_server(told, time.time())]
        permitted = told.get("data", {}).get("permissions", {})
        publish = permitted.get("publish", {}).get("allow") or [ALL_SERVERS]
        if ALL_SERVERS in publish or ">" in publish:
            await self._ping_servers()
        else:
            self._facts.refused.append("other servers")
        if any(permitted.get(kind) for kind in ("publish", "subscribe")):
            self._facts.refused.append(MAPPINGS)
        else:
            await self._probe()

    async def _ping_servers(self) -> None:
        replies: dict[str, NatsServer] = {}

        def receive(msg: RawMessage) -> None:
            if msg.data:
                server = _server(json.loads(msg.data), time.time())
                replies.setdefault(server.name, server)

        inbox = self._bus.new_inbox()
        subscription = await self._bus.subscribe_raw(inbox, receive)
        for _ in range(2):  # the other servers may not know the inbox at first
            self._bus.post(ALL_SERVERS, ONE_CONNECTION, inbox)
            await asyncio.sleep(SERVERS_S)
        await subscription.unsubscribe()
        if replies:
            self._facts.servers = [replies[name] for name in sorted(replies)]
            self._facts.all_servers = True

    async def _probe(self) -> None:
        """Send to subjects of the mesh to which no process listens, and see what arrives."""
        subjects = self._bus.subjects
        name = f"doctor-{secrets.token_hex(4)}"
        probed = {
            f"{subject.partition('.doctor.')[0]}.>": subject
            for subject in (
                *(subjects.work(name), subjects.out(name), subjects.ctl(name), subjects.ask(name)),
                *(subjects.dump(name), subjects.ping(name), subjects.kvbm(name)),
                *(subjects.returns(name), subjects.adapters(name)),
                *(subjects.router_at("doctor", name), subjects.index_at(name)),
            )
        }
        arrived = dict.fromkeys(probed.values(), 0)
        everything = asyncio.Event()

        def receive(msg: RawMessage) -> None:
            if msg.subject in arrived:
                arrived[msg.subject] += 1
                if all(count == PROBES for count in arrived.values()):
                    everything.set()

        subscriptions = [
            await self._bus.subscribe_raw(subject, receive) for subject in probed.values()
        ]
        await self._bus.flush()
        for subject in probed.values():
            for _ in range(PROBES):
                self._bus.post(subject, Raw(b""))
        with suppress(TimeoutError):
            async with asyncio.timeout(PROBE_S):
                await everything.wait()
        for subscription in subscriptions:
            await subscription.unsubscribe()
        self._facts.lost = [p for p, subject in probed.items() if arrived[subject] != PROBES]

    async def stored(self) -> None:
        """Find subjects of streams that do not lead there, by messages that each stream refuses."""
        bus, streams, altered = self._bus, self._facts.streams or {}, self._facts.altered
        subjects, name = bus.subjects, f"doctor-{secrets.token_hex(4)}"
        probed = {
            subjects.kv_stream: subjects.kv("doctor", name),
            subjects.route_stream: subjects.route(name),
            subjects.seq_stream: subjects.seq(name),
            subjects.scaling_stream: subjects.scaling(name),
        }
        for stream in streams:
            kind, _, bucket = stream.partition("_")
            if kind == "KV":
                probed[stream] = f"$KV.{bucket}.{name}"
            elif kind == "OBJ":
                probed[stream] = f"$O.{bucket}.C.{name}"  # as the chunks of an object
        known = [stream for stream in probed if stream in streams and stream not in altered]
        seen: dict[str, set[str]] = {}  # by the subject of a probe, those on which it arrived

        def receive(msg: RawMessage) -> None:
            if msg.headers and (sent := msg.headers.get(PROBE)):
                seen.setdefault(sent, set()).add(msg.subject)

        patterns = [each for name in known for each in streams[name].config.subjects or ()]
        watched = patterns if bus.js.is_own else []
        subscriptions = [await bus.subscribe_raw(pattern, receive) for pattern in watched]
        await bus.flush()
        arrived = await asyncio.gather(*(self._is_stored(each, probed[each]) for each in known))
        await bus.flush()  # what has arrived elsewhere is read before the server's answer
        for subscription in subscriptions:
            await subscription.unsubscribe()
        self._facts.astray = {
            stream: f"{probed[stream].partition('.doctor')[0]}.>"
            for stream, all_arrived in zip(known, arrived, strict=True)
            if not all_arrived
        }
        self._facts.moved = {
            probed[stream].replace(name, "NAME"): sorted(other)[0].replace(name, "NAME")
            for stream in known
            if stream not in self._facts.astray
            and (other := seen.get(probed[stream], set()) - {probed[stream]})
        }

    async def _is_stored(self, stream: str, subject: str) -> bool:
        """True if messages on the subject reach the stream, which refuses each for its number."""
        headers = {
            "Nats-Expected-Stream": stream,
            "Nats-Expected-Last-Sequence": NEVER,
            PROBE: subject,
        }
        for _ in range(PROBES):
            try:
                await self._bus.store(subject, EMPTY, PROBE_S, headers)
            except Conflict:
                continue
            except (JetStreamError, NoResponder):
                return False
            return False  # another stream has no such check
        return True

    async def fitness(self) -> None:
        """Raises ServerUnfit."""
        await check_server(self._bus)

    async def uses(self) -> None:
        account = await self._bus.js.account_info()
        self._facts.domain = account.domain or ""
        tiers: list[tuple[str, AccountInfo | Tier]] = [("", account)]
        for tier, use in tiers + list((account.tiers or {}).items()):
            of_tier = f" of {tier}" if tier else ""
            numbers = (
                ("max_memory", use.memory, use.limits.max_memory, True),
                ("max_storage", use.storage, use.limits.max_storage, True),
                ("max_streams", use.streams, use.limits.max_streams, False),
                ("max_consumers", use.consumers, use.limits.max_consumers, False),
            )
            self._facts.uses += [
                UsedLimit(f"{name}{of_tier}", used, limit, is_bytes)
                for name, used, limit, is_bytes in numbers
                if limit and limit > 0
            ]

    async def streams(self) -> None:
        """The streams of the mesh, and which are missing or do not answer."""
        bus, facts = self._bus, self._facts
        all_streams: dict[str, StreamInfo] = {}
        listed = False
        with suppress(TimeoutError, BusTimeout):  # a list waits for streams without a leader
            async with asyncio.timeout(ASK_S / 3):
                all_streams = {info.config.name or "": info for info in await bus.js.streams_info()}
                listed = True
        found = {name: info for name, info in all_streams.items() if bus.subjects.owns(name)}
        lacking = [name for name in needed_streams(bus) if name not in found]
        if listed and not found:
            matches = (re.fullmatch("kvm-(.+)-kv", name) for name in all_streams)
            facts.others = sorted(match[1] for match in matches if match is not None)
        results = await asyncio.gather(
            *(self._stream(name) for name in lacking), return_exceptions=True
        )
        for name, result in zip(lacking, results, strict=True):
            if isinstance(result, StreamInfo):
                found[name] = result
            elif isinstance(result, NotFound):
                facts.absent.append(name)
            elif isinstance(result, TimeoutError | BusTimeout):
                facts.leaderless[name] = "timed out"
            elif isinstance(result, BusError):
                facts.leaderless[name] = _explained(result)
            else:
                raise result
        if not listed and not found and not facts.absent:
            facts.leaderless.clear()
            raise TimeoutError
        facts.streams = found
        limits = stream_limits(self._settings.streams)
        facts.differences = differences(bus, limits, found.values())
        for name, info in sorted({**all_streams, **found}.items()):
            has = found_stream(info.config)
            faults = list(harm(has) if name in found else answered(has, facts.namespace))
            if faults:
                facts.altered[name] = faults

    async def _stream(self, name: str) -> StreamInfo:
        async with asyncio.timeout(ASK_S / 3):
            return await self._bus.js.stream_info(name)

    async def report(self) -> None:
        self._facts.report = await gather(self._bus, self._settings)

    async def ranks(self) -> None:
        """Checks of the index; they take as long as indexers take."""
        report = self._facts.report
        assert report is not None
        with suppress(NotPermitted):
            self._facts.ranks = await check_ranks(self._bus, [m.card for m in report.instances])

    async def caches(self) -> None:
        """The tokens that each worker has served lately and those expected of it; its KV events."""
        report, stream = self._facts.report, self._bus.subjects.route_stream
        info = (self._facts.streams or {}).get(stream)
        assert report is not None
        cards = [member.card for member in report.instances]
        last = info.state.last_seq if info is not None else 0
        since = time.time() - SERVED_SINCE_S
        served = (await read_served(self._bus, since, last)).since(since)
        events: dict[str, list[RankEvents]] = {}
        try:
            events = await events_of(self._bus, cards)
        except NotPermitted:
            self._facts.events_refused = True
        self._facts.caches = [
            WorkerCache(
                card.instance,
                served.get(card.instance, ServedTokens()),
                events.get(card.instance),
            )
            for card in cards
            if card.instance in served or card.instance in events
        ]

    async def plans(self) -> None:
        """The latest decision about each model, if a planner runs."""
        report = self._facts.report
        if report is not None and any(m.card.role is Role.PLANNER for m in report.instances):
            self._facts.plans = await read_decisions(self._bus, None, None)

    async def clocks(self) -> None:
        """The times in the last messages of processes, beside when the server stored them."""
        report = self._facts.report
        cards = [member.card for member in report.instances] if report is not None else []
        workers = [c for c in cards if c.role is Role.WORKER and c.model is not None][:MOST_CLOCKS]
        found = await asyncio.gather(*map(self._worker_clock, workers))
        self._facts.clocks = [clock for clock in found if clock is not None]
        self._facts.clocks += await self._route_clocks()

    async def _worker_clock(self, card: Instance) -> Clock | None:
        assert card.model is not None
        subjects = self._bus.subjects
        subject = subjects.kv(card.model.name, card.name)
        try:
            last = await self._bus.js.get_msg(subjects.kv_stream, subject=subject)
            batch = _batches.decode(last.data or b"")
        except (NotFound, msgspec.MsgspecError):
            return None
        if batch.instance != card.instance or last.time is None:
            return None
        return Clock(card.instance, batch.time - last.time.timestamp())

    async def _route_clocks(self) -> list[Clock]:
        """Those of routers, and one of all frontends; of several messages the latest time."""
        stream = self._bus.subjects.route_stream
        info = (self._facts.streams or {}).get(stream)
        last = info.state.last_seq if info is not None else 0
        ahead: dict[str, float] = {}
        for seq in range(max(last - RECENT, 0) + 1, last + 1):
            try:
                message = await self._bus.js.get_msg(stream, seq)
            except NotFound:
                continue
            if message.time is None:
                continue
            for data in unpacked(message.data or b""):
                try:
                    event = _routes.decode(data)
                except msgspec.MsgspecError:
                    continue
                name = event.router if isinstance(event, Decision) else "a frontend"
                skew = event.time - message.time.timestamp()
                ahead[name] = max(skew, ahead.get(name, skew))
        return [Clock(name, skew) for name, skew in ahead.items()]


def _explained(error: BusError) -> str:
    """The server's description of a refusal, without the codes that surround it."""
    code = error.err_code if isinstance(error, JetStreamError) else None
    if code == NO_LEADER:
        return "JetStream has no leader: fewer than half of the cluster's servers are connected"
    description = re.search("description='(.+)'", cause(error))
    return f"{description[1]} (error {code})" if description is not None else cause(error)


def _server(reply: dict[str, Any], now: float) -> NatsServer:
    """A server, from its reply of this moment to a question of the account."""
    told = reply.get("server", {})
    return NatsServer(
        name=told.get("name", "?"),
        version=told.get("ver", ""),
        ahead_s=_unix(told.get("time"), now) - now,
        long_acks=told.get("feature_flags", {}).get("js_ack_fc_v2"),
        connections=reply.get("data", {}).get("total", 0),
    )


def _unix(text: str | None, otherwise: float) -> float:
    """The time of an RFC 3339 text with nanoseconds."""
    try:
        return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", text or "")).timestamp()
    except ValueError:
        return otherwise
