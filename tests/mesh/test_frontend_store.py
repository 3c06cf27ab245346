"""Data of frontends on the bus: stored responses, API keys, the tenants' secret."""

import asyncio
import hashlib
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from nats.js.errors import APIError
from nats.js.kv import KeyValue
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import JetStreamError
from kvmesh.bus.messages import SessionPrompt
from kvmesh.bus.storage.buckets import keys_bucket
from kvmesh.bus.storage.shared_secret import SecretUnusable
from kvmesh.frontend.apis.base import StoredTurn
from kvmesh.frontend.auth.accounts import Key
from kvmesh.frontend.auth.authenticator import Authenticator
from kvmesh.frontend.auth.bucket_quota import owner_of
from kvmesh.frontend.auth.tenant_secret import tenant_secret
from kvmesh.frontend.batches.batch import StoredBatch, cancelled
from kvmesh.frontend.batches.forms import LineResult, StoredFile
from kvmesh.frontend.batches.runner import BatchRunner
from kvmesh.frontend.batches.spool import Spool
from kvmesh.frontend.batches.store import BatchStore, LineRecord
from kvmesh.frontend.errors import ApiError, InvalidRequest
from kvmesh.frontend.fair_threads import FairThreads
from kvmesh.frontend.http.responses.store import MAX_TURN, ResponseNotFound, ResponseStore
from kvmesh.frontend.namespaces import TenantNamespaces, scoped
from kvmesh.frontend.sessions.last_prompts import LastPrompts
from kvmesh.settings.schema import FrontendSettings


def turn(name: str, text: str = "x", previous: str | None = None, tenant: str = "") -> StoredTurn:
    item = Raw(msgspec.json.encode({"role": "user", "content": text}))
    return StoredTurn(f"resp_{name}", previous, [item], [item], Raw(b'{"output":[]}'), tenant)


@pytest.fixture
def store(bus: Bus) -> ResponseStore:
    return ResponseStore(bus, 60.0, 64 << 20)


async def test_a_conversation_comes_back_in_order(store: ResponseStore) -> None:
    await store.put(turn("a", "one"))
    await store.put(turn("b", "two", "resp_a"))
    history = await store.history("resp_b", "")
    assert [kept.id for kept in history] == ["resp_a", "resp_b"]
    assert msgspec.json.decode(history[0].input[0])["content"] == "one"


def stored_file(name: str, size: int, expires: float) -> StoredFile:
    return StoredFile(
        id=name, tenant="t", name="a", purpose="batch", bytes=size, created=0.0, expires=expires
    )


def batch(name: str, **changes: Any) -> StoredBatch:
    return StoredBatch(
        id=name, form="openai", endpoint="", tenant="t", key="", headers={}, input_file="file-b",
        **{"created": time.time(), "owner": "", "output_ttl_s": 1.0, **changes},
    )  # fmt: skip


@pytest.fixture
def spooled() -> Iterator[Callable[[bytes], Spool]]:
    """Puts bytes into a spool that is closed at the end."""
    with ExitStack() as stack:

        def put(data: bytes) -> Spool:
            spool = Spool()
            stack.callback(spool.close)
            spool.write(data)
            return spool

        yield put


async def test_files_that_have_expired_make_room(
    bus: Bus, spooled: Callable[[bytes], Spool]
) -> None:
    files = BatchStore(bus, FrontendSettings(files_bytes=4 << 20))
    size, now = 400 << 10, files.now
    spool = spooled(bytes(size))
    for name, expires in (("file-a", now - 1), ("file-b", now - 1)):
        await files.add_file(stored_file(name, size, expires), spool)
    running = batch("batch_1")
    await files.create(running)
    await files.add_file(stored_file("file-c", size, now + 60), spool)
    (await files.content("file-b", "t")).close()  # a batch in progress needs it
    with pytest.raises(ApiError) as gone:
        await files.content("file-a", "t")
    assert gone.value.kind == "not_found"
    with pytest.raises(ApiError) as full:
        await files.add_file(stored_file("file-d", size, now + 60), spool)
    assert full.value.code == "storage_limit_exceeded"


async def test_what_a_batch_needed_is_removed_also_after_its_frontend_was_killed(
    bus: Bus, spooled: Callable[[bytes], Spool]
) -> None:
    files = BatchStore(bus, FrontendSettings(files_bytes=4 << 20))
    await files.add_file(stored_file("file-b", 1, files.now + 60), spooled(b"1"))
    ended = batch("batch_2", status="completed")
    await files.create(ended)
    for number in range(3):
        await files.add_record(ended, number, [LineRecord(number, "succeeded", b"x")])
    assert await files.all_running() == []
    assert [await files.record(ended, number) for number in range(3)] == [None] * 3
    assert await files.all_running() == []


