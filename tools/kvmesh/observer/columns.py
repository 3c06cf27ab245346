"""Columns of fleet, sessions and tenants, for terminals and pages: order and text. Pure."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from kvmesh.bus.messages import StartSource
from kvmesh.runtime.logs import printable
from kvmesh.runtime.quantities import duration, size

NONE = "(none)"
PARTS = {"weights": "weights from", "code": "code from"}  # of a start, with their headings


def count_text(value: int | None) -> str:
    """A number with separators; empty if unknown."""
    return "" if value is None else f"{value:,}"


def tiers_text(value: Sequence[int] | None) -> str:
    """Numbers by tier, without those that are 0 at the end; empty if unknown."""
    if value is None:
        return ""
    used = max((tier for tier, number in enumerate(value) if number), default=0) + 1
    return " + ".join(map(count_text, value[:used]))


def signed_text(value: int | None) -> str:
    """A difference with its sign; empty if unknown or 0."""
    return f"{value:+,}" if value else ""


def rate_text(value: float | None) -> str:
    """A rate; empty if unknown."""
    return "" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def share_text(value: float | None) -> str:
    """A share in percent; empty if unknown."""
    return "" if value is None else f"{value:.1%}"


def part_text(part: int, whole: int) -> str:
    """The share of a part in percent; a dash if there is nothing."""
    return share_text(part / whole) if whole else "–"


def ago_text(value: float) -> str:
    """The time since a Unix time."""
    return duration(max(0.0, time.time() - value))


def named_text(value: str) -> str:
    """A name that someone chose; NONE if it is empty."""
    return printable(value) or NONE


def sources_text(sources: Iterable[StartSource], part: str) -> str:
    """The sources of one part of a start, the largest first; empty if none is known."""
    found = sorted((each for each in sources if each.part == part), key=lambda each: -each.bytes)
    texts = (f"{each.source} {size(each.bytes)}" if each.bytes else each.source for each in found)
    return ", ".join(map(printable, texts))


@dataclass(frozen=True)
class RowColumn:
    """A column: attribute of the row, which is its name in `--sort` and JSON, and its text.

    Pages break the text of one that `wraps` into lines.
    """

    name: str
    heading: str
    text: Callable[[Any], str] = printable
    number: bool = True
    wraps: bool = False


@dataclass(frozen=True)
class RowView:
    """A view: its columns, the one that it is sorted by at first, and that in reverse.

    A narrow screen leaves out the columns in `hide`, in this order, until the others fit.
    """

    name: str
    columns: tuple[RowColumn, ...]
    sort: str
    reverse: bool
    hide: tuple[str, ...] = ()

    def column(self, name: str) -> RowColumn | None:
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


FLEET = RowView(
    "fleet",
    (
        RowColumn("instance", "instance", number=False),
        RowColumn("role", "role", number=False),
        RowColumn("state", "state", number=False),
        RowColumn("model", "model", number=False),
        RowColumn("running", "running", count_text),
        RowColumn("waiting", "waiting", count_text),
        RowColumn("kv_used", "KV used", share_text),
        RowColumn("kv_cached", "cached", share_text),
        RowColumn("reused", "reused", share_text),
        RowColumn("prompt_tokens_per_s", "in tok/s", rate_text),
        RowColumn("output_tokens_per_s", "out tok/s", rate_text),
        RowColumn("speed", "speed", lambda v: "" if v is None else f"{v:.1f}×"),
        RowColumn("outlier_s", "outlier for", lambda v: "" if v is None else duration(v)),
    ),
    "instance",
    False,
    (
        *("outlier_s", "kv_cached", "prompt_tokens_per_s", "reused", "speed", "kv_used"),
        *("output_tokens_per_s", "model", "waiting", "running"),
    ),
)
SESSIONS = RowView(
    "sessions",
    (
        RowColumn("session", "session", named_text, number=False),
        RowColumn("tenant", "tenant", named_text, number=False),
        RowColumn("requests", "requests", count_text),
        RowColumn("prompt_tokens", "prompt", count_text),
        RowColumn("reused", "reused", share_text),
        RowColumn("possible", "possible", share_text),
        RowColumn("lost_tokens", "lost", count_text),
        RowColumn("lost_for", "lost for", number=False),
        RowColumn("ttft_s", "first token", lambda v: "" if v is None else f"{v * 1000:,.0f} ms"),
        RowColumn("last_seen", "seen", ago_text),
        RowColumn("waits_for", "waits for", number=False),
        RowColumn("moving", "prompt changed in", number=False),
    ),
    "last_seen",
    True,
    (
        *("moving", "possible", "requests", "ttft_s", "waits_for", "tenant", "lost_for"),
        *("prompt_tokens", "lost_tokens", "last_seen", "reused"),
    ),
)
TENANTS = RowView(
    "tenants",
    (
        RowColumn("tenant", "tenant", named_text, number=False),
        RowColumn("requests_per_min", "req/min", rate_text),
        RowColumn("requests", "requests", count_text),
        RowColumn("prompt_tokens", "prompt", count_text),
        RowColumn("output_tokens", "output", count_text),
        RowColumn("reused", "reused", share_text),
        RowColumn("possible", "possible", share_text),
        RowColumn("queue_s", "queue", lambda v: f"{v:,.1f} s"),
        RowColumn("ttft_s", "first token", lambda v: "" if v is None else f"{v * 1000:,.0f} ms"),
        RowColumn("errors", "errors", count_text),
    ),
    "requests_per_min",
    True,
    (
        *("possible", "output_tokens", "queue_s", "requests", "prompt_tokens", "ttft_s"),
        *("reused", "errors", "requests_per_min"),
    ),
)
CACHES = RowView(
    "caches",
    (
        RowColumn("instance", "instance", number=False),
        RowColumn("prompts", "prompts", count_text),
        RowColumn("expected_tokens", "expected", count_text),
        RowColumn("served_tokens", "served", count_text),
        RowColumn("engine_difference", "in engine", signed_text),
        RowColumn("host_difference", "in host", signed_text),
        RowColumn("disk_difference", "on disk", signed_text),
        RowColumn("remote_difference", "remote", signed_text),
        RowColumn("unexpected_tokens", "not expected", count_text),
        RowColumn("missing_tokens", "missing", count_text),
        RowColumn("kept_blocks", "kept events", tiers_text),
        RowColumn("dropped_blocks", "dropped", number=False),
    ),
    "unexpected_tokens",
    True,
    (
        *("remote_difference", "disk_difference", "host_difference", "engine_difference"),
        *("prompts", "dropped_blocks", "kept_blocks", "expected_tokens", "served_tokens"),
        *("missing_tokens", "unexpected_tokens"),
    ),
)
VIEWS = {view.name: view for view in (FLEET, SESSIONS, TENANTS, CACHES)}
