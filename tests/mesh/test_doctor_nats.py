"""`kvmesh doctor` says what is wrong with NATS, also when NATS cannot answer."""

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.nats import NatsServer
from support.nats_cluster import Cluster
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import Outcome, encode
from kvmesh.bus.streams.configuration import (
    StreamLimits,
    apply,
    differences,
    ensure_streams,
    mesh_streams,
)
from kvmesh.cli.commands.look import doctor
from kvmesh.cli.doctor import gathering
from kvmesh.cli.doctor.checks import diagnose
from kvmesh.cli.doctor.gathering import gather_facts
from kvmesh.settings import load

ACCOUNTS = """
accounts {
  A { users: [{user: a, password: a}], jetstream: %s, mappings: { %s } }
  SYS { users: [{user: s, password: s}] }
}
system_account: SYS
"""


async def found(bus: Bus, **environ: str) -> dict[tuple[str, str], str]:
    """The texts of the findings, by severity and check; those of one check joined."""
    settings = load(None, environ, {})
    texts: dict[tuple[str, str], list[str]] = {}
    for each in diagnose(await gather_facts(bus, settings)):
        texts.setdefault((each.severity, each.check), []).append(f"{each.subject}: {each.text}")
    return {key: "\n".join(lines) for key, lines in texts.items()}


async def connected(server: NatsServer, **options: object) -> Bus:
    return await Bus.connect(BusOptions(url=server.url, **options), "doctor")  # type: ignore[arg-type]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    yield server
    server.kill()


async def in_account(
    server: NatsServer, limits: StreamLimits, jetstream: str = "enabled", mappings: str = ""
) -> Bus:
    server.settings = ACCOUNTS % (jetstream, mappings)
    server.start()
    bus = await connected(server, user="a", password="a")
    if jetstream != "disabled":
        await ensure_streams(bus, limits)
    return bus


