"""Rows of the planner's benchmark, their table, and the targets that they reach or miss."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

SAME = 0.005  # less of the requests kept counts as the same share
FLAT = 1.10  # of the cheapest static fleet
VARYING = 0.85  # of the best baseline
BOUND = 1.25  # of the clairvoyant
TTFT = 1 / 3  # of Dynamo's sla
KEPT = 0.95  # the quantile of the promises
CALM = 4.0  # changes an hour under steady load
LOOSE = ", promises ×10"
PLANNER, SLA = "kvmesh", "dynamo sla"
PARKED, ASLEEP = "kvmesh parked", "kvmesh asleep"
TOLD = "told in advance"
ITSELF = "dynamo itself"  # its own planner in its own replay


@dataclass(frozen=True)
class Row:
    """One run: shares of 1, seconds, hours of devices (weighted by cost), counts.

    `lasted_h` are the hours of the run, `flat` says that its load is steady; in `waited_h` hours of
    workers these were parked or asleep, and held no device.
    """

    scenario: str
    startup_s: float
    policy: str
    kept: float
    ttft_p50: float
    ttft_p99: float
    itl_p99: float
    hours: float
    goodput: float
    least: int
    most: int
    changes: int
    failed: int
    lasted_h: float
    flat: bool = False
    waited_h: float = 0.0


def show(rows: Sequence[Row], bounds: dict[str, float]) -> None:
    """Print the table; `bounds` are the hours of the clairvoyant by scenario."""
    table = Table(title="Planner, in virtual time", title_justify="left")
    for name in ("scenario", "start-up s", "policy", "kept %", "TTFT p50 s", "p99 s", "ITL p99 ms"):
        table.add_column(name, justify="left" if name in ("scenario", "policy") else "right")
    for name in ("device-hours", "waiting h", "× bound", "goodput tok/s", "fleet"):
        table.add_column(name, justify="right")
    for name in ("changes /h", "failed"):
        table.add_column(name, justify="right")
    for row in rows:
        bound = bounds.get(row.scenario)
        table.add_row(
            row.scenario,
            f"{row.startup_s:g}",
            row.policy,
            f"{row.kept:.1%}"[:-1],
            f"{row.ttft_p50:.2f}",
            f"{row.ttft_p99:.1f}",
            f"{row.itl_p99 * 1000:.0f}",
            f"{row.hours:.2f}",
            f"{row.waited_h:.2f}" if row.waited_h else "",
            f"{row.hours / bound:.2f}" if bound else "",
            f"{row.goodput:.1f}",
            f"{row.least}–{row.most}",
            f"{row.changes / row.lasted_h:.1f}",
            str(row.failed),
        )
    Console(width=170).print(table)


def show_targets(rows: Sequence[Row], bounds: dict[str, float]) -> None:
    """Print each target with its number, for each run of the planner."""
    table = Table(title="Targets", title_justify="left")
    for name in ("scenario", "start-up s", "target", "measured", ""):
        table.add_column(name, justify="right" if name == "start-up s" else "left")
    for row in rows:
        if row.policy == PLANNER:
            beside = [r for r in rows if r.scenario == row.scenario and r is not row]
            same = [r for r in beside if _static(r) or r.startup_s == row.startup_s]
            for target, measured, reached in _targets(row, same, rows, bounds):
                verdict = "reached" if reached else "missed"
                table.add_row(row.scenario, f"{row.startup_s:g}", target, measured, verdict)
    Console(width=170).print(table)


def _static(row: Row) -> bool:
    return row.policy.startswith("static")


def _targets(
    row: Row, beside: Sequence[Row], rows: Sequence[Row], bounds: dict[str, float]
) -> Iterator[tuple[str, str, bool]]:
    """Target, measured figure, and whether it is reached; targets without a row to compare with
    are left out."""
    others = [r for r in beside if not r.policy.startswith(PLANNER) and r.policy != TOLD]
    equal = [r for r in others if r.kept >= row.kept - SAME]
    statics = [r for r in equal if _static(r)]
    if row.flat:
        if statics:
            yield _against(row, min(statics, key=lambda r: r.hours), FLAT)
        calm = row.changes / row.lasted_h
        yield f"at most {CALM:g} changes an hour", f"{calm:.1f}", calm <= CALM
    elif equal:
        yield _against(row, min(equal, key=lambda r: r.hours), VARYING)
    elif others:
        yield "hours of a baseline that keeps as many", f"none does, {row.kept:.1%}", True
    for sla in beside:
        if sla.policy == SLA or sla.policy.startswith(f"{ITSELF}, sla"):
            share, hours = row.ttft_p99 / sla.ttft_p99, row.hours / sla.hours
            yield (
                f"p99 TTFT at most a third of {sla.policy}, at no more hours",
                f"{share:.2f} of its p99, {hours:.2f} of its hours",
                share <= TTFT and hours <= 1,
            )
    bound = bounds.get(row.scenario)
    if bound:
        yield f"at most {BOUND} × the bound", f"{row.hours / bound:.2f}", row.hours <= BOUND * bound
    loose = [
        r
        for r in rows
        if r.scenario == row.scenario + LOOSE
        and (r.policy, r.startup_s) == (row.policy, row.startup_s)
    ]
    for each in loose:
        share = each.hours / row.hours
        yield "ten times looser promises cost less", f"{share:.2f} of the hours", share <= 0.9
    yield f"{KEPT:.0%} of the requests within both promises", f"{row.kept:.1%}", row.kept >= KEPT
    yield "no failed request", str(row.failed), not row.failed


def _against(row: Row, other: Row, most: float) -> tuple[str, str, bool]:
    share = row.hours / other.hours
    return (
        f"at most {most:.2f} × the hours of the cheapest that keeps as many ({other.policy})",
        f"{share:.2f}, kept {row.kept:.1%} to {other.kept:.1%}",
        share <= most,
    )
