"""The reference of all metrics, made from the code that exports them."""

from collections.abc import Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

import kvmesh.frontend.metrics
import kvmesh.indexer.metrics
import kvmesh.kvbm.metrics
import kvmesh.planner.metrics
import kvmesh.router.metrics
import kvmesh.runtime.warnings
import kvmesh.worker.metrics
from kvmesh.bus.metrics import BusCollector
from kvmesh.frontend.metrics import ServedCollector, TenantCollector
from kvmesh.indexer.metrics import StateCollector
from kvmesh.kvbm.core.blocks.block import ARENA
from kvmesh.kvbm.core.config import KvbmConfig
from kvmesh.kvbm.core.manager import Manager
from kvmesh.kvbm.metrics import ManagerCollector
from kvmesh.weights.frames import WeightsCounts
from kvmesh.worker.capabilities import HandoffCounts, TierCounts
from kvmesh.worker.metrics import (
    EventCollector,
    HandoffCollector,
    LoadCollector,
    RetentionCollector,
    SourceCollector,
    StartCollector,
    TierCollector,
    WeightsCollector,
    WorkerLabels,
)


class MetricSource(NamedTuple):
    """The code behind the metrics of one kind of process, and the heading of their table."""

    heading: str
    module: ModuleType | None
    collectors: list[Collector]


class MetricEntry(NamedTuple):
    """One documented metric; `name` is that of its series, for a histogram without suffix."""

    name: str
    kind: str
    labels: list[str]
    text: str


def sources() -> dict[str, MetricSource]:
    """The sources by process; `process` has what every process exports."""
    labels = WorkerLabels("", "")
    worker: list[Collector] = [
        StartCollector(labels, list),
        LoadCollector(labels, list),
        RetentionCollector(labels, list),
        TierCollector(labels, lambda: TierCounts(loaded=[])),
        EventCollector(labels, list),
        HandoffCollector(labels, lambda: HandoffCounts(ended={})),
        SourceCollector(labels, list),
        WeightsCollector(labels, WeightsCounts, int),
    ]
    return {
        "process": MetricSource("Every process", kvmesh.runtime.warnings, [BusCollector(None)]),
        "frontend": MetricSource(
            "Frontend", kvmesh.frontend.metrics, [TenantCollector(), ServedCollector(list)]
        ),
        "router": MetricSource("Router", kvmesh.router.metrics, []),
        "indexer": MetricSource("Indexer", kvmesh.indexer.metrics, [StateCollector(dict)]),
        "worker": MetricSource("Worker", kvmesh.worker.metrics, worker),
        "kvbm": MetricSource("Block manager", kvmesh.kvbm.metrics, [_kvbm()]),
        "planner": MetricSource("Planner", kvmesh.planner.metrics, []),
    }


def _kvbm() -> Collector:
    manager = Manager(KvbmConfig({ARENA: 1 << 20}), "")
    server: Any = SimpleNamespace(requests=0, malformed=0)
    compatibility: Any = SimpleNamespace(incompatible_layouts={}, incompatible_keys=0)
    return ManagerCollector(manager, server, compatibility)


def entries(source: MetricSource) -> list[MetricEntry]:
    """The metrics of a source, by name."""
    families: list[Any] = [metric for c in source.collectors for metric in c.collect()]
    found = [_entry(family, family._labelnames) for family in families]
    for wrapper in _wrappers(source.module):
        found += [_entry(metric, wrapper._labelnames) for metric in wrapper.describe()]
    return sorted(found)


def _wrappers(module: ModuleType | None) -> Iterator[MetricWrapperBase]:
    values = vars(module).values() if module is not None else ()
    return (value for value in values if isinstance(value, MetricWrapperBase))


def _entry(metric: Metric, labels: Iterable[str]) -> MetricEntry:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    return MetricEntry(name, metric.type, list(labels), metric.documentation)


def markdown() -> str:
    """One list for each kind of process."""
    lines = []
    for source in sources().values():
        lines += ["", f"## {source.heading}", ""]
        for name, kind, labels, text in entries(source):
            shown = f"`{name}{{{','.join(labels)}}}`" if labels else f"`{name}`"
            meaning = text[0].lower() + text[1:] if not text[:2].isupper() else text
            histogram = "histogram: " if kind == "histogram" else ""
            lines.append(f"- {shown}: {histogram}{meaning}")
    return "\n".join(lines[1:]) + "\n"
