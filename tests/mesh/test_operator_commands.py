"""Commands of an operator beside a mesh whose records are known: output, messages, exit status.

The mesh is a NATS server with the streams, cards and events that its processes would publish.
"""

import asyncio
import hashlib
import json
import logging
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from support.nats import NatsServer, free_port

from kvmesh.bus import messages as m
from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.bus.subjects import Subjects
from kvmesh.cli.main import find_command, run

pytestmark = pytest.mark.timeout(30)
NAMESPACE = "operators"
MODEL = "demo"
LIMITS = StreamLimits(
    kv_bytes=8 << 20, route_bytes=8 << 20, seq_bytes=8 << 20, lease_s=300.0, kv_age_s=3600.0
)
POST_S = 0.03
NOW = time.time()


def hashes(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def candidate(worker: str, cost: float, overlap: int) -> m.Candidate:
    return m.Candidate(
        instance=f"{worker}-1",
        worker=worker,
        rank=0,
        overlap=[overlap, 0, 0, 0],
        prefill=1.0,
        decode=4.0,
        requests=1,
        cost=cost,
    )


def decision(request: str, chosen: str, attempt: int = 0) -> m.Decision:
    both = {"worker-0": candidate("worker-0", 5.0, 2), "worker-1": candidate("worker-1", 8.5, 0)}
    return m.Decision(
        request=request,
        model=MODEL,
        time=NOW,
        router="router-0-1",
        policy="kv",
        chosen=both[chosen],
        candidates=list(both.values()),
        eligible=2,
        tokens=50,
        sequence_hashes=hashes(1, 2, 3),
        max_tokens=9,
        block_size=16,
        attempt=attempt,
    )


def outcome(request: str, instance: str) -> m.Outcome:
    return m.Outcome(
        request=request,
        instance=instance,
        time=NOW,
        cached_tokens=32,
        output_tokens=9,
        ttft_s=0.05,
        total_s=1.5,
        finish="stop",
    )


LOAD = m.Load(
    instance="worker-0-1",
    rank=0,
    running=3,
    waiting=1,
    active_blocks=10,
    cached_blocks=20,
    total_blocks=100,
    prefill_tokens=7,
    steps=1,
    prompt_tokens=1,
    cached_tokens=1,
    output_tokens=1,
    requests=1,
)
CARDS = [
    m.Instance(
        instance=f"{name}-1",
        role=role,
        name=name,
        version="0.1.0",
        started=NOW - 90,
        model=m.ModelCard(name=MODEL, context=4096, block_size=16, files="")
        if role is m.Role.WORKER
        else None,
        capacity=m.Capacity(blocks=100, max_sequences=8, max_batched_tokens=512)
        if role is m.Role.WORKER
        else None,
        draining=name == "worker-1",
        warnings=["the disk is slow"] if name == "router-0" else [],
    )
    for name, role in (
        ("router-0", m.Role.ROUTER),
        ("worker-0", m.Role.WORKER),
        ("worker-1", m.Role.WORKER),
    )
]
# A request moved from worker-0 to worker-1 after a loss, and two others.
ROUTES = [
    decision("chat-1", "worker-0"),
    decision("chat-1.1", "worker-1", attempt=1),
    outcome("chat-1.1", "worker-1-1"),
    decision("chat-10", "worker-0"),
    outcome("chat-10", "worker-0-1"),
    decision("chat-2", "worker-0"),
]


@dataclass
class Operator:
    """Runs commands on the mesh of this module."""

    url: str
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str, namespace: str = NAMESPACE) -> tuple[int, str, str]:
        """Run a command; returns its exit status, its output and its messages."""
        words = [*arguments, "--nats", self.url, "--nats-namespace", namespace]
        try:
            status = run(words)
        except SystemExit as ending:
            status = int(ending.code or 0)
        captured = self.capsys.readouterr()
        return status, captured.out, captured.err

    def lines(self, *arguments: str) -> list[str]:
        status, out, err = self(*arguments)
        assert status == 0, err
        return out.splitlines()

    def objects(self, *arguments: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines(*arguments, "--json")]

    def refused(self, *arguments: str, status: int) -> str:
        """The one line of a command that fails without output."""
        ended, out, err = self(*arguments)
        assert (ended, out) == (status, ""), err
        (line,) = err.splitlines()
        found, _ = find_command(arguments)
        assert found is not None
        assert line.startswith(f"kvmesh {found.name}: ")
        return line.partition(": ")[2]


