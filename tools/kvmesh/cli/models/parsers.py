"""`kvmesh model parse`: parses a model family's raw output, without a mesh or a model."""

import sys
from pathlib import Path

import msgspec

from kvmesh.frontend.conversation import Tool
from kvmesh.frontend.dialects import UnknownParser, preview_output
from kvmesh.frontend.dialects.output import parser_names


def parse(operands: list[str], tools_file: str | None) -> int:
    """Print all parsers, or the parts of a file's output by the parser named first; the status."""
    if not operands:
        tool, reasoning = parser_names()
        print(f"tool calls: {', '.join(tool)}\nreasoning:  {', '.join(reasoning)}")
        return 0
    if len(operands) == 1:
        print("kvmesh model: parse needs a parser and a file", file=sys.stderr)
        return 2
    name, file = operands
    try:
        tools = _tools(Path(tools_file).read_bytes()) if tools_file else []
        print(preview_output(name, _text(file), tools))
    except (UnknownParser, OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        print(f"kvmesh model: {error}", file=sys.stderr)
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
