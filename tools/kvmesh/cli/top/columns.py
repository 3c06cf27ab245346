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
class Column:
    """A column: attribute of the row, which is its name in `--sort` and JSON, and its text."""

    name: str
    heading: str
    text: Callable[[Any], str] = printable
    number: bool = True


@dataclass(frozen=True)
class TopView:
    """A view: its columns, the one that it is sorted by at first, and that in reverse."""

    name: str
    columns: tuple[Column, ...]
    sort: str
    reverse: bool

    def column(self, name: str) -> Column | None:
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
        Column("instance", "instance", number=False),
        Column("role", "role", number=False),
        Column("state", "state", number=False),
        Column("model", "model", number=False),
        Column("running", "running", _count),
        Column("waiting", "waiting", _count),
        Column("kv_used", "KV used", _share),
        Column("kv_cached", "cached", _share),
        Column("reused", "reused", _share),
        Column("prompt_tokens_per_s", "in tok/s", _rate),
        Column("output_tokens_per_s", "out tok/s", _rate),
        Column("speed", "speed", lambda v: "" if v is None else f"{v:.1f}×"),
    ),
    "instance",
    False,
)
SESSIONS = TopView(
    "sessions",
    (
        Column("session", "session", _named, number=False),
        Column("tenant", "tenant", _named, number=False),
        Column("requests", "requests", _count),
        Column("prompt_tokens", "prompt", _count),
        Column("reused", "reused", _share),
        Column("possible", "possible", _share),
        Column("lost_tokens", "lost", _count),
        Column("lost_for", "lost for", number=False),
        Column("ttft_s", "first token", lambda v: "" if v is None else f"{v * 1000:,.0f} ms"),
        Column("last_seen", "seen", _ago),
        Column("moving", "prompt changed in", number=False),
    ),
    "last_seen",
    True,
)
TENANTS = TopView(
    "tenants",
    (
        Column("tenant", "tenant", _named, number=False),
        Column("requests_per_min", "req/min", _rate),
        Column("requests", "requests", _count),
        Column("prompt_tokens", "prompt", _count),
        Column("output_tokens", "output", _count),
        Column("reused", "reused", _share),
        Column("possible", "possible", _share),
        Column("queue_s", "queue", lambda v: f"{v:,.1f} s"),
        Column("ttft_s", "first token", lambda v: "" if v is None else f"{v * 1000:,.0f} ms"),
        Column("errors", "errors", _count),
    ),
    "requests_per_min",
    True,
)
VIEWS = {view.name: view for view in (FLEET, SESSIONS, TENANTS)}
