"""Output grammar of a model: its selection, and the parsers made from it."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, TypeAlias
from uuid import uuid4

import msgspec
from msgspec import Struct

from kvmesh.frontend.conversation import AnswerEvent, TextDelta, Tool
from kvmesh.frontend.dialects.errors import UnknownParser
from kvmesh.frontend.dialects.families import (
    AUTO,
    CHANNELS,
    REASONING_ALIASES,
    REASONING_PARSERS,
    TOOL_ALIASES,
    TOOL_PARSERS,
    by_architecture,
    by_name,
    by_template,
)
from kvmesh.frontend.dialects.grammar import (
    ChannelGrammar,
    OwnGrammar,
    ReasoningGrammar,
    ToolCallGrammar,
)
from kvmesh.frontend.dialects.parsing import harmony
from kvmesh.frontend.dialects.parsing.channels import ChannelParser
from kvmesh.frontend.dialects.parsing.parser import GrammarParser
from kvmesh.frontend.dialects.read_back import calls_read, reads_thinking
from kvmesh.frontend.dialects.templates.chat_template import ChatTemplate

HARMONY = "harmony"
NONE = "none"
OWN = "own"  # the grammar in the model's folder
# "opened" by the prompt; "expected", if the model always thinks; "possible", if it may open it
Thoughts: TypeAlias = Literal["none", "possible", "expected", "opened"]


class OutputParser(Protocol):
    """Streaming parser of one output: text in, typed events out.

    `in_call`: it holds back text that begins as a call does.
    """

    @property
    def in_call(self) -> bool: ...

    def feed(self, text: str) -> list[AnswerEvent]: ...

    def finish(self) -> list[AnswerEvent]:
        """The remaining events at the end of the output, complete or not."""
        ...


class PlainText:
    """The parser of models without an output grammar, and of raw completions."""

    in_call = False

    def feed(self, text: str) -> list[AnswerEvent]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[AnswerEvent]:
        return []


def call_id() -> str:
    """A random id of a tool call."""
    return f"call_{uuid4().hex[:24]}"


class OutputGrammar(Struct, frozen=True):
    """The grammar of a model's output, as names of parsers; None: everything is text.

    The name OWN stands for the parts of `own`.
    """

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    own: OwnGrammar = OwnGrammar()

    @property
    def harmony(self) -> bool:
        return HARMONY in (self.tool_parser, self.reasoning_parser)

    @property
    def calls(self) -> ToolCallGrammar | None:
        if self.tool_parser == OWN:
            return self.own.tool_calls
        return TOOL_PARSERS.get(self.tool_parser or "")

    @property
    def reasoning(self) -> ReasoningGrammar | None:
        if self.reasoning_parser == OWN:
            return self.own.reasoning
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
            return harmony.HarmonyParser(tools, new_id, eager, prompt, calls)
        if self._channels is not None:
            return ChannelParser(self._channels, tools, new_id, eager, calls)
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

    def end_of_thinking(self, prompt: str, constrained: bool) -> str:
        """The text that ends thinking and begins the answer; empty if the family has none.

        With several marks, it is that of the mark with which the prompt has begun the thinking.
        Nothing may stand before a `constrained` answer.
        """
        if self.harmony:
            return harmony.ANSWER
        reasoning = self.reasoning
        if reasoning is None:
            return ""
        begun = [i for i, mark in enumerate(reasoning.begin) if prompt.rstrip().endswith(mark)]
        same = len(reasoning.begin) == len(reasoning.end)
        end = reasoning.end[begun[0] if begun and same else 0]
        return end if constrained else f"{end}\n\n"

    def tail_of(self, text: str) -> str:
        """The end of a prompt that continues the answer `text`, as `begins_thinking` takes it.

        It is the tag that the text has passed last: no fixed number of characters shows that.
        """
        reasoning = self.reasoning
        if reasoning is None:
            return ""
        thinks = max(map(text.rfind, reasoning.begin)) > max(map(text.rfind, reasoning.end))
        return (reasoning.begin if thinks else reasoning.end)[0]

    @property
    def _channels(self) -> ChannelGrammar | None:
        return CHANNELS.get(self.tool_parser or "") or CHANNELS.get(self.reasoning_parser or "")

    def uses(self, token: str) -> bool:
        """True if the special token is part of the grammar and its text must reach the parser."""
        if self.harmony:
            return token in harmony.MARKERS
        used = (self._channels, self.calls, self.reasoning)
        return bool(token) and any(
            token in marker for part in used for marker in grammar_texts(part)
        )


def choose_grammar(
    model: str,
    template: ChatTemplate | None = None,
    *,
    architectures: Iterable[str] = (),
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    own: OwnGrammar | None = None,
) -> OutputGrammar:
    """The grammar of a model: as configured, else by its chat template, architectures or name.

    `own` is the grammar in its folder, of which the name "own" stands for either part.

    Calls and thinking that the template writes are read back: parsers that read more of them than
    the detected ones replace those.

    Raises UnknownParser for an unknown parser name; "none" switches a parser off, "auto" leaves
    the choice to the template and the name.
    """
    tool, reasoning = by_architecture(architectures) or by_name(model)
    detected = by_template(template.source) if template else None
    if detected is not None:
        tool, reasoning = detected[0] or tool, detected[1]
    if template is not None and template.plain_parser:
        tool = template.plain_parser
    own = own or OwnGrammar()
    parsers = TOOL_PARSERS | ({OWN: own.tool_calls} if own.tool_calls else {})
    given = _resolve("tool-call", tool_parser, parsers, TOOL_ALIASES)
    if given != AUTO:
        tool = None if given == NONE else given
    elif template is not None:
        tool = _that_reads_calls(template, tool, reasoning)
    thoughts = REASONING_PARSERS | ({OWN: own.reasoning} if own.reasoning else {})
    given = _resolve("reasoning", reasoning_parser, thoughts, REASONING_ALIASES)
    if given != AUTO:
        reasoning = None if given == NONE else given
    elif template is not None:
        reasoning = _that_reads_thinking(template, tool, reasoning)
    return OutputGrammar(tool, reasoning, own)


def _that_reads_calls(
    template: ChatTemplate, tool: str | None, reasoning: str | None
) -> str | None:
    """The parser that reads most of the template's calls: `tool`, or the first other one."""

    def score(name: str | None) -> int:
        # a template may show calls without the thinking with which answers begin
        return calls_read(template, OutputGrammar(name, reasoning), OutputGrammar(name))

    if score(tool) == len(template.written_calls):
        return tool
    return max((tool, *TOOL_PARSERS, *CHANNELS), key=score)