@pytest.fixture(scope="module")
def populated(nats_server: NatsServer) -> str:
    async def populate() -> None:
        bus = await Bus.connect(BusOptions(url=nats_server.url, namespace=NAMESPACE), "test")
        subjects = bus.subjects
        await ensure_streams(bus, LIMITS)
        instances = await bus.js.key_value(subjects.instances_bucket)
        for card in CARDS:
            await instances.put(subjects.lease_key(card.role, card.instance), m.encode(card))
        stored = m.Stored(0, None, hashes(7, 8), hashes(3, 4), 5)
        for worker in ("worker-0", "worker-1"):
            batch = m.KvBatch(worker, f"{worker}-1", 0, 0, NOW, [stored])
            await bus.store(subjects.kv(MODEL, worker), m.encode(batch), 5.0)
        plan = await bus.js.key_value(subjects.plan_bucket)
        idle = m.IdleModel(card=m.ModelCard(name="asleep", context=100, block_size=16, files=""))
        await plan.put(subjects.idle_key("asleep"), m.encode(idle))
        for event in ROUTES:
            await bus.store(subjects.route(MODEL), m.encode(event), 5.0)
        added = m.SeqAdd("chat-1", "worker-0-1", 0, hashes(1), 50, 0, 9, NOW)
        batch_of_one = m.encode(m.SeqBatch("router-0-1", [added]))
        await bus.store(subjects.seq(MODEL), batch_of_one, 5.0)
        await bus.close()

    asyncio.run(populate())
    return nats_server.url


