"""The documented metrics are exactly the exported ones."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

import kvmesh.frontend.metrics
import kvmesh.indexer.metrics
import kvmesh.kvbm.metrics
import kvmesh.oracle.metrics
import kvmesh.planner.metrics
import kvmesh.router.metrics
import kvmesh.runtime.warnings
import kvmesh.worker.metrics
from kvmesh.bus.messages import Instance, Load, Role
from kvmesh.frontend.metrics import WorkerLoads
from kvmesh.indexer.metrics import StateCollector
from kvmesh.kvbm.core.blocks.block import ARENA, DISK
from kvmesh.kvbm.core.config import KvbmConfig
from kvmesh.kvbm.core.manager import Manager
from kvmesh.kvbm.metrics import ManagerCollector
from kvmesh.worker.capabilities import TierCounts
from kvmesh.worker.enginecore.counters import RetentionState
from kvmesh.worker.metrics import LoadCollector, RetentionCollector, TierCollector

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LOAD = Load(
    instance="w-1",
    rank=0,
    running=1,
    waiting=1,
    active_blocks=1,
    cached_blocks=1,
    total_blocks=1,
    prefill_tokens=1,
    steps=1,
    prompt_tokens=1,
    cached_tokens=1,
    output_tokens=1,
    requests=1,
)
RETENTION = RetentionState(rank=0, sessions=1, pins=1, charged_blocks=1, outcomes={"honoured": 1})


def frontend() -> Collector:
    loads = WorkerLoads()
    card = Instance(instance="w-1", role=Role.WORKER, name="w", version="", started=0.0)
    loads.joined(card)
    loads.receive(LOAD)
    return loads


def kvbm() -> Collector:
    manager = Manager(KvbmConfig({ARENA: 1 << 20, DISK: 1 << 20}), "k")
    server: Any = SimpleNamespace(requests=1, malformed=1)
    compatibility: Any = SimpleNamespace(incompatible_layouts={"m": 1}, incompatible_keys=1)
    return ManagerCollector(manager, server, compatibility)


MODULES = {
    "frontend": kvmesh.frontend.metrics,
    "indexer": kvmesh.indexer.metrics,
    "kvbm": kvmesh.kvbm.metrics,
    "oracle": kvmesh.oracle.metrics,
    "planner": kvmesh.planner.metrics,
    "router": kvmesh.router.metrics,
    "worker": kvmesh.worker.metrics,
}
COLLECTORS: dict[str, list[Callable[[], Collector]]] = {
    "frontend": [frontend],
    "indexer": [lambda: StateCollector(dict)],
    "kvbm": [kvbm],
    "oracle": [],
    "planner": [],
    "router": [],
    "worker": [
        lambda: LoadCollector(lambda: [LOAD]),
        lambda: RetentionCollector(lambda: [RETENTION]),
        lambda: TierCollector(lambda: TierCounts(loaded=[0, 1, 1, 1])),
    ],
}
# Page with the table of a service's metrics, and the prefix of the names in it.
PAGES = {
    "frontend": ("api.md", "kvmesh_frontend_"),
    "indexer": ("indexer.md", "kvmesh_indexer_"),
    "kvbm": ("kvbm.md", "kvmesh_kvbm_"),
    "oracle": ("oracle.md", "kvmesh_oracle_"),
    "planner": ("planner.md", "kvmesh_planner_"),
    "router": ("routing.md", "kvmesh_router_"),
}
# The frontend repeats the load of every rank under a prefix of its own.
PREFIXES = {
    service: ("kvmesh_frontend_", "kvmesh_mesh_worker_")
    if service == "frontend"
    else (f"kvmesh_{service}_",)
    for service in MODULES
}
NAME = re.compile(r"`(kvmesh_[a-z_]+|…_[a-z_]+|_[a-z_]+|[a-z_]+)(?:\{([a-z, ]+)\})?`")


def wrappers(module: ModuleType) -> Iterator[MetricWrapperBase]:
    return (value for value in vars(module).values() if isinstance(value, MetricWrapperBase))


def series(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def collected(service: str) -> Iterator[Metric]:
    for make in COLLECTORS[service]:
        yield from make().collect()


def exported(service: str) -> dict[str, set[str] | None]:
    """Names of the metrics of a service, each with its labels; None if it has no sample."""
    found: dict[str, set[str] | None] = {}
    for wrapper in wrappers(MODULES[service]):
        found |= {series(metric): set(wrapper._labelnames) for metric in wrapper.describe()}
    for metric in collected(service):
        labels = [set(sample.labels) for sample in metric.samples]
        found[series(metric)] = labels[0] if labels else None
    return found


def rows(page: Path) -> Iterator[str]:
    """First cells of the tables of metrics on a page."""
    inside = False
    for line in page.read_text().splitlines():
        cells = line.split(" | ")
        if not line.startswith("|"):
            inside = False
        elif cells[0] in ("| metric", "| name", "| metric of a worker", "| metric of a rank"):
            inside = True
        elif inside and not line.startswith("| ---"):
            yield cells[0]


def names(text: str, prefix: str) -> Iterator[tuple[str, set[str] | None]]:
    """Full names in a text and the labels in their braces; `…_x` and `_x` continue the prefix."""
    for name, labels in NAME.findall(text):
        full = name if name.startswith("kvmesh_") else prefix + name.lstrip("…").lstrip("_")
        yield full, {label.strip() for label in labels.split(",")} if labels else None


def documented(service: str) -> dict[str, set[str] | None]:
    """Names of metrics in the tables of a service, each with the labels in braces."""
    if service == "worker":
        page = (DOCS / "engines.md").read_text()
        lines = [*page.splitlines(), *rows(DOCS / "retention.md")]
        found: dict[str, set[str] | None] = {}
        for line in lines:
            for name, labels in names(line, "kvmesh_worker_"):
                if name in exported("worker") and (name not in found or labels):
                    found[name] = labels
        return found
    page_name, prefix = PAGES[service]
    found = {}
    for row in rows(DOCS / page_name):
        known = re.search(r"`(kvmesh_mesh_worker_)", row)
        found |= dict(names(row, known[1] if known else prefix))
    return found


def pages() -> Iterable[Path]:
    return [*sorted(DOCS.glob("*.md")), ROOT / "README.md", *ROOT.glob("services/*/README.md")]


@pytest.mark.parametrize("service", sorted(MODULES))
def test_every_metric_of_a_service_is_documented(service: str) -> None:
    assert sorted(exported(service).keys() - documented(service).keys()) == []


@pytest.mark.parametrize("service", sorted(PAGES))
def test_every_metric_in_a_table_is_exported(service: str) -> None:
    assert sorted(documented(service).keys() - exported(service).keys()) == []


@pytest.mark.parametrize("service", sorted(MODULES))
def test_labels_in_a_table_are_those_of_the_metric(service: str) -> None:
    real = exported(service)
    if service == "frontend":
        unlabelled = [name for name, labels in documented(service).items() if labels is None]
        assert [n for n in unlabelled if n.startswith("kvmesh_frontend_") and real[n]] == []
    wrong = {
        name: (labels, real[name])
        for name, labels in documented(service).items()
        if labels is not None and real.get(name) is not None and labels != real[name]
    }
    assert wrong == {}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_metric_named_on_a_page_is_exported(page: Path) -> None:
    everything = {name for service in MODULES for name in exported(service)} | {"kvmesh_warnings"}
    unknown = []
    for line in page.read_text().splitlines():
        full = [n for n, _ in names(line, "") if n.startswith("kvmesh_") and not n.endswith("_")]
        roots = {prefix for s in PREFIXES.values() for prefix in s if f"`{prefix}" in line}
        if len(roots) == 1:
            prefix = roots.pop()
            tails = [name for name, _ in NAME.findall(line) if name.startswith("…_")]
            full += [prefix + tail.removeprefix("…_") for tail in tails]
        unknown += [name for name in full if name not in everything]
    assert unknown == []


@pytest.mark.parametrize("service", sorted(MODULES))
def test_names_keep_to_the_prefix_of_their_service(service: str) -> None:
    assert [name for name in exported(service) if not name.startswith(PREFIXES[service])] == []


def test_no_metric_is_exported_by_two_services() -> None:
    every = [name for service in MODULES for name in exported(service)]
    assert sorted({name for name in every if every.count(name) > 1}) == []


@pytest.mark.parametrize("service", sorted(MODULES))
def test_no_name_is_given_twice_within_a_service(service: str) -> None:
    found = [series(metric) for metric in collected(service)]
    found += [series(m) for wrapper in wrappers(MODULES[service]) for m in wrapper.describe()]
    assert sorted({name for name in found if found.count(name) > 1}) == []


@pytest.mark.parametrize("service", sorted(MODULES))
def test_every_metric_has_a_help_text_and_a_plain_name(service: str) -> None:
    metrics = list(collected(service))
    metrics += [metric for wrapper in wrappers(MODULES[service]) for metric in wrapper.describe()]
    for metric in metrics:
        assert metric.documentation.strip(), metric.name
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", metric.name), metric.name
        # Prometheus' base units
        assert not metric.name.endswith(("_s", "_ms", "_milliseconds", "_mb")), metric.name


def test_the_gauge_of_warnings_is_on_the_page_on_deployment() -> None:
    (gauge,) = wrappers(kvmesh.runtime.warnings)
    assert [metric.name for metric in gauge.describe()] == ["kvmesh_warnings"]
    assert "`kvmesh_warnings{kind}`" in (DOCS / "deployment.md").read_text()
