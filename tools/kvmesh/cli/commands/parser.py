"""`kvmesh parser`: parses a model family's raw output, without a mesh or a model."""

import argparse
import sys
from pathlib import Path

import msgspec

from kvmesh.frontend.conversation import Tool
from kvmesh.frontend.dialects import UnknownParser, preview_output
from kvmesh.frontend.dialects.output import parser_names
from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s list | %(prog)s try NAME FILE [--tools FILE]"
    actions = parser.add_subparsers(
        prog=parser.prog, dest="action", required=True, metavar="ACTION"
    )
    actions.add_parser("list", help="print the parser_names of all parsers")
    attempt = actions.add_parser("try", help="show the parts of a raw output")
    attempt.add_argument("name", metavar="NAME", help="a parser's name")
    attempt.add_argument("file", metavar="FILE", help="the raw output, - for standard input")
    attempt.add_argument(
        "--tools", metavar="FILE", help="the tools of the request (OpenAI form), to type arguments"
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    if arguments.action == "list":
        tool, reasoning = parser_names()
        print(f"tool calls: {', '.join(tool)}\nreasoning:  {', '.join(reasoning)}")
        return 0
    try:
        tools = _tools(Path(arguments.tools).read_bytes()) if arguments.tools else []
        print(preview_output(arguments.name, _text(arguments.file), tools))
    except (UnknownParser, OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        print(f"kvmesh parser: {error}", file=sys.stderr)
        return 1
    return 0


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
