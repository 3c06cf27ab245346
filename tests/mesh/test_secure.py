"""A mesh under `kvmesh secure`: every role can do its work, and nothing else."""

import asyncio
import gc
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from msgspec import Raw
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig
from nats.js.errors import NotFoundError
from openai import AsyncOpenAI
from support import forks
from support.mesh import Mesh
from support.nats import NEWER_REPLIES, NatsServer, understands
from support.places.on_bus import BusPlace
from support.planners import Planners
from support.secured import SecuredServer, secure
from support.wait import PATIENCE_S, eventually
from support.weights import Agents, make_weights

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.connection.direct_client import PermissionDenied
from kvmesh.bus.errors import BusError, BusUnavailable, NotPermitted
from kvmesh.bus.messages import ControlReply, Dump, MessageDecoder, Resend, encode
from kvmesh.bus.permissions import User
from kvmesh.bus.storage.buckets import keys_bucket, read_bucket
from kvmesh.bus.streams.configuration import StreamLimits, StreamMissing, ensure_streams
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.bus.subjects import Subjects
from kvmesh.cli.doctor.permission_checks import check_permissions
from kvmesh.dashboard.mesh import Mesh as DashboardMesh
from kvmesh.demo import model_dir
from kvmesh.frontend.apis.base import StoredTurn
from kvmesh.frontend.auth.accounts import Key
from kvmesh.frontend.auth.tenant_secret import tenant_secret
from kvmesh.frontend.http.responses.store import ResponseNotFound, ResponseStore
from kvmesh.settings import Settings, load
from kvmesh.weights.frames import WeightsTaken
from kvmesh.weights.models.catalog import find_model
from kvmesh.weights.models.former import remove_former_manifests
from kvmesh.weights.models.reference import parse_reference
from kvmesh.weights.process.search import offered

CONTROL_REPLY = MessageDecoder(ControlReply)

WORKERS = ("worker-0", "worker-1")
SUBJECTS = Subjects("kvmesh")
pytestmark = pytest.mark.asyncio(loop_scope="module")


SERVERS = {"nkeys": ((), ""), "JWTs and newer replies": (("--jwt",), NEWER_REPLIES)}


@pytest.fixture(scope="module", params=list(SERVERS.values()), ids=list(SERVERS))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecuredServer]:
    folder = tmp_path_factory.mktemp("secured")
    mode, settings = request.param
    server = SecuredServer(folder, "--workers", ",".join(WORKERS), "--kvbms", "kv-0", *mode)
    server.settings = settings if understands(settings) else ""
    server.start()
    yield server
    server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    server: SecuredServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    """Every service as its own user; the frontend, which creates the streams, starts last."""
    folder = tmp_path_factory.mktemp("mesh")
    mesh = Mesh(server.url, folder, {"KVMESH_MOCK_SPEEDUP": "20"}, namespace="kvmesh")
    node = {"KVMESH_KVBM_DIRECTORY": str(folder / "node"), "KVMESH_KVBM_PEERS": "true"}
    try:
        mesh.start("indexer", "indexer-0", **server.env("indexer"))
        mesh.start("router", "router-0", **server.env("router"))
        mesh.start("kvbm", "kv-0", **server.env("kvbm.kv-0"), **node)
        for name in WORKERS:
            mesh.start("worker", name, **server.env(f"worker.{name}"))
        mesh.start("frontend", "frontend-0", **server.env("frontend"))
        await mesh.ready(60)
        yield mesh
    finally:
        mesh.stop()


async def complete(mesh: Mesh, prompt: str, tokens: int, session: str = "") -> tuple[int, int]:
    """Completion tokens and cached tokens of one streamed response."""
    async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        chunks = await client.chat.completions.create(
            model="kvmesh-demo",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"x-kvmesh-session-id": session} if session else {},
            extra_body={"nvext": {"ignore_eos": True}},
        )
        last = [chunk async for chunk in chunks][-1]
    assert last.usage is not None
    details = last.usage.prompt_tokens_details
    return last.usage.completion_tokens, (details and details.cached_tokens) or 0


