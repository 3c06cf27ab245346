"""What a parser makes of a raw output, for people to read."""

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
from kvmesh.frontend.dialects.output import OutputGrammar, choose, names


def try_it(name: str, text: str, tools: list[Tool] | None = None) -> str:
    """The output `text` as the parser called `name` sees it: one headed part per piece.

    A tool-call parser and a reasoning parser of one name work together; a tool-call parser alone
    is joined by `basic` thinking. `tools` give arguments their types. Raises UnknownParser.
    """
    parser = _grammar(name).parser(tools or [], eager=False, new_id=lambda: "")
    return "\n\n".join(_part(piece) for piece in joined(parser.feed(text) + parser.finish()))


def _grammar(name: str) -> OutputGrammar:
    tool, reasoning = names()
    if name not in tool and name not in reasoning:
        raise UnknownParser("output", name, sorted({*tool, *reasoning}))
    return choose(
        "",
        tool_parser=name if name in tool else None,
        reasoning_parser=name if name in reasoning else "basic",
    )


def joined(events: list[AnswerEvent]) -> list[tuple[str, str, str]]:
    """Kind, tool name and whole text of every piece of an answer, in order."""
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
