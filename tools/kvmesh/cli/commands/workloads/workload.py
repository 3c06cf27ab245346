"""`kvmesh workload`: reads, analyses, synthesises, generates and captures workloads."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.cli.arguments import add_since, failed, positive, result_file
from kvmesh.cli.flags import FlagParser, add_flags
from kvmesh.cli.traces.options import SOURCES, add_trace_options, load_trace, title_of
from kvmesh.runtime.quantities import counted
from kvmesh.settings import Settings
from kvmesh.terminal.console import stdout_console
from kvmesh.workload.analysis.analysis import analyze
from kvmesh.workload.analysis.comparison import compare, show_comparison
from kvmesh.workload.analysis.tables import show
from kvmesh.workload.errors import WorkloadError
from kvmesh.workload.formats.registry import SUFFIXES, load, save
from kvmesh.workload.model import Workload
from kvmesh.workload.writing.targets import Target

FILES = "file to write; its suffix sets the format: " + ", ".join(
    f"{suffix} {name}" for suffix, name in SUFFIXES.items()
)
Action = Callable[[argparse.Namespace, Settings], int]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh workload ACTION … [options]"
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=FlagParser
    )

    def action(name: str, run: Action, help_text: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=help_text, prog=f"kvmesh workload {name}")
        added.set_defaults(perform=run)
        return added

    _read_options(action("read", _read, "check a workload, or convert it to another format"))
    _analyze_options(action("analyze", _analyze, "show lengths, prefix sharing and pace"))
    _synthesize_options(
        action("synthesize", _synthesize, "make a new trace with the structure of a seed trace")
    )
    _generate_options(action("generate", _generate, "draw agent sessions from a profile"))
    _capture_options(action("capture", _capture, "capture a live mesh's requests, without text"))


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    perform: Action = arguments.perform
    try:
        return perform(arguments, settings)
    except (WorkloadError, OSError) as error:
        return failed("workload", error, 2)


def _source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help=SOURCES)
    add_trace_options(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed")


def _output(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "-o", "--output", type=result_file, metavar="FILE", required=required, help=FILES
    )
    _target(parser)
    _block_size(parser, "tokens per hash id of a Mooncake file")


def _target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--for",
        dest="target",
        choices=get_args(Target),
        help="write a .jsonl file as this tool reads it",
    )


def _block_size(parser: argparse.ArgumentParser, help_text: str) -> None:
    parser.add_argument("--block-size", type=positive, metavar="N", help=help_text)


def _load(arguments: argparse.Namespace) -> Workload:
    output: Path | None = getattr(arguments, "output", None)
    if output is not None and output.resolve() in [Path(s).resolve() for s in arguments.sources]:
        raise WorkloadError(f"{output} is what is read: name another file")
    workload, summary = load_trace(arguments, arguments.sources, arguments.seed)
    if summary:
        print(summary)
    return workload


def _save(
    workload: Workload, file: Path | None, block_size: int | None, target: Target | None
) -> None:
    if file is None:
        if target is not None:
            raise WorkloadError("--for needs -o FILE")
        return
    try:
        saved = save(workload, file, block_size, target)
    except OSError as error:
        raise WorkloadError(f"cannot write {file}: {error.strerror}") from error
    for loss in saved.losses:
        print(
            f"{f'{target} ignores' if target else 'lost in this format'}: {loss}", file=sys.stderr
        )
    print(f"wrote {counted(len(workload), 'request')} to {file} ({file.stat().st_size:,} bytes)")
    if saved.usage:
        print(f"read it with: {saved.usage}" if target else saved.usage)


# --- read --------------------------------------------------------------------------------------


def _read_options(parser: argparse.ArgumentParser) -> None:
    _source(parser)
    _output(parser, required=False)


def _read(arguments: argparse.Namespace, _: Settings) -> int:
    workload = _load(arguments)
    requests, sessions = len(workload), len(workload.sessions)
    print(f"{counted(requests, 'request')} in {counted(sessions, 'session')}")
    _save(workload, arguments.output, arguments.block_size, arguments.target)
    return 0


# --- analyze -----------------------------------------------------------------------------------


def _analyze_options(parser: argparse.ArgumentParser) -> None:
    _source(parser)
    _block_size(parser, "block size of the hits in tokens (the trace's own)")
    parser.add_argument(
        "--against", metavar="SOURCE", help="show the figures beside those of another workload"
    )
    parser.add_argument(
        "--json", type=result_file, metavar="FILE", help="write the figures as JSON"
    )


def _analyze(arguments: argparse.Namespace, _: Settings) -> int:
    if arguments.against is not None:
        return _compare(arguments)
    analysis = analyze(_load(arguments), arguments.block_size)
    show(analysis, stdout_console())
    _write_json(analysis, arguments.json)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    workload = _load(arguments)
    other, repairs = load(arguments.against, seed=arguments.seed)
    for line in repairs.lines():
        print(line, file=sys.stderr)
    figures = compare(workload, other, arguments.block_size)
    names = (title_of(arguments.sources), Path(arguments.against).name)
    show_comparison(figures, names, stdout_console())
    _write_json(figures, arguments.json)
    return 0


def _write_json(figures: object, file: Path | None) -> None:
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


# --- synthesize --------------------------------------------------------------------------------


def _synthesize_options(parser: argparse.ArgumentParser) -> None:
    from kvmesh.workload.generate.synthesizer import SynthesisOptions

    _source(parser)
    parser.add_argument(
        "-o", "--output", type=result_file, metavar="FILE", required=True, help=FILES
    )
    _target(parser)
    _block_size(parser, "tokens per hash id of a Mooncake file (the seed trace's, or 512)")
    for field in msgspec.structs.fields(SynthesisOptions):
        if field.name == "seed":
            continue
        own = field.default is msgspec.NODEFAULT
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            metavar="X",
            default=None if own else field.default,
            help="default the seed trace's" if own else f"default {field.default:,}",
        )
    parser.epilog = SynthesisOptions.__doc__


def _synthesize(arguments: argparse.Namespace, _: Settings) -> int:
    from kvmesh.workload.generate.synthesizer import SynthesisOptions, Synthesizer

    workload = _load(arguments)
    given = {
        field.name: getattr(arguments, field.name)
        for field in msgspec.structs.fields(SynthesisOptions)
        if getattr(arguments, field.name) is not None
    }
    try:
        options = msgspec.convert(
            {"num_requests": len(workload), **given}, SynthesisOptions, strict=False
        )
    except msgspec.ValidationError as error:
        raise WorkloadError(str(error).replace("`$.", "`--").replace("_", "-")) from error
    made = Synthesizer(workload, options).workload()
    _save(made, arguments.output, arguments.block_size, arguments.target)
    return 0


# --- generate ----------------------------------------------------------------------------------


def _generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", nargs="?", metavar="PROFILE", help="a TOML file or shipped name")
    parser.add_argument(
        "--sessions", type=positive, metavar="N", help="sessions (the profile's number)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed")
    parser.add_argument("--print", action="store_true", help="print the profile as TOML")
    _output(parser, required=False)
    parser.epilog = "Without PROFILE, lists the shipped profiles."


def _generate(arguments: argparse.Namespace, _: Settings) -> int:
    from kvmesh.workload.generate.agents import AgentGenerator
    from kvmesh.workload.generate.profile import builtin, load_profile

    if arguments.profile is None:
        for name in builtin():
            print(f"{name:<16}  {load_profile(name).description}")
        return 0
    profile = load_profile(arguments.profile)
    if arguments.print:
        print(builtin().get(arguments.profile, Path(arguments.profile)).read_text(), end="")
        return 0
    workload = AgentGenerator(profile, arguments.seed).workload(arguments.sessions)
    if arguments.output is None:
        show(analyze(workload), stdout_console())
    _save(workload, arguments.output, arguments.block_size, arguments.target)
    return 0


# --- capture -----------------------------------------------------------------------------------


def _capture_options(parser: argparse.ArgumentParser) -> None:
    add_since(parser, "start of the capture: 90s, 5m, 2h, 1d ago or a time (%(default)s)", "15m")
    parser.add_argument("--model", metavar="NAME", help="only requests of this model")
    _output(parser, required=True)
    add_flags(parser, "", ("nats", "log"))


def _capture(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.cli.bus_session import run_on_bus
    from kvmesh.workload.capture import assemble, capture

    async def record(bus: Bus) -> int:
        recorder = await capture(bus, arguments.since, arguments.model)
        workload = assemble(recorder.rounds)
        if recorder.unfinished:
            print(f"skipped {recorder.unfinished:,} unfinished requests", file=sys.stderr)
        _save(workload, arguments.output, arguments.block_size, arguments.target)
        return 0

    return run_on_bus("workload", settings, record)
