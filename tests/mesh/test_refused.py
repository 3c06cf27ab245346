"""Subjects that a NATS server refuses: a process is not ready, says so, and heals by itself."""

import asyncio
import logging
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from support.mesh import Mesh
from support.nats import free_port
from support.restricted import RestrictedServer
from support.wait import PATIENCE_S, eventually
from support.weights import Agents, make_weights

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.connection.refused.permission_probe import refused_subjects
from kvmesh.bus.discovery.directory import Directory, routable
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.errors import NotPermitted
from kvmesh.bus.faults import REFUSED, STALLED
from kvmesh.bus.messages import Instance, MessageDecoder, Ping, Role
from kvmesh.bus.permissions import USER_INFO, Permissions, User, covers, permissions
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams, mesh_streams
from kvmesh.bus.streams.reader import Start, StreamReader
from kvmesh.weights.frames import SubjectsRefused

pytestmark = pytest.mark.asyncio(loop_scope="module")
PINGS = MessageDecoder(Ping)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestrictedServer]:
    server = RestrictedServer(tmp_path_factory.mktemp("restricted"))
    server.forbid()
    server.start()
    yield server
    server.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def own(server: RestrictedServer, options: BusOptions) -> AsyncIterator[Bus]:
    server.forbid()
    bus = await Bus.connect(server.options(options), "own")
    yield bus
    await bus.close()


