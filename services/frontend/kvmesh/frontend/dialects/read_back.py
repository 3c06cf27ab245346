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
from kvmesh.frontend.dialects.templates.written_calls import ARGUMENTS, NAME, THOUGHT, TOOL


class _Parser(Protocol):
    def feed(self, text: str) -> list[AnswerEvent]: ...


class Reader(Protocol):
    """The grammar of a model's output."""

    def parser(self, tools: list[Tool], prompt: str = "", *, eager: bool = True) -> _Parser: ...


def reads_back(template: ChatTemplate, grammar: Reader) -> bool:
    """True if the grammar reads the calls and the thinking that the template writes."""
    return reads_calls(template, grammar) and reads_thinking(template, grammar)


def reads_calls(template: ChatTemplate, *grammars: Reader) -> bool:
    """True if one of the grammars reads each call, and no text before it; or there is none."""
    return all(
        any(_call(grammar, prompt, output)[1] for grammar in grammars for prompt in prompts)
        for prompts, output in template.written_calls
    )


def reads_thinking(template: ChatTemplate, grammar: Reader) -> bool:
    """True if the grammar reads the thinking that the template writes before a call."""
    return all(
        any(_call(grammar, prompt, output)[0] == THOUGHT for prompt in prompts)
        for prompts, output in template.written_calls
        if THOUGHT in output
    )


def _call(grammar: Reader, prompt: str, output: str) -> tuple[str, bool]:
    """The thinking before the first call; whether that is `ARGUMENTS` without text before it."""
    thinking, arguments, alone = "", "", True
    for event in grammar.parser([TOOL], prompt, eager=False).feed(output):
        if isinstance(event, ThinkingDelta):
            thinking += event.text
        elif isinstance(event, TextDelta):
            alone = False
        elif isinstance(event, ToolCallStart):
            alone = alone and event.name == NAME
        elif isinstance(event, ToolCallDelta):
            arguments += event.arguments
        else:
            return thinking.strip(), alone and json.loads(arguments) == ARGUMENTS
    return thinking.strip(), False