@pytest.fixture
def operator(
    populated: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> Iterator[Operator]:
    monkeypatch.setenv("KVMESH_UP_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("KVMESH_STREAMS_LEASE_S", str(LIMITS.lease_s))
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield Operator(populated, capsys)
    root.handlers[:] = handlers
    root.setLevel(level)


class Posting(threading.Thread):
    """Posts a message repeatedly until the block ends."""

    def __init__(self, url: str, subject: str, message: Struct) -> None:
        super().__init__()
        self._options = BusOptions(url=url, namespace=NAMESPACE)
        self._subject = subject
        self._data = m.encode(message)
        self._over = threading.Event()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        asyncio.run(self._post())

    async def _post(self) -> None:
        bus = await Bus.connect(self._options, "poster")
        while not self._over.is_set():
            await bus.client.publish(self._subject, self._data)
            await asyncio.sleep(POST_S)
        await bus.close()


def test_status_as_json_has_one_shape(operator: Operator) -> None:
    with Posting(operator.url, Subjects(NAMESPACE).load("worker-0-1"), LOAD):
        _, out, err = operator("status", "--json")
    report = json.loads(out)
    assert err == ""
    names = "nats server namespace time instances starting streams buckets warnings idle_models"
    assert set(report) == {*names.split(), "aliases", "failed_starts"}
    assert report["namespace"] == NAMESPACE
    members = {member["card"]["name"]: member for member in report["instances"]}
    assert list(members) == ["router-0", "worker-0", "worker-1"]
    assert [load["running"] for load in members["worker-0"]["load"]] == [3]
    assert (members["worker-0"]["eligible"], members["worker-1"]["eligible"]) == (True, False)
    assert members["worker-0"]["age_s"] < 60  # by the server's time, whatever the card states
    streams = {stream["name"]: stream["messages"] for stream in report["streams"]}
    assert streams[f"kvm-{NAMESPACE}-route"] == len(ROUTES)
    assert {bucket["kind"] for bucket in report["buckets"]} == {"kv", "object"}
    assert report["warnings"] == [{"instance": "router-0-1", "text": "the disk is slow"}]


def test_status_shows_warnings_and_who_drains(operator: Operator) -> None:
    status, out, _ = operator("status")
    assert status == 0
    assert "router-0-1: the disk is slow" in out
    (line,) = [line for line in out.splitlines() if line.lstrip().startswith("worker-1-1")]
    assert "draining" in line


def test_the_tail_of_each_stream_replays_its_messages(operator: Operator) -> None:
    past = ("--since", "1h", "--no-follow")
    assert len(operator.lines("tail", "route", *past)) == len(ROUTES)
    assert len(operator.lines("tail", "kv", *past)) == 2
    assert len(operator.lines("tail", "seq", *past)) == 1
    assert len(operator.lines("tail", "kv", "route", "seq", *past)) == len(ROUTES) + 3
    assert operator.lines("tail", "load", *past) == []


def test_a_filter_of_the_tail_narrows_a_kind(operator: Operator) -> None:
    past = ("--since", "1h", "--no-follow")
    for subject in (f"kv.{MODEL}.worker-1", "kv.*.worker-1", f"kvm.{NAMESPACE}.kv.*.worker-1"):
        (line,) = operator.lines("tail", subject, *past)
        assert "worker-1-1#0" in line
    assert operator.lines("tail", "kv.other.>", *past) == []
    assert len(operator.lines("tail", ">", *past)) == len(ROUTES) + 3


def test_limits_and_times_bound_the_tail(operator: Operator) -> None:
    shown = operator.objects("tail", "route", "--since", "1h", "--limit", "3")
    assert [line["message"]["request"] for line in shown] == ["chat-1", "chat-1.1", "chat-1.1"]
    assert operator.lines("tail", "route", "--since", "0s", "--no-follow") == []
    reason = operator.refused("tail", "route", "--since", "2100-01-01T00:00:00Z", status=2)
    assert "a time in the future: 2100-01-01T00:00:00Z" in reason
    early = "1999-01-01T00:00:00+00:00"
    assert len(operator.lines("tail", "route", "--since", early, "--no-follow")) == len(ROUTES)


def test_the_tail_as_json_has_one_shape(operator: Operator) -> None:
    for line in operator.objects("tail", ">", "--since", "1h", "--no-follow"):
        assert set(line) == {"time", "subject", "message"}
        assert line["subject"].startswith(f"kvm.{NAMESPACE}.")
        assert abs(line["time"] - time.time()) < 600
        assert line["message"]["type"] in {"KvBatch", "Decision", "Outcome", "SeqBatch"}


def test_the_tail_of_instances_shows_their_cards(operator: Operator) -> None:
    shown = operator.objects("tail", "instances", "--limit", "3")
    assert {line["message"]["name"] for line in shown} == {card.name for card in CARDS}
    assert {line["message"]["type"] for line in shown} == {"Instance"}


SUBJECTS = Subjects(NAMESPACE)
WAKE = m.Wake(model=MODEL, frontend="frontend-0-1", request="q", waiting=1, tokens=3, time=NOW)
WORK = m.Work(request="q", frontend="f", tokens=b"", sampling=m.Sampling(max_tokens=1))
ROUTE = m.RouteRequest(
    request="q", model=MODEL, sequence_hashes=b"", tokens=1, max_tokens=1, deadline_s=1.0
)


@pytest.mark.parametrize(
    ("kind", "subject", "message"),
    [
        ("load", SUBJECTS.load("worker-0-1"), LOAD),
        ("wake", SUBJECTS.wake(MODEL), WAKE),
        ("out", SUBJECTS.out("frontend-0-1"), m.StepOutput("worker-0-1", [m.Chunk("q", 0, [1])])),
        ("work", SUBJECTS.work("worker-0-1"), WORK),
        ("ctl", SUBJECTS.ctl("worker-0-1"), m.Release(sessions=["s"])),
        ("returns", SUBJECTS.returns("worker-0-1"), m.ExpectReturns([])),
        (
            "adapters",
            SUBJECTS.adapters("worker-0-1"),
            m.TakeAdapter(adapter="a", files="f", idle_s=1.0),
        ),
        ("dump", SUBJECTS.dump("worker-0-1"), m.Dump(0)),
        ("ping", SUBJECTS.ping("worker-0-1"), m.Ping()),
        ("kvbm", SUBJECTS.kvbm("kvbm-0-1"), m.Lend(bytes(16), 64)),
        ("computing", SUBJECTS.computing(MODEL), m.ClaimAnnouncement("kvbm-0-1", 1, b"", 1.0)),
        ("sessions", SUBJECTS.sessions, m.SessionQuery(MODEL, "s")),
        ("limits", SUBJECTS.limits, m.LimitUse("f", [])),
        ("traces", SUBJECTS.traces, m.KeepTraces(["4bf92f3577b34da6a3ce929d0e0e4736"])),
        ("index", SUBJECTS.index(MODEL), m.OverlapQuery([hashes(1)])),
        ("indexer", SUBJECTS.index_at("indexer-0-1"), m.OverlapQuery([hashes(1)])),
        ("router", SUBJECTS.router(MODEL), ROUTE),
    ],
)
def test_the_tail_shows_every_kind_as_it_passes(
    operator: Operator, kind: str, subject: str, message: Struct
) -> None:
    with Posting(operator.url, subject, message):
        (shown,) = operator.objects("tail", kind, "--limit", "1")
        (line,) = operator.lines("tail", kind, "--limit", "1")
    assert shown["message"]["type"] == type(message).__name__
    assert shown["subject"] == subject
    assert kind in line


def test_explain_shows_a_request_with_its_migration(operator: Operator) -> None:
    out = "\n".join(operator.lines("explain", "chat-1"))
    first, second, end = (
        out.index("chat-1: 50 tokens of demo, 3 full blocks"),
        out.index("chat-1.1: 50 tokens"),
        out.index("chat-1.1: stop on worker-1-1"),
    )
    assert first < second < end
    assert "to worker-0 rank 0 (worker-0-1) by kv" in out[first:second]
    assert "3.5 cheaper than the best alternative, worker-1 rank 0" in out[first:second]
    assert "attempt 2" in out[second:end]
    assert "3.5 more expensive" in out[second:end]
    assert "cached 32 prompt tokens, expected 0" in out[end:]
    assert "chat-10" not in out


def test_explain_as_json_is_the_messages(operator: Operator) -> None:
    shown = operator.objects("explain", "chat-1")
    assert [(line["type"], line["request"]) for line in shown] == [
        ("Decision", "chat-1"),
        ("Decision", "chat-1.1"),
        ("Outcome", "chat-1.1"),
    ]
    assert shown[0]["sequence_hashes"] == [f"{value:016x}" for value in (1, 2, 3)]
    assert [c["worker"] for c in shown[0]["candidates"]] == ["worker-0", "worker-1"]


def test_explain_of_an_attempt_shows_that_attempt(operator: Operator) -> None:
    assert {line["request"] for line in operator.objects("explain", "chat-1.1")} == {"chat-1.1"}


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_an_unknown_request_is_named(operator: Operator, more: tuple[str, ...]) -> None:
    reason = operator.refused("explain", "chat-3", *more, status=1)
    assert reason == "no decision about chat-3"


def test_explain_searches_from_a_moment_on(operator: Operator) -> None:
    later = ("--since", "0s")
    assert "chat-1" in operator.refused("explain", "chat-1", *later, status=1)
    assert len(operator.objects("explain", "chat-1", "--since", "1h")) == 3


def test_busy_sets_shows_and_forgets_thresholds(operator: Operator) -> None:
    assert operator.lines("model", "busy", MODEL) == [f"{MODEL}: the routers' settings apply"]
    given = ("--blocks", "80", "--blocks-share", "0.5", "--prefill-tokens", "4096")
    line = f"{MODEL}: blocks 80, blocks-share 0.5, prefill-tokens 4096"
    assert operator.lines("model", "busy", MODEL, *given) == [line]
    assert operator.lines("model", "busy", MODEL) == [line]
    assert operator.lines("model", "busy", MODEL, "--blocks", "9") == [f"{MODEL}: blocks 9"]
    assert operator.lines("model", "busy", MODEL, "--reset") == [
        f"{MODEL}: the routers' settings apply"
    ]
    assert operator.lines("model", "busy", MODEL, "--reset") == [
        f"{MODEL}: the routers' settings apply"
    ]


def test_busy_doubts_a_model_without_workers(operator: Operator) -> None:
    status, out, err = operator("model", "busy", "demos")
    assert status == 0
    assert out == "demos: the routers' settings apply\n"
    assert err == "kvmesh model: no worker serves demos now; did you mean demo?\n"
    reason = operator.refused("model", "busy", "demos", "--blocks", "5", status=1)
    assert reason == "nothing was stored: no worker serves demos now; did you mean demo?"
    assert operator("model", "busy", "demos")[1] == "demos: the routers' settings apply\n"


def test_busy_knows_idle_models(operator: Operator) -> None:
    assert operator("model", "busy", "asleep", "--blocks", "5") == (0, "asleep: blocks 5\n", "")
    assert operator.lines("model", "busy", "asleep", "--reset") == [
        "asleep: the routers' settings apply"
    ]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--blocks", "0"), "--blocks 0 must be at least 1"),
        (("--prefill-tokens", "-1"), "--prefill-tokens -1 must be at least 1"),
        (("--blocks-share", "1.5"), "--blocks-share 1.5 must be above 0 and at most 1"),
        (("--blocks-share", "nan"), "--blocks-share nan must be above 0 and at most 1"),
        (("--blocks", "many"), "argument --blocks: invalid int value: 'many'"),
    ],
)
def test_bad_thresholds_change_nothing(
    operator: Operator, flags: tuple[str, ...], reason: str
) -> None:
    assert operator.refused("model", "busy", MODEL, *flags, status=2).startswith(reason)
    assert operator.lines("model", "busy", MODEL) == [f"{MODEL}: the routers' settings apply"]


