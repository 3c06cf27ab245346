"""`kvmesh doctor`: checks NATS and a mesh, its index against the workers included."""

import argparse
from typing import TYPE_CHECKING

from kvmesh.bus.permissions import User
from kvmesh.settings import Settings

if TYPE_CHECKING:
    from kvmesh.cli.status.findings import Finding


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit status 1 if there is a fault. Each indexer compares each rank's blocks with the "
        "worker's own; a rank that differs is dumped anew."
    )
    parser.add_argument(
        "--monitoring",
        metavar="URL",
        default="",
        help="NATS's monitoring port, as http://127.0.0.1:8222: check how JetStream syncs, too",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per finding")
    parser.add_argument(
        "--as",
        dest="role",
        choices=[role.value for role in User],
        metavar="ROLE",
        help="check only that the server permits these credentials all subjects of a role",
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.bus.client import Bus
    from kvmesh.cli.bus_session import run_on_bus
    from kvmesh.cli.doctor.checks import diagnose
    from kvmesh.cli.doctor.gathering import gather_facts
    from kvmesh.cli.doctor.permission_checks import check_permissions
    from kvmesh.cli.status.findings import Finding

    async def main(bus: Bus) -> int:
        if arguments.role is not None:
            found = await check_permissions(bus, User(arguments.role), settings)
        else:
            found = diagnose(await gather_facts(bus, settings, arguments.monitoring))
        return _show(found, arguments.json)

    def failed(reason: str) -> int:
        return _show([Finding("fault", "nats", reason, "connection")], arguments.json)

    return run_on_bus("doctor", settings, main, failed)


def _show(findings: "list[Finding]", as_json: bool) -> int:
    """Print the findings; the exit status."""
    import msgspec
    from rich.text import Text

    from kvmesh.cli.units import literal
    from kvmesh.terminal.console import stdout_console
    from kvmesh.terminal.tables import FittedTable, TextColumn

    if as_json:
        for finding in findings:
            print(msgspec.json.encode(finding).decode())
    else:
        table = FittedTable([TextColumn(""), TextColumn(""), TextColumn("", wraps=True)])
        for finding in findings:
            severity = Text(finding.severity, _COLOURS[finding.severity])
            action = f"; to do: {finding.action}" if finding.action else ""
            table.add_row(severity, literal(finding.subject), literal(finding.text + action))
        table.show(stdout_console())
    return 1 if any(finding.severity == "fault" for finding in findings) else 0


_COLOURS = {"ok": "green", "note": "yellow", "fault": "red"}
