"""Completion for shells, and the manual page: both from the parsers of the commands."""

import argparse
import sys
from importlib.util import find_spec

from kvmesh.cli.flags import add_flags
from kvmesh.cli.registry import COMMANDS


def whole_parser() -> argparse.ArgumentParser:
    """One parser of all commands with all their flags."""
    parser = argparse.ArgumentParser("kvmesh", description="A mesh for coding agents.")
    added = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        own = added.add_parser(
            command.name, help=command.help, description=f"{command.help}.".capitalize()
        )
        command.load().configure(own)
        for action in own._actions:  # shtab takes a mapping for subcommands
            if isinstance(action.choices, dict) and not hasattr(action, "add_parser"):
                action.choices = tuple(action.choices)
        if command.own or command.sections:
            add_flags(own, command.own, command.sections, command.excluded)
    return parser


def completion(shell: str) -> str:
    """The completion script of a shell. Raises ImportError without shtab."""
    import shtab

    script: str = shtab.complete(whole_parser(), shell)
    return script


def manual() -> str:
    """The manual page kvmesh(1) in roff. Raises ImportError without argparse-manpage."""
    from build_manpages.manpage import Manpage

    page = Manpage(whole_parser())
    page.manual = "kvmesh"
    return str(page)


def missing(module: str, package: str) -> str:
    """The reason why a library cannot be used, or empty."""
    if find_spec(module) is not None:
        return ""
    return f"install {package}: {sys.executable} -m pip install 'kvmesh[shell]'"