def test_keys_are_added_listed_rotated_and_revoked(operator: Operator) -> None:
    assert operator.lines("keys", "list") == ["no keys"]
    status, secret, notice = operator("keys", "add", "ann", "--tenant", "team", "--scopes", "cache")
    assert (status, notice) == (0, "secret of ann, shown only once:\n")
    digest = hashlib.sha256(secret.strip().encode()).hexdigest()
    (line,) = operator.lines("keys", "list")
    assert line == f"ann: sha256 {digest[:8]}…, tenant team, scopes cache"
    _, newer, notice = operator("keys", "rotate", "ann", "--grace", "2h")
    assert newer != secret
    assert notice.startswith("the old secret is valid until ")
    (line,) = operator.lines("keys", "list")
    assert hashlib.sha256(newer.strip().encode()).hexdigest()[:8] in line
    assert "old secret until" in line
    _, _, notice = operator("keys", "rotate", "ann", "--grace", "0s")
    assert notice == "secret of ann, shown only once:\n"
    assert operator.lines("keys", "revoke", "ann") == ["revoked ann"]
    assert operator.lines("keys", "list") == ["no keys"]


def test_an_expiring_key_shows_its_end(operator: Operator) -> None:
    assert operator("keys", "add", "guest", "--expires", "1d", "--models", "a, b")[0] == 0
    (line,) = operator.lines("keys", "list")
    assert "models a,b" in line
    assert time.strftime("%Y-%m-%d", time.localtime(time.time() + 86400)) in line
    operator.lines("keys", "revoke", "guest")


