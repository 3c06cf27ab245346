"""`kvmesh config completion`: prints the completion script of a shell, or the manual page."""

import argparse

from kvmesh.cli.arguments import failed
from kvmesh.settings import Settings

MANUAL = "man"
KINDS = ("bash", "zsh", "tcsh", MANUAL)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh config completion bash|zsh|tcsh|man"
    parser.epilog = (
        "bash: kvmesh config completion bash > ~/.local/share/bash-completion/completions/kvmesh"
    )
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.cli.references import shell

    manual = arguments.kind == MANUAL
    module, package = ("build_manpages", "argparse-manpage") if manual else ("shtab", "shtab")
    if reason := shell.missing(module, package):
        return failed("config completion", reason)
    print(shell.manual() if manual else shell.completion(arguments.kind))
    return 0
