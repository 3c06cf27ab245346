"""The views of `kvmesh top` and their columns; sorting and text of the cells. Pure."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from kvmesh.cli.units import duration
from kvmesh.runtime.logs import printable

NONE = "(none)"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _ago(value: float) -> str:
    return duration(max(0.0, time.time() - value))


def _named(value: str) -> str:
    return printable(value) or NONE


@dataclass(frozen=True)
class TopColumn:
    """A column: attribute of the row, which is its name in `--sort` and JSON, and its text."""

    name: str
    heading: str
    text: Callable[[Any], str] = printable
    number: bool = True


@dataclass(frozen=True)
class TopView:
    """A view: its columns, the one that it is sorted by at first, and that in reverse."""

    name: str
    columns: tuple[TopColumn, ...]
    sort: str
    reverse: bool

    def column(self, name: str) -> TopColumn | None:
        return next((column for column in self.columns if column.name == name), None)

    def ordered(self, rows: Iterable[Any], sort: str, reverse: bool) -> list[Any]:
        """The rows by a column; those without a value there come last."""
        valued: list[Any] = []
        without: list[Any] = []
        for row in rows:
            (without if getattr(row, sort) is None else valued).append(row)
        return sorted(valued, key=attrgetter(sort), reverse=reverse) + without

    def record(self, row: Any) -> dict[str, Any]:
        """The row as JSON shows it."""
        return {column.name: getattr(row, column.name) for column in self.columns}


FLEET = TopView(
    "fleet",
    (
        TopColumn("instance", "instance", number=False),
        TopColumn("role", "role", number=False),
        TopColumn("state", "state", number=False),
        TopColumn("model", "model", number=False),
        TopColumn("running", "running", _count),
        TopColumn("waiting", "waiting", _count),
        TopColumn("kv_used", "KV used", _share),
        TopColumn("kv_cached", "cached", _share),
        TopColumn("reused", "reused", _share),
        TopColumn("prompt_tokens_per_s", "in tok/s", _rate),
        TopColumn("output_tokens_per_s", "out tok/s", _rate),
        TopColumn("speed", "speed", lambda v: "" if v is None else f"{v:.1f}×"),
    ),
    "instance",
    False,
)
SESSIONS = TopView(
    "sessions",
    (
        TopColumn("session", "session", _named, number=False),
        TopColumn("tenant", "tenant", _named, number=False),
        TopColumn("requests", "requests", _count),
        TopColumn("prompt_tokens", "prompt", _count),
        TopColumn("reused", "reused", _share),
        TopColumn("possible", "possible", _share),
        TopColumn("lost_tokens", "lost", _count),
        TopColumn("lost_for", "lost for", number=False),
        TopColumn("ttft_s", "first token", lambda v: "" if v is None else f"{v * 1000:,.0f} ms"),
        TopColumn("last_seen", "seen", _ago),
        TopColumn("moving", "prompt changed in", number=False),
    ),
    "last_seen",
    True,
)
TENANTS = TopView(
    "tenants",
    (
        TopColumn("tenant", "tenant", _named, number=False),
        TopColumn("requests_per_min", "req/min", _rate),
        TopColumn("requests", "requests", _count),
        TopColumn("prompt_tokens", "prompt", _count),
        TopColumn("output_tokens", "output", _count),
        TopColumn("reused", "reused", _share),
        TopColumn("possible", "possible", _share),
        TopColumn("queue_s", "queue", lambda v: f"{v:,.1f} s"),
        TopColumn("ttft_s", "first token", lambda v: "" if v is None else f"{v * 1000:,.0f} ms"),
        TopColumn("errors", "errors", _count),
    ),
    "requests_per_min",
    True,
)
VIEWS = {view.name: view for view in (FLEET, SESSIONS, TENANTS)}
