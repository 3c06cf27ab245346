"""`kvmesh doctor`: checks a mesh, its index against the workers included."""

import argparse
from typing import TYPE_CHECKING

from kvmesh.bus.permissions import User
from kvmesh.settings import Settings

if TYPE_CHECKING:
    from kvmesh.cli.status.report import MeshReport


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
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from kvmesh.bus.client import Bus
    from kvmesh.bus.errors import NotPermitted, ServerUnfit
    from kvmesh.bus.streams.server_check import check_server, old_version
    from kvmesh.cli.bus_session import run_on_bus
    from kvmesh.cli.status.findings import Finding, of_checks, of_report
    from kvmesh.cli.status.index_checks import check_ranks
    from kvmesh.cli.status.permission_checks import check_permissions
    from kvmesh.cli.status.report import gather

    async def server(bus: Bus) -> Finding:
        try:
            domain = await check_server(bus)
        except ServerUnfit as error:
            return Finding("fault", "nats", str(error))
        except NotPermitted:
            return Finding("note", "nats", "not checked: this user may not")
        place = f", JetStream domain {domain}" if domain else ""
        return Finding("ok", "nats", f"{bus.server_version} at {bus.server}{place}")

    async def index(bus: Bus, report: "MeshReport") -> list[Finding]:
        try:
            return list(of_checks(await check_ranks(bus, [m.card for m in report.instances])))
        except NotPermitted:
            return [Finding("note", "index", "not compared: only an operator may ask indexers")]

    async def main(bus: Bus) -> int:
        findings = [await server(bus)]
        if warning := old_version(bus):
            findings.append(Finding("note", "nats", warning))
        if arguments.role is not None:
            findings += await check_permissions(bus, User(arguments.role), settings)
        else:
            report = await gather(bus, settings)
            findings += [*of_report(report), *await index(bus, report)]
        if arguments.json:
            for finding in findings:
                print(msgspec.json.encode(finding).decode())
        else:
            table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
            for finding in findings:
                table.add_row(_COLOURS[finding.severity], finding.subject, finding.text)
            console = Console(highlight=False)
            (console if console.is_terminal else Console(highlight=False, width=200)).print(table)
        return 1 if any(finding.severity == "fault" for finding in findings) else 0

    return run_on_bus("doctor", settings, main)


_COLOURS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "fault": "[red]fault[/red]"}