async def test_batches_and_files_that_cannot_be_read_hide_no_others(
    bus: Bus, spooled: Callable[[bytes], Spool]
) -> None:
    files = BatchStore(bus, FrontendSettings(files_bytes=4 << 20))
    await files.add_file(stored_file("file-b", 1, files.now + 60), spooled(b"1"))
    for name in ("batch_4", "batch_5"):
        await files.create(batch(name))
    bucket = await bus.js.context.key_value(bus.subjects.batches_bucket)
    for kind, name in (("batch", "batch_4"), ("file", "file-c")):
        await bucket.put(
            f"{kind}.{owner_of('t')}.{name}", msgspec.msgpack.encode({"status": "new"})
        )
    assert [each.id for each, _ in await files.all_running()] == ["batch_5"]
    assert [each.id for each in await files.batches("t", "openai")] == ["batch_5"]
    assert [each.id for each in await files.files("t")] == ["file-b"]
    await files.add_file(stored_file("file-d", 1, files.now + 60), spooled(b"1"))


async def test_a_batch_ends_on_request_though_its_results_have_no_room(
    bus: Bus, spooled: Callable[[bytes], Spool]
) -> None:
    files = BatchStore(bus, FrontendSettings(files_bytes=1 << 20))
    runner = BatchRunner("f", files, FairThreads(), 1, lambda _: [], lambda _: False, lambda: True)

    executed = asyncio.Event()

    async def execute(*_: object) -> LineResult:
        executed.set()
        return LineResult(200, msgspec.json.encode(random.randbytes(2 << 20).hex()), "r")

    runner.execute_with(execute)
    line = b'{"custom_id":"a","method":"POST","url":"","body":{}}'
    await files.add_file(stored_file("file-b", len(line), files.now + 60), spooled(line))
    begun = batch("batch_3", owner="f")
    runner.start(begun, await files.create(begun))

    async def has(status: str) -> bool:
        return (await files.batch("batch_3", "t"))[0].status == status

    await executed.wait()
    found, revision = await files.batch("batch_3", "t")
    await files.change(cancelled(found, files.now), revision)
    runner.notice("batch_3")
    await eventually(lambda: has("failed"))
    assert (await files.batch("batch_3", "t"))[0].faults[0].code == "storage_limit_exceeded"
    await runner.stop()


