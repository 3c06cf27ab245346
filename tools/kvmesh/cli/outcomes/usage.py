"""Sums of tokens and times of requests by tenant, key, model or session."""

from collections.abc import Callable, Iterable
from operator import attrgetter

from msgspec import Struct

from kvmesh.bus.messages import Outcome
from kvmesh.cli.units import literal
from kvmesh.frontend.namespaces import own_name
from kvmesh.terminal.tables import FittedTable, columns

MAX_GROUPS = 100_000
OTHER = "(others)"
NONE = "(none)"


class Use(Struct, kw_only=True):
    """Sums over requests. Tokens as in the answers' usage; times in seconds.

    `queue_s` is the time in routers' queues, `device_s` the share of the devices' time.
    """

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_s: float = 0.0
    device_s: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Add one sequence; a further choice of a prompt adds its output and times only."""
        if not outcome.choice:
            self.requests += 1
            self.failed += outcome.finish == "error"
        if outcome.prompt_tokens:
            self.prompt_tokens += outcome.prompt_tokens
            self.cached_tokens += outcome.cached_tokens
        self.output_tokens += outcome.output_tokens
        self.queue_s += outcome.wait_s
        self.device_s += outcome.device_s


class UsageRow(Struct, kw_only=True):
    """The use of one group, named by each of the dimensions."""

    group: dict[str, str]
    use: Use


DIMENSIONS: dict[str, Callable[[Outcome], str]] = {
    "tenant": attrgetter("tenant"),
    "key": attrgetter("key"),
    "model": attrgetter("model"),
    "session": attrgetter("session"),
}
_ORDER = attrgetter("use.device_s", "use.prompt_tokens", "use.output_tokens")


class UsageTable:
    """Sums by the `dimensions` together, and in total; bounded however long the window is.

    Groups beyond MAX_GROUPS count as one, named OTHER.
    """

    def __init__(self, dimensions: Iterable[str]) -> None:
        self.dimensions = list(dict.fromkeys(dimensions))
        self.total = Use()
        self._parts = [DIMENSIONS[name] for name in self.dimensions]
        self._uses: dict[tuple[str, ...], Use] = {}

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        group = tuple([part(outcome) for part in self._parts])
        use = self._uses.get(group)
        if use is None:
            if len(self._uses) >= MAX_GROUPS:
                group = (OTHER,) * len(group)
            use = self._uses.setdefault(group, Use())
        use.add(outcome)
        self.total.add(outcome)

    def rows(self) -> list[UsageRow]:
        """The groups, those with the most device time first."""
        named = (
            UsageRow(group=dict(zip(self.dimensions, map(_shown, group), strict=True)), use=use)
            for group, use in self._uses.items()
        )
        return sorted(named, key=_ORDER, reverse=True)


def render(table: UsageTable, limit: int) -> FittedTable:
    """The first `limit` rows, the sum of the others, and the total."""
    figures = ("requests", "failed", "prompt", "cached", "share", "output", "queue", "GPU time")
    hide = ("queue", "failed", "share", "cached", "output", "requests", "prompt", "GPU time")
    shown = FittedTable(columns(*table.dimensions, *figures, numbers=figures, hide=hide))
    rows = table.rows()
    for row in rows[:limit]:
        shown.add_row(*map(literal, row.group.values()), *_figures(row.use))
    blank = [""] * (len(table.dimensions) - 1)
    if len(rows) > limit:
        shown.add_row(f"and {len(rows) - limit:,} more", *blank, *_figures(_sum(rows[limit:])))
    shown.add_row("total", *blank, *_figures(table.total), style="bold")
    return shown


def _sum(rows: list[UsageRow]) -> Use:
    total = Use()
    for row in rows:
        for name in Use.__struct_fields__:
            setattr(total, name, getattr(total, name) + getattr(row.use, name))
    return total


def _figures(use: Use) -> list[str]:
    share = f"{use.cached_tokens / use.prompt_tokens:.1%}" if use.prompt_tokens else ""
    return [
        f"{use.requests:,}",
        f"{use.failed:,}",
        f"{use.prompt_tokens:,}",
        f"{use.cached_tokens:,}",
        share,
        f"{use.output_tokens:,}",
        f"{use.queue_s:,.1f} s",
        f"{use.device_s:,.1f} s",
    ]


def _shown(name: str) -> str:
    return own_name(name) or NONE
