"""All checks of `kvmesh doctor`, in the order in which it prints their findings."""

from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from kvmesh.cli.doctor import cache_checks, nats_checks
from kvmesh.cli.doctor.facts import Facts
from kvmesh.cli.status import findings
from kvmesh.cli.status.findings import Finding
from kvmesh.cli.status.report import MeshReport

Check = Callable[[Facts], Iterable[Finding]]


def _of_report(check: Callable[[MeshReport], Iterable[Finding]]) -> Check:
    return lambda facts: check(facts.report) if facts.report is not None else ()


def _processes(facts: Facts) -> Iterator[Finding]:
    """As those of the report, with where the processes may be if there are none at all."""
    if facts.report is not None:
        hint = "" if facts.report.instances else nats_checks.elsewhere(facts)
        for finding in findings.roles(facts.report):
            yield replace(finding, text=finding.text + hint)


def _index(facts: Facts) -> Iterable[Finding]:
    if facts.report is None:
        return ()
    if facts.ranks is None:
        return [Finding("note", "index", "not compared: only an operator may ask indexers")]
    return findings.of_checks(facts.ranks)


CHECKS: dict[str, Check] = {
    "server": nats_checks.server,
    "answers": nats_checks.answers,
    "version": nats_checks.version,
    "streams": nats_checks.streams,
    "replicas": nats_checks.replicas,
    "peers": nats_checks.peers,
    "limits": nats_checks.limits,
    "mappings": nats_checks.mappings,
    "replies": nats_checks.replies,
    "clocks": nats_checks.clocks,
    "processes": _processes,
    "warnings": _of_report(findings.warnings),
    "versions": _of_report(findings.versions),
    "readers": _of_report(findings.readers),
    "index": _index,
    "caches": cache_checks.caches,
}


def diagnose(facts: Facts) -> list[Finding]:
    """The findings of all checks, each with its check's name."""
    return [
        replace(finding, check=name) for name, check in CHECKS.items() for finding in check(facts)
    ]
