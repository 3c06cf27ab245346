"""The bus against a real server: requests, streams, leases, model files."""

import asyncio
import base64
import gc
import logging
import re
import threading
import time
import weakref
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import inf, nan
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from msgspec.structs import fields
from support.mesh import Mesh
from support.nats import NatsServer, free_port
from support.wait import PATIENCE_S, eventually

from kvmesh.bus import client
from kvmesh.bus.client import Bus, BusOptions, Reply
from kvmesh.bus.connection.first_connection import FirstConnection
from kvmesh.bus.discovery.cards import MOST_LEFT, RECORD, keep, read_cards
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.discovery.failed_starts import failed_starts, record_failed_start
from kvmesh.bus.discovery.leases import Lease, delete_lease
from kvmesh.bus.discovery.worker_reports import follow_loads
from kvmesh.bus.errors import (
    BusError,
    BusUnavailable,
    JetStreamError,
    ModelFilesError,
    NoResponder,
    ObjectUnreadable,
    RequestTimeout,
)
from kvmesh.bus.messages import (
    ControlReply,
    FailedStart,
    Instance,
    Load,
    MessageDecoder,
    Ping,
    Role,
    SeqBatch,
    SeqFree,
    encode,
)
from kvmesh.bus.storage.buckets import read_headers
from kvmesh.bus.storage.model_files import fetch_model, publish_model
from kvmesh.bus.storage.object_bucket import ObjectBucket
from kvmesh.bus.streams.configuration import MAX_WATCHERS, StreamLimits, ensure_streams
from kvmesh.bus.streams.reader import BATCH_S, Start, StreamMessage, StreamReader

CONTROL_REPLY = MessageDecoder(ControlReply)
PING = MessageDecoder(Ping)


def card(name: str) -> Instance:
    return Instance(
        instance=f"{name}-1", role=Role.WORKER, name=name, version="0", started=0.0, engine="mock"
    )


async def test_more_processes_may_watch_the_instances_than_the_servers_default(bus: Bus) -> None:
    info = await bus.js.stream_info(f"KV_{bus.subjects.instances_bucket}")
    assert info.config.max_consumers == MAX_WATCHERS


async def test_a_request_gets_a_reply_no_responder_or_a_timeout(bus: Bus) -> None:
    async def answer(_: Ping, reply: Reply) -> None:
        reply(ControlReply(ok=True))

    async def ignore(_: Ping, __: Reply) -> None:
        return

    await bus.serve(bus.subjects.ping("a"), PING, answer)
    await bus.serve(bus.subjects.ping("b"), PING, ignore)
    assert (await bus.request(bus.subjects.ping("a"), Ping(), CONTROL_REPLY, PATIENCE_S)).ok
    with pytest.raises(NoResponder):
        await bus.request(bus.subjects.ping("c"), Ping(), CONTROL_REPLY, PATIENCE_S)
    with pytest.raises(RequestTimeout):
        await bus.request(bus.subjects.ping("b"), Ping(), CONTROL_REPLY, 0.05)