def health(port: int) -> int:
    """The HTTP status of a process's /health; 0 if it does not listen."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S).close()
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
    return 200


def refused(bus: Bus, *words: str) -> bool:
    text = " ".join(bus.faults.texts(REFUSED))
    return bool(text) and all(word in text for word in words)


async def healed(bus: Bus) -> None:
    await eventually(lambda: not bus.faults.texts(REFUSED), what="the refusals are over")


def named(bus: Bus) -> Permissions:
    """The subjects that the faults name."""
    texts = " ".join(bus.faults.texts(REFUSED))
    found = re.findall(r"(publish on|subscribe to) (\S+)", texts)
    publish = tuple(subject for act, subject in found if act == "publish on")
    return Permissions(publish, tuple(subject for act, subject in found if act != "publish on"))


def without(table: Permissions, lost: str) -> Permissions:
    publish = tuple(each for each in table.publish if each != lost)
    return Permissions(publish, tuple(each for each in table.subscribe if each != lost))


SERVICES = sorted({*User} - {User.OPERATOR, User.OBSERVER, User.DASHBOARD})


@pytest.mark.parametrize("role", SERVICES)
async def test_each_subject_of_a_role_that_is_lost_is_named_before_it_is_used(
    server: RestrictedServer, options: BusOptions, role: User
) -> None:
    mine = replace(server.options(options), inbox_prefix="_INBOX.mine")
    server.forbid()
    bus = await Bus.connect(mine, "own")
    try:
        table = bus.needs(role, "name-1")
        bus.refusals.need(table.publish)
        inbox = "_INBOX.mine.>"

        def permit(table: Permissions) -> None:
            server.permit(replace(table, publish=(*table.publish, USER_INFO)))

        for lost in table.publish:
            others = replace(table, publish=without(table, lost).publish)
            permit(others)
            assert await bus.refusals.compare(table)
            lacks = () if any(covers(other, lost) for other in others.publish) else (lost,)
            assert named(bus) == Permissions(lacks, ())
        for lost in table.subscribe:
            if lost != inbox:  # without it, a process cannot ask
                permit(replace(table, subscribe=without(table, lost).subscribe))
                assert await bus.refusals.compare(table)
                assert named(bus) == Permissions((), (lost,))
        permit(without(table, inbox))

        async def found() -> bool:
            await bus.refusals.compare(table)
            return refused(bus, inbox)

        await eventually(found)
        permit(table)
        await healed(bus)
        server.permit(table)
        assert not await bus.refusals.compare(table), "it may not ask, as under an earlier secure"
        assert not bus.faults.texts(REFUSED)
    finally:
        await bus.close()


@pytest.mark.parametrize("queue", ["", "group"])
async def test_a_subscription_that_a_reload_refuses_is_made_again(
    server: RestrictedServer, own: Bus, queue: str
) -> None:
    subject = own.subjects.ping("Upper-1")
    got: list[Ping] = []
    await own.serve(subject, PINGS, lambda message, reply: got.append(message), queue)
    await own.flush()
    server.forbid(subscribe=[subject])
    await eventually(lambda: refused(own, "subscribe to", subject))
    server.forbid()
    await healed(own)
    own.post(subject, Ping())
    await eventually(lambda: got)


async def test_a_subscription_that_ends_is_refused_no_longer(
    server: RestrictedServer, own: Bus
) -> None:
    subject = own.subjects.ping("w-1")
    server.forbid(subscribe=[subject])
    subscription = await own.subscribe(subject, PINGS, lambda _: None)
    await eventually(lambda: refused(own, subject))
    await subscription.unsubscribe()
    await healed(own)


async def test_subscriptions_made_at_a_reconnect_are_refused_and_heal(
    server: RestrictedServer, own: Bus
) -> None:
    subject = own.subjects.ping("w-1")
    await own.subscribe(subject, PINGS, lambda _: None)
    await own.flush()
    server.forbid(subscribe=[subject])
    server.restart()
    await eventually(lambda: refused(own, subject))
    server.forbid()
    server.restart()
    await healed(own)


async def test_a_refused_publish_heals_without_a_message(
    server: RestrictedServer, own: Bus
) -> None:
    """The bus tries it by messages that reach nobody."""
    subject = own.subjects.ping("Upper-1")
    got: list[object] = []
    every = subject.replace("Upper.1", "*.*")
    own.refusals.need([every])
    await own.subscribe_raw(every, got.append)
    server.forbid(publish=[subject])

    async def posted() -> bool:
        own.post(subject, Ping())
        await own.flush()
        return refused(own, "publish on")

    await eventually(posted)
    got.clear()
    server.forbid()
    await healed(own)
    assert got == []
    own.post("other.subject", Ping())
    own.post(subject, Ping())
    await eventually(lambda: got)


async def test_a_subject_that_the_process_does_not_need_is_no_fault(
    server: RestrictedServer, own: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer may name any subject for a reply."""
    own.refusals.need(["kvm.needed"])
    server.forbid(publish=["kvm.other"])

    async def said() -> bool:
        own.post("kvm.other", Ping())
        await own.flush()
        return "violation for publish to" in caplog.text

    with caplog.at_level(logging.WARNING):
        await eventually(said)
    assert own.faults.texts(REFUSED) == []


async def test_a_refused_inbox_names_the_setting_and_requests_fail_at_once(
    server: RestrictedServer, options: BusOptions
) -> None:
    mine = replace(server.options(options), inbox_prefix="_INBOX_mine")
    server.forbid(subscribe=["_INBOX_mine.>"])
    bus = await Bus.connect(mine, "own")
    with pytest.raises(NotPermitted, match=r"set nats.inbox_prefix .* _INBOX_mine"):
        await bus.request(bus.subjects.ping("w-1"), Ping(), PINGS, 60.0)
    with pytest.raises(NotPermitted, match=r"nats\.inbox_prefix"):
        await bus.js.account_info()
    server.forbid()
    await healed(bus)
    assert (await bus.js.account_info()).memory >= 0
    await bus.close()


async def test_the_card_shows_it_until_it_heals(
    server: RestrictedServer, own: Bus, limits: StreamLimits
) -> None:
    await ensure_streams(own, limits)
    subject = own.subjects.ping("w-1")
    card = Instance(instance="w-1", role=Role.WORKER, name="w", version="0", started=0.0)
    lease = Lease(own, card, limits)
    await lease.open()
    other = await Bus.connect(own.options, "other")
    directory = Directory(other, limits)
    await directory.open()
    await own.subscribe(subject, PINGS, lambda _: None)
    await own.flush()
    server.forbid(subscribe=[subject])
    await eventually(
        lambda: any(subject in text for c in directory.instances for text in c.warnings)
    )
    assert not any(map(routable, directory.instances))
    server.forbid()
    await eventually(lambda: any(map(routable, directory.instances)))
    assert [c.warnings for c in directory.instances] == [[]]
    await directory.close()
    await lease.close()
    await other.close()


