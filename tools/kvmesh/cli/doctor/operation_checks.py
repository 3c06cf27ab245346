"""Checks of promises, disks and open servers. Pure functions of the facts."""

from collections.abc import Iterator
from ipaddress import ip_address

from kvmesh.cli.doctor.facts import Facts
from kvmesh.cli.status.findings import Finding
from kvmesh.runtime.quantities import size

FULL = 0.9  # share of a disk
LEAST_FREE = 1 << 30  # bytes
SYNC_S = 10.0  # of unsynced records are few; the default is two minutes


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


def store(facts: Facts) -> Iterator[Finding]:
    """The interval in which JetStream syncs its files, and the use of its storage."""
    if facts.monitoring_fault:
        yield Finding("fault", "nats", facts.monitoring_fault)
    found = facts.monitored
    if found is None or not found.stores:
        return
    if not found.sync_always and found.sync_s > SYNC_S:
        text = f"JetStream syncs its files every {found.sync_s:g} s: a machine that loses its power"
        text += " loses what was stored since"
        if facts.replicas > 1 and facts.clustered:
            yield Finding("note", found.url, f"{text}, unless another server of the cluster has it")
        else:
            action = "set jetstream { sync_interval: 1s } in the server's configuration"
            yield Finding("fault", found.url, text, action=action)
    else:
        each = "message" if found.sync_always else f"{found.sync_s:g} s"
        yield Finding("ok", "store", f"JetStream syncs its files every {each}")
    if found.most and found.used > FULL * found.most:
        text = f"JetStream has stored {size(found.used)} of {size(found.most)}"
        action = "raise max_file_store, or lower limits of streams (`kvmesh config streams apply`)"
        yield Finding("fault", found.url, text, action=action)


def open_ports(facts: Facts) -> Iterator[Finding]:
    """Frontends that the network reaches and that need no key."""
    for frontend in facts.frontends:
        if not frontend.needs_key:
            text = f"it answers anyone who reaches {frontend.url}, without an API key"
            action = "set frontend.keys_file or frontend.keys_bucket, or listen on 127.0.0.1"
            yield Finding("fault", frontend.instance, text, action=action)
    if facts.frontends and all(frontend.needs_key for frontend in facts.frontends):
        count = len(facts.frontends)
        yield Finding("ok", "access", f"{count} frontends in the network need API keys")


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
