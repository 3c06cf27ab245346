"""`kvmesh model tiny`: writes a small random model for trials of the torch engine."""

import argparse
import sys
from pathlib import Path

from kvmesh.cli.flags import FlagParser
from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh model KIND FOLDER [options]"
    kinds = parser.add_subparsers(
        dest="kind", required=True, metavar="KIND", parser_class=FlagParser
    )
    about = "a 3 MB Llama with random weights"
    tiny = kinds.add_parser("tiny", help=about, prog="kvmesh model tiny")
    tiny.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write")
    tiny.add_argument("--seed", type=int, default=0, help="seed of the weights")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    try:
        from kvmesh.worker.engines.torch.model.tiny import make_tiny_model
    except ModuleNotFoundError as error:
        print(
            f"kvmesh model: {error.name} is not installed: pip install 'kvmesh[torch]'",
            file=sys.stderr,
        )
        return 1
    try:
        make_tiny_model(arguments.folder, arguments.seed)
    except OSError as error:
        print(f"kvmesh model: cannot write the model: {error}", file=sys.stderr)
        return 1
    print(f"wrote {arguments.folder}; try: kvmesh up --engine torch --model {arguments.folder}")
    return 0
