"""Checks of promises, disks and open servers. Pure functions of the facts."""

from collections.abc import Iterator
from ipaddress import ip_address

from kvmesh.cli.doctor.facts import Facts
from kvmesh.cli.status.findings import Finding
from kvmesh.runtime.quantities import size

FULL = 0.9  # share of a disk
LEAST_FREE = 1 << 30  # bytes


def promises(facts: Facts) -> Iterator[Finding]:
    """Promises of planners that no worker can keep, and those that were not kept lately."""
    for plan in facts.plans:
        for promise in plan.unreachable:
            yield Finding(
                "fault",
                plan.model,
                f"no worker can keep the promise {promise}, not even an idle one",
                action="promise less (`kvmesh plan set`), or use faster workers",
            )
    kept = sum(len(plan.kept) for plan in facts.plans)
    if kept and not any(plan.unreachable for plan in facts.plans):
        yield Finding("ok", "promises", f"{kept}, each within reach of a worker")


def disks(facts: Facts) -> Iterator[Finding]:
    """Disks of this machine that are nearly full."""
    full = 0
    for disk in facts.disks:
        if disk.total and (disk.free < (1 - FULL) * disk.total or disk.free < LEAST_FREE):
            full += 1
            text = f"{size(disk.free)} of {size(disk.total)} are free on the disk of {disk.path}"
            action = f"make room: {disk.effect}"
            yield Finding("fault", disk.owner, text, action=action)
    if facts.disks and not full:
        least = min(disk.free for disk in facts.disks)
        yield Finding("ok", "disks", f"at least {size(least)} are free here")


def open_server(facts: Facts) -> Iterator[Finding]:
    """A NATS server beyond this machine that accepts anyone, which may read and write the mesh."""
    if not facts.anonymous or not facts.server:
        return
    host = facts.server.rpartition("://")[2].rpartition(":")[0].strip("[]")
    if _is_local(host):
        yield Finding("ok", "access", "NATS needs no credentials, and listens on this machine")
        return
    text = f"NATS at {facts.server} accepts connections without credentials from the network"
    action = "`kvmesh secure` writes users for every role and the server's configuration"
    yield Finding("fault", "access", text, action=action)


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
