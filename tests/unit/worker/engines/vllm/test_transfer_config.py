"""vLLM's `kv_transfer_config`: several connectors, those that hand KV off, and lost ones."""

from collections.abc import Mapping
from typing import Any

import pytest

from kvmesh.worker.engines.vllm.connectors.offloading import (
    BYTES,
    DESCRIBED,
    EXTRA,
    described,
    is_lazy,
    with_offloading,
)
from kvmesh.worker.engines.vllm.transfer_config import (
    MULTI,
    PACKAGE,
    combined_config,
    connectors_of,
    handing_off,
    is_multi,
    lost_connectors,
    serves_any_role,
)

OURS = {"kv_connector": "K", "kv_role": "kv_both", "kv_connector_module_path": f"{PACKAGE}.k"}
GIB = 1 << 30


def nixl(role: str) -> dict[str, Any]:
    return {"kv_connector": "NixlConnector", "kv_role": role}


def cache(**extra: Any) -> dict[str, Any]:
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", EXTRA: extra}


def is_nixl(connector: Mapping[str, Any]) -> bool:
    return bool(connector["kv_connector"] == "NixlConnector")


@pytest.mark.parametrize(
    ("config", "handoff", "any_role"),
    [
        (None, False, False),
        (OURS, False, False),
        (nixl("kv_both"), True, True),
        (nixl("kv_producer"), True, False),
        (combined_config(nixl("kv_both"), OURS), True, True),
        (combined_config(nixl("kv_consumer"), OURS), True, False),
        (combined_config(nixl("kv_both"), nixl("kv_producer")), True, False),
        (combined_config(cache(), OURS), False, False),
        (combined_config({**cache(), "kv_role": "kv_consumer"}, nixl("kv_both")), True, True),
    ],
)
def test_only_what_hands_kv_off_decides_about_roles(
    config: dict[str, Any] | None, handoff: bool, any_role: bool
) -> None:
    found = handing_off(config, is_nixl)
    assert bool(found) == handoff
    assert serves_any_role(found) == any_role


def test_one_of_kvmesh_s_connectors_stays_alone() -> None:
    assert combined_config(OURS) == OURS
    assert not is_multi(OURS)
    for config in (combined_config(cache()), combined_config(cache(), OURS)):
        assert is_multi(config)
        assert connectors_of(config)[0] == cache()


@pytest.mark.parametrize(
    "config", [{}, {"kv_connector": MULTI}, {"kv_connector": MULTI, EXTRA: {}}]
)
def test_a_configuration_without_connectors_has_none(config: dict[str, Any]) -> None:
    assert connectors_of(config) == []
    config = {**config, EXTRA: None} if config else config
    assert connectors_of(config) == []


def test_what_vllm_has_replaced_is_named() -> None:
    given = combined_config(nixl("kv_both"), OURS)
    assert lost_connectors(given, given) == []
    assert lost_connectors(given, cache()) == ["NixlConnector", "K"]
    assert lost_connectors(given, None) == ["NixlConnector", "K"]
    # the name alone is no proof: vLLM keeps the module of the connector that it replaces
    replaced = {**OURS, "kv_connector": "OffloadingConnector"}
    assert lost_connectors(OURS, replaced) == ["K"]
    assert lost_connectors(None, given) == []


def test_the_size_of_vllm_s_offloading_becomes_a_connector() -> None:
    assert with_offloading(None, 2, "native", False) == [cache(**{BYTES: 2 * GIB})]
    added = with_offloading(combined_config(nixl("kv_both"), OURS), 0.5, "native", False)
    assert added == [nixl("kv_both"), OURS, cache(**{BYTES: GIB / 2})]
    (simple,) = with_offloading(None, 1, "native", True)
    assert simple["kv_connector"] == "SimpleCPUOffloadConnector"
    (lmcache,) = with_offloading(None, 1, "lmcache", True)
    assert (lmcache["kv_connector"], lmcache[EXTRA]) == ("LMCacheMPConnector", {})


def test_the_size_goes_to_the_offloading_that_is_configured() -> None:
    given = {**cache(spec_name="TieringOffloadingSpec"), "kv_connector_module_path": None}
    (sized,) = with_offloading(given, 1, "native", False)
    assert sized[EXTRA] == {"spec_name": "TieringOffloadingSpec", BYTES: GIB}
    assert given[EXTRA] == {"spec_name": "TieringOffloadingSpec"}


def test_offloading_describes_its_blocks_unless_told_not_to() -> None:
    connectors = [nixl("kv_both"), cache(), {**cache(), EXTRA: None}, cache(**{DESCRIBED: False})]
    assert described(connectors) == [
        nixl("kv_both"),
        cache(**{DESCRIBED: True}),
        cache(**{DESCRIBED: True}),
        cache(**{DESCRIBED: False}),
    ]
    assert not is_lazy(connectors)
    assert is_lazy([cache(lazy_offload=True)])
