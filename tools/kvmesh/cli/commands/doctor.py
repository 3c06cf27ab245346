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
            found = diagnose(await gather_facts(bus, settings))
        return _show(found, arguments.json)

    def failed(reason: str) -> int:
        return _show([Finding("fault", "nats", reason, "connection")], arguments.json)

    return run_on_bus("doctor", settings, main, failed)


def _show(findings: "list[Finding]", as_json: bool) -> int:
    """Print the findings; the exit status."""
    import msgspec
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if as_json:
        for finding in findings:
            print(msgspec.json.encode(finding).decode())
    else:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for finding in findings:
            cells = escape(finding.subject), escape(finding.text)
            table.add_row(_COLOURS[finding.severity], *cells)
        console = Console(highlight=False)
        (console if console.is_terminal else Console(highlight=False, width=200)).print(table)
    return 1 if any(finding.severity == "fault" for finding in findings) else 0


_COLOURS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "fault": "[red]fault[/red]"}
