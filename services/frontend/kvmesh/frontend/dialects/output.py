"""Output grammar of a model: its selection, and the parsers made from it."""

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias
from uuid import uuid4

import msgspec
from msgspec import Struct

from kvmesh.frontend.conversation import AnswerEvent, TextDelta, Tool
from kvmesh.frontend.dialects.errors import UnknownParser
from kvmesh.frontend.dialects.families import (
    REASONING_ALIASES,
    REASONING_PARSERS,
    TOOL_ALIASES,
    TOOL_PARSERS,
    by_name,
    by_template,
)
from kvmesh.frontend.dialects.grammar import ReasoningGrammar, ToolCallGrammar
from kvmesh.frontend.dialects.parsing import harmony
from kvmesh.frontend.dialects.parsing.parser import GrammarParser
from kvmesh.frontend.dialects.templates.chat_template import ChatTemplate

HARMONY = "harmony"
NONE = "none"
# "opened" by the prompt; "expected", if the model always thinks; "possible", if it may open it
Thoughts: TypeAlias = Literal["none", "possible", "expected", "opened"]


class OutputParser(Protocol):
    """Streaming parser of one output: text in, typed events out."""

    def feed(self, text: str) -> list[AnswerEvent]: ...

    def finish(self) -> list[AnswerEvent]:
        """The remaining events at the end of the output, complete or not."""
        ...


class PlainText:
    """The parser of models without an output grammar, and of raw completions."""

    def feed(self, text: str) -> list[AnswerEvent]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[AnswerEvent]:
        return []


def call_id() -> str:
    """A random id of a tool call."""
    return f"call_{uuid4().hex[:24]}"


class OutputGrammar(Struct, frozen=True):
    """The grammar of a model's output, as names of parsers; None: everything is text."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None

    @property
    def harmony(self) -> bool:
        return HARMONY in (self.tool_parser, self.reasoning_parser)

    @property
    def calls(self) -> ToolCallGrammar | None:
        return TOOL_PARSERS.get(self.tool_parser or "")

    @property
    def reasoning(self) -> ReasoningGrammar | None:
        return REASONING_PARSERS.get(self.reasoning_parser or "")

    def parser(
        self,
        tools: list[Tool],
        prompt: str = "",
        *,
        thinking: bool | None = None,
        calls: bool = True,
        eager: bool = True,
        new_id: Callable[[], str] = call_id,
    ) -> OutputParser:
        """The parser of one output; the end of `prompt` shows whether thinking has begun.

        `thinking` says so instead. Without `calls`, tool calls are text. `eager` emits arguments as
        they arrive, and a call that breaks off lacks its `ToolCallEnd`; otherwise an incomplete
        call is text.
        """
        if self.harmony:
            return harmony.HarmonyParser(tools, new_id, eager)
        if thinking is None:
            thinking = self.begins_thinking(prompt)
        reasoning, grammar = self.reasoning, self.calls
        if grammar is not None and not calls:
            # a call still ends thinking, but it is not read
            ends = reasoning is not None and reasoning.calls_end_it
            grammar = ToolCallGrammar((), grammar.openers) if ends else None
        return GrammarParser(grammar, reasoning, tools, new_id, eager, thinking)

    def begins_thinking(self, prompt: str) -> bool:
        """True if the output after `prompt` begins with thinking, as its end shows."""
        return self.thoughts(prompt) in ("opened", "expected")

    def thoughts(self, prompt: str) -> Thoughts:
        """The thinking at the beginning of the output after `prompt`, as its end shows."""
        if self.harmony:
            return "possible"
        reasoning = self.reasoning
        if reasoning is None:
            return "none"
        tail = prompt[-64:].rstrip()
        if tail.endswith(tuple(b.rstrip() for b in reasoning.begin)):
            return "opened"
        if tail.endswith(reasoning.end):
            return "none"
        return "expected" if reasoning.forced else "possible"

    def uses(self, token: str) -> bool:
        """True if the special token is part of the grammar and its text must reach the parser."""
        if self.harmony:
            return token in harmony.MARKERS
        used = (self.calls, self.reasoning)
        return bool(token) and any(token in marker for part in used for marker in _texts(part))


def choose_grammar(
    model: str,
    template: ChatTemplate | None = None,
    *,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> OutputGrammar:
    """The grammar of a model: as configured, else by its chat template, else by its name.

    Raises UnknownParser for an unknown parser name; "none" switches a parser off.
    """
    tool, reasoning = by_name(model)
    detected = by_template(template.source) if template else None
    if detected is not None:
        tool, reasoning = detected[0] or tool, detected[1]
    if template is not None and template.plain_parser:
        tool = template.plain_parser
    if tool_parser is not None:
        tool = _resolve("tool-call", tool_parser, TOOL_PARSERS, TOOL_ALIASES)
    if reasoning_parser is not None:
        reasoning = _resolve("reasoning", reasoning_parser, REASONING_PARSERS, REASONING_ALIASES)
    return OutputGrammar(tool, reasoning)


def parser_names() -> tuple[list[str], list[str]]:
    """Names of all tool-call parsers and of all reasoning parsers, aliases included."""
    return (
        _all_names(TOOL_PARSERS, TOOL_ALIASES),
        _all_names(REASONING_PARSERS, REASONING_ALIASES),
    )


def _all_names(parsers: dict[str, Any], aliases: dict[str, str]) -> list[str]:
    return sorted({*parsers, *aliases, HARMONY, NONE})


def _resolve(kind: str, name: str, parsers: dict[str, Any], aliases: dict[str, str]) -> str | None:
    found = aliases.get(name, name)
    if found == NONE:
        return None
    if found != HARMONY and found not in parsers:
        raise UnknownParser(kind, name, _all_names(parsers, aliases))
    return found


def _texts(value: ToolCallGrammar | ReasoningGrammar | None) -> list[str]:
    """All strings in a grammar."""
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
