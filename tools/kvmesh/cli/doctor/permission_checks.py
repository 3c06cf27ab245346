"""Checks of `kvmesh doctor --as`: whether the server permits a role's user all that it needs."""

from collections.abc import Iterator

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.refused.permission_probe import ProbeFailed, refused_subjects
from kvmesh.bus.connection.translation import bus_errors
from kvmesh.bus.errors import NotPermitted
from kvmesh.bus.permissions import ANY, Permissions, User
from kvmesh.cli.status.findings import Finding
from kvmesh.settings import Settings

CHECK = "permissions"


async def check_permissions(bus: Bus, role: User, settings: Settings) -> list[Finding]:
    """A fault for each subject of the role that the server refuses; raises BusError."""
    name = {User.WORKER: settings.worker.name, User.KVBM: settings.kvbm.name}.get(role) or ANY
    wanted = bus.needs(role, name)
    try:
        with bus_errors():
            refused = await refused_subjects(bus.client, bus.refusals, wanted)
    except ProbeFailed as error:
        return [Finding("note", role, str(error), CHECK)]
    faults = list(_faults(role, refused, f"{bus.options.inbox_prefix}.>"))
    if faults:
        return faults
    counts = f"{len(wanted.publish)} publishes and {len(wanted.subscribe)} subscriptions"
    return [Finding("ok", role, f"the server permits all {counts} of the role", CHECK)]


def _faults(role: User, refused: Permissions, inbox: str) -> Iterator[Finding]:
    for pattern in refused.subscribe:
        act = "receive replies (set nats.inbox_prefix) on" if pattern == inbox else "subscribe to"
        yield Finding("fault", role, str(NotPermitted(pattern, act)), CHECK)
    for pattern in refused.publish:
        yield Finding("fault", role, str(NotPermitted(pattern)), CHECK)
