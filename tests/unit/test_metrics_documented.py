"""Each metric has one exporter and one meaning, and docs/metrics.md is made from the code."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvmesh.cli.references.metrics import MetricEntry, entries, markdown, sources

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = sources()
ENTRIES = [(process, entry) for process in SOURCES for entry in entries(SOURCES[process])]
NAMES = {entry.name for _, entry in ENTRIES}
PREFIXES = {process: (f"kvmesh_{process}_",) for process in SOURCES} | {
    "process": ("kvmesh_bus_", "kvmesh_warnings")
}
NAME = re.compile(r"`(kvmesh_[a-z_]+)(?:\{([a-z, ]+)\})?`")


def pages() -> Iterable[Path]:
    return [*sorted(DOCS.glob("*.md")), ROOT / "README.md", *ROOT.glob("services/*/README.md")]


def test_the_reference_of_all_metrics_is_current() -> None:
    assert (DOCS / "metrics.md").read_text().endswith(markdown()), "run `make docs`"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_metric_named_on_a_page_is_exported(page: Path) -> None:
    labels = {entry.name: set(entry.labels) for _, entry in ENTRIES}
    for name, named in NAME.findall(page.read_text()):
        if not name.endswith("_"):
            assert name in NAMES
            assert {label.strip() for label in named.split(",") if label} <= labels[name], name


def test_no_metric_is_exported_by_two_processes() -> None:
    names = [entry.name for _, entry in ENTRIES]
    assert sorted({name for name in names if names.count(name) > 1}) == []


@pytest.mark.parametrize(
    ("process", "entry"), ENTRIES, ids=lambda value: getattr(value, "name", value)
)
def test_names_keep_to_the_conventions(process: str, entry: MetricEntry) -> None:
    assert entry.name.startswith(PREFIXES[process])
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", entry.name)
    assert entry.name.endswith("_total") == (entry.kind == "counter")
    # Prometheus' base units
    assert not entry.name.removesuffix("_total").endswith(("_s", "_ms", "_milliseconds", "_mb"))
    assert entry.text.strip()


def test_a_prefix_in_a_name_does_not_stand_for_another_process() -> None:
    everything = {prefix for prefixes in PREFIXES.values() for prefix in prefixes}
    for _, entry in ENTRIES:
        assert sum(entry.name.startswith(prefix) for prefix in everything) == 1, entry.name