def _that_reads_thinking(
    template: ChatTemplate, tool: str | None, reasoning: str | None
) -> str | None:
    for name in (reasoning, *REASONING_PARSERS):
        if reads_thinking(template, OutputGrammar(tool, name)):
            return name
    return reasoning


def parser_names() -> tuple[list[str], list[str]]:
    """Names of all tool-call parsers and of all reasoning parsers, aliases included."""
    return (
        _all_names(TOOL_PARSERS, TOOL_ALIASES),
        _all_names(REASONING_PARSERS, REASONING_ALIASES),
    )


def _all_names(parsers: dict[str, Any], aliases: dict[str, str]) -> list[str]:
    return sorted({*parsers, *aliases, *CHANNELS, HARMONY, AUTO, NONE})


def _resolve(kind: str, name: str | None, parsers: dict[str, Any], aliases: dict[str, str]) -> str:
    """The parser, AUTO or NONE that a name stands for."""
    if name is None:
        return AUTO
    found = name.lower().replace("-", "_")
    found = aliases.get(found, found)
    if found not in (AUTO, NONE, HARMONY) and found not in parsers and found not in CHANNELS:
        raise UnknownParser(kind, name, _all_names(parsers, aliases))
    return found


def grammar_texts(value: Struct | None) -> list[str]:
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
