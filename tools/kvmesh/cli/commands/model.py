"""`kvmesh model tiny`: a folder with a small random model, to try the torch engine with."""

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
    about = "a Llama of 3 MB with random weights, which talks nonsense"
    tiny = kinds.add_parser("tiny", help=about, prog="kvmesh model tiny")
    tiny.add_argument("folder", type=Path, metavar="FOLDER", help="where to write it")
    tiny.add_argument("--seed", type=int, default=0, help="another seed makes other weights")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    try:
        from kvmesh.worker.engines.torch.model.tiny import make_tiny_model
    except ModuleNotFoundError as error:
        print(
            f"kvmesh model: this needs {error.name}: pip install 'kvmesh[torch]'", file=sys.stderr
        )
        return 1
    try:
        make_tiny_model(arguments.folder, arguments.seed)
    except OSError as error:
        print(f"kvmesh model: cannot write the model: {error}", file=sys.stderr)
        return 1
    print(f"wrote {arguments.folder}; try: kvmesh up --engine torch --model {arguments.folder}")
    return 0