def run(server: SecuredServer, user: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forks.run(arguments, {**os.environ, **server.env(user)}, PATIENCE_S)


async def test_the_whole_mesh_serves_without_a_refusal(mesh: Mesh, server: SecuredServer) -> None:
    prompt = "Explain this in detail. " * 40
    assert await complete(mesh, prompt, 40) == (40, 0)

    async def cached() -> bool:
        count, found = await complete(mesh, prompt, 20)
        return count == 20 and found > 0

    await eventually(cached, what="the index knows the prompt")
    mesh.kill("worker-0")
    assert (await complete(mesh, prompt, 20))[0] == 20
    mesh.restart("worker-0")
    await eventually(lambda: "serving" in mesh.logs().rpartition("--- worker-0")[2])
    assert "violation" not in mesh.logs().lower()
    assert "does not permit" not in mesh.logs()
    for name in ("nkey.seed", "key.pem"):
        for user in server.users:
            assert (server.folder / user / name).read_text().strip() not in mesh.logs()


async def test_commands_work_within_the_permissions_of_their_user(
    mesh: Mesh, server: SecuredServer
) -> None:

    async def seen() -> bool:
        status = await asyncio.to_thread(run, server, "observer", "status")
        assert status.returncode == 0, status.stderr
        return all(name in status.stdout for name in (*WORKERS, "router-0", "kv-0"))

    await eventually(seen)
    tail = ("tail", "kv", "route", "seq", "--since", "10m", "--no-follow")

    async def tailed() -> bool:
        done = await asyncio.to_thread(run, server, "observer", *tail)
        return all(f" {kind} " in done.stdout for kind in ("kv", "route", "seq"))

    await eventually(tailed)
    busy = ("model", "busy", "kvmesh-demo")
    changed = await asyncio.to_thread(run, server, "operator", *busy, "--blocks", "9")
    assert "blocks 9" in changed.stdout, changed.stderr
    await asyncio.to_thread(run, server, "operator", *busy, "--reset")
    refused = await asyncio.to_thread(run, server, "observer", *busy, "--blocks", "1")
    assert refused.returncode == 1
    assert "does not permit" in refused.stderr
    assert "such as operator" in refused.stderr


async def test_a_worker_parks_and_an_operator_promotes_it(
    mesh: Mesh, server: SecuredServer
) -> None:
    mesh.kill("worker-1", signal.SIGTERM)
    parked = {"KVMESH_WORKER_PARKED": "true"}
    mesh.start("worker", "worker-1", **server.env("worker.worker-1"), **parked)

    async def promoted() -> bool:
        wait = ("fleet", "promote", "worker-1", "--wait", "30")
        done = await asyncio.to_thread(run, server, "operator", *wait)
        return done.returncode == 0 and "serves after" in done.stdout

    await eventually(promoted)
    refused = await asyncio.to_thread(run, server, "observer", "fleet", "promote", "worker-1")
    assert refused.returncode == 1
    assert "violation" not in mesh.logs().lower()


async def test_a_doctor_compares_the_index_for_an_operator_only(
    mesh: Mesh, server: SecuredServer
) -> None:
    async def compared() -> bool:
        done = await asyncio.to_thread(run, server, "operator", "doctor")
        return "equal to the workers in 2 comparisons of ranks" in done.stdout

    await eventually(compared, what="both ranks are compared")
    seen = await asyncio.to_thread(run, server, "observer", "doctor")
    assert "not compared: only an operator may ask indexers" in seen.stdout
    status = await asyncio.to_thread(run, server, "observer", "status")
    assert (status.returncode, status.stderr) == (0, "")
    used = await asyncio.to_thread(run, server, "observer", "usage")
    assert used.returncode == 0
    assert "total" in used.stdout
    top = await asyncio.to_thread(run, server, "observer", "top", "--once", "--view", "fleet")
    assert (top.returncode, top.stderr) == (0, "")
    assert all(name in top.stdout for name in (*WORKERS, "router-0", "kv-0"))


async def test_an_operator_alone_asks_what_routers_have_learned(
    mesh: Mesh, server: SecuredServer
) -> None:
    await complete(mesh, "Who comes back, and when? " * 20, 4, "returning")

    async def shown(user: str) -> str:
        done = await asyncio.to_thread(run, server, user, "explain", "--session", "returning")
        return done.stdout if done.returncode == 0 else ""

    async def forecast() -> bool:
        return "in 1 min" in await shown("operator")

    await eventually(forecast, what="an operator sees forecasts")
    seen = await shown("observer")
    assert "then waits for" in seen
    assert "in 1 min" in seen  # decisions carry what was expected of a turn
    learned = await asyncio.to_thread(run, server, "operator", "plan", "learned", "returns")
    assert (learned.returncode, learned.stderr) == (0, "")
    assert "anything" in learned.stdout
    refused = await asyncio.to_thread(run, server, "observer", "plan", "learned", "returns")
    assert (refused.returncode, "does not permit" in refused.stderr) == (1, True)


async def test_a_dashboard_asks_the_index_and_reads_pins_as_its_own_user_only(
    mesh: Mesh, server: SecuredServer
) -> None:
    await complete(mesh, "Describe the mesh to someone who watches it. " * 20, 4)
    for user, fault in (("dashboard", ""), ("observer", "do not permit publishing on")):
        async with server.connected(user) as bus:
            seen = DashboardMesh(bus, Settings())
            async with seen.following():
                await eventually(partial(prefixes_are_known, seen, fault), what=user)
                await eventually(partial(pins_are_known, seen, fault), what=user)
            assert bus.client.last_error is None or fault


def prefixes_are_known(seen: DashboardMesh, fault: str) -> bool:
    polled = seen.prefixes.of("kvmesh-demo")
    snapshot = polled.poll() if polled is not None else None
    if snapshot is None or not snapshot.tree.roots:
        return False
    held = [holders.held for holders in snapshot.holders.values()]
    return fault in snapshot.fault and (None in held) == bool(fault)


def pins_are_known(seen: DashboardMesh, fault: str) -> bool:
    known = seen.pins.poll() is not None
    return known if not fault else fault in seen.pins.fault


async def test_a_reader_gets_more_than_the_server_sends_unanswered(
    server: SecuredServer, mesh: Mesh
) -> None:
    """Beyond some hundred kilobytes the server waits for the reader's flow control."""
    stream, subject = f"OBJ_{SUBJECTS.model_bucket}", f"$O.{SUBJECTS.model_bucket}.C.flood"
    read = 0

    def count(_: StreamMessage) -> None:
        nonlocal read
        read += 1

    async with server.connected(W0) as bus:
        for _ in range(400):
            await bus.store(subject, bytes(20 << 10), 30.0)
        reader = StreamReader(bus, stream, subject, count, Start())
        await reader.open()
        await asyncio.wait_for(reader.caught_up.wait(), PATIENCE_S)
        assert (read, bus.counts.reader_restarts[stream]) == (400, 0)
        await reader.close()
        assert bus.client.last_error is None
        await bus.js.purge_stream(stream, subject=subject)


async def test_a_planner_works_within_its_permissions(mesh: Mesh, server: SecuredServer) -> None:
    asked = ("plan", "set", "pools=east:min=2,max=6")
    async with server.connected("operator") as bus:
        place = BusPlace(bus)
        await place.start()
        planners = Planners(mesh, bus)
        await planners.start(
            **server.env("planner"),
            KVMESH_PLANNER_POOLS="east:min=0,max=6",
            KVMESH_PLANNER_ZERO_AFTER_S="3600",
        )

        async def listed() -> bool:
            return bool(await read_bucket(bus, SUBJECTS.plan_bucket, "idle.*"))

        async def removed() -> bool:
            return not await listed()

        await eventually(listed)
        done = await asyncio.to_thread(run, server, "operator", *asked)
        assert done.returncode == 0, done.stderr
        await eventually(removed)
        await eventually(lambda: place.report.pools["east"] == 2)
        refused = await asyncio.to_thread(run, server, "observer", *asked)
        assert (refused.returncode, "does not permit" in refused.stderr) == (1, True)
        for command in (("plan",), ("tail", "scaling", "--since", "1h", "--no-follow")):
            shown = await asyncio.to_thread(run, server, "observer", *command)
            assert (shown.returncode, "east" in shown.stdout) == (0, True), shown.stderr
        assert planners.warnings() == ""
        mesh.kill("planner-0", signal.SIGTERM)
        await place.close()
    log = planners.log()
    assert "violation" not in log.lower()
    assert "permit" not in log
    assert "Traceback" not in log


async def test_only_permitted_users_create_missing_streams(
    server: SecuredServer, mesh: Mesh
) -> None:
    async with server.connected("operator") as operator, server.connected("indexer") as indexer:
        bucket = f"OBJ_{SUBJECTS.model_bucket}"
        await operator.js.context.delete_stream(bucket)
        with pytest.raises(StreamMissing, match="only frontends and operators may create it"):
            await ensure_streams(indexer)
        async with server.connected("frontend") as frontend:
            await ensure_streams(frontend)
        await ensure_streams(indexer)
        assert (await operator.js.stream_info(bucket)).config.name == bucket


# Permissions of each user, by subject. A listener subscribes with the given `>` and `*`.

W0, W1, KV = "worker.worker-0", "worker.worker-1", "kvbm.kv-0"
EVERYBODY = {"frontend", "router", "indexer", W0, W1, KV, "planner"}
EVERYBODY |= {"operator", "observer", "dashboard"}
LOOKS = {"operator", "observer", "dashboard"}
SENDS: dict[str, set[str]] = {
    SUBJECTS.kv("m", "worker-0"): {W0},
    SUBJECTS.kv("m", "kv-0"): {KV},
    SUBJECTS.route("m"): {"frontend", "router"},
    SUBJECTS.seq("m"): {"frontend", "router"},
    SUBJECTS.index("m"): {"router", "indexer", KV, "dashboard"},
    SUBJECTS.index_at("indexer-0-1f"): {"router", "indexer", "dashboard"},
    SUBJECTS.index_part_at("indexer-0-1f"): {"indexer"},
    SUBJECTS.router("m"): {"frontend"},
    SUBJECTS.router_at("m", "router-0-1f"): {"frontend"},
    SUBJECTS.sessions: {"frontend"},
    SUBJECTS.limits: {"frontend"},
    SUBJECTS.wake("m"): {"frontend"},
    SUBJECTS.tool("s"): {"frontend"},
    SUBJECTS.ping("worker-0-1f"): {"frontend", W0, W1},
    SUBJECTS.work("worker-0-1f"): {"frontend"},
    SUBJECTS.out("frontend-0-1f"): {W0, W1},
    SUBJECTS.ctl("worker-0-1f"): {"frontend", "planner", "operator"},
    SUBJECTS.returns("worker-0-1f"): {"router"},
    SUBJECTS.returns("kv-0-1f"): {"router"},
    SUBJECTS.ask("indexer-0-1f"): {"operator"},
    SUBJECTS.ask("frontend-0-1f"): {"operator"},
    SUBJECTS.dump("worker-0-1f"): {"indexer"},
    SUBJECTS.kvbm("kv-0-1f"): {W0, W1, KV},
    SUBJECTS.computing("m"): {KV},
    SUBJECTS.weights("d"): {W0, W1, "operator"},
    SUBJECTS.load("worker-0-1f"): {W0},
    SUBJECTS.starting("worker-0-1f"): {W0},
    SUBJECTS.scaling("m"): {"planner"},
    "_INBOX.frontend.x": {"frontend", "router", "indexer", W0, W1, KV, "planner"},
    f"$KV.{SUBJECTS.instances_bucket}.worker.worker-0.1f": {"frontend", W0, "operator"},
    f"$KV.{SUBJECTS.instances_bucket}.parked.worker-0.1f": {"frontend", W0, "operator"},
    f"$KV.{SUBJECTS.instances_bucket}.router.r.1f": {"router", "operator"},
    f"$KV.{SUBJECTS.instances_bucket}.planner.p.1f": {"planner", "operator"},
    f"$KV.{SUBJECTS.plan_bucket}.desired": {"planner", "operator"},
    f"$KV.{SUBJECTS.keys_bucket}.a": {"operator"},
    f"$KV.{SUBJECTS.pins_bucket}.a": {"frontend", "operator"},
    f"$KV.{SUBJECTS.secrets_bucket}.tenants": {"frontend", "operator"},
    f"$KV.{SUBJECTS.responses_bucket}.a": {"frontend", "operator"},
    f"$KV.{SUBJECTS.answers_bucket}.a": {"frontend", "operator"},
    f"$KV.{SUBJECTS.router_bucket}.{SUBJECTS.busy_key('m')}": {"frontend", "operator"},
    f"$KV.{SUBJECTS.router_bucket}.learned": {"operator"},
    f"$KV.{SUBJECTS.kvbm_bucket}.identity": {KV, "operator"},
    f"$KV.{SUBJECTS.weights_bucket}.manifests": {W0, W1, "operator"},
    f"$O.{SUBJECTS.index_bucket}.C.x": {"indexer", "operator"},
    f"$O.{SUBJECTS.model_bucket}.C.x": {W0, W1, "operator"},
    f"$O.{SUBJECTS.model_store_bucket}.C.x": {"operator"},
    f"$O.{SUBJECTS.files_bucket}.C.x": {"frontend", "operator"},
    f"$KV.{SUBJECTS.batches_bucket}.a": {"frontend", "operator"},
    f"$KV.{SUBJECTS.catalog_bucket}.m.d": {"operator"},
    "other.subject": set(),
    "kvm.other.work.worker-0.1f": set(),
}
HEARS: dict[str, set[str]] = {
    SUBJECTS.kv_all: LOOKS,
    SUBJECTS.route_all: LOOKS,
    SUBJECTS.seq_all: {"router", *LOOKS},
    SUBJECTS.scaling_all: LOOKS,
    SUBJECTS.load_all: {"router", "indexer", "planner", *LOOKS},
    SUBJECTS.starting_all: {"planner", *LOOKS},
    SUBJECTS.wake_all: {"planner", *LOOKS},
    SUBJECTS.tool_all: {"router", *LOOKS},
    SUBJECTS.index_all: {"indexer"},
    SUBJECTS.index_at("indexer-0-1f"): {"indexer"},
    SUBJECTS.index_part_at("indexer-0-1f"): {"indexer"},
    SUBJECTS.router("m"): {"router"},
    SUBJECTS.router_at("m", "router-0-1f"): {"router"},
    SUBJECTS.ping("worker-0-1f"): {"router", W0, "planner"},
    SUBJECTS.sessions: {"frontend"},
    SUBJECTS.limits: {"frontend"},
    SUBJECTS.work("worker-0-1f"): {W0},
    SUBJECTS.work("worker-1-1f"): {W1},
    "kvm.kvmesh.work.>": set(),
    SUBJECTS.out("frontend-0-1f"): {"frontend"},
    "kvm.kvmesh.out.>": set(),
    SUBJECTS.ctl("worker-0-1f"): {W0},
    SUBJECTS.returns("worker-0-1f"): {W0},
    SUBJECTS.returns("worker-1-1f"): {W1},
    SUBJECTS.returns("kv-0-1f"): {KV},
    SUBJECTS.ask("indexer-0-1f"): {"frontend", "router", "indexer"},
    SUBJECTS.dump("worker-0-1f"): {W0},
    SUBJECTS.kvbm("kv-0-1f"): {KV},
    SUBJECTS.kvbm("kv-1-1f"): set(),
    SUBJECTS.computing("m"): {KV},
    SUBJECTS.weights("d"): {W0, W1},
    "_INBOX.>": set(),
    "_INBOX.*.x": set(),
    "_INBOX.frontend.x": {"frontend"},
    "_INBOX.worker=2Eworker-0.x": {W0},
    "_INBOX.worker=2Eworker-1.x": {W1},
    "$KV.>": set(),
    f"$KV.{SUBJECTS.keys_bucket}.>": set(),
    f"$KV.{SUBJECTS.kvbm_bucket}.>": set(),
    f"$KV.{SUBJECTS.weights_bucket}.>": set(),
    "$JS.API.>": set(),
    "$SYS.>": set(),
    ">": set(),
}
READS: dict[str, set[str]] = {
    SUBJECTS.kv_stream: {"indexer", *LOOKS},
    SUBJECTS.route_stream: {"router", "planner", *LOOKS},
    SUBJECTS.seq_stream: {"router", "planner", *LOOKS},
    SUBJECTS.scaling_stream: {"planner", *LOOKS},
    f"KV_{SUBJECTS.instances_bucket}": EVERYBODY,
    f"KV_{SUBJECTS.keys_bucket}": {"frontend", "operator", "dashboard"},
    f"KV_{SUBJECTS.pins_bucket}": {"frontend", "operator", "dashboard"},
    f"KV_{SUBJECTS.secrets_bucket}": {"frontend", "operator"},
    f"KV_{SUBJECTS.responses_bucket}": {"frontend", "operator"},
    f"KV_{SUBJECTS.answers_bucket}": {"frontend", "operator"},
    f"KV_{SUBJECTS.router_bucket}": {"frontend", "router", "operator"},
    f"KV_{SUBJECTS.kvbm_bucket}": {KV, "operator"},
    f"KV_{SUBJECTS.weights_bucket}": {W0, W1, "operator"},
    f"KV_{SUBJECTS.plan_bucket}": {"frontend", "planner", *LOOKS},
    f"OBJ_{SUBJECTS.index_bucket}": {"indexer", "operator"},
    f"OBJ_{SUBJECTS.model_bucket}": {"frontend", W0, W1, "operator"},
    f"OBJ_{SUBJECTS.model_store_bucket}": {W0, W1, "operator"},
    f"OBJ_{SUBJECTS.files_bucket}": {"frontend", "operator"},
    f"KV_{SUBJECTS.batches_bucket}": {"frontend", "operator"},
    f"KV_{SUBJECTS.catalog_bucket}": {W0, W1, "operator"},
    "KV_another-mesh": {"operator"},
}


async def refused(bus: Bus) -> bool:
    """True if the server has refused the last message."""
    for _ in range(2):  # the first may overtake the message, the second not
        await bus.client.flush()
    error, bus.client._err = bus.client.last_error, None
    assert error is None or "ermissions violation" in str(error).lower(), error
    return error is not None


@pytest.mark.parametrize("user", sorted(EVERYBODY))
async def test_a_user_has_exactly_the_permissions_of_the_table(
    server: SecuredServer, user: str
) -> None:
    found: dict[str, set[str]] = {"sends": set(), "hears": set(), "reads": set()}
    async with server.connected(user) as bus:
        for subject in SENDS:
            await bus.client.publish(subject, b"")
            if not await refused(bus):
                found["sends"].add(subject)
        for subject in HEARS:
            subscription = await bus.client.subscribe(subject)
            if not await refused(bus):
                found["hears"].add(subject)
            await subscription.unsubscribe()  # a refused one would be tried again, and refused
        for stream in READS:
            if await reads(bus, stream):
                found["reads"].add(stream)
    for act, table in (("sends", SENDS), ("hears", HEARS), ("reads", READS)):
        assert found[act] == {subject for subject, users in table.items() if user in users}, act


@pytest.mark.parametrize("user", sorted(EVERYBODY))
async def test_a_doctor_finds_the_role_of_a_user_permitted_and_others_not(
    server: SecuredServer, user: str
) -> None:
    own = user.partition(".")[0]
    settings = load(None, server.env(user), {})
    async with server.connected(user) as bus:
        for role in User:
            found = await check_permissions(bus, role, settings)
            permitted = {finding.severity for finding in found} == {"ok"}
            assert permitted is (role == own or (own == "operator" and role == "observer")), found


async def reads(bus: Bus, stream: str) -> bool:
    """True if a user can read messages of a stream in any way that NATS offers."""
    outcomes = set()
    config = ConsumerConfig(deliver_subject=bus.client.new_inbox(), inactive_threshold=1.0)
    for attempt in (
        bus.js.add_consumer(stream, config),
        bus.js.add_consumer(stream, config.evolve(name="probe")),
        bus.js.get_msg(stream, seq=1),
    ):
        try:
            await attempt
            outcomes.add(True)
        except NotPermitted:
            outcomes.add(False)
        except BusError:  # the server replied: no such message or stream
            outcomes.add(True)
    assert len(outcomes) == 1, outcomes
    return outcomes.pop()


@pytest.mark.parametrize("user", sorted(EVERYBODY - {"operator"}))
async def test_only_an_operator_changes_streams_or_the_server(
    server: SecuredServer, user: str
) -> None:
    calls = [
        f"STREAM.{call}.{stream}"
        for call in ("UPDATE", "DELETE", "SNAPSHOT", "RESTORE", "PEER.REMOVE")
        for stream in (SUBJECTS.kv_stream, f"KV_{SUBJECTS.keys_bucket}")
    ]
    calls += ["STREAM.CREATE.thief", "CONSUMER.CREATE.thief", "META.LEADER.STEPDOWN"]
    if user != "frontend":
        calls += [f"STREAM.CREATE.{SUBJECTS.kv_stream}", f"STREAM.CREATE.KV_{SUBJECTS.keys_bucket}"]
    async with server.connected(user) as bus:
        for call in calls:
            with pytest.raises(PermissionDenied):
                await bus.client.request(f"$JS.API.{call}", b"{}", timeout=5)


@pytest_asyncio.fixture(loop_scope="module")
async def agents(
    server: SecuredServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Agents]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    async with server.connected(W0) as bus:
        agents = Agents(bus, StreamLimits(), tmp_path)
        yield agents
        await agents.close()


async def test_workers_take_weights_from_each_other(
    mesh: Mesh, server: SecuredServer, agents: Agents, tmp_path: Path
) -> None:
    async with server.connected("operator") as operator:  # other tests write into this bucket
        await operator.js.context.delete_stream(f"KV_{SUBJECTS.weights_bucket}")
        await ensure_streams(operator)
    model = make_weights(tmp_path / "model")
    first = await agents.start("worker-0", model, env=server.env(W0))
    await eventually(lambda: first.answer)
    first.process.engine_runs()
    await eventually(lambda: first.digest)
    await first.join()
    second = await agents.start("worker-1", env=server.env(W1))
    taken = await eventually(lambda: second.event(WeightsTaken))
    assert taken is not None
    assert set(taken.sources) == {first.job.instance}


async def test_operators_push_models_and_workers_read_them(
    mesh: Mesh,
    server: SecuredServer,
    agents: Agents,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVMESH_STREAMS_MODELS_BYTES", str(64 << 20))
    model = tmp_path / "model"
    shutil.copytree(model_dir(), model, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    make_weights(model)
    for user in ("frontend", W0, "observer"):
        refused = await asyncio.to_thread(run, server, user, "model", "push", str(model))
        assert refused.returncode == 1
        assert "permit" in refused.stderr
    pushed = await asyncio.to_thread(run, server, "operator", "model", "push", str(model))
    assert pushed.returncode == 0, pushed.stderr
    async with server.connected(W0) as bus:
        entry = await find_model(bus, parse_reference("model"))
        agent = await agents.start("worker-0", pinned=entry.weights, env=server.env(W0))
        taken = await eventually(lambda: agent.event(WeightsTaken))
        assert taken is not None
        assert set(taken.sources) == {"store"}
        await eventually(lambda: offered(bus, entry.weights), what="the worker offers them")
        places = count()

        async def pulled_from_worker() -> bool:  # one that replies late is not asked for weights
            pull = ("model", "pull", "model", str(tmp_path / f"pulled-{next(places)}"))
            pulled = await asyncio.to_thread(run, server, "operator", *pull)
            assert not pulled.returncode, pulled.stderr
            return agent.job.instance in pulled.stdout

        await eventually(pulled_from_worker)
        await remove_former_manifests(bus, grace_s=-1.0)
    await agents.close()
    evicted = await asyncio.to_thread(run, server, "operator", "model", "evict", "model")
    assert evicted.returncode == 0, evicted.stderr


FORGED = msgspec.json.encode(Key(name="forged", sha256="0" * 64, scopes=["admin"]))


@pytest.mark.parametrize("bucket", [SUBJECTS.keys_bucket, SUBJECTS.secrets_bucket])
async def test_a_worker_cannot_put_its_bytes_into_a_bucket_of_others(
    server: SecuredServer, mesh: Mesh, bucket: str
) -> None:
    async with (
        server.connected("frontend") as frontend,
        server.connected("operator") as operator,
        server.connected(W0) as worker,
    ):
        await keys_bucket(frontend)
        secret = await tenant_secret(frontend, None)
        entry = f"$KV.{bucket}.{SUBJECTS.tenants_key}"
        await forge(worker, entry)
        found = await read_bucket(operator, bucket)
        for value in found.values():  # a reply about them may be there, which is not a key
            with pytest.raises(msgspec.DecodeError):
                msgspec.json.decode(value, type=Key)
        assert await tenant_secret(frontend, None) == secret


async def forge(worker: Bus, entry: str) -> None:
    """Try each way in which a worker could make the server write bytes, or a reply, to `entry`."""
    own = SUBJECTS.ping("worker-0-1f")
    received = await worker.client.subscribe(own)
    await worker.client.publish(own, b"", reply=entry)
    message = await received.next_msg(timeout=5)
    await worker.client.publish(message.reply, FORGED)  # the reply to its own request
    assert await refused(worker)
    await received.unsubscribe()
    piece, stream = f"$O.{SUBJECTS.model_bucket}.C.forged", f"OBJ_{SUBJECTS.model_bucket}"
    await worker.client.publish(piece, FORGED, reply=entry)
    kept = await worker.js.context.publish(piece, FORGED)
    wanted = f'{{"seq":{kept.seq}}}'.encode()
    await worker.client.publish(f"$JS.API.DIRECT.GET.{stream}", wanted, reply=entry)
    assert await refused(worker)
    await worker.client.publish(f"$JS.API.DIRECT.GET.{stream}.{piece}", reply=entry)
    assert await refused(worker)
    await worker.client.publish(f"$JS.API.STREAM.MSG.GET.{stream}", wanted, reply=entry)
    pushed = ConsumerConfig(
        deliver_subject=entry, ack_policy=AckPolicy.NONE, inactive_threshold=1.0
    )
    with suppress(BusError):
        await worker.js.add_consumer(stream, pushed)
    assert not await refused(worker)


async def test_a_process_drops_messages_that_a_user_has_a_stream_deliver(
    server: SecuredServer, mesh: Mesh
) -> None:
    stream, piece = f"OBJ_{SUBJECTS.model_bucket}", f"$O.{SUBJECTS.model_bucket}.C.stray"
    subject, decoder = SUBJECTS.work("worker-1-1f"), MessageDecoder(Dump)
    async with (
        server.connected("frontend") as frontend,
        server.connected("operator") as operator,
        server.connected(W0) as thief,
        server.connected(W1) as worker,
    ):
        received: list[Dump] = []

        async def in_task(dump: Dump) -> None:
            received.append(dump)

        await worker.subscribe(subject, decoder, received.append)
        await worker.subscribe(subject, decoder, in_task)
        await worker.client.flush()
        await thief.js.context.publish(piece, encode(Dump(666)))
        pushed = ConsumerConfig(
            deliver_subject=subject,
            filter_subject=piece,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=1.0,
        )
        consumer = await thief.js.add_consumer(stream, pushed)

        async def delivered() -> bool:
            info = await operator.js.context.consumer_info(stream, consumer.name)
            return info.delivered is not None and info.delivered.consumer_seq == 1

        await eventually(delivered)
        frontend.post(subject, Dump(1))
        await eventually(lambda: len(received) >= 2)
        assert received == [Dump(1), Dump(1)]


@pytest.mark.parametrize("user", sorted(EVERYBODY - {"operator"}))
async def test_only_an_operator_reads_directly(server: SecuredServer, user: str) -> None:
    async with server.connected(user) as bus:
        for stream in READS:
            with pytest.raises(NotPermitted):
                await bus.js.get_msg(stream, seq=1, direct=True)


async def test_responses_are_read_from_a_bucket_that_allows_direct_reads_and_deleted(
    server: SecuredServer,
) -> None:
    bucket = SUBJECTS.responses_bucket
    older = StreamConfig(
        name=f"KV_{bucket}",
        subjects=[f"$KV.{bucket}.>"],
        allow_direct=True,
        max_msgs_per_subject=1,
    )
    async with server.connected("operator") as operator, server.connected("frontend") as frontend:
        with suppress(NotFoundError):  # the mesh's frontend has made one if it runs
            await operator.js.context.delete_stream(older.name or "")
        await operator.js.add_stream(older)
        store = ResponseStore(frontend, 60.0, 1 << 20)
        assert await store.put(StoredTurn("resp_a", None, [], [], Raw(b"{}"), ""))
        assert (await store.get("resp_a", "")).id == "resp_a"
        await store.delete("resp_a", "")
        with pytest.raises(ResponseNotFound):
            await store.get("resp_a", "")


async def test_a_reply_reaches_only_its_requester(mesh: Mesh, server: SecuredServer) -> None:
    async with (
        server.connected("frontend") as frontend,
        server.connected("indexer") as indexer,
        server.connected(W0) as worker,
    ):
        overreceived: list[object] = []
        for bus in (indexer, worker):
            for subject in ("_INBOX.frontend.>", "_INBOX.>"):
                await bus.client.subscribe_direct(subject, overreceived.append)
                assert await refused(bus)
        cards = await read_bucket(frontend, SUBJECTS.instances_bucket)
        key = next(key for key in cards if key.startswith("worker.worker-1."))
        instance = "-".join(key.split(".")[1:])
        reply = await frontend.request(SUBJECTS.ctl(instance), Resend("x", 0), CONTROL_REPLY, 5)
        assert not reply.ok
        await worker.client.flush()
        assert overreceived == []
        with pytest.raises(NotPermitted, match="does not permit this process to publish on"):
            await worker.request(SUBJECTS.ctl(instance), Resend("x", 0), CONTROL_REPLY, 5)


# Connections


async def test_the_server_requires_a_certificate_and_a_key(
    server: SecuredServer,
) -> None:
    whole = server.options("router")
    stranger = replace(whole, nkey_seed=server.options("router").nkey_seed, tls_cert=None)
    for options in (
        replace(whole, tls_cert=None, tls_key=None),
        replace(whole, nkey_seed=None, credentials=None),
        BusOptions(url=server.url.replace("tls", "nats")),
        stranger,
    ):
        with pytest.raises(BusUnavailable):
            await Bus.connect(options, "stranger", timeout=2)


async def test_a_server_that_falls_silent_after_the_handshake_leaves_no_connection_open(
    server: SecuredServer,
) -> None:
    """An open connection that becomes garbage would fail this test."""
    own = server.folder / "nats"
    certificate = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate.load_cert_chain(own / "cert.pem", own / "key.pem")
    shaken: list[asyncio.StreamWriter] = []

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"version":"2.11.0","tls_required":true,"max_payload":1000000}\r\n')
        await writer.start_tls(certificate)
        shaken.append(writer)

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as silent:
        url = f"tls://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        with pytest.raises(BusUnavailable):
            await Bus.connect(replace(server.options("router"), url=url), "router", timeout=1)
        gc.collect()
        for writer in shaken:
            writer.transport.abort()
    assert shaken


async def test_a_server_of_another_authority_or_without_tls_is_refused(
    server: SecuredServer, nats_server: NatsServer, tmp_path: Path
) -> None:
    plain = replace(server.options("router"), url=nats_server.url)
    with pytest.raises(BusUnavailable, match="does not offer TLS"):
        await Bus.connect(plain, "router", timeout=2)
    assert secure(tmp_path / "other").returncode == 0
    other = replace(server.options("router"), tls_ca=tmp_path / "other" / "authority" / "ca.pem")
    with pytest.raises(BusUnavailable, match="certificate verify failed"):
        await Bus.connect(other, "router", timeout=2)
