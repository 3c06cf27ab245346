"""Retention and pins by tenant, and KV memory by tier."""

import time
from collections.abc import Mapping

from nicegui import ui

from kvmesh.dashboard.elements.figure_row import FigureRow
from kvmesh.dashboard.elements.shell import REFRESH_S, every, heading
from kvmesh.dashboard.elements.table import PagedTable
from kvmesh.dashboard.mesh import Mesh
from kvmesh.dashboard.state.kv_tiers import TIER_VIEW, tier_rows
from kvmesh.dashboard.state.pins import PINS, PinRow, pin_rows
from kvmesh.dashboard.state.retention import TENANT_LOSSES, TENANT_RETENTION, TenantRow, tenant_rows
from kvmesh.observer.columns import part_text

UNTOLD = (
    "No message of the mesh carries a tenant's budget, the blocks that it retains, or the blocks"
    " that a block manager holds now: /metrics of each process does"
    " (kvmesh_worker_retention_charged_blocks, kvmesh_kvbm_blocks, kvmesh_kvbm_retained_bytes)."
)


def show(mesh: Mesh, query: Mapping[str, str]) -> None:
    """Build the page."""

    def pinned() -> list[PinRow]:
        return pin_rows(mesh.pins.value or [], mesh.tenant_names, time.time())

    def by_tenant() -> list[TenantRow]:
        return tenant_rows(mesh.tenants.rows(time.time()), pinned())

    def with_losses() -> list[TenantRow]:
        return [row for row in by_tenant() if row.lost_tokens]

    figures = FigureRow("tenants", "prompt tokens", "reused", "possible", "lost tokens", "pins")
    notice = ui.label().classes("notice").props('role="status"')
    heading("Tenants")
    ui.label(
        f"Prompt tokens of the last {mesh.window_s / 60:.0f} minutes: those that engines found"
        " cached, those that an endless cache would have held, and those that were lost."
    ).classes("quiet")
    tenants = PagedTable(TENANT_RETENTION, by_tenant, "tenants").show()
    heading("Lost tokens by reason")
    ui.label(
        "Lost tokens are computed again: their blocks were evicted, had expired, were beyond the"
        " tenant's budget (clipped), or were in another worker."
    ).classes("quiet")
    losses = PagedTable(TENANT_LOSSES, with_losses, "losses").show()
    heading("Pins")
    ui.label(
        "Workers pin those blocks of a pin's prompt that they have, and the others when they"
        " arrive. A clear drops blocks, not the pin."
    ).classes("quiet")
    pins = PagedTable(PINS, pinned, "pins").show()
    heading("KV memory by tier")
    tiers = PagedTable(
        TIER_VIEW, lambda: tier_rows(mesh.cards, mesh.fleet_rows()), "tiers", filtered=False
    ).show()
    ui.label(UNTOLD).classes("quiet note")

    def refresh() -> None:
        mesh.pins.poll()
        notice.text = f"Pins are not up to date. {mesh.pins.fault}" if mesh.pins.fault else ""
        rows = mesh.tenants.rows(time.time())
        tokens = sum(row.prompt_tokens for row in rows)
        accounted = sum(row.accounted_tokens for row in rows)
        figures.set(
            f"{len(rows):,}",
            f"{tokens:,}",
            part_text(sum(row.reused_tokens for row in rows), tokens),
            part_text(sum(row.possible_tokens for row in rows), accounted),
            f"{sum(row.lost_tokens for row in rows):,}",
            "–" if mesh.pins.value is None else f"{len(pinned()):,}",
        )
        tenants.refresh()
        losses.refresh()
        pins.refresh()
        tiers.refresh()

    every(REFRESH_S, refresh)
