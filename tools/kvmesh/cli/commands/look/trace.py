"""`kvmesh explain trace`: shows the requests of a session over time, or writes them as a trace."""

import argparse
from typing import TYPE_CHECKING

from kvmesh.cli.arguments import add_since, failed, result_file
from kvmesh.settings import Settings

if TYPE_CHECKING:
    from kvmesh.workload.capture import CapturedRound


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh explain trace SESSION [options]"
    parser.epilog = (
        "A session is named as its client names it (docs/requests.md); its subagents' sessions are "
        "included. Without a file, prints a table."
    )
    parser.add_argument("session", metavar="SESSION", help="the session's id")
    add_since(parser, "start of the search: 90s, 5m, 2h, 1d ago or a time (%(default)s)", "1d")
    parser.add_argument(
        "--perfetto",
        type=result_file,
        metavar="FILE",
        help="write a timeline for ui.perfetto.dev",
    )
    parser.add_argument(
        "--jsonl", type=result_file, metavar="FILE", help="write Dynamo's trace records"
    )
    parser.add_argument(
        "--form",
        choices=("request", "agent"),
        default="request",
        help="of the records: dynamo.request.trace.v1 or dynamo.agent.trace.v1 (%(default)s)",
    )
    parser.add_argument(
        "--mooncake",
        type=result_file,
        metavar="FILE",
        help="write a workload that `kvmesh replay` and `kvmesh simulate` read",
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.bus.client import Bus
    from kvmesh.cli.bus_session import run_on_bus
    from kvmesh.cli.session_trace.turns import session_rounds
    from kvmesh.workload.capture import CaptureError, capture

    async def main(bus: Bus) -> int:
        try:
            recorder = await capture(bus, arguments.since, None)
        except CaptureError as error:
            return failed("explain trace", error)
        rounds = session_rounds(recorder.rounds, arguments.session)
        if not rounds:
            return failed("explain trace", f"no request of session {arguments.session}")
        _write(rounds, arguments)
        return 0

    return run_on_bus("explain trace", settings, main)


def _write(rounds: "list[CapturedRound]", arguments: argparse.Namespace) -> None:
    from kvmesh.cli.session_trace.dynamo import trace_records
    from kvmesh.cli.session_trace.table import turn_table
    from kvmesh.cli.session_trace.timeline import perfetto_timeline
    from kvmesh.cli.session_trace.turns import session_turns
    from kvmesh.terminal.console import stdout_console
    from kvmesh.workload.capture import assemble
    from kvmesh.workload.writing.mooncake import write

    turns = list(session_turns(rounds))
    if arguments.perfetto is not None:
        arguments.perfetto.write_bytes(perfetto_timeline(turns))
    if arguments.jsonl is not None:
        lines = trace_records(turns, arguments.form)
        arguments.jsonl.write_bytes(b"".join(line + b"\n" for line in lines))
    if arguments.mooncake is not None:
        write(assemble(rounds), arguments.mooncake)
    if arguments.perfetto is arguments.jsonl is arguments.mooncake is None:
        turn_table(turns).show(stdout_console())
