"""Completion for shells, and the manual page: both from the parsers of the commands."""

import argparse
import sys
from importlib.util import find_spec
from itertools import chain
from typing import TypeAlias

from kvmesh.cli.flags import add_flags
from kvmesh.cli.registry import COMMANDS

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def whole_parser() -> argparse.ArgumentParser:
    """One parser of all commands with all their flags."""
    parser = argparse.ArgumentParser("kvmesh", description="A mesh for coding agents.")
    added = parser.add_subparsers(dest="command", metavar="COMMAND")
    nouns: dict[str, argparse.ArgumentParser] = {}
    for command in COMMANDS:
        noun, _, action = command.name.rpartition(" ")
        own = (_actions(nouns[noun]) if noun else added).add_parser(
            action, help=command.help, description=f"{command.help}.".capitalize()
        )
        nouns[command.name] = own
        command.load().configure(own)
        for each in own._actions:  # shtab takes a mapping for subcommands
            if isinstance(each.choices, dict) and not hasattr(each, "add_parser"):
                each.choices = tuple(each.choices)
        if command.own or command.sections:
            add_flags(own, command.own, command.sections, command.excluded)
    return parser


def _actions(noun: argparse.ArgumentParser) -> Subparsers:
    """The parsers of a command's actions, also of those that are choices of its first operand."""
    for action in noun._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action
    choices = [each for each in noun._actions if each.dest == "action"]
    for each in choices:
        noun._actions.remove(each)
    operands = [*noun._actions]
    added = noun.add_subparsers(metavar="ACTION")
    for name in chain.from_iterable(each.choices or () for each in choices):
        added.add_parser(name, add_help=False, help=name)._actions = operands
    noun._actions.insert(0, noun._actions.pop())
    return added


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