async def test_the_card_shows_a_refused_inbox_which_leaves_it_unacknowledged(
    server: RestrictedServer, own: Bus, limits: StreamLimits
) -> None:
    await ensure_streams(own, limits)
    mine = await Bus.connect(replace(own.options, inbox_prefix="_INBOX_mine"), "mine")
    card = Instance(instance="w-1", role=Role.WORKER, name="w", version="0", started=0.0)
    lease = Lease(mine, card, limits)
    await lease.open()
    directory = Directory(own, limits)
    await directory.open()
    server.forbid(subscribe=["_INBOX_mine.>"])
    await eventually(lambda: any("_INBOX_mine" in str(c.warnings) for c in directory.instances))
    assert not any(map(routable, directory.instances))
    server.forbid()
    await eventually(lambda: any(map(routable, directory.instances)))
    await directory.close()
    await lease.close()
    await mine.close()


async def test_a_consumer_that_stalls_is_replaced_and_reported(
    server: RestrictedServer, own: Bus, limits: StreamLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without flow control the server delivers the beginning, then heartbeats alone."""
    monkeypatch.setattr("kvmesh.bus.streams.reader.STALLED_S", 1.0)
    await ensure_streams(own, limits)
    stream = own.subjects.kv_stream
    own.refusals.need(["$JS.FC.>"])
    for _ in range(400):
        await own.store(own.subjects.kv("m", "w"), bytes(20 << 10), PATIENCE_S)
    server.forbid(publish=["$JS.FC.>"])
    read: list[int] = []
    reader = StreamReader(
        own, stream, own.subjects.kv_all, lambda message: read.append(message.seq), Start()
    )
    await reader.open()
    try:
        await eventually(lambda: own.faults.texts(STALLED))
        assert f"stream {stream} is read slowly or not at all" in own.faults.texts(STALLED)[0]
        await eventually(lambda: refused(own, "publish on $JS.FC.>"))
        await eventually(lambda: own.counts.reader_restarts[stream])
        assert len(read) < 400
        server.forbid()
        await eventually(reader.caught_up.is_set)
        assert read == list(range(1, 401))
        assert own.faults.texts(STALLED) == []
        await healed(own)
    finally:
        await reader.close()


async def test_a_weights_process_tells_its_worker_what_is_refused(
    server: RestrictedServer,
    own: Bus,
    limits: StreamLimits,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    await ensure_streams(own, limits)
    server.forbid(subscribe=[own.subjects.weights("*").replace("=2A", "*")])
    agents = Agents(own, limits, tmp_path)
    env = {
        "KVMESH_NATS_URL": server.url,
        "KVMESH_NATS_NAMESPACE": own.options.namespace,
        **server.credentials,
    }
    agent = await agents.start("worker-0", make_weights(tmp_path / "model"), env=env)
    try:
        await eventually(lambda: agent.answer)
        agent.process.engine_runs()
        told = await eventually(lambda: agent.event(SubjectsRefused))
        assert told is not None
        own.refusals.add("weights", told.texts)
        assert refused(own, "subscribe to", f"kvm.{own.options.namespace}.weights.")
        server.forbid()
        await eventually(lambda: agent.event(SubjectsRefused) == SubjectsRefused({}))
    finally:
        await agents.close()


# the mesh


async def test_a_mesh_that_is_deaf_is_not_ready_and_heals(
    server: RestrictedServer, tmp_path: Path
) -> None:
    """Each role, from its start: `doctor` names the subject, and /health is 503."""
    server.forbid()
    port = free_port()
    env = {"KVMESH_MOCK_SPEEDUP": "20", **server.credentials}
    mesh = Mesh(server.url, tmp_path, env)
    prefix = f"kvm.{mesh.namespace}"
    deaf = [f"{prefix}.work.>", f"{prefix}.router.>", f"{prefix}.index.>", f"{prefix}.sessions"]
    server.forbid(subscribe=deaf)
    try:
        mesh.start("indexer", "indexer-0")
        mesh.start("router", "router-0", KVMESH_ROUTER_METRICS_PORT=str(port))
        mesh.start("worker", "worker-0")
        mesh.start("frontend", "frontend-0")

        async def found() -> bool:
            done = await mesh.command("doctor")
            kinds = ("work.worker-0", "router.kvmesh-demo", "index.", "sessions")
            named = all(f"subscribe to {prefix}.{kind}" in done.stdout for kind in kinds)
            return done.returncode == 1 and named

        await eventually(found, what="doctor names each refused subject")
        for at in (port, mesh.worker_ports["worker-0"], mesh.port):
            assert await asyncio.to_thread(health, at) == 503
        server.forbid()
        await mesh.ready()

        async def content() -> bool:
            return (await mesh.command("doctor")).returncode == 0

        await eventually(content, what="doctor finds no fault")
        assert "Traceback" not in mesh.logs()
    finally:
        mesh.stop()


async def test_a_process_that_cannot_start_tells_what_is_refused_and_then_starts(
    server: RestrictedServer, tmp_path: Path
) -> None:
    server.forbid()
    port = free_port()
    mesh = Mesh(server.url, tmp_path, server.credentials)
    needed = f"$JS.API.STREAM.INFO.kvm-{mesh.namespace}-kv"

    async def doctor() -> str:
        return (await mesh.command("doctor")).stdout

    def ready() -> bool:
        return health(port) == 200

    async def told() -> bool:
        found = re.search(rf"router-0\S* .*publish on {re.escape(needed)}", await doctor())
        return found is not None

    try:
        mesh.start("frontend", "frontend-0")
        await eventually(lambda: "listening" in mesh.logs())  # the streams exist
        server.forbid(publish=[needed])
        mesh.start("router", "router-0", KVMESH_ROUTER_METRICS_PORT=str(port))
        await eventually(told)
        assert await asyncio.to_thread(health, port) == 503
        server.forbid()
        await eventually(lambda: asyncio.to_thread(ready))
    finally:
        mesh.stop()


# `kvmesh doctor --as`


async def test_the_probe_finds_what_is_refused_and_reaches_nobody(
    server: RestrictedServer, own: Bus, limits: StreamLimits
) -> None:
    await ensure_streams(own, limits)
    subjects = own.subjects
    listener = await Bus.connect(own.options, "listener")
    heard: list[str] = []
    await listener.subscribe_raw(">", lambda message: heard.append(message.subject))
    await listener.flush()
    stored = {s.config.name: s.state.last_seq for s in await mesh_streams(own)}
    await listener.flush()
    heard.clear()
    for role in User:
        wanted = permissions(subjects, role, role)
        found = await refused_subjects(own.client, own.refusals, wanted)
        assert (role, found) == (role, Permissions((), ()))
    await listener.flush()
    # the server's own events are of former tests
    assert [subject for subject in heard if not subject.startswith("$JS.EVENT.")] == []
    assert stored == {s.config.name: s.state.last_seq for s in await mesh_streams(own)}
    await listener.close()
    wanted = permissions(subjects, User.FRONTEND, "frontend")
    instances = f"$KV.{subjects.instances_bucket}.worker.*.*"
    server.forbid(subscribe=[subjects.limits], publish=[subjects.sessions, instances])

    async def named() -> bool:
        found = await refused_subjects(own.client, own.refusals, wanted)
        return found == Permissions((instances, subjects.sessions), (subjects.limits,))

    await eventually(named)
    assert own.faults.texts(REFUSED) == []
