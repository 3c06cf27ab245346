"""Stores below an engine's memory: which there are, and what becomes of them at a clear."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvmesh.bus.messages import Clear
from kvmesh.worker.adapters.connector_stores import clear_stores
from kvmesh.worker.adapters.engine_stores import (
    EngineStore,
    not_clearable,
    sglang_stores,
    vllm_stores,
)
from kvmesh.worker.adapters.kv_events.cache_events import AllCleared
from kvmesh.worker.adapters.kv_events.decoder import EventDecoder
from kvmesh.worker.clearing import ClearOutcome, clear_reply, combined


def connector(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_extra_config": extra}


TIERS = [
    {"type": "fs", "root_dir": "/kv"},
    {"type": "fs", "root_dir": "/pvc", "locality": "REMOTE"},
    {"type": "obj", "locality": "LOCAL"},
    {"type": "p2p"},
    {"type": "kvcr"},
]
SEVERAL = connector(
    "MultiConnector",
    connectors=[
        connector("NixlConnector"),
        connector("KvmeshRetentionConnector"),
        connector("OffloadingConnector", secondary_tiers=TIERS),
        connector("LMCacheMPConnector"),
        connector("MooncakeStoreConnector"),
    ],
)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (None, []),
        ({}, []),
        (connector("NixlConnector"), []),
        (connector("SomethingNew"), [("SomethingNew", (1, 2, 3), False)]),
        (
            connector("SimpleCPUOffloadConnector", kv_offload_backend="disk", disk_path="/kv"),
            [("SimpleCPUOffloadConnector", (2,), True)],
        ),
        (
            SEVERAL,
            [
                ("OffloadingConnector", (1,), True),
                ("the fs tier of OffloadingConnector", (2,), False),
                ("the fs tier of OffloadingConnector", (3,), False),
                ("the obj tier of OffloadingConnector", (2,), False),
                ("the p2p tier of OffloadingConnector", (3,), False),
                ("the kvcr tier of OffloadingConnector", (1, 2, 3), False),
                ("LMCacheMPConnector", (1, 2, 3), False),
                ("MooncakeStoreConnector", (3,), True),
            ],
        ),
    ],
)
def test_the_stores_of_a_vllm(config: Any, found: list[tuple[str, tuple[int, ...], bool]]) -> None:
    assert vllm_stores(config) == [EngineStore(*each) for each in found]


def test_the_stores_of_an_sglang() -> None:
    assert sglang_stores({"hicache_storage_backend": None}) == []
    [file] = sglang_stores({"hicache_storage_backend": "file"})
    assert (file.tiers, file.clears, file.confirms) == ((2,), True, True)
    [other] = sglang_stores({"hicache_storage_backend": "nixl"})
    assert (other.tiers, other.clears) == ((3,), False)
    [lmcache] = sglang_stores({"enable_lmcache": True, "hicache_storage_backend": "file"})
    assert (lmcache.tiers, lmcache.confirms) == ((1, 2, 3), False)


def test_only_named_tiers_are_told() -> None:
    stores = vllm_stores(SEVERAL)
    assert not_clearable(stores, Clear(tiers=[0])) == {}
    assert not_clearable(stores, Clear(tiers=[2])).keys() == {2}
    assert "namespace" in not_clearable(vllm_stores(connector("OffloadingConnector")), Clear(1))[1]


class Connector:
    """A KV connector with the reply of its `reset_cache`."""

    def __init__(self, reply: bool | None) -> None:
        self.reply = reply
        self.resets = 0

    def reset_cache(self) -> bool | None:
        self.resets += 1
        return self.reply


class OffloadingConnector(Connector):
    pass


class MooncakeStoreConnector(Connector):
    pass


def scheduler(config: dict[str, Any], *children: Connector) -> Any:
    transfer = SimpleNamespace(**config)
    parent = SimpleNamespace(_connectors=[Connector(None), *children])
    return SimpleNamespace(
        vllm_config=SimpleNamespace(kv_transfer_config=transfer), connector=parent
    )


def test_each_store_in_a_named_tier_is_cleared_alone() -> None:
    host, remote = OffloadingConnector(True), MooncakeStoreConnector(True)
    made = scheduler(SEVERAL, host, remote)
    kept, events = clear_stores(made, Clear(tiers=[0, 1]))
    assert (host.resets, remote.resets) == (1, 0)
    assert kept == {1: "LMCacheMPConnector cannot be cleared"}
    batch = msgspec.msgpack.encode([0.0, events, 0])
    assert EventDecoder().decode(batch) == [AllCleared(1)]
    assert clear_stores(made, Clear(5, [1, 3]))[1] == []
    assert (host.resets, remote.resets) == (1, 0)


def test_a_store_that_does_not_confirm_is_told() -> None:
    config = connector("OffloadingConnector")
    for reply in (False, None):
        kept, events = clear_stores(scheduler(config, OffloadingConnector(reply)), Clear())
        assert (kept, events) == ({1: "OffloadingConnector did not clear it"}, [])


def test_two_stores_of_one_name_are_both_cleared() -> None:
    two = [connector("OffloadingConnector"), connector("OffloadingConnector")]
    config = connector("MultiConnector", connectors=two)
    for replies, kept in (((True, True), False), ((False, True), True), ((True, False), True)):
        made = [OffloadingConnector(reply) for reply in replies]
        assert (1 in clear_stores(scheduler(config, *made), Clear())[0]) == kept
        assert all(one.resets for one in made)


def test_a_vllm_without_connectors_has_no_stores() -> None:
    config = SimpleNamespace(kv_transfer_config=None)
    assert clear_stores(SimpleNamespace(vllm_config=config, connector=None), Clear()) == ({}, [])


def test_the_reply_names_each_reason_once() -> None:
    outcome = combined([ClearOutcome(3, {1: "a", 2: "a"}), ClearOutcome(4, {0: "b", 2: "c"})])
    reply = clear_reply(outcome)
    assert (reply.ok, reply.blocks) == (False, 7)
    assert reply.reason == "tier 0: b; tiers 1, 2: a"
    assert clear_reply(ClearOutcome(2)).ok
