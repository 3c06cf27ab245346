"""Which grammar a model's output is in, and the parsers made from it."""

from collections.abc import Callable
from typing import Any, Protocol
from uuid import uuid4

import msgspec
from msgspec import Struct

from kvmesh.frontend.conversation import AnswerEvent, Tool
from kvmesh.frontend.dialects.errors import UnknownParser
from kvmesh.frontend.dialects.families import (
    REASONING_ALIASES,
    REASONING_PARSERS,
    TOOL_ALIASES,
    TOOL_PARSERS,
    by_name,
    by_template,
)
from kvmesh.frontend.dialects.grammar import Calls, Reasoning
from kvmesh.frontend.dialects.parsing import harmony
from kvmesh.frontend.dialects.parsing.parser import GrammarParser
from kvmesh.frontend.dialects.templates.chat_template import ChatTemplate

HARMONY = "harmony"
NONE = "none"


class OutputParser(Protocol):
    """One output's state: text in, typed events out."""

    def feed(self, text: str) -> list[AnswerEvent]: ...

    def finish(self) -> list[AnswerEvent]:
        """The output is over, complete or not."""
        ...


def call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


class OutputGrammar(Struct, frozen=True):
    """How a model writes what it thinks, says and calls; the names are those of the parsers."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None

    def parser(
        self,
        tools: list[Tool],
        prompt: str = "",
        *,
        calls: bool = True,
        eager: bool = True,
        new_id: Callable[[], str] = call_id,
    ) -> OutputParser:
        """The parser of one output to `prompt`, whose end tells whether thinking has begun.

        Without `calls` what looks like one is text. `eager` passes arguments on as they come; a
        call that breaks off then lacks its `ToolCallEnd`. Otherwise calls are whole or text.
        """
        if HARMONY in (self.tool_parser, self.reasoning_parser):
            return harmony.HarmonyParser(tools, new_id, eager)
        grammar = TOOL_PARSERS.get(self.tool_parser or "") if calls else None
        reasoning = REASONING_PARSERS.get(self.reasoning_parser or "")
        thinking = reasoning is not None and _begins_thinking(reasoning, prompt)
        return GrammarParser(grammar, reasoning, tools, new_id, eager, thinking)

    def shows(self, token: str) -> bool:
        """Whether the text of a special token is part of the grammar and must reach the parser."""
        if HARMONY in (self.tool_parser, self.reasoning_parser):
            return token in harmony.MARKERS
        used = (
            TOOL_PARSERS.get(self.tool_parser or ""),
            REASONING_PARSERS.get(self.reasoning_parser or ""),
        )
        return bool(token) and any(token in marker for part in used for marker in _texts(part))


def choose(
    model: str,
    template: ChatTemplate | None = None,
    *,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> OutputGrammar:
    """The grammar of a model: as told, else by its chat template, else by its name.

    Raises UnknownParser if told a name that there is not. "none" switches a parser off.
    """
    tool, reasoning = by_name(model)
    seen = by_template(template.source) if template else None
    if seen is not None:
        tool, reasoning = seen[0] or tool, seen[1]
    if template is not None and template.plain_parser:
        tool = template.plain_parser
    if tool_parser is not None:
        tool = _known("tool-call", tool_parser, TOOL_PARSERS, TOOL_ALIASES)
    if reasoning_parser is not None:
        reasoning = _known("reasoning", reasoning_parser, REASONING_PARSERS, REASONING_ALIASES)
    return OutputGrammar(tool, reasoning)


def names() -> tuple[list[str], list[str]]:
    """The tool-call parsers and the reasoning parsers, with their other names."""
    return (
        _all_names(TOOL_PARSERS, TOOL_ALIASES),
        _all_names(REASONING_PARSERS, REASONING_ALIASES),
    )


def _all_names(parsers: dict[str, Any], aliases: dict[str, str]) -> list[str]:
    return sorted({*parsers, *aliases, HARMONY, NONE})


def _known(kind: str, name: str, parsers: dict[str, Any], aliases: dict[str, str]) -> str | None:
    found = aliases.get(name, name)
    if found == NONE:
        return None
    if found != HARMONY and found not in parsers:
        raise UnknownParser(kind, name, _all_names(parsers, aliases))
    return found


def _begins_thinking(reasoning: Reasoning, prompt: str) -> bool:
    tail = prompt[-64:].rstrip()
    if tail.endswith(tuple(b.rstrip() for b in reasoning.begin)):
        return True
    return reasoning.forced and not tail.endswith(reasoning.end)


def _texts(value: Calls | Reasoning | None) -> list[str]:
    """Every string in a grammar."""
    if value is None:
        return []
    found: list[str] = []
    pending: list[Any] = list(msgspec.structs.astuple(value))
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, tuple):
            pending.extend(item)
        elif isinstance(item, Struct):
            pending.extend(msgspec.structs.astuple(item))
    return found
