"""Findings of `kvmesh doctor`: faults of a mesh, from its report and from checks of its index."""

from collections.abc import Iterable, Iterator
from typing import Literal

from msgspec import Struct

from kvmesh.bus.discovery.leases import STATE
from kvmesh.bus.messages import IndexCheck, Role
from kvmesh.cli.status.index_checks import RankCheck
from kvmesh.cli.status.report import MeshReport

NEEDED = (Role.FRONTEND, Role.ROUTER, Role.INDEXER, Role.WORKER)
READER_LAG = 10_000  # messages
Severity = Literal["ok", "note", "fault"]


class Finding(Struct, frozen=True):
    """One line: its subject and the result. A `note` needs no action. `check` names the check.

    `action` is what an operator does about it, empty if the text says it or nothing is to be done.
    """

    severity: Severity
    subject: str
    text: str
    check: str = ""
    action: str = ""


def warnings(report: MeshReport) -> Iterator[Finding]:
    """Warnings of processes."""
    for warning in report.warnings:
        yield Finding("fault", warning.instance, warning.text)
    if not report.warnings:
        yield Finding("ok", "warnings", "no process warns")


def versions(report: MeshReport) -> Iterator[Finding]:
    """Processes of several versions."""
    by_version: dict[str, list[str]] = {}
    for member in report.instances:
        by_version.setdefault(member.card.version, []).append(member.card.name)
    if len(by_version) == 1:
        yield Finding("ok", "versions", f"all processes run {next(iter(by_version))}")
    if len(by_version) > 1:
        texts = (f"{found} ({_some(names)})" for found, names in sorted(by_version.items()))
        action = "finish the upgrade: restart the processes of the older version one by one"
        text = f"processes of several versions: {', '.join(texts)}"
        yield Finding("note", "versions", text, action=action)


def readers(report: MeshReport) -> Iterator[Finding]:
    """Readers of streams that are behind."""
    slow = [
        (reader.owner or reader.name, stream.name, reader.lag)
        for stream in report.streams
        for reader in stream.readers
        if reader.lag > READER_LAG
    ]
    for owner, stream, lag in slow:
        yield Finding("fault", owner, f"{lag:,} messages of {stream} behind")

    if report.streams and not slow:
        count = sum(len(stream.readers) for stream in report.streams)
        yield Finding("ok", "readers", f"{count} readers of streams keep up")


def _some(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + more


def of_checks(checks: Iterable[RankCheck]) -> Iterator[Finding]:
    """One finding for each comparison without agreement, one for all the others.

    An indexer that does not reply is one fault.
    """
    equal = blocks = 0
    silent: set[str] = set()
    for found in checks:
        subject = f"{found.indexer}, rank {found.rank} of {found.instance}"
        if not found.replied:
            if found.indexer not in silent:
                yield Finding("fault", found.indexer, _inconclusive(found.check))
            silent.add(found.indexer)
        elif found.check.result == "equal":
            equal, blocks = equal + 1, blocks + found.check.held
        elif found.check.result == "differs":
            yield Finding("fault", subject, f"{_difference(found.check)}; it is dumped anew")
        else:
            yield Finding("note", subject, _inconclusive(found.check))
    if equal:
        text = f"equal to the workers in {equal} comparisons of ranks, {blocks:,} blocks"
        yield Finding("ok", "index", text)


def roles(report: MeshReport) -> Iterator[Finding]:
    """Roles without a ready process, and processes that are not ready."""
    ready = {member.card.role for member in report.instances if member.eligible}
    for role in NEEDED:
        if role not in ready and not (role is Role.WORKER and report.idle_models):
            yield Finding("fault", role.value, "none is ready")
    waiting = [m for m in report.instances if not m.eligible and not m.reason]
    for member in waiting:
        card = member.card
        state = card.labels.get(STATE, "draining" if card.draining else "not ready")
        rests = "asleep" if card.asleep else "parked"
        parked = f"{rests}, until {card.parked_for} needs it" if card.parked_for else ""
        yield Finding("note", card.instance, parked or state)
    if ready.issuperset(NEEDED):
        text = f"{len(report.instances)}, at least one of each role ready"
        yield Finding("ok", "processes", text)


def _difference(check: IndexCheck) -> str:
    if check.missing is None or check.extra is None:
        return f"the index has {check.indexed:,} blocks, the worker {check.held:,}"
    return (
        f"the index lacks {check.missing:,} of the worker's {check.held:,} blocks and has"
        f" {check.extra:,} that are gone"
    )


def _inconclusive(check: IndexCheck) -> str:
    if check.result == "unknown":
        return "the index waits for a dump of the rank"
    if check.result == "moved":
        return "not compared: its blocks changed too fast, try again"
    return f"not compared: {check.reason}"