async def test_a_large_turn_is_stored_in_parts(store: ResponseStore) -> None:
    text = "".join(hashlib.sha256(bytes([n % 256, n // 256])).hexdigest() for n in range(40_000))
    await store.put(turn("large", text))
    kept = await store.get("resp_large", "")
    assert msgspec.json.decode(kept.input[0])["content"] == text


async def test_a_response_belongs_to_its_tenant(store: ResponseStore) -> None:
    await store.put(turn("a", tenant="t"))
    assert (await store.get("resp_a", "t")).id == "resp_a"
    for tenant in ("", "u"):
        with pytest.raises(ResponseNotFound):
            await store.get("resp_a", tenant)
        with pytest.raises(ResponseNotFound):
            await store.delete("resp_a", tenant)


async def test_a_response_outlives_its_frontend_and_the_server(
    nats_server: NatsServer, bus: Bus, store: ResponseStore
) -> None:
    assert await store.put(turn("kept", "one", tenant="t"))
    nats_server.restart()
    other = await Bus.connect(bus.options, "another")
    again = ResponseStore(other, 60.0, 64 << 20)
    assert await again.get("resp_kept", "t") == turn("kept", "one", tenant="t")
    found = await again.items({"resp_kept": [0], "resp_gone": []}, "t")
    listed = [msgspec.json.decode(item) for item in found["resp_kept"]]
    assert list(found) == ["resp_kept"]
    assert listed[-1]["content"] == [{"type": "input_text", "text": "one"}]
    assert await again.items({"resp_kept": [0]}, "u") == {}
    await other.close()


@pytest.mark.parametrize("name", ["resp_gone", "x", "resp_a.1", "resp_>", "", "resp_" + "a" * 300])
async def test_an_unknown_response_is_not_found(store: ResponseStore, name: str) -> None:
    with pytest.raises(ResponseNotFound):
        await store.get(name, "")


async def test_a_deleted_turn_breaks_the_conversation(store: ResponseStore) -> None:
    await store.put(turn("a"))
    await store.put(turn("b", previous="resp_a"))
    await store.delete("resp_a", "")
    with pytest.raises(ResponseNotFound) as error:
        await store.history("resp_b", "")
    assert error.value.response_id == "resp_a"


async def test_a_tenant_s_oldest_turns_are_purged_beyond_its_quota(bus: Bus) -> None:
    store = ResponseStore(bus, 60.0, 1 << 20, tenant_share=0.1)
    noise = [hashlib.sha256(bytes([n])).hexdigest() * 400 for n in range(10)]
    await store.put(turn("theirs", tenant="other"))
    for number, text in enumerate(noise):
        scattered = f"evil/{number}"
        assert await store.put(turn(f"n{number}", shuffled(text), tenant=scattered))
    assert (await store.get("resp_theirs", "other")).id == "resp_theirs"
    assert (await store.get("resp_n9", "evil/9")).id == "resp_n9"
    with pytest.raises(ResponseNotFound):
        await store.get("resp_n0", "evil/0")


async def test_a_full_bucket_takes_new_turns(bus: Bus) -> None:
    store = ResponseStore(bus, 60.0, 1 << 20)
    for number in range(12):
        text = shuffled("x" * 200_000, number)
        assert await store.put(turn(f"n{number}", text, tenant=f"t{number}"))
    assert (await store.get("resp_n11", "t11")).id == "resp_n11"


async def test_storing_a_turn_that_is_too_large_fails(store: ResponseStore) -> None:
    assert not await store.put(turn("large", "x" * MAX_TURN))
    with pytest.raises(ResponseNotFound):
        await store.get("resp_large", "")


async def test_the_size_of_a_history_is_bounded(store: ResponseStore) -> None:
    previous = None
    for number in range(5):
        assert await store.put(turn(f"n{number}", "x" * (4 << 20), previous))
        previous = f"resp_n{number}"
    with pytest.raises(InvalidRequest) as error:
        await store.history("resp_n4", "")
    assert error.value.param == "previous_response_id"
    assert len(await store.history("resp_n2", "")) == 3


def shuffled(text: str, seed: int = 0) -> str:
    """A text of this length that is nearly incompressible."""
    rng = random.Random(f"{text[:100]}{seed}")
    return "".join(rng.choices("0123456789abcdefghijklmnopqrstuvwxyz", k=len(text)))


async def test_an_invalid_entry_of_the_bucket_does_not_affect_other_keys(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Authenticator(bus, None, use_bucket=True, local=True, tenants=TenantNamespaces())
    await gate.open()
    bucket = await keys_bucket(bus)
    await bucket.put("bad", b'{"name": "bad"}')
    await bucket.put("ci", msgspec.json.encode(key("secret", "ci")))
    running = asyncio.create_task(gate.run())
    await eventually(lambda: knows(gate, "secret"))
    await bucket.put("more", msgspec.json.encode(key("other", "more")))
    await eventually(lambda: knows(gate, "other"))
    await bucket.delete("ci")
    await eventually(lambda: not knows(gate, "secret"))
    running.cancel()
    warnings = [line for line in caplog.messages if "bad" in line]
    assert len(warnings) == 1


def key(secret: str, name: str) -> Key:
    return Key(name=name, sha256=hashlib.sha256(secret.encode()).hexdigest())


async def test_keys_of_the_bucket_are_added_and_removed_live(bus: Bus) -> None:
    gate = Authenticator(bus, None, use_bucket=True, local=True, tenants=TenantNamespaces())
    await gate.open()
    running = asyncio.create_task(gate.run())
    headers = {"x-api-key": "secret"}
    with pytest.raises(ApiError):
        gate.account(headers)
    bucket = await keys_bucket(bus)
    await bucket.put("ci", msgspec.json.encode(key("secret", "ci")))
    await eventually(lambda: knows(gate, "secret"))
    await bucket.delete("ci")
    await eventually(lambda: not knows(gate, "secret"))
    running.cancel()


async def test_an_invalid_file_does_not_change_the_keys(bus: Bus, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nname = "a"\nsha256 = "{key("one", "a").sha256}"\n')
    gate = Authenticator(bus, file, use_bucket=False, local=True, tenants=TenantNamespaces())
    await gate.open()
    running = asyncio.create_task(gate.run())
    file.write_text("[[key")
    assert knows(gate, "one")
    file.write_text(f'[[key]]\nname = "b"\nsha256 = "{key("other", "b").sha256}"\n')
    await eventually(lambda: knows(gate, "other") and not knows(gate, "one"))
    running.cancel()


async def test_keys_expire_by_the_servers_time(bus: Bus, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    expires = time.time() - 1800.0
    sha256 = key("one", "a").sha256
    file.write_text(f'[[key]]\nname = "a"\nsha256 = "{sha256}"\nexpires = {expires}\n')
    gate = Authenticator(bus, file, use_bucket=False, local=True, tenants=TenantNamespaces())
    await gate.open()
    assert not knows(gate, "one")
    bus.clock.heard(time.time() - 3600.0, time.time())  # this machine is an hour ahead
    assert knows(gate, "one")


def knows(gate: Authenticator, secret: str) -> bool:
    try:
        gate.account({"x-api-key": secret})
    except ApiError:
        return False
    return True


async def test_without_keys_only_local_callers_may_use_the_cache_endpoints(bus: Bus) -> None:
    assert (
        Authenticator(
            bus, None, use_bucket=False, local=True, tenants=TenantNamespaces()
        ).require_scope({}, "cache")
        is None
    )
    with pytest.raises(ApiError) as error:
        Authenticator(
            bus, None, use_bucket=False, local=False, tenants=TenantNamespaces()
        ).require_scope({}, "cache")
    assert error.value.kind == "permission"


async def test_the_first_frontend_creates_the_secret_that_all_share(bus: Bus) -> None:
    made = await asyncio.gather(*(tenant_secret(bus, None) for _ in range(8)))
    assert len(set(made)) == 1
    assert len(made[0]) == 32
    assert await tenant_secret(bus, "ab" * 32) == bytes.fromhex("ab" * 32)


@pytest.mark.parametrize("wrong", ["", "ab", "x" * 64])
async def test_an_invalid_secret_is_named_and_not_replaced(bus: Bus, wrong: str) -> None:
    with pytest.raises(SecretUnusable, match=r"frontend\.tenant_secret must be 64") as error:
        await tenant_secret(bus, wrong)
    assert error.value.configured
    bucket = await bucket_of_an_earlier_release(bus)
    await bucket.put(bus.subjects.tenants_key, b"short")
    with pytest.raises(SecretUnusable, match="has 5 bytes"):
        await tenant_secret(bus, None)


async def bucket_of_an_earlier_release(bus: Bus) -> KeyValue:
    """A bucket of secrets whose entries may be replaced."""
    return await bus.js.context.create_key_value(bucket=bus.subjects.secrets_bucket)


async def test_a_secret_of_an_earlier_release_stays_valid(bus: Bus) -> None:
    bucket = await bucket_of_an_earlier_release(bus)
    await bucket.put(bus.subjects.tenants_key, b"s" * 32)
    assert await tenant_secret(bus, None) == b"s" * 32


async def test_an_existing_secret_is_never_replaced(bus: Bus) -> None:
    secret = await tenant_secret(bus, None)
    name = bus.subjects.tenants_key
    bucket = await bus.js.context.key_value(bus.subjects.secrets_bucket)
    for attempt in (bucket.put(name, b"x" * 32), bucket.delete(name), bucket.purge(name)):
        with pytest.raises(APIError):
            await attempt
    with pytest.raises(JetStreamError):
        await bus.js.purge_stream(f"KV_{bus.subjects.secrets_bucket}")
    assert await tenant_secret(bus, None) == secret


async def test_a_frontend_without_the_secret_does_not_start(
    nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    bucket = await bucket_of_an_earlier_release(bus)
    await bucket.put(bus.subjects.tenants_key, b"short")
    mesh = Mesh(nats_server.url, tmp_path, namespace=bus.options.namespace)
    mesh.start("frontend", "frontend-0")
    try:
        status = await asyncio.to_thread(mesh.processes["frontend-0"].wait, PATIENCE_S)
    finally:
        mesh.stop()
    assert status == 1
    assert "the secret tenants in bucket" in mesh.logs()
    assert "Traceback" not in mesh.logs()


async def test_sessions_of_a_tenant_do_not_displace_those_of_another(bus: Bus) -> None:
    sessions, last = LastPrompts(bus, 100_000), SessionPrompt(bytes(4000), None)
    await sessions.open()
    tenants = TenantNamespaces(bytes(32))
    mine = [scoped(tenants.tag("team-a"), "s1"), "of nobody"]
    for name in mine:
        sessions.store("m", name, last)
    flood = [scoped(tenants.tag("evil", f"part{n}"), f"s{n}") for n in range(100)]
    for name in flood:
        sessions.store("m", name, last)
    for name in (*mine, flood[-1], flood[-10]):
        assert await sessions.find("m", name) == last
    assert await sessions.find("m", flood[0]) is None
    sessions.store("m", mine[0], SessionPrompt(bytes(96_000), None))
    assert await sessions.find("m", mine[1]) == last