def test_the_cause_is_printed_if_nothing_can_be_asked(
    server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.jetstream = None
    server.start()
    for url, check, text in (
        (server.url, "server", "the NATS server runs without JetStream: add jetstream {"),
        ("nats://127.0.0.1:1", "connection", "cannot use NATS at nats://127.0.0.1:1: "),
    ):
        settings = load(None, {"KVMESH_NATS_URL": url}, {})
        assert doctor.run(arguments(as_json=True), settings) == 1
        printed = capsys.readouterr()
        lines = [json.loads(line) for line in printed.out.splitlines()]
        faults = [line for line in lines if line["severity"] == "fault"]
        assert [fault["check"] for fault in faults] == [check]
        assert faults[0]["text"].startswith(text)
        assert "Traceback" not in printed.err
        assert doctor.run(arguments(as_json=False), settings) == 1
        assert text in capsys.readouterr().out


def arguments(as_json: bool) -> argparse.Namespace:
    return argparse.Namespace(json=as_json, role=None, monitoring="")


async def test_limits_and_mappings_of_the_account_are_found(
    server: NatsServer, limits: StreamLimits
) -> None:
    moved = '"kvm.kvmesh.work.>": "other.>", "kvm.kvmesh.kv.>": [{destination: "x.>", weight: 90%}]'
    moved += ', "$KV.kvm-kvmesh-plan.*": "$KV.kvm-kvmesh-router.{{wildcard(1)}}"'
    bus = await in_account(server, limits, "{ max_streams: 13, max_file: 10GB }", moved)
    texts = await found(bus)
    assert "near its limit: max_streams 11 of 13, 85%" in texts["note", "limits"]
    assert "messages on kvm.kvmesh.work.> do not arrive" in texts["fault", "mappings"]
    assert "kvm.kvmesh.ctl" not in texts["fault", "mappings"]
    for stream, subject in (
        ("kvm-kvmesh-kv", "kvm.kvmesh.kv.>"),
        ("KV_kvm-kvmesh-plan", "$KV.kvm-kvmesh-plan.>"),
    ):
        gone = f"messages on {subject} do not reach stream {stream}"
        assert gone in texts["fault", "mappings"]
    assert texts["fault", "mappings"].count("do not reach") == 2
    assert all(not info.state.messages for info in await mesh_streams(bus))
    assert texts["ok", "streams"] == "streams: 11, none is missing"
    assert "none is ready" in texts["fault", "processes"]
    await bus.close()


@pytest.mark.parametrize(
    ("mapping", "subject", "other"),
    [
        (
            '"kvm.kvmesh.kv.*.*": "kvm.kvmesh.kv.moved.{{wildcard(1)}}.{{wildcard(2)}}"',
            "kvm.kvmesh.kv.doctor.NAME",
            "kvm.kvmesh.kv.moved.doctor.NAME",
        ),
        (
            '"$KV.kvm-kvmesh-instances.>": "$KV.kvm-kvmesh-instances.of.>"',
            "$KV.kvm-kvmesh-instances.NAME",
            "$KV.kvm-kvmesh-instances.of.NAME",
        ),
        (
            '"kvm.kvmesh.seq.*": [{ destination: "kvm.kvmesh.seq.one", weight: 90% }]',
            "kvm.kvmesh.seq.NAME",
            "kvm.kvmesh.seq.one",
        ),
    ],
)
async def test_a_mapping_within_one_stream_is_found(
    server: NatsServer, limits: StreamLimits, mapping: str, subject: str, other: str
) -> None:
    bus = await in_account(server, limits, mappings=mapping)
    fault = (await found(bus))["fault", "mappings"]
    assert f"messages on {subject} reach their stream on {other}" in fault
    assert len(fault.splitlines()) == 1
    assert all(not info.state.messages for info in await mesh_streams(bus))
    await bus.close()


async def test_an_account_without_jetstream_is_found(
    server: NatsServer, limits: StreamLimits
) -> None:
    bus = await in_account(server, limits, "disabled")
    texts = await found(bus)
    assert "JetStream" in texts["fault", "server"]
    assert ("fault", "answers") not in texts
    await bus.close()


async def test_missing_streams_and_wrong_clocks_are_found(bus: Bus) -> None:
    subjects = bus.subjects
    ahead = Outcome(
        request="r",
        instance="w-0-1",
        time=time.time() + 60,
        cached_tokens=0,
        output_tokens=1,
        ttft_s=None,
        total_s=1.0,
        finish="stop",
    )
    await bus.store(subjects.route("m"), encode(ahead), PATIENCE_S)
    texts = await found(bus)
    assert "a frontend: its clock is 60" in texts["fault", "clocks"]
    assert ("fault", "streams") not in texts
    assert f"{subjects.kv_stream} has max_bytes" in texts["note", "streams"]
    assert "streams.kv_bytes is 4294967296 for this command" in texts["note", "streams"]
    await bus.js.context.delete_stream(subjects.kv_stream)
    texts = await found(bus)
    assert f"{subjects.kv_stream}: this stream is missing: indexers" in texts["fault", "streams"]
    elsewhere = await Bus.connect(replace(bus.options, namespace="nowhere"), "doctor")
    texts = await found(elsewhere)
    assert "no mesh is named nowhere" in texts["fault", "streams"]
    await elsewhere.close()


async def test_a_server_that_does_not_answer_is_one_fault(
    server: NatsServer, limits: StreamLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "ASK_S", 0.5)
    server.start()
    bus = await connected(server)
    await ensure_streams(bus, limits)
    server.signal(signal.SIGSTOP)
    texts = await found(bus)
    assert "no answer within" in texts["fault", "answers"]
    assert "the account" in texts["fault", "answers"]
    assert len(texts["fault", "answers"].splitlines()) == 1
    os.kill(server.pid, signal.SIGCONT)
    await bus.close()


async def test_a_cluster_is_checked(tmp_path: Path, limits: StreamLimits) -> None:
    cluster = Cluster(tmp_path)
    await asyncio.to_thread(cluster.start)
    options = BusOptions(url=cluster.url)
    bus = await Bus.connect(options, "doctor")

    async def made() -> bool:
        try:
            await ensure_streams(bus, limits)
        except BusError:
            return False
        return True

    async def made_on_all() -> bool:
        await apply(replicated, differences(replicated, limits, await mesh_streams(replicated)))
        return True

    await eventually(made, what="the cluster has a leader")
    texts = await found(bus)
    assert "on one server of the cluster only" in texts["fault", "replicas"]
    assert "one of 3 servers" in texts["ok", "server"]
    replicated = await Bus.connect(replace(options, replicas=3), "doctor")
    await eventually(made_on_all, what="all streams have three replicas")

    async def sound() -> bool:
        texts = await found(replicated, KVMESH_NATS_REPLICAS="3")
        assert "all replicas of 11 streams are current" in texts.get(("ok", "peers"), "")
        assert ("fault", "replicas") not in texts
        return True

    await eventually(sound)
    away = await cluster.follower(replicated, bus.subjects.kv_stream)
    away.kill()

    async def offline() -> bool:
        texts = await found(replicated, KVMESH_NATS_REPLICAS="3")
        assert f"{away.name}: this server is offline for" in texts.get(("fault", "peers"), "")
        return True

    await eventually(offline)
    next(m for m in cluster.members if m is not away and str(m.port) not in bus.server).kill()

    async def lost() -> bool:
        texts = await found(bus)
        assert "it has no leader" in texts.get(("fault", "answers"), "")
        return True

    await eventually(lost)
    await replicated.close()
    await bus.close()
    cluster.stop()
