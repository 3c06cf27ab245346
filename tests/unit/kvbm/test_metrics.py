"""Prometheus series of a kvbm."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvmesh.kvbm.core.blocks.block import ARENA, DISK
from kvmesh.kvbm.core.blocks.store import RemoteTierConfig
from kvmesh.kvbm.core.config import KvbmConfig
from kvmesh.kvbm.core.manager import Manager
from kvmesh.kvbm.metrics import ManagerCollector

REMOTE = RemoteTierConfig(9, 1.0)


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        (KvbmConfig({ARENA: 1 << 20}), set()),
        (KvbmConfig({ARENA: 1 << 20, DISK: 1 << 20}), {("1", "2"), ("2", "1")}),
        (KvbmConfig({ARENA: 1 << 20}, remote=REMOTE), {("3", "1")}),
        (KvbmConfig({ARENA: 1 << 20}, remote=REMOTE, shares=True), {("1", "3"), ("3", "1")}),
    ],
    ids=["arena", "disk", "peers", "store"],
)
def test_every_series_is_there_before_its_first_event(
    config: KvbmConfig, paths: set[tuple[str, str]]
) -> None:
    server: Any = SimpleNamespace(requests=0, malformed=0)
    compatibility: Any = SimpleNamespace(incompatible_layouts={}, incompatible_keys=0)
    registry = CollectorRegistry()
    registry.register(ManagerCollector(Manager(config), server, compatibility))
    found = {family.name: family.samples for family in registry.collect()}
    for name in ("moved_bytes", "moved_blocks", "failed_moves", "moving_blocks"):
        samples = found[f"kvmesh_kvbm_{name}"]
        assert {(s.labels["source"], s.labels["target"]) for s in samples} == paths
        assert {sample.value for sample in samples} <= {0.0}
    refused = {sample.labels["reason"] for sample in found["kvmesh_kvbm_refused_blocks"]}
    assert refused == {"closed", "thinking", "orphan", "busy", "full", "slow"}