@pytest.mark.parametrize("action", ["rotate", "revoke"])
def test_an_absent_key_is_named(operator: Operator, action: str) -> None:
    assert operator.refused("keys", action, "bob", status=1) == "no key named bob"


def test_a_key_is_not_added_twice(operator: Operator) -> None:
    assert operator("keys", "add", "twice")[0] == 0
    reason = operator.refused("keys", "add", "twice", status=1)
    assert reason == "key twice exists; rotate gives it a new secret"
    operator.lines("keys", "revoke", "twice")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("add",), "add takes a name"),
        (("revoke",), "revoke takes a name"),
        (("list", "ann"), "list takes no name"),
        (("rotate", "ann", "--tenant", "t"), "rotate cannot set fields"),
        (("add", "ann", "--grace", "1h"), "--grace applies to rotate only"),
        (("rotate", "ann", "--grace", "soon"), "not a duration such as 90s, 15m, 12h or 30d"),
        (("add", "ann", "--scopes", "root"), "--scopes root: "),
        (("add", "ann", "--concurrency", "0"), "--concurrency 0: "),
        (("add", "ann", "--expires", "1w"), "--expires 1w: not a duration"),
        (("forget", "ann"), "argument ACTION: invalid choice: 'forget'"),
    ],
)
def test_a_bad_command_about_keys_changes_nothing(
    operator: Operator, arguments: tuple[str, ...], reason: str
) -> None:
    assert operator.refused("keys", *arguments, status=2).startswith(reason)
    assert operator.lines("keys", "list") == ["no keys"]


