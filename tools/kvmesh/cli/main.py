"""The `kvmesh` command: finds the subcommand, resolves its settings, runs it."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import NoReturn

from kvmesh.cli.flags import FlagParser, add_flags, did_you_mean, settings_flags
from kvmesh.cli.references.foreign_flags import foreign_variables
from kvmesh.cli.registry import COMMANDS, GROUPS, Command
from kvmesh.settings import Settings, SettingsError, load

VERSION = "--version"
NOUNS = [command.name for command in COMMANDS if command.is_noun]
# Former commands, which are parts of others now.
MOVED = {
    **{action: f"fleet {action}" for action in ("drain", "sleep", "promote", "role")},
    "busy": "model busy",
    "returns": "plan learned returns",
    "learned": "plan learned",
    "restore": "backup restore",
    "metrics": "config metrics",
    "completion": "config completion",
    "streams": "config streams",
    "roll": "fleet roll",
    "adapter": "model adapter",
    "parser": "model parser",
    "trace": "explain trace",
    "whatif": "simulate live",
    "version": VERSION,
}
ENDED = {"oracle": "planners evaluate fleets by their queue model alone"}
STARTED = ("up", "frontend", "router", "indexer", "worker", "planner")  # like processes of Dynamo


def check_parsers(settings: Settings) -> None:
    """Raise SettingsError if the worker's settings name an unknown parser."""
    tool, reasoning = settings.worker.tool_parser, settings.worker.reasoning_parser
    if not tool and not reasoning:
        return
    from kvmesh.frontend.dialects import UnknownParser, choose_grammar

    try:
        choose_grammar("", tool_parser=tool or None, reasoning_parser=reasoning or None)
    except UnknownParser as error:
        flag = "tool_parser" if error.name == tool else "reasoning_parser"
        raise SettingsError(f"worker.{flag}", str(error)) from error


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one subcommand and exit with its status; 2 means a usage or settings error."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one subcommand; returns its exit status."""
    parser = FlagParser(
        prog="kvmesh",
        usage="kvmesh COMMAND [options]",
        description="A mesh that serves open-weight models to coding agents.",
        epilog=f"{_listing()}\n\nkvmesh COMMAND --help shows a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--version", dest="command", action="store_const", const=VERSION, help="print the version"
    )
    name = parser.parse_args(arguments[:1] or ["--help"]).command
    if name == VERSION:
        print(f"kvmesh {version('kvmesh')}, cores {cores()}")
        return 0
    command, rest = find_command(arguments)
    if command is None:
        now = f"; it is kvmesh {MOVED[name]} now" if name in MOVED else ""
        ended = f"; {ENDED[name]}" if name in ENDED else ""
        parser.error(f"unknown command {name}{now or ended or did_you_mean(name, NOUNS)}")
    return _run(command, rest)


def find_command(arguments: Sequence[str]) -> tuple[Command | None, Sequence[str]]:
    """The command that the first two words name, or the first one, and the words after its name."""
    for words in (2, 1):
        name = " ".join(arguments[:words])
        for command in COMMANDS:
            if command.name == name:
                return command, arguments[words:]
    return None, arguments


def cores() -> str:
    """Form of the cores: `interpreted`, or `compiled` by mypyc."""
    core = find_spec("kvmesh.router.placement.router")
    return "interpreted" if core is None or str(core.origin).endswith(".py") else "compiled"


def _listing() -> str:
    width = max(map(len, NOUNS))
    return "\n\n".join(
        f"{group}:\n" + "\n".join(f"  {c.name:<{width}}  {c.help}" for c in commands if c.is_noun)
        for group, commands in GROUPS.items()
    )


def _run(command: Command, arguments: Sequence[str]) -> int:
    implementation = command.load()
    description = f"{command.help[0].upper()}{command.help[1:]}."
    parser = FlagParser(
        prog=f"kvmesh {command.name}", usage="%(prog)s [options]", description=description
    )
    implementation.configure(parser)
    if command.own or command.sections:
        add_flags(parser, command.own, command.sections, command.excluded)
    if actions := [c.name for c in COMMANDS if c.name.startswith(f"{command.name} ")]:
        more = f"`{'`, `'.join(f'kvmesh {name} --help' for name in actions)}` show more."
        parser.epilog = f"{parser.epilog}\n{more}" if parser.epilog else more
    namespace = parser.parse_args(arguments)
    namespace.command = command.name
    try:
        settings = load(getattr(namespace, "config", None), os.environ, settings_flags(namespace))
        check_parsers(settings)
    except SettingsError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    for line in foreign_variables(os.environ) if command.own in STARTED else ():
        print(f"{parser.prog}: {line}", file=sys.stderr)
    try:
        return implementation.run(namespace, settings)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0


if __name__ == "__main__":
    main()
