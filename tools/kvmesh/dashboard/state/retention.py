"""Reuse, losses and pins by tenant. Pure."""

from collections.abc import Iterable

from kvmesh.bus.messages.kv_events import (
    CLEARED,
    CLIPPED,
    EVICTED,
    EXPIRED,
    RELEASED,
    SUPERSEDED,
    WORKER_GONE,
)
from kvmesh.dashboard.state.pins import PinRow
from kvmesh.observer.activity import Activity
from kvmesh.observer.columns import RowColumn, RowView, count_text, named_text, share_text

_LOST = (EVICTED, EXPIRED, CLIPPED, RELEASED, SUPERSEDED, CLEARED, WORKER_GONE)
ELSEWHERE = "elsewhere"


class TenantRow:
    """The prompt tokens of one tenant in the window, and its pins now."""

    def __init__(self, tenant: str, activity: Activity | None, pins: list[PinRow]) -> None:
        self.tenant = tenant
        self.prompt_tokens = activity.prompt_tokens if activity else 0
        self.reused = activity.reused if activity else None
        self.possible = activity.possible if activity else None
        lost = dict(activity.lost_by_reason) if activity else {}
        self.lost_tokens = sum(lost.values())
        self.evicted = lost.pop(EVICTED, 0)
        self.expired = lost.pop(EXPIRED, 0)
        self.clipped = lost.pop(CLIPPED, 0)
        self.released = lost.pop(RELEASED, 0)
        self.superseded = lost.pop(SUPERSEDED, 0)
        self.cleared = lost.pop(CLEARED, 0)
        self.worker_gone = lost.pop(WORKER_GONE, 0)
        others = {reason for reason in lost if reason.partition(":")[0] == ELSEWHERE}
        self.elsewhere = sum(lost.pop(reason) for reason in others)
        self.other = sum(lost.values())
        self.pins = len(pins)
        self.pinned_tokens = sum(pin.tokens for pin in pins)


def tenant_rows(activities: Iterable[Activity], pins: Iterable[PinRow]) -> list[TenantRow]:
    """A row for each tenant with requests in the window or pins."""
    pinned: dict[str, list[PinRow]] = {}
    for pin in pins:
        pinned.setdefault(pin.tenant, []).append(pin)
    rows = [TenantRow(each.tenant, each, pinned.pop(each.tenant, [])) for each in activities]
    return rows + [TenantRow(tenant, None, found) for tenant, found in pinned.items()]


TENANT_RETENTION = RowView(
    "retention",
    (
        RowColumn("tenant", "tenant", named_text, number=False),
        RowColumn("prompt_tokens", "prompt tokens", count_text),
        RowColumn("reused", "reused", share_text),
        RowColumn("possible", "possible", share_text),
        RowColumn("lost_tokens", "lost", count_text),
        RowColumn("pins", "pins", count_text),
        RowColumn("pinned_tokens", "pinned tokens", count_text),
    ),
    "prompt_tokens",
    True,
)
TENANT_LOSSES = RowView(
    "losses",
    (
        RowColumn("tenant", "tenant", named_text, number=False),
        RowColumn("lost_tokens", "lost", count_text),
        *(
            RowColumn(reason, reason.replace("_", " "), count_text)
            for reason in (*_LOST, ELSEWHERE, "other")
        ),
    ),
    "lost_tokens",
    True,
)
