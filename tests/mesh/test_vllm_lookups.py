"""Blocks found by a lookup of vLLM's scheduler are held while they may be copied, no longer."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace
from support.small_kvbm import KEY, SmallKvbm
from support.vllm_bridge import LAYOUT, PARTS, TOKENS, attached, origin
from support.wait import PATIENCE_S, eventually

from kvmesh._native import xxh3
from kvmesh.blocks.digests import chain_digests, part_digests, root_digest, split_digests
from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Computed, Detach, Fetch, Finish
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.runtime.service import bus_options
from kvmesh.settings import Settings
from kvmesh.settings.schema import NatsSettings, TracingSettings
from kvmesh.worker.engines.vllm.kvbm import bridge
from kvmesh.worker.engines.vllm.kvbm import lookups as lookups_module
from kvmesh.worker.engines.vllm.kvbm.bridge import BridgeOptions
from kvmesh.worker.engines.vllm.kvbm.lookups import SchedulerBridge
from kvmesh.worker.engines.vllm.kvbm.parts import KvGroup, KvParts
from kvmesh.worker.engines.vllm.kvbm.settings import kvbm_transfer_config

HEADERS = "OTEL_EXPORTER_OTLP_TRACES_HEADERS"


@pytest_asyncio.fixture
async def kvbm(bus: Bus, limits: StreamLimits, tmp_path: Path) -> AsyncIterator[SmallKvbm]:
    """A kvbm with three blocks of zeros."""
    kvbm = SmallKvbm(bus, limits, tmp_path)
    await kvbm.start()
    root = root_digest(KEY, "m", "", "", LAYOUT)
    packed = chain_digests(KEY, root, TOKENS.tobytes(), 4)
    size = LAYOUT.block_bytes
    for place, digest in enumerate(split_digests(packed)):
        kvbm.blocks[digest] = (place * size, xxh3(bytes(size)))
    yield kvbm
    await kvbm.stop()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the kvbm of a busy machine: without its reply no block is found."""
    monkeypatch.setattr("kvmesh.blocks.kvbm_client.REQUEST_S", PATIENCE_S)


@pytest_asyncio.fixture
async def lookups(bus: Bus, kvbm: SmallKvbm, patient: None) -> AsyncIterator[SchedulerBridge]:
    lookups = await attached(bus.options, kvbm.node, PARTS)
    yield lookups
    await asyncio.to_thread(lookups.close)