async def test_a_query_that_nobody_receives_is_no_malformed_reply(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[ControlReply] = []
    inbox = bus.new_inbox()
    await bus.subscribe(inbox, CONTROL_REPLY, heard.append)
    bus.post(bus.subjects.ping("nobody"), Ping(), reply=inbox)
    bus.post(inbox, ControlReply(ok=True))
    await eventually(lambda: heard)
    assert "malformed" not in caplog.text


async def test_a_malformed_request_gets_a_reply_and_the_server_continues(bus: Bus) -> None:
    async def answer(_: Ping, reply: Reply) -> None:
        reply(ControlReply(ok=True))

    await bus.serve(
        bus.subjects.ping("a"), PING, answer, on_malformed=lambda why: ControlReply(False, why)
    )
    reply = await bus.request(
        bus.subjects.ping("a"),
        {"type": "nonsense"},
        CONTROL_REPLY,
        PATIENCE_S,
    )
    assert not reply.ok
    assert "nonsense" in reply.reason
    assert (await bus.request(bus.subjects.ping("a"), Ping(), CONTROL_REPLY, PATIENCE_S)).ok


async def test_a_plain_handler_may_reply_later_and_shares_its_queue_group(bus: Bus) -> None:
    replies: list[Reply] = []

    def defer(_: Ping, reply: Reply) -> None:
        replies.append(reply)

    subject = bus.subjects.ping("a")
    for _ in range(2):
        await bus.serve(subject, PING, defer, "group", lambda why: ControlReply(False, why))
    pending = asyncio.create_task(bus.request(subject, Ping(), CONTROL_REPLY, PATIENCE_S))
    await eventually(lambda: replies)
    replies[0](ControlReply(ok=True))
    assert (await pending).ok
    assert len(replies) == 1
    assert not (await bus.request(subject, {"type": "nonsense"}, CONTROL_REPLY, PATIENCE_S)).ok


async def test_posts_keep_their_order_on_a_congested_connection(bus: Bus) -> None:
    subject, received, padding = bus.subjects.out("f"), [], "x" * 2000

    def receive(event: SeqFree) -> None:
        received.append(int(event.request.rstrip("x")))

    await bus.subscribe(subject, MessageDecoder(SeqFree), receive)
    for number in range(3000):
        bus.post(subject, SeqFree(f"{number}{padding}"))
    await eventually(lambda: len(received) == 3000)
    assert received == list(range(3000))


async def test_a_plain_handler_gets_all_messages_in_order_and_may_raise(bus: Bus) -> None:
    subject, received = bus.subjects.out("f"), []

    def receive(event: SeqFree) -> None:
        received.append(int(event.request))
        if event.request == "7":
            raise ValueError("seven")

    await bus.subscribe(subject, MessageDecoder(SeqFree), receive)
    for number in range(0, 3000, 3):
        assert bus.client.try_publish(subject, encode(SeqFree(str(number))))
        bus.post(subject, SeqFree(str(number + 1)))
        await bus.client.publish(subject, encode(SeqFree(str(number + 2))), headers={"a": "b"})
    await eventually(lambda: len(received) == 3000)
    assert received == list(range(3000))


async def test_a_subject_that_is_too_long_fails_alone(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    """The server would end the connection. Names of other processes are parts of subjects."""
    subject = bus.subjects.router("m" * 5000)
    with pytest.raises(BusError, match=r"has 50.. characters"):
        await bus.subscribe_raw(subject, lambda _: None)
    with pytest.raises(BusError, match=r"has 50.. characters"):
        await bus.request(subject, Ping(), MessageDecoder(Ping), PATIENCE_S)
    bus.post(subject, Ping())
    await bus.flush()
    assert "has 50" in caplog.text
    assert bus.counts.reconnects == 0


async def test_messages_posted_during_an_outage_are_sent_after_it(
    nats_server: NatsServer, bus: Bus
) -> None:
    received: list[str] = []
    subject = bus.subjects.out("f")
    await bus.subscribe(
        subject, MessageDecoder(SeqFree), lambda event: received.append(event.request)
    )
    await asyncio.to_thread(nats_server.stop)
    await eventually(lambda: not bus.connected)
    assert not bus.client.try_publish(subject, encode(SeqFree("a")))
    bus.post(subject, SeqFree("a"))
    await asyncio.to_thread(nats_server.start)
    await eventually(lambda: bus.client.try_publish(subject, encode(SeqFree("b"))))
    await eventually(lambda: received == ["a", "b"])


async def test_failed_connection_attempts_are_closed(nats_server: NatsServer, bus: Bus) -> None:
    attempts: list[asyncio.StreamReader] = []

    async def send_garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        attempts.append(reader)
        writer.write(b"hello\r\n")
        await reader.read()
        writer.close()

    await asyncio.to_thread(nats_server.stop)
    async with await asyncio.start_server(send_garbage, "127.0.0.1", nats_server.port):
        await eventually(lambda: len(attempts) > 2)
        await eventually(lambda: all(reader.at_eof() for reader in attempts[:2]))
    await asyncio.to_thread(nats_server.start)
    await eventually(lambda: bus.connected)


async def test_no_server_is_a_clear_error() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(BusUnavailable, match=url):
        await Bus.connect(BusOptions(url=url), "test", timeout=0.5)


async def test_a_connection_to_a_silent_server_is_closed(options: BusOptions) -> None:
    left = asyncio.Event()

    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        left.set()
        writer.close()

    async with await asyncio.start_server(ignore, "127.0.0.1", port := free_port()):
        silent = replace(options, url=f"nats://127.0.0.1:{port}")
        with pytest.raises(BusUnavailable):
            await Bus.connect(silent, "test", timeout=0.5)
        await asyncio.wait_for(left.wait(), PATIENCE_S)


class CollectingReader:
    """A reader that collects the request ids of SeqFree events."""

    def __init__(self, bus: Bus, start: Start) -> None:
        self.ids: list[str] = []
        self.recreated = 0
        self.reader = StreamReader(
            bus,
            bus.subjects.seq_stream,
            bus.subjects.seq_all,
            self._receive,
            start,
            self._on_recreated,
        )

    def _receive(self, message: StreamMessage) -> None:
        batch = msgspec.msgpack.decode(message.data, type=SeqBatch)
        self.ids.extend(event.request for event in batch.events)

    def _on_recreated(self) -> None:
        self.recreated += 1


async def free(bus: Bus, *ids: str) -> None:
    for name in ids:
        bus.post(bus.subjects.seq("m"), SeqBatch("test", [SeqFree(name)]))
    await bus.flush()


async def test_store_returns_once_stored_and_raises_otherwise(bus: Bus) -> None:
    await bus.store(bus.subjects.seq("m"), encode(SeqBatch("test", [SeqFree("a")])), 5)
    assert (await bus.js.stream_info(bus.subjects.seq_stream)).state.messages == 1
    with pytest.raises(NoResponder):
        await bus.store("nowhere", b"", 5)
    small = f"{bus.options.namespace}-small"
    await bus.js.add_stream(name=small, subjects=[small], max_msg_size=8)
    with pytest.raises(JetStreamError, match="exceeds"):
        await bus.store(small, b"too much for it", 5)


async def test_a_reader_replays_then_follows(bus: Bus) -> None:
    await free(bus, "a", "b")

    async def stored() -> bool:  # JetStream stores after the server has read
        return (await bus.js.stream_info(bus.subjects.seq_stream)).state.messages == 2

    await eventually(stored)
    reading = CollectingReader(bus, Start())
    await reading.reader.open()
    await asyncio.wait_for(reading.reader.caught_up.wait(), PATIENCE_S)
    assert reading.ids == ["a", "b"]
    await free(bus, "c")
    await eventually(lambda: reading.ids == ["a", "b", "c"])
    resumed = CollectingReader(bus, Start(after=reading.reader.last_seq - 1))
    await resumed.reader.open()
    await eventually(lambda: resumed.ids == ["c"])
    await reading.reader.close()
    await resumed.reader.close()


async def test_a_busy_reader_lets_other_tasks_run(bus: Bus) -> None:
    await free(bus, *map(str, range(20)))
    turns = 0
    seen: list[int] = []

    def other() -> None:
        nonlocal turns
        turns += 1
        if len(seen) < 20:
            asyncio.get_running_loop().call_soon(other)

    def slow(_: StreamMessage) -> None:
        time.sleep(2 * BATCH_S)
        seen.append(turns)

    stream, subject = bus.subjects.seq_stream, bus.subjects.seq("m")
    reader = StreamReader(bus, stream, subject, slow, Start())
    other()
    await reader.open()
    await eventually(lambda: len(seen) == 20)
    assert all(after > before for before, after in pairwise(seen))
    await reader.close()


async def test_a_closed_reader_leaves_nothing_to_the_garbage_collector(bus: Bus) -> None:
    stream, subject = bus.subjects.seq_stream, bus.subjects.seq("m")
    gc.disable()
    try:
        reader = StreamReader(bus, stream, subject, lambda _: None, Start())
        await reader.open()
        held = weakref.ref(reader)
        await reader.close()
        del reader
        await eventually(lambda: held() is None)
    finally:
        gc.enable()


async def test_a_reader_survives_the_loss_of_its_consumer(bus: Bus) -> None:
    reading = CollectingReader(bus, Start())
    await reading.reader.open()
    await free(bus, "a")
    await eventually(lambda: reading.ids == ["a"])
    for consumer in await bus.js.consumers_info(bus.subjects.seq_stream):
        await bus.js.delete_consumer(bus.subjects.seq_stream, consumer.name)
    await free(bus, "b")
    await eventually(lambda: reading.ids == ["a", "b"])
    await reading.reader.close()


async def test_a_reader_starts_over_when_the_server_lost_the_stream(
    nats_server: NatsServer, bus: Bus, limits: StreamLimits
) -> None:
    reading = CollectingReader(bus, Start())
    await reading.reader.open()
    await free(bus, "a", "b", "c")
    await eventually(lambda: len(reading.ids) == 3)
    await asyncio.to_thread(nats_server.wipe)
    await eventually(lambda: bus.connected)
    await ensure_streams(bus, limits)
    await free(bus, "d")
    await eventually(lambda: reading.ids[3:] == ["d"])
    assert reading.recreated == 1
    await reading.reader.close()


async def test_a_lease_joins_changes_and_leaves(bus: Bus, limits: StreamLimits) -> None:
    lease = Lease(bus, card("w"), limits)
    await lease.open()
    joined: list[Instance] = []
    left: list[Instance] = []
    directory = Directory(bus, limits, joined.append, left.append)
    await directory.open()
    assert [i.name for i in joined] == ["w"]
    await lease.update(msgspec.structs.replace(lease.card, draining=True))
    await eventually(lambda: joined[-1].draining)
    await lease.close()
    await eventually(lambda: [i.name for i in left] == ["w"])
    assert directory.instances == []
    await directory.close()


async def test_a_process_joins_once_the_bucket_has_room(
    bus: Bus, limits: StreamLimits, caplog: pytest.LogCaptureFixture
) -> None:
    stream = f"KV_{bus.subjects.instances_bucket}"
    before = (await bus.js.stream_info(stream)).config
    await bus.js.update_stream(before.evolve(max_bytes=100))
    lease = Lease(bus, card("w"), limits)
    joining = asyncio.create_task(lease.open())
    await eventually(lambda: "waiting for room" in caplog.text)
    assert f"stream {stream} is full, raise its max_bytes" in caplog.text
    assert not joining.done()
    await bus.js.update_stream(before)
    await joining
    assert lease.held
    assert caplog.text.count("waiting for room") == 1
    await lease.close()


async def test_a_process_that_is_to_stop_waits_for_no_room(
    nats_server: NatsServer, bus: Bus, limits: StreamLimits, tmp_path: Path
) -> None:
    stream = f"KV_{bus.subjects.instances_bucket}"
    config = (await bus.js.stream_info(stream)).config
    await bus.js.update_stream(config.evolve(max_bytes=100))
    mesh = Mesh(nats_server.url, tmp_path, namespace=bus.options.namespace)
    mesh.start("router", "router-0")
    await eventually(lambda: "waiting for room" in mesh.logs())
    process = mesh.processes.pop("router-0")
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    assert "stopped during its start" in mesh.logs()


async def test_a_card_that_changes_while_its_process_joins_is_stored(
    bus: Bus, limits: StreamLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease(bus, card("w"), limits)
    get_msg = bus.js.get_msg

    async def change_and_get(*args: Any, **options: Any) -> object:
        await lease.update(msgspec.structs.replace(lease.card, draining=True))
        return await get_msg(*args, **options)

    monkeypatch.setattr(bus.js, "get_msg", change_and_get)
    await lease.open()
    monkeypatch.undo()
    directory = Directory(bus, limits)
    await directory.open()
    assert [found.draining for found in directory.instances] == [True]
    await directory.close()
    await lease.close()


async def test_a_card_at_the_key_of_another_process_is_ignored(
    bus: Bus, limits: StreamLimits, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = await bus.js.key_value(bus.subjects.instances_bucket)
    for key, forged in (
        (
            "worker.a.1",
            msgspec.structs.replace(card("b"), instance="a-1"),
        ),  # under its own key, another's name
        ("worker.a.2", card("b")),
        ("worker.a.3", msgspec.structs.replace(card("a"), instance="a-3", role=Role.ROUTER)),
    ):
        await bucket.put(key, encode(forged))
    directory = Directory(bus, limits)
    await directory.open()
    await bucket.put("worker.b.1", encode(card("b")))
    await eventually(lambda: [found.instance for found in directory.instances] == ["b-1"])
    assert caplog.text.count("ignored the card of") == 3
    await directory.close()


async def test_a_rejected_card_is_logged_once_however_often_it_is_renewed(
    bus: Bus, limits: StreamLimits, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Directory(bus, limits)
    await directory.open()
    bucket = await bus.js.key_value(bus.subjects.instances_bucket)
    for _ in range(3):
        await bucket.put("worker.a.2", encode(card("b")))
        await bucket.put("worker.a.3", b"no card")
    await bucket.put("worker.a.3", b"\x93")  # another reason
    await bucket.put("worker.b.1", encode(card("b")))
    await eventually(lambda: [found.instance for found in directory.instances] == ["b-1"])
    assert caplog.text.count("ignored the card of") == 1
    assert caplog.text.count("ignored an unreadable card at worker.a.3") == 2
    await directory.close()


async def test_a_card_that_is_not_utf_8_hinders_no_start(bus: Bus, limits: StreamLimits) -> None:
    bucket = await bus.js.key_value(bus.subjects.instances_bucket)
    await bucket.put("worker.a.3", b"\x81\xa8instance\xa2\xff\xfe")
    directory = Directory(bus, limits)
    await asyncio.wait_for(directory.open(), 5)
    await directory.close()


async def test_renewed_leases_are_all_that_a_process_at_rest_exchanges_with_the_server(
    bus: Bus, limits: StreamLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    needless: list[object] = []
    directory, lease = Directory(bus, limits), Lease(bus, card("a"), limits)
    await directory.open()
    await lease.open()
    monkeypatch.setattr(directory._reader, "_on_status", lambda *status: needless.append(status))
    monkeypatch.setattr(bus.promptness, "check", lambda: needless.append("round trip"))
    renewals: set[float] = set()
    while len(renewals) < 4:
        await eventually(lambda: lease._renewed_at not in renewals)
        renewals.add(lease._renewed_at)
        await bus.client._send_ping()  # as after each interval
        needless += bus.client._pongs
    assert needless == []
    bus.promptness._heard_at = -inf
    await bus.client._send_ping()
    assert len(bus.client._pongs) == 1  # a silent server is asked whether it lives
    await directory.close()
    await lease.close()


async def test_an_instance_reports_only_its_own_load(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    def load(instance: str, running: int, **others: float) -> Load:
        zeros = dict.fromkeys((field.name for field in fields(Load) if field.required), 0)
        return Load(**{**zeros, "instance": instance, "running": running, **others})  # type: ignore[arg-type]

    received: list[Load] = []
    await follow_loads(bus, received.append)
    bus.post(bus.subjects.load("a-1"), load("b-1", 99))
    await bus.client.publish(bus.subjects.load("a-1"), b"no load")
    for name, value in (("busy_s", inf), ("step_s", nan), ("computed_tokens", 1 << 60)):
        bus.post(bus.subjects.load("c-1"), load("c-1", 0, **{name: value}))
    bus.post(bus.subjects.load("c-1"), load("c-1", -1))
    bus.post(bus.subjects.load("b-1"), load("b-1", 1))
    await eventually(lambda: received)
    assert received == [load("b-1", 1)]
    assert "logged once: it describes b-1" in caplog.text
    assert caplog.text.count("load.c.1") == 1


async def test_the_servers_clock_decides_which_instance_is_later(
    bus: Bus, limits: StreamLimits
) -> None:
    fast = Lease(bus, msgspec.structs.replace(card("w"), started=4e9), limits)
    slow = Lease(bus, msgspec.structs.replace(card("w"), instance="w-2", started=1.0), limits)
    for lease in (fast, slow):
        made = lease.card
        await lease.open()
        await lease.update(made)  # by the process's own clock
    directory = Directory(bus, limits)
    await directory.open()
    incarnations = sorted(directory.instances, key=lambda card: card.started)
    assert [card.instance for card in incarnations] == ["w-1", "w-2"]
    assert all(abs(card.started - time.time()) < PATIENCE_S for card in incarnations)
    await directory.close()
    for lease in (fast, slow):
        await lease.close()


@pytest.mark.parametrize("lease_s", [1.0])
async def test_a_lease_without_renewal_expires(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    dying = await Bus.connect(options, "dying")
    lease = Lease(dying, card("w"), limits)
    await lease.open()
    directory = Directory(bus, limits)
    await directory.open()
    assert len(directory.instances) == 1
    await dying.close()
    await eventually(lambda: directory.instances == [])
    await directory.close()
    await lease.close()


async def test_processes_with_different_settings_agree_on_leases(
    options: BusOptions, limits: StreamLimits
) -> None:
    bus = await Bus.connect(options, "test")
    await ensure_streams(bus, replace(limits, lease_s=6.0))
    lease = Lease(bus, card("w"), replace(limits, lease_s=600.0))
    await lease.open()
    left: list[Instance] = []
    directory = Directory(bus, replace(limits, lease_s=0.1), left=left.append)
    await directory.open()
    bucket = await bus.js.key_value(bus.subjects.instances_bucket)
    key = bus.subjects.lease_key(Role.WORKER, lease.card.instance)

    async def renewed() -> bool:
        return (await bucket.get(key)).revision == 3

    await eventually(renewed)
    assert left == []
    await directory.close()
    await lease.close()
    await bus.close()


@pytest.mark.parametrize("lease_s", [1.0])
async def test_any_process_may_delete_a_lease_and_a_living_owner_notices(
    bus: Bus, limits: StreamLimits
) -> None:
    lapses: list[bool] = []
    lease = Lease(bus, card("w"), limits, lambda: lapses.append(True))
    await lease.open()
    directory = Directory(bus, limits)
    await directory.open()
    await delete_lease(bus, lease.card)
    await eventually(lambda: directory.instances == [])
    await eventually(lambda: len(directory.instances) == 1)  # it was alive: it renews
    assert lapses == [True]
    await directory.close()
    await lease.close()


@pytest.mark.parametrize("lease_s", [1.0])
async def test_a_renewal_with_a_lost_reply_does_not_end_the_lease(
    bus: Bus, limits: StreamLimits
) -> None:
    lapses: list[bool] = []
    lease = Lease(bus, card("w"), limits, lambda: lapses.append(True))
    await lease.open()
    bucket = await bus.js.key_value(bus.subjects.instances_bucket)
    key = bus.subjects.lease_key(Role.WORKER, lease.card.instance)
    revision = await bucket.put(key, encode(lease.card))

    async def renewed() -> bool:
        return ((await bucket.get(key)).revision or 0) > revision

    await eventually(renewed)
    assert not lapses
    await lease.close()


@pytest.mark.parametrize("lease_s", [1.0])
async def test_the_age_of_a_worker_and_a_failed_start_outlive_the_renewals(
    bus: Bus, limits: StreamLimits
) -> None:
    lease = Lease(bus, card("w"), limits)
    await lease.open()
    failed = FailedStart(
        instance="f-1", model="m", engine="mock", phase="engine", started=1, failed=2, error="no"
    )
    await record_failed_start(bus, failed)
    bucket = bus.subjects.instances_bucket
    subject = f"$KV.{bucket}.{bus.subjects.lease_key(Role.WORKER, lease.card.instance)}"

    async def old() -> bool:
        renewed = (await bus.js.get_msg(f"KV_{bucket}", subject=subject)).time
        (known,) = await read_cards(bus, Role.WORKER)
        return renewed is not None and renewed.timestamp() - known.started > 3 * limits.lease_s

    await eventually(old, what="its age is not that of a renewal")
    assert await failed_starts(bus) == [failed]
    await lease.close()


@pytest.mark.parametrize("lease_s", [1.0])
async def test_workers_that_are_killed_again_and_again_leave_few_records(
    bus: Bus, limits: StreamLimits
) -> None:
    alive = Lease(bus, card("alive"), limits)
    await alive.open()
    for role in (Role.WORKER, Role.PARKED):
        for number in range(MOST_LEFT + 8):
            key = bus.subjects.lease_key(role, f"killed-{number}")
            await keep(bus, f"{key}{RECORD}", b"")
    directory = Directory(bus, limits)
    await directory.open()

    async def records() -> Counter[str]:
        # nats-py's own keys() may find none of those that are there
        keys = await read_headers(bus, bus.subjects.instances_bucket)
        return Counter(".".join(key.split(".")[:2]) for key in keys if key.endswith(RECORD))

    async def few() -> bool:
        await directory.delete_left_records()
        return await records() == {
            "worker.alive": 1,
            "worker.killed": MOST_LEFT,
            "parked.killed": MOST_LEFT,
        }

    await eventually(few)
    await directory.close()
    await alive.close()


async def test_a_directory_of_one_role_has_no_others(bus: Bus, limits: StreamLimits) -> None:
    cards = [msgspec.structs.replace(card(role.value), role=role) for role in Role]
    leases = [Lease(bus, each, limits) for each in cards]
    for lease in leases:
        await lease.open()
    directory = Directory(bus, limits, role=Role.FRONTEND)
    await directory.open()
    assert [found.name for found in directory.instances] == ["frontend"]
    for lease in leases:
        await lease.close()
    await eventually(lambda: not directory.instances)
    await directory.close()


@pytest.mark.parametrize("lease_s", [1.0])
async def test_leases_come_back_after_a_server_restart(
    nats_server: NatsServer, bus: Bus, limits: StreamLimits
) -> None:
    lapses: list[bool] = []
    lease = Lease(bus, card("w"), limits, lambda: lapses.append(True))
    await lease.open()
    directory = Directory(bus, limits)
    await directory.open()
    await asyncio.to_thread(nats_server.restart)
    await eventually(lambda: bus.connected_for > limits.lease_s * 2)
    await eventually(lambda: [i.name for i in directory.instances] == ["w"])
    assert not lapses, "the lease was lost at the server only; it did not lapse"
    await directory.close()
    await lease.close()


async def test_a_connection_that_is_cancelled_as_it_is_made_is_not_made_again(
    options: BusOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Cancelled(FirstConnection):
        async def result(self, attempt: "asyncio.Task[None]", timeout: float | None) -> None:
            await attempt
            raise asyncio.CancelledError

    monkeypatch.setattr(client, "FirstConnection", Cancelled)
    others = asyncio.all_tasks()
    with pytest.raises(asyncio.CancelledError):
        await Bus.connect(options, "gone")
    await eventually(lambda: asyncio.all_tasks() == others)
    assert not caplog.records


async def test_a_lost_server_is_one_line_with_its_cause(
    nats_server: NatsServer, bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvmesh.bus")
    nats_server.kill()
    await eventually(lambda: not bus.connected)
    await eventually(lambda: bus.client.last_error is not None)  # an attempt failed as well
    await asyncio.to_thread(nats_server.start)
    await eventually(lambda: len(caplog.messages) > 1)
    lost, back = caplog.messages
    assert re.fullmatch(r"lost the connection to NATS, reconnecting: .+", lost)
    assert back == f"reconnected to 127.0.0.1:{nats_server.port}"


async def test_model_files_travel_and_are_checked(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "model.safetensors").write_text("weights stay")
    digest = await publish_model(bus, tmp_path)
    assert await publish_model(bus, tmp_path) == digest
    assert await fetch_model(bus, digest) == {"tokenizer.json": b"{}", "config.json": b'{"a": 1}'}
    with pytest.raises(ModelFilesError):
        await fetch_model(bus, "0" * 64)
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json"):
        await publish_model(bus, tmp_path / "nowhere")


@pytest.mark.parametrize("damaged", ["M", "C"])
async def test_damaged_model_files_are_stored_again(bus: Bus, tmp_path: Path, damaged: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    digest = await publish_model(bus, tmp_path)
    stream, prefix = f"OBJ_{bus.subjects.model_bucket}", f"$O.{bus.subjects.model_bucket}"
    if damaged == "M":
        name = base64.urlsafe_b64encode(digest.encode()).decode()
        await bus.store(f"{prefix}.M.{name}", b"{", 5, {"Nats-Rollup": "sub"})
    else:
        await bus.js.purge_stream(stream, subject=f"{prefix}.C.>")
    with pytest.raises(ModelFilesError):
        await fetch_model(bus, digest)
    assert await publish_model(bus, tmp_path) == digest
    assert await fetch_model(bus, digest) == {"tokenizer.json": b"{}"}


async def test_a_reply_that_arrived_while_the_process_was_stopped_counts(
    options: BusOptions, bus: Bus
) -> None:
    """As under uvloop, which services run on: its timers come before what is to be read."""
    subject, timeout = bus.subjects.ping("w"), 2.0
    asked, stops, answered = threading.Event(), threading.Event(), threading.Event()

    async def answer(_: Ping, reply: Reply) -> None:
        asked.set()
        await eventually(stops.is_set, what="the other process stops")
        reply(ControlReply(ok=True))
        await bus.flush()
        answered.set()

    await bus.serve(subject, PING, answer)
    await bus.flush()  # the other connection's request must find it

    async def stopped() -> ControlReply:
        own = await Bus.connect(options, "stopped")
        pending = asyncio.create_task(own.request(subject, Ping(), CONTROL_REPLY, timeout))
        await eventually(asked.is_set, what="the request arrives")
        stops.set()
        assert answered.wait(PATIENCE_S)  # nothing runs here meanwhile, as while it is stopped
        time.sleep(timeout)  # noqa: ASYNC251
        try:
            return await pending
        finally:
            await own.close()

    assert (await asyncio.to_thread(uvloop.run, stopped())).ok


async def test_a_request_that_repeats_survives_its_loss(bus: Bus) -> None:
    received = 0

    def answer(_: Ping, reply: Reply) -> None:
        nonlocal received
        received += 1
        if received > 1:  # the first one is lost
            reply(ControlReply(ok=True))

    subject = bus.subjects.ping("w")
    await bus.serve(subject, PING, answer)
    reply = await bus.request(subject, Ping(), CONTROL_REPLY, PATIENCE_S, repeats=True)
    assert reply.ok
    assert received == 2


async def test_an_object_is_read_only_up_to_a_size(bus: Bus) -> None:
    await ensure_streams(bus, StreamLimits())
    bucket = ObjectBucket(bus, bus.subjects.model_bucket)
    data = b"x" * 100
    await bucket.put("files", len(data), lambda at, n: data[at : at + n])
    assert await bucket.content("files", 100) == data
    with pytest.raises(ObjectUnreadable, match="has 100 bytes, more than 99"):
        await bucket.content("files", 99)
