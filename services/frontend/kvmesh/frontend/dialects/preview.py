"""Readable preview of a parser's result for a raw output."""

import json

from kvmesh.frontend.conversation import (
    AnswerEvent,
    TextDelta,
    ThinkingDelta,
    Tool,
    ToolCallDelta,
    ToolCallStart,
)
from kvmesh.frontend.dialects.errors import UnknownParser
from kvmesh.frontend.dialects.output import OutputGrammar, choose_grammar, parser_names


def preview_output(name: str, text: str, tools: list[Tool] | None = None) -> str:
    """The output `text` as parser `name` splits it: one part with a heading per piece.

    If a tool-call and a reasoning parser share the name, both apply; a tool-call parser alone is
    combined with `basic` reasoning. `tools` type the arguments. Raises UnknownParser.
    """
    return shown(_grammar(name), text, tools)


def shown(grammar: OutputGrammar, text: str, tools: list[Tool] | None = None) -> str:
    """The output `text` as `grammar` splits it, as `preview_output` shows it."""
    parser = grammar.parser(tools or [], eager=False, new_id=lambda: "")
    return "\n\n".join(_part(piece) for piece in merge_deltas(parser.feed(text) + parser.finish()))


def _grammar(name: str) -> OutputGrammar:
    tool, reasoning = parser_names()
    if name not in tool and name not in reasoning:
        raise UnknownParser("output", name, sorted({*tool, *reasoning}))
    return choose_grammar(
        "",
        tool_parser=name if name in tool else None,
        reasoning_parser=name if name in reasoning else "basic",
    )


def merge_deltas(events: list[AnswerEvent]) -> list[tuple[str, str, str]]:
    """(kind, tool name, whole text) of every piece of an output, in order."""
    pieces: list[tuple[str, str, str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            pieces.append(("call", event.name, ""))
        elif isinstance(event, ToolCallDelta):
            kind, name, text = pieces[-1]
            pieces[-1] = (kind, name, text + event.arguments)
        elif isinstance(event, TextDelta | ThinkingDelta):
            kind = "text" if isinstance(event, TextDelta) else "thinking"
            if pieces and pieces[-1][0] == kind:
                pieces[-1] = (kind, "", pieces[-1][2] + event.text)
            else:
                pieces.append((kind, "", event.text))
    return pieces


def _part(piece: tuple[str, str, str]) -> str:
    kind, name, text = piece
    if kind != "call":
        return f"[{kind}]\n{text}"
    arguments = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    return f"[call {name}]\n{arguments}"