class Clock:
    """Stands in for the module `time`."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lookups_module, "time", clock)
    monkeypatch.setattr(lookups_module, "UNCLAIMED_S", 0.2)
    return clock


async def found(lookups: SchedulerBridge, request: str) -> None:
    await eventually(lambda: lookups.lookup(request, origin(request), TOKENS, 0) == 3)


async def test_an_unpolled_lookup_expires_and_can_be_repeated(
    lookups: SchedulerBridge, kvbm: SmallKvbm, clock: Clock
) -> None:
    for request in ("left", "asked", "taken"):
        await found(lookups, request)
    assert len(kvbm.tickets) == 3
    assert lookups.begin_copy("taken") is not None
    clock.now = 0.15
    assert lookups.lookup("asked", origin("asked"), TOKENS, 1) == 2
    clock.now = 0.3
    await eventually(lambda: kvbm.count(Finish) == 1, what="one is given back")
    assert lookups.begin_copy("left") is None
    assert lookups.begin_copy("asked") is not None
    clock.now = 10.0
    await found(lookups, "left")
    clock.now = 11.0
    await eventually(lambda: kvbm.count(Finish) == 2, what="it is given back once more")
    assert len(kvbm.tickets) == 2
    for request in ("taken", "asked"):
        lookups.release_lookup(request)
    await eventually(lambda: not kvbm.tickets)


@pytest.mark.parametrize("checkers", [1, 2, 8])
@pytest.mark.parametrize(("wrong", "right"), [([], 3), ([2], 2), ([1, 2], 1), ([0, 2], 0)])
async def test_threads_that_share_a_check_find_the_first_wrong_block(
    lookups: SchedulerBridge,
    kvbm: SmallKvbm,
    monkeypatch: pytest.MonkeyPatch,
    checkers: int,
    wrong: list[int],
    right: int,
) -> None:
    monkeypatch.setattr(lookups_module, "CHECKERS", checkers)
    monkeypatch.setattr(lookups_module, "MIN_CHECKED_BYTES", 1)
    digests = list(kvbm.blocks)
    for place in wrong:
        offset, checksum = kvbm.blocks[digests[place]]
        kvbm.blocks[digests[place]] = (offset, checksum ^ 1)
    await eventually(lambda: lookups.lookup("r", origin("r"), TOKENS, 0) == right)
    assert lookups.corrupt == bool(wrong)


@pytest.mark.parametrize("polled", [True, False])
async def test_closing_ends_lookups(
    bus: Bus,
    kvbm: SmallKvbm,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    polled: bool,
) -> None:
    """With its result taken by vLLM, or before the kvbm has replied."""
    # closing waits for the reply for as long, and must begin before the kvbm counts as lost
    monkeypatch.setattr("kvmesh.blocks.kvbm_client.REQUEST_S", 4.0)
    lookups = await attached(bus.options, kvbm.node, PARTS)
    if polled:
        await found(lookups, "r")
        assert lookups.begin_copy("r") is not None
    else:
        kvbm.silent.add(Fetch)
        assert lookups.lookup("r", origin("r"), TOKENS, 0) is None
        await eventually(lambda: kvbm.count(Fetch) == 1)
    await asyncio.to_thread(lookups.close)
    assert not kvbm.tickets
    assert kvbm.count(Detach) == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_blocks_beyond_the_arena_are_not_used(
    lookups: SchedulerBridge, kvbm: SmallKvbm
) -> None:
    """Not even with the right checksum of the nothing that is there."""
    digest = list(kvbm.blocks)[1]
    kvbm.blocks[digest] = (kvbm.arena.stat().st_size, xxh3(b""))
    await eventually(lambda: lookups.lookup("r", origin("r"), TOKENS, 0) == 1)
    assert lookups.corrupt == 1


async def test_the_kvbm_knows_a_request_by_the_meshs_id(
    lookups: SchedulerBridge, kvbm: SmallKvbm
) -> None:
    named = origin("of-the-mesh")
    await eventually(lambda: lookups.lookup("of-vllm", named, TOKENS, 0) == 3)
    lookups.finish_request("of-vllm", named)
    await eventually(lambda: kvbm.count(Computed) == 1, what="the end of the computation")
    fetches = [message for message in kvbm.requests if isinstance(message, Fetch | Computed)]
    assert [message.request for message in fetches] == ["of-the-mesh", "of-the-mesh"]


WINDOW = replace(LAYOUT, window=8)
IN_PARTS = KvParts(
    block_size=4,
    groups=[
        KvGroup(index=0, layers=["l"], layout=LAYOUT),
        KvGroup(index=1, layers=["w"], layout=WINDOW),
    ],
    shards=1,
    replicas=1,
)


@pytest.mark.parametrize(
    ("full", "window", "expected"),
    [
        ({0, 1, 2}, {0, 1, 2}, (3, 1)),
        ({0, 1, 2}, {1, 2}, (3, 1)),
        ({0, 1, 2}, {0, 1}, (2, 0)),
        ({0, 1, 2}, {1}, None),
        ({0, 1}, {0, 1, 2}, (2, 0)),
        ({1, 2}, {0, 1, 2}, None),
        ({0, 1, 2}, set(), None),
    ],
)
@pytest.mark.usefixtures("patient")
async def test_a_prefix_is_found_if_every_part_has_what_it_needs(
    bus: Bus,
    limits: StreamLimits,
    tmp_path: Path,
    full: set[int],
    window: set[int],
    expected: tuple[int, int] | None,
) -> None:
    """`expected`: the end of the prefix, and the first block that is read of the window's part."""
    kvbm = SmallKvbm(bus, limits, tmp_path)
    await kvbm.start()
    lead, other = IN_PARTS.layouts
    packed = chain_digests(KEY, root_digest(KEY, "m", "", "", lead), TOKENS.tobytes(), 4)
    size = LAYOUT.block_bytes
    for layout, present in ((lead, full), (other, window)):
        of_part = split_digests(part_digests(KEY, packed, layout))
        for block in present:
            kvbm.blocks[of_part[block]] = (block * size, xxh3(bytes(size)))
    lookups = await attached(bus.options, kvbm.node, IN_PARTS)
    await eventually(lambda: lookups.lookup("r", origin("r"), TOKENS, 0) is not None)
    count = lookups.lookup("r", origin("r"), TOKENS, 0)
    found = lookups.begin_copy("r")
    if expected is None:
        assert (count, found) == (0, None)
    else:
        assert found is not None
        assert (count, found.parts[1].first) == expected
    lookups.release_lookup("r")
    await eventually(lambda: not kvbm.tickets, what="all tickets are returned")
    await asyncio.to_thread(lookups.close)
    await kvbm.stop()


def test_logged_connector_options_contain_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(bridge.BUS_OPTIONS_VARIABLE, "")
    monkeypatch.setenv(HEADERS, "")  # removed again at the end
    monkeypatch.delenv(HEADERS)
    (tmp_path / "config.json").write_text("{}")
    nats = NatsSettings(
        url="nats://u:hidden@h", password="hidden", token="hidden", nkey_seed="hidden"
    )
    tracing = TracingSettings(endpoint="http://c:4317", headers="key=hidden")
    config = kvbm_transfer_config(Settings(nats=nats, tracing=tracing), tmp_path, "m")
    assert "hidden" not in str(config)
    assert bridge.inherited_bus_options() == bus_options(nats)
    assert os.environ[HEADERS] == "key=hidden"
    given = msgspec.convert(config["kv_connector_extra_config"]["kvmesh"], BridgeOptions)
    assert given.tracing == replace(tracing, headers=None)
