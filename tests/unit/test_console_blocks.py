"""The commands in console blocks of README and docs exist, with their flags."""

import os
import subprocess
import sys

import pytest
from support.console_blocks import ConsoleCommand, console_commands

from kvmesh.cli.flags import FlagParser, add_flags
from kvmesh.cli.main import find_command

ALL = list(console_commands())
PARSED = [each for each in ALL if each.kvmesh and not each.fails]


def test_blocks_are_found() -> None:
    assert len(ALL) > 150
    assert len(PARSED) > 100
    assert sum(not each.reason for each in ALL) > 60


@pytest.mark.parametrize("command", PARSED, ids=lambda each: f"{each.page}:{each.line}")
def test_a_command_and_its_flags_exist(command: ConsoleCommand) -> None:
    found, words = find_command(command.kvmesh)
    assert found is not None, command.text
    parser = FlagParser(prog=f"kvmesh {found.name}")
    found.load().configure(parser)
    if found.own or found.sections:
        add_flags(parser, found.own, found.sections, found.excluded)
    parser.parse_args(words)


@pytest.mark.parametrize("command", [each for each in ALL if each.fails], ids=lambda e: e.page)
def test_an_example_of_an_error_fails(command: ConsoleCommand) -> None:
    text = command.text.replace("kvmesh", f"{sys.executable} -m kvmesh.cli.main")
    done = subprocess.run(text, shell=True, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 2, done.stderr
