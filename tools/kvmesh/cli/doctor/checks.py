"""All checks of `kvmesh doctor`, in the order in which it prints their findings."""

from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from kvmesh.cli.doctor import cache_checks, nats_checks, operation_checks
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
    "promises": operation_checks.promises,
    "disks": operation_checks.disks,
    "store": operation_checks.store,
    "access": operation_checks.open_server,
    "ports": operation_checks.open_ports,
}
# What an operator does about a fault that names no remedy of its own.
ACTIONS = {
    "answers": "look at the log of nats-server; in a cluster, start the servers that are missing",
    "version": "upgrade nats-server, one server after the other",
    "streams": "processes create what is missing within 20 s: their warnings say why they cannot",
    "peers": "start that server again, or remove it from the cluster",
    "limits": "raise the limit in the server's or account's configuration, or remove connections",
    "clocks": "run an NTP client, such as chrony, on that machine",
    "processes": "start one, and read the log of those that are not ready",
    "warnings": "docs/runbook.md#warnings explains each warning",
    "store": "name the monitoring port of nats-server, as http://127.0.0.1:8222",
    "readers": "give that process more CPU; if its lag does not shrink, restart it",
    "index": "nothing, if it happens once; otherwise report it with the log of that indexer",
    "caches": "docs/cache-misses.md explains what engines serve and what routers expect",
}


def diagnose(facts: Facts) -> list[Finding]:
    """The findings of all checks, each with its check's name."""
    return [
        _with_action(replace(finding, check=name))
        for name, check in CHECKS.items()
        for finding in check(facts)
    ]


def _with_action(finding: Finding) -> Finding:
    if finding.severity != "fault" or finding.action:
        return finding
    return replace(finding, action=ACTIONS.get(finding.check, ""))