def test_streams_are_listed_with_what_the_settings_would_change(operator: Operator) -> None:
    same = (
        *("--streams-kv-bytes", str(LIMITS.kv_bytes), "--streams-route-bytes", str(8 << 20)),
        *("--streams-seq-bytes", str(8 << 20)),
        *("--streams-kv-age-s", "3600"),
    )
    lines = operator.lines("config", "streams", "list", *same)
    for kind in ("kv", "route", "seq"):
        (line,) = [line for line in lines if f"kvm-{NAMESPACE}-{kind} " in line]
        assert "8.0 MiB" in line
    assert not [line for line in lines if "apply` changes it" in line]
    lines = operator.lines("config", "streams", "list", *same, "--streams-seq-bytes", str(16 << 20))
    (line,) = [line for line in lines if "apply` changes it" in line]
    assert f"kvm-{NAMESPACE}-seq has max_bytes {8 << 20}" in line
    changed = operator.lines(
        "config", "streams", "apply", *same, "--streams-seq-bytes", str(16 << 20)
    )
    assert changed == [f"kvm-{NAMESPACE}-seq: max_bytes {8 << 20} → {16 << 20}"]
    assert operator.lines("config", "streams", "apply", *same)[0].endswith(
        f"{16 << 20} → {8 << 20}"
    )


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("apply", "--streams-kv-bytes", "1"), "--streams-kv-bytes: expected `int` >= 1048576"),
        (("apply", "--nats-replicas", "6"), "--nats-replicas: expected `int` <= 5"),
        (("grow",), "argument action: invalid choice: 'grow'"),
        ((), "the following arguments are required: action"),
    ],
)
def test_a_bad_command_about_streams_is_a_usage_error(
    operator: Operator, flags: tuple[str, ...], reason: str
) -> None:
    assert operator.refused("config", "streams", *flags, status=2).startswith(reason)


COMMANDS = [
    ("tail", "kv", "--since", "1h", "--no-follow"),
    ("status",),
    ("status", "--json"),
    ("explain", "chat-1"),
    ("model", "busy", MODEL),
    ("config", "streams", "list"),
    ("config", "streams", "apply"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_absent_mesh_is_one_line(
    operator: Operator,
    command: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # without meshes of other tests
    status, out, err = operator(*command, namespace="elsewhere")
    assert (status, out) == (1, "")
    found, _ = find_command(command)
    assert found is not None
    assert err == f"kvmesh {found.name}: no mesh named elsewhere at {operator.url}\n"


@pytest.mark.parametrize("command", [*COMMANDS, ("keys", "list")], ids=" ".join)
def test_an_absent_server_is_one_line(operator: Operator, command: tuple[str, ...]) -> None:
    operator.url = f"nats://user:hidden@127.0.0.1:{free_port()}"
    reason = operator.refused(*command, status=1)
    assert "cannot use NATS at nats://***@127.0.0.1:" in reason
    assert "KVMESH_NATS_URL" in reason


def test_the_settings_of_a_command_line_are_shown_by_config(operator: Operator) -> None:
    lines = operator.lines("config", "--router-policy", "random")
    assert any(line.startswith('policy = "random"') for line in lines)
    assert any(line.startswith(f'namespace = "{NAMESPACE}"') for line in lines)
    assert "--router-seed" in operator.refused("config", "--router-seed", "x", status=2)


def test_a_workload_is_captured_from_the_records(operator: Operator, tmp_path: Path) -> None:
    file = tmp_path / "captured.json"
    status, out, err = operator("workload", "capture", "--since", "1h", "-o", str(file))
    assert (status, out) == (0, f"wrote 2 requests to {file} ({file.stat().st_size:,} bytes)\n")
    assert "unfinished requests" in err
    assert operator("workload", "capture", "-o", str(file), "--since", "never")[0] == 2
