"""Checks that a grammar reads what its model's own template writes. Pure."""

import json
from typing import Protocol

from kvmesh.frontend.conversation import (
    AnswerEvent,
    TextDelta,
    ThinkingDelta,
    Tool,
    ToolCallDelta,
    ToolCallStart,
)
from kvmesh.frontend.dialects.templates.chat_template import ChatTemplate
from kvmesh.frontend.dialects.templates.written_calls import NAME, THOUGHT, TOOL, WrittenCall


class _Parser(Protocol):
    def feed(self, text: str) -> list[AnswerEvent]: ...


class Reader(Protocol):
    """The grammar of a model's output."""

    def parser(self, tools: list[Tool], prompt: str = "", *, eager: bool = True) -> _Parser: ...


def reads_back(template: ChatTemplate, grammar: Reader) -> bool:
    """True if the grammar reads the calls and the thinking that the template writes."""
    read = calls_read(template, grammar)
    return read == len(template.written_calls) and reads_thinking(template, grammar)


def calls_read(template: ChatTemplate, *grammars: Reader) -> int:
    """The number of the template's calls that one of the grammars reads, with no text before."""
    return sum(
        any(
            _call(grammar, written, prompt)[1] for grammar in grammars for prompt in written.prompts
        )
        for written in template.written_calls
    )


def reads_thinking(template: ChatTemplate, grammar: Reader) -> bool:
    """True if the grammar reads the thinking that the template writes before a call."""
    return all(
        any(_call(grammar, written, prompt)[0] == THOUGHT for prompt in written.prompts)
        for written in template.written_calls
        if THOUGHT in written.output
    )


def _call(grammar: Reader, written: WrittenCall, prompt: str) -> tuple[str, bool]:
    """The thinking before the first call; True if that is the call alone, without text."""
    thinking, arguments, alone = "", "", True
    for event in grammar.parser([TOOL], prompt, eager=False).feed(written.output):
        if isinstance(event, ThinkingDelta):
            thinking += event.text
        elif isinstance(event, TextDelta):
            alone = False
        elif isinstance(event, ToolCallStart):
            alone = alone and event.name == NAME
        elif isinstance(event, ToolCallDelta):
            arguments += event.arguments
        else:
            return thinking.strip(), alone and json.loads(arguments) == written.arguments
    return thinking.strip(), False
