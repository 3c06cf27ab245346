"""`kvmesh model parser`: parses a model's raw output, and drafts parsers, without a mesh."""

import argparse
import json
import sys
from pathlib import Path

import msgspec

from kvmesh.bus.errors import ModelFilesError
from kvmesh.cli.arguments import failed
from kvmesh.cli.models.parser_drafts import DraftFailed, Proof, new_parser
from kvmesh.frontend.conversation import Tool
from kvmesh.frontend.dialects import DialectError, UnknownParser, preview_output
from kvmesh.frontend.dialects.output import parser_names
from kvmesh.frontend.dialects.own_grammar import own_output_grammar
from kvmesh.frontend.dialects.preview import shown
from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s list | %(prog)s try NAME FILE [--tools FILE] | %(prog)s new FOLDER [OUTPUT …]"
    )
    actions = parser.add_subparsers(
        prog=parser.prog, dest="action", required=True, metavar="ACTION"
    )
    actions.add_parser("list", help="print the parser_names of all parsers")
    attempt = actions.add_parser("try", help="show the parts of a raw output")
    attempt.add_argument(
        "name", metavar="NAME", help="a parser's name, or a model folder that has its own"
    )
    attempt.add_argument("file", metavar="FILE", help="the raw output, - for standard input")
    attempt.add_argument(
        "--tools", metavar="FILE", help="the tools of the request (OpenAI form), to type arguments"
    )
    new = actions.add_parser(
        "new", help="draft a parser from a model's chat template, and prove it on outputs"
    )
    new.add_argument("folder", metavar="FOLDER", type=Path, help="the model's folder")
    new.add_argument(
        "outputs", metavar="OUTPUT", nargs="*", help="files with raw outputs of the model"
    )
    new.add_argument(
        "--dry-run", action="store_true", help="print the parser, and do not write kvmesh.json"
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    if arguments.action == "list":
        tool, reasoning = parser_names()
        print(f"tool calls: {', '.join(tool)}\nreasoning:  {', '.join(reasoning)}")
        return 0
    try:
        if arguments.action == "new":
            return _new(arguments)
        tools = _tools(Path(arguments.tools).read_bytes()) if arguments.tools else []
        folder, text = Path(arguments.name), _text(arguments.file)
        if folder.is_dir():
            print(shown(own_output_grammar(folder), text, tools))
        else:
            print(preview_output(arguments.name, text, tools))
    except (
        UnknownParser,
        DialectError,
        DraftFailed,
        ModelFilesError,
        OSError,
        UnicodeDecodeError,
        msgspec.DecodeError,
    ) as error:
        return failed("model parser", error)
    return 0


def _new(arguments: argparse.Namespace) -> int:
    outputs = {file: _text(file) for file in arguments.outputs}
    made = new_parser(arguments.folder, outputs)
    if made.known:
        print(f"{made.known} read what the template writes, and the outputs: no other is needed")
    else:
        print(json.dumps(made.hints, indent=2, ensure_ascii=False))
    for proof in made.proofs:
        print(f"\n{_headline(proof)}" + (f"\n{proof.parts}" if proof.parts else ""))
    if made.known or arguments.dry_run:
        return 0
    file = made.write(arguments.folder)
    print(f"\nwrote {file}: workers that start with this folder have the parser")
    return 0


def _headline(proof: Proof) -> str:
    verdict = "read" if proof.ok else "NOT read as a whole"
    return f"{proof.of}: {verdict}, {proof.detail}"


def _text(file: str) -> str:
    return sys.stdin.read() if file == "-" else Path(file).read_text()


class _Function(msgspec.Struct):
    name: str
    description: str = ""
    parameters: dict[str, object] = {}


class _Tool(msgspec.Struct):
    function: _Function


def _tools(raw: bytes) -> list[Tool]:
    found = [tool.function for tool in msgspec.json.decode(raw, type=list[_Tool])]
    return [Tool(tool.name, tool.description, tool.parameters) for tool in found]
