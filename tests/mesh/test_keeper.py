"""One process keeps its streams, and what it stores in them, whole."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from nats.js.api import (
    DiscardPolicy,
    RePublish,
    StreamConfig,
    StreamConsumerLimits,
    StreamSource,
    SubjectTransform,
)
from support.nats import NatsServer
from support.nats_cluster import Cluster
from support.wait import PATIENCE_S, eventually
from support.wholeness import key_entry

from kvmesh.bus.client import Bus, BusOptions, RawMessage
from kvmesh.bus.discovery.leases import Lease, delete_lease
from kvmesh.bus.errors import BusTimeout, ModelFilesError, StorageFull
from kvmesh.bus.messages import Instance, MessageDecoder, Role
from kvmesh.bus.storage.buckets import (
    KnownEntries,
    evicting_bucket,
    keys_bucket,
    read_bucket,
    write_once_bucket,
)
from kvmesh.bus.storage.model_files import fetch_model, keep_model, publish_model
from kvmesh.bus.storage.object_bucket import ObjectBucket
from kvmesh.bus.storage.shared_secret import keep_secret, shared_secret
from kvmesh.bus.streams import keeper as keeping
from kvmesh.bus.streams.altered import FoundStream, answered, found_stream, harm
from kvmesh.bus.streams.configuration import (
    Difference,
    StreamLimits,
    apply,
    ensure_model_store,
    mesh_streams,
)
from kvmesh.bus.streams.keeper import StreamKeeper, keeper_of
from kvmesh.bus.streams.preparation import prepare_streams
from kvmesh.cli.doctor import nats_checks
from kvmesh.cli.doctor.gathering import gather_facts
from kvmesh.frontend.auth.authenticator import Authenticator
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.settings import load


class Kept:
    """The warnings of a keeper that runs, by kind; it looks every 0.1 s."""

    def __init__(self, keeper: StreamKeeper) -> None:
        self.warnings: dict[str, dict[str, str]] = {}
        self.task = asyncio.create_task(keeper.run(self._warn, tells=True))

    def _warn(self, kind: str, found: Mapping[str, str]) -> None:
        self.warnings[kind] = dict(found)


@pytest_asyncio.fixture
async def kept(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kept]:
    monkeypatch.setattr(keeping, "CHECK_S", 0.1)
    monkeypatch.setattr(keeping, "SPACING_S", 0.0)
    kept = Kept(keeper_of(bus))
    await eventually(lambda: "lost_data" in kept.warnings)
    yield kept
    kept.task.cancel()


async def test_a_stream_is_made_again_with_the_limits_that_were_set_since(
    bus: Bus, kept: Kept
) -> None:
    stream = bus.subjects.route_stream
    await apply(bus, [Difference(stream, "max_bytes", 0, 5 << 20, "")])

    async def noted() -> bool:
        return b"5242880" in bytes(keeper_of(bus)._seen[stream].config)

    await eventually(noted)
    await bus.js.context.delete_stream(stream)

    async def same() -> bool:
        names = await keeping.stream_names(bus)
        return stream in names and (await bus.js.stream_info(stream)).config.max_bytes == 5 << 20

    await eventually(same)


async def test_a_stream_with_other_subjects_is_named_and_not_made_again_as_it_was(
    bus: Bus, kept: Kept
) -> None:
    stream, own = bus.subjects.kv_stream, bus.subjects.kv_all
    await bus.js.update_stream(
        (await bus.js.stream_info(stream)).config.evolve(subjects=[f"{own[:-1]}other.>"])
    )
    text = f"stream {stream} does not store messages on {own}"
    await eventually(lambda: text in kept.warnings["missing_stream"].get(stream, ""))
    await bus.js.context.delete_stream(stream)

    async def whole() -> bool:
        names = await keeping.stream_names(bus)
        return stream in names and (await bus.js.stream_info(stream)).config.subjects == [own]

    await eventually(whole)
    await eventually(lambda: not kept.warnings["missing_stream"])


@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        ("kv", {"discard": DiscardPolicy.NEW}, "refuses messages once it is full: set discard"),
        ("kv", {"no_ack": True}, "acknowledges nothing: set no_ack to false"),
        ("plan", {"no_ack": True}, "acknowledges nothing: set no_ack to false"),
        ("kv", {"max_msg_size": 8}, "refuses messages of more than 8 bytes: set max_msg_size"),
        ("plan", {"max_age": 600.0}, "drops its entries after 600 s: set max_age to 0"),
        ("models", {"max_age": 600.0}, "drops its entries after 600 s: set max_age to 0"),
        ("route", {"max_age": 1.5}, "drops messages after 1.5 s, before all have read them"),
        ("plan", {"max_msgs": 3}, "stores at most 3 entries: set max_msgs to -1"),
        ("route", {"max_msgs": 3}, "drops all but the last 3 entries: set max_msgs to -1"),
        ("kv", {"max_msgs_per_subject": 1}, "the last 1 on each subject: set max_msgs_per_subject"),
        ("models", {"max_msgs_per_subject": 1}, "the last 1 on each subject"),
        ("kv", {"max_bytes": 1000}, "drops what exceeds 1000 bytes in total: raise max_bytes"),
        ("plan", {"discard": DiscardPolicy.OLD}, "drops its oldest entries once it is full: set"),
        ("plan", {"sources": [StreamSource(name="other")]}, "takes in what others have stored"),
        ("kv", {"sealed": True}, "is sealed, and stores nothing: delete it"),
        ("kv", {"deny_purge": True}, "have in their snapshots: delete it"),
        ("models", {"deny_delete": True}, "lets nobody remove objects: delete it"),
        ("models", {"allow_rollup_hdrs": False}, "descriptions of objects: set allow_rollup_hdrs"),
        ("weights", {"discard_new_per_subject": False}, "lets its entries be replaced: set"),
        ("instances", {"max_age": 0}, "keeps the cards of dead processes: set max_age to 10 s"),
        ("seq", {"max_consumers": 1}, "permits only 1 readers: raise max_consumers"),
        (
            "scaling",
            {"consumer_limits": StreamConsumerLimits(inactive_threshold=9.0)},
            "limits what readers may ask for: remove consumer_limits",
        ),
        (
            "kv",
            {"republish": RePublish(src=">", dest="kvm.x.work.>")},
            "sends what it stores to the mesh's own kvm.x.work.>: remove republish",
        ),
        (
            "kv",
            {"subject_transform": SubjectTransform(src=">", dest="x.>")},
            "stores messages on other subjects: remove subject_transform",
        ),
    ],
)
async def test_settings_of_a_stream_that_do_harm_are_named(
    bus: Bus, kept: Kept, kind: str, change: dict[str, Any], text: str
) -> None:
    stream = next(name for name in bus.specs if name.endswith(f"-{kind}"))
    before = (await bus.js.stream_info(stream)).config
    await bus.js.update_stream(before.evolve(**change))
    await eventually(lambda: text in kept.warnings["missing_stream"].get(stream, ""))
    facts = await gather_facts(bus, load(None, {}, {}))
    faults = [each for each in nats_checks.streams(facts) if each.severity == "fault"]
    assert [each.subject for each in faults] == [stream]
    assert text in f"this stream {faults[0].text}: {faults[0].action}"
    assert [each for each in nats_checks.mappings(facts) if each.severity == "fault"] == []
    if {"sealed", "deny_purge", "deny_delete"} & change.keys():  # for good
        await bus.js.context.delete_stream(stream)
    else:
        await bus.js.update_stream(before)
    await eventually(lambda: not kept.warnings["missing_stream"])


@pytest.mark.parametrize("own", [False, True])
async def test_a_stream_that_answers_requests_is_named_and_not_believed(
    bus: Bus, kept: Kept, own: bool
) -> None:
    subject, stream = bus.subjects.work("w-1"), bus.subjects.route_stream if own else "archive"
    taken = f"{subject[: -len('w.1')]}>"
    if own:
        before = (await bus.js.stream_info(stream)).config
        await bus.js.update_stream(before.evolve(subjects=[bus.subjects.route_all, taken]))
    else:
        await bus.js.add_stream(StreamConfig(name=stream, subjects=[taken]))
    cards = MessageDecoder(Instance)
    serving = await bus.serve(subject, cards, lambda request, reply: reply(request))
    sent = card("asked")
    assert await bus.request(subject, sent, cards, PATIENCE_S) == sent
    text = f"what is sent on {taken}, too, and answers requests there: remove that subject"
    await eventually(lambda: text in kept.warnings["missing_stream"].get(stream, ""))
    settings = load(None, {"KVMESH_NATS_NAMESPACE": bus.options.namespace}, {})
    faults = nats_checks.streams(await gather_facts(bus, settings))
    named = {f.subject: f"{f.text}: {f.action}" for f in faults if f.severity == "fault"}
    assert list(named) == [stream]
    assert text in named[stream]
    await serving.unsubscribe()
    await bus.js.context.delete_stream(stream)


@pytest.mark.parametrize(
    ("subject", "answers"),
    [
        (">", True),
        ("kvm.>", True),
        ("kvm.*.work.>", True),
        ("kvm.m.router.x", True),
        ("kvm.m.*.>", True),
        ("kvm.other.>", False),
        ("kvm.m.load.>", False),
        ("kvm.m", False),
        ("orders.>", False),
    ],
)
def test_streams_that_answer_requests_are_told_from_others(subject: str, answers: bool) -> None:
    assert bool(list(answered(FoundStream("x", [subject]), "m"))) is answers
    assert list(answered(FoundStream("x", [subject], no_ack=True), "m")) == []


async def test_the_settings_of_the_mesh_itself_do_no_harm(bus: Bus, kept: Kept) -> None:
    name = bus.subjects.responses_bucket
    evicting_bucket(bus, name, 60.0, 1 << 20)
    await keys_bucket(bus)
    write_once_bucket(bus, bus.subjects.secrets_bucket)
    await keeper_of(bus).make_missing()
    await ensure_model_store(bus, StreamLimits(models_bytes=1 << 20))
    found = {info.config.name: found_stream(info.config) for info in await mesh_streams(bus)}
    assert f"KV_{name}" in found
    assert [text for has in found.values() for text in harm(has)] == []


@pytest.mark.parametrize("bucket", [False, True])
async def test_a_stream_that_refuses_what_is_stored_is_named_until_it_stores(
    bus: Bus, kept: Kept, bucket: bool
) -> None:
    stream = f"KV_{bus.subjects.plan_bucket}" if bucket else bus.subjects.kv_stream
    full = {"max_bytes": 100, "discard": DiscardPolicy.NEW}
    before = (await bus.js.stream_info(stream)).config
    await bus.js.update_stream(before.evolve(**full))

    async def store() -> None:
        if bucket:
            await bus.bucket(bus.subjects.plan_bucket).put("a", bytes(200))
        else:
            await bus.store(bus.subjects.kv("m", "w"), bytes(200), PATIENCE_S)

    with pytest.raises(StorageFull, match=f"stream {stream} is full, raise its max_bytes"):
        await store()
    text = f"NATS refuses what is stored in {stream}: stream {stream} is full"
    await eventually(lambda: text in kept.warnings["not_stored"].get(stream, ""))
    await bus.js.update_stream(before)
    await store()
    await eventually(lambda: not kept.warnings["not_stored"])


async def test_storing_makes_a_missing_bucket_first(bus: Bus) -> None:
    bucket = write_once_bucket(bus, bus.subjects.secrets_bucket)
    await bucket.create("a", b"1")
    await bus.js.context.delete_stream(f"KV_{bus.subjects.secrets_bucket}")
    await bucket.create("a", b"2")
    assert (await bucket.get("a")).value == b"2"


async def test_a_lost_secret_is_stored_again_and_another_stored_one_holds(
    bus: Bus, kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    name, adopted = bus.subjects.secrets_bucket, list[bytes]()
    bucket = write_once_bucket(bus, name)
    secret = await shared_secret(bus, name, "s", 32)
    keep_secret(bus, name, "s", secret, adopted.append)
    await bus.js.context.delete_stream(f"KV_{name}")

    async def restored() -> bool:
        names = await keeping.stream_names(bus)
        return f"KV_{name}" in names and await read_bucket(bus, name) == {"s": secret}

    await eventually(restored)
    kept.task.cancel()
    await bus.js.context.delete_stream(f"KV_{name}")
    await bucket.create("s", b"o" * 32)
    again = Kept(keeper_of(bus))
    await eventually(lambda: adopted == [b"o" * 32])
    assert "is another one now" in caplog.text
    again.task.cancel()


@pytest.mark.parametrize("change", [{"size": 1}, {"chunks": 2}, {"nuid": "other"}, {}])
async def test_model_files_that_others_have_altered_are_stored_again(
    bus: Bus, kept: Kept, tmp_path: Path, change: dict[str, Any]
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    digest = await publish_model(bus, tmp_path)
    bucket = bus.subjects.model_bucket
    found = await ObjectBucket(bus, bucket).find(digest)
    if change:
        at = (await bus.js.get_msg(f"OBJ_{bucket}", seq=found.version)).subject or ""
        described = json.loads((await bus.js.get_msg(f"OBJ_{bucket}", subject=at)).data or b"")
        data = json.dumps({**described, **change}).encode()
        await bus.store(at, data, PATIENCE_S, {"Nats-Rollup": "sub"})
    else:
        at = f"$O.{bucket}.C.{found.nuid}"
        await bus.js.purge_stream(f"OBJ_{bucket}", subject=at)
        await bus.store(at, bytes(found.size), PATIENCE_S)
    with pytest.raises(ModelFilesError):
        await fetch_model(bus, digest)
    keep_model(bus, tmp_path, digest)

    async def readable() -> bool:
        with suppress(ModelFilesError):
            return bool(await fetch_model(bus, digest))
        return False

    await eventually(readable)
    versions = await ObjectBucket(bus, bucket).complete_version(digest)
    await keeper_of(bus)._check()
    assert await ObjectBucket(bus, bucket).complete_version(digest) == versions


async def test_a_newcomer_waits_for_those_who_hold_the_secret(
    bus: Bus, limits: StreamLimits
) -> None:
    name = bus.subjects.secrets_bucket
    bucket = write_once_bucket(bus, name)
    await keeper_of(bus).make_missing()
    holder = Lease(bus, card("f", Role.FRONTEND), limits)
    await holder.open()
    newcomer = asyncio.create_task(shared_secret(bus, name, "s", 32, Role.FRONTEND))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(newcomer), 0.5)
    await bucket.create("s", b"h" * 32)
    assert await newcomer == b"h" * 32
    await holder.close()


async def test_known_entries_are_stored_again_unless_they_were_deleted(
    bus: Bus, kept: Kept
) -> None:
    name = bus.subjects.plan_bucket
    known = KnownEntries(bus, name, "entries", lambda: True)
    known.note("a", b"1")
    known.note("b", b"1")
    known.note("b", b"")

    async def only_a() -> bool:
        return await read_bucket(bus, name) == {"a": b"1"}

    await eventually(only_a)
    await bus.js.purge_stream(f"KV_{name}")
    await eventually(only_a)


async def test_a_purge_of_the_leases_ends_none(bus: Bus, limits: StreamLimits) -> None:
    lapsed: list[str] = []
    lease = Lease(bus, card("w"), limits, lambda: lapsed.append("w"))
    await lease.open()
    await bus.js.purge_stream(f"KV_{bus.subjects.instances_bucket}")
    await lease.update(lease.card)
    await bus.js.context.delete_stream(f"KV_{bus.subjects.instances_bucket}")
    await lease.update(lease.card)
    assert lapsed == []
    await delete_lease(bus, lease.card)
    await lease.update(lease.card)
    assert lapsed == ["w"]
    await lease.close()


async def test_a_stream_that_acknowledges_nothing_is_named(
    bus: Bus, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(_: RawMessage) -> None:
        """Like a stream whose disk was full: it is there, and does not reply."""

    await bus.subscribe_raw("$KV.full.>", silent)
    monkeypatch.setattr("kvmesh.bus.connection.acks.MIN_S", 0.0)
    for _ in range(3):
        with pytest.raises(BusTimeout):
            await bus.store("$KV.full.key", b"", 0.1)
    await eventually(lambda: "disk may be full" in kept.warnings["not_stored"].get("KV_full", ""))
    bus.acks.arrived("KV_full", 0.0)
    await eventually(lambda: kept.warnings["not_stored"] == {})


async def test_a_keys_bucket_made_anew_with_as_many_keys_is_read_anew(bus: Bus, kept: Kept) -> None:
    gate = Authenticator(bus, None, use_bucket=True, local=True, tenants=TenantNamespaces())
    await (await keys_bucket(bus)).put("alice", key_entry("alice"))
    await gate.open()
    assert gate.account({"x-api-key": "alice"}) is not None
    await bus.js.context.delete_stream(f"KV_{bus.subjects.keys_bucket}")
    await (await keys_bucket(bus)).put("bob", key_entry("bob"))
    running = asyncio.create_task(gate.run())
    await eventually(lambda: [account.key.name for account in gate.accounts] == ["bob"])
    about = "the bucket of API keys was lost or is an older copy: alice are gone; bob are valid"
    await eventually(lambda: about in kept.warnings["lost_data"].get("API keys", ""))
    running.cancel()


def card(name: str, role: Role = Role.WORKER) -> Instance:
    return Instance(instance=f"{name}-1", role=role, name=name, version="0", started=0.0)


async def test_a_stream_for_which_the_server_has_no_room_any_more_is_named_with_the_limit(
    tmp_path: Path, limits: StreamLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "CHECK_S", 0.1)
    monkeypatch.setattr(keeping, "SPACING_S", 0.0)
    server = NatsServer(tmp_path)
    await asyncio.to_thread(server.start)
    bus = await Bus.connect(BusOptions(url=server.url), "test")
    await prepare_streams(bus, limits)
    kept, stream = Kept(keeper_of(bus)), bus.subjects.seq_stream
    await eventually(lambda: stream in keeper_of(bus)._seen)
    server.jetstream = "max_memory_store: 1KB"
    await asyncio.to_thread(server.restart)
    text = "MiB; raise max_memory_store in the server's configuration"
    await eventually(lambda: text in kept.warnings["missing_stream"].get(stream, ""))
    for name in (stream, "another") * 3:
        bus.acks.missed(name, -inf)
    await eventually(lambda: "another" in kept.warnings["not_stored"])
    assert stream not in kept.warnings["not_stored"], "one line suffices"
    server.jetstream = ""
    await asyncio.to_thread(server.restart)
    await eventually(lambda: not any(kept.warnings.values()))
    kept.task.cancel()
    await bus.close()
    server.stop()


async def test_a_cluster_without_a_leader_misses_no_stream(
    tmp_path: Path, limits: StreamLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "CHECK_S", 0.1)
    monkeypatch.setattr(keeping, "SPACING_S", 0.0)
    cluster = Cluster(tmp_path)
    await asyncio.to_thread(cluster.start)
    stays, *others = cluster.members
    bus = await Bus.connect(BusOptions(url=stays.url, namespace="c", replicas=3), "test")
    await prepare_streams(bus, limits)
    kept = Kept(keeper_of(bus))
    await eventually(lambda: "lost_data" in kept.warnings)
    for member in others:
        member.kill()
    text = "JetStream stores nothing: the cluster of NATS servers has no leader"
    await eventually(lambda: text in str(kept.warnings["not_stored"]))
    assert not kept.warnings["missing_stream"]
    for member in others:
        await asyncio.to_thread(member.start)
    await eventually(lambda: not kept.warnings["not_stored"])
    assert not kept.warnings["missing_stream"]
    kept.task.cancel()
    await bus.close()
    cluster.stop()


async def test_a_server_that_accepts_too_small_messages_by_now_is_named(
    tmp_path: Path, limits: StreamLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "CHECK_S", 0.1)
    monkeypatch.setattr(keeping, "SPACING_S", 0.0)
    server = NatsServer(tmp_path)
    await asyncio.to_thread(server.start)
    bus = await Bus.connect(BusOptions(url=server.url), "test")
    await prepare_streams(bus, limits)
    kept = Kept(keeper_of(bus))
    await eventually(lambda: kept.warnings.get("small_messages") == {})
    server.max_payload = "512KB"
    await asyncio.to_thread(server.restart)
    text = "too small messages (max_payload of the NATS server, 524288 bytes): set max_payload to"
    await eventually(lambda: text in kept.warnings["small_messages"].get("", ""))
    server.max_payload = "8MB"
    await asyncio.to_thread(server.restart)
    await eventually(lambda: not any(kept.warnings.values()))
    kept.task.cancel()
    await bus.close()
    server.stop()
