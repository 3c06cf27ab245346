"""Conversion of a conversation to the messages that chat templates expect.

The conversion keeps each turn's prompt a prefix of the next turn's: data that varies between turns
or sessions (ids, billing headers, the form of content) never reaches the template.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, groupby, takewhile
from typing import Any, NamedTuple

from kvmesh.frontend.conversation import (
    GAP,
    Block,
    Generated,
    Image,
    Message,
    ResultPart,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolNotice,
    ToolResult,
)
from kvmesh.frontend.dialects import tools as tool_forms
from kvmesh.frontend.dialects.plain_tools import calls_text
from kvmesh.frontend.dialects.templates.answer_forms import WHOLE, AnswerPieces, MessageForm
from kvmesh.frontend.dialects.templates.answer_frames import MarkedAnswer, markers
from kvmesh.frontend.dialects.templates.call_arguments import PLAIN_TOOLS, ShownTools
from kvmesh.frontend.dialects.templates.capabilities import TemplateCapabilities, call_id
from kvmesh.frontend.dialects.templates.control_tokens import GUARD
from kvmesh.frontend.dialects.templates.prompt_json import RepeatedEntry, dumps
from kvmesh.frontend.turn_memo import NO_MEMO, TurnMemo

ERROR = "Error: "
ERROR_CHARS = 64  # at the start of a result, where it may say itself that it is an error
# Differs between conversations and between an agent and its subagents, at the prompt's start.
BILLING_HEADER = "x-anthropic-billing-header:"
_BILLING = re.compile(rf"\A{BILLING_HEADER}[^\n]*\n*")


class ConversationTurn(NamedTuple):
    role: str
    blocks: list[Block]
    generated: Generated | None = None


def template_messages(
    messages: Sequence[Message],
    tools: list[Tool],
    capabilities: TemplateCapabilities,
    parser: str,
    shown: ShownTools = PLAIN_TOOLS,
    mark: Callable[[MarkedAnswer], bool] | None = None,
    count: int = 0,
    memo: TurnMemo = NO_MEMO,
) -> list[dict[str, Any]]:
    """The messages in the form that the template supports; `tools`: all tools, even deferred.

    `parser` reads the calls that are shown as text; `shown` is what the prompt shows of tools.
    An answer that is known as it was generated is written as markers if `mark` returns True.
    `count` calls come before the messages.
    """
    writer = _MessageWriter(tools, capabilities, parser, shown, count)
    if mark is None and capabilities.parallel and not _merges(capabilities):
        return _continued(messages, tools, writer, capabilities, memo)
    entries = _entries(_join_assistants(_separate(messages)), writer, capabilities, mark=mark)
    if not capabilities.parallel:
        entries = _one_call_each(entries)
    entries = _arrange_system(entries, capabilities)
    if _merges(capabilities):
        entries = _merge(entries, capabilities)
    return _in_parts(entries, capabilities)


def _merges(capabilities: TemplateCapabilities) -> bool:
    """True if messages that stand together may become one."""
    return not capabilities.repeats or not capabilities.user_after_tool


class _WrittenTurns(NamedTuple):
    """The entries of a conversation's first `end` messages, and the writer's state behind them.

    `rest` are those of the others. `asked`: a message of the user came after them.
    """

    end: int
    entries: list[dict[str, Any]]
    rest: list[dict[str, Any]]
    state: "_WriterState"
    asked: bool


def _continued(
    messages: Sequence[Message],
    tools: list[Tool],
    writer: "_MessageWriter",
    capabilities: TemplateCapabilities,
    memo: TurnMemo,
) -> list[dict[str, Any]]:
    """The entries for a template that shows every turn for itself; the first ones may be known.

    An answer's entries depend on the turn behind it, and on whether the user asks again.
    """
    step, items = ("entries", writer.parser, writer.count), [capabilities, *tools, *messages]
    same, known = memo.recall(step, items)
    start, entries = 0, list[dict[str, Any]]()
    if known is not None and known.end < same - len(tools) - 1:
        turns = _join_assistants(_separate(messages[known.end :]))
        if not capabilities.forms or _asks(turns, capabilities) == known.asked:
            start, entries = known.end, known.entries
            writer.restore(known.state)
    end = _last_request(messages, start)
    turns = _join_assistants(_separate(messages[start:end]))
    rest = _join_assistants(_separate(messages[end:]))
    following, asked = rest[0].role if rest else "", _asks(rest, capabilities)
    written = _entries(turns, writer, capabilities, following, asked)
    if not start:
        if all(entry["role"] == "system" for entry in written):
            written += _entries(rest, writer, capabilities)
            return _in_parts(_arrange_system(written, capabilities), capabilities)
        entries = _in_parts(_arrange_system(written, capabilities), capabilities)
        written = []
    state, count = writer.state(), len(entries) + len(written)
    written += _entries(rest, writer, capabilities)
    written = _in_parts(_later_system(written, capabilities), capabilities)
    if start:
        written[: len(known.rest)] = map(_same_request, written, known.rest)
    entries = [*entries, *written]
    memo.note(step, items, _WrittenTurns(end, entries[:count], entries[count:], state, asked))
    return entries


def _same_request(entry: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """The earlier entry if it is the same message to the model, so that it stays one object."""
    return earlier if entry["role"] != "assistant" and entry == earlier else entry


def _last_request(messages: Sequence[Message], start: int) -> int:
    """The index of the last message that begins a turn of its own, which is no answer."""
    for index in range(len(messages) - 1, start, -1):
        if messages[index].role in ("user", "tool") and messages[index].blocks:
            return index
    return start


def _asks(turns: Sequence[ConversationTurn], capabilities: TemplateCapabilities) -> bool:
    return any(_shown_role(turn, capabilities) == "user" for turn in turns)


def _entries(
    turns: Sequence[ConversationTurn],
    writer: "_MessageWriter",
    capabilities: TemplateCapabilities,
    following: str = "",
    asked_again: bool = False,
    mark: Callable[[MarkedAnswer], bool] | None = None,
) -> list[dict[str, Any]]:
    """The entries of turns; `following` is the role of the next one. `asked_again`: the user asks
    behind them."""
    entries: list[dict[str, Any]] = []
    number, asked = 0, 0
    if capabilities.forms:
        asked = len(turns) if asked_again else _last_question(turns, capabilities)
    for index, turn in enumerate(turns):
        after = turns[index + 1].role if index + 1 < len(turns) else following
        writer.later = index < asked
        writer.calls_last = not capabilities.text_after_calls and after == "tool"
        if mark is not None and turn.generated is not None:
            answer = writer.mark(turn, number, _ends_in_result(turns, index, capabilities))
            number += 1
            if answer is not None and mark(answer):
                entries += writer.marked(turn, answer)
                continue
        entries += writer.write(turn)
    return entries


def ends_in_result(
    messages: Sequence[Message], end: int, capabilities: TemplateCapabilities
) -> bool:
    """True if the template shows a tool's result at the end of the first `end` messages.

    Templates may write such a result within the model's turn, which then does not begin anew.
    """
    before = (messages[index] for index in range(end - 1, -1, -1))
    recent = [*takewhile(lambda message: message.role != "assistant", before)]
    turns = _separate(reversed(recent))
    return _ends_in_result(turns, len(turns), capabilities)


def _ends_in_result(
    turns: Sequence[ConversationTurn], end: int, capabilities: TemplateCapabilities
) -> bool:
    """`ends_in_result` of the first `end` turns."""
    for index in range(end - 1, -1, -1):
        role = _shown_role(turns[index], capabilities)
        if role == "tool":
            return capabilities.calls is not None
        if role == "assistant" or (role == "user" and capabilities.user_after_tool):
            return False
    return False


def _last_question(turns: Sequence[ConversationTurn], capabilities: TemplateCapabilities) -> int:
    """The index of the last message of the user; 0 if there is none."""
    for index in range(len(turns) - 1, -1, -1):
        if _shown_role(turns[index], capabilities) == "user":
            return index
    return 0


def _shown_role(turn: ConversationTurn, capabilities: TemplateCapabilities) -> str:
    return "user" if turn.role == "system" and not capabilities.late_system else turn.role


def _separate(messages: Iterable[Message]) -> list[ConversationTurn]:
    """One turn per tool result and one per run of other blocks."""
    turns: list[ConversationTurn] = []
    for message in messages:
        blocks = without_billing(message) if message.role == "system" else message.blocks
        if message.generated is not None:
            turns.append(ConversationTurn(message.role, blocks, message.generated))
            continue
        if len(blocks) == 1 and type(blocks[0]) is Text:
            turns.append(
                ConversationTurn("user" if message.role == "tool" else message.role, blocks)
            )
            continue
        role = "user" if message.role == "tool" else message.role
        if blocks and ToolResult not in map(type, blocks):
            turns.append(ConversationTurn(role, blocks))
            continue
        if len(blocks) == 1:
            turns.append(ConversationTurn("tool", blocks))
            continue
        for is_result, run in groupby(blocks, lambda block: type(block) is ToolResult):
            if is_result:
                turns.extend(ConversationTurn("tool", [block]) for block in run)
            else:
                turns.append(ConversationTurn(role, list(run)))
    return turns


def without_billing(message: Message) -> list[Block]:
    """The blocks of a system message without billing headers."""
    kept: list[Block] = []
    for block in message.blocks:
        if not isinstance(block, Text):
            kept.append(block)
        elif text := _BILLING.sub("", block.text):
            kept.append(Text(text))
    return kept


def _join_assistants(turns: list[ConversationTurn]) -> list[ConversationTurn]:
    """Join neighbouring assistant turns: APIs split a turn into items in different ways."""
    joined: list[ConversationTurn] = []
    own = False  # the blocks of the last turn are its message's, unless they are joined ones
    for turn in turns:
        role, blocks, _ = turn
        if role == "assistant" and joined and joined[-1].role == "assistant":
            before = joined[-1].blocks if own else list(joined[-1].blocks)
            own = True
            if isinstance(before[-1], Text) and isinstance(blocks[0], Text):
                before.append(Text(GAP))
            before += blocks
            joined[-1] = ConversationTurn(role, before)
        else:
            joined.append(turn)
            own = False
    return joined


class _WriterState(NamedTuple):
    """The number of calls, their ids and names by the client's ids, and those shown as text."""

    number: int
    calls: dict[str, tuple[str, str]]
    plain: set[str]


class _MessageWriter:
    """Writes turns one by one; the ids of calls depend only on their index.

    `later`: a message of the user comes after the turn; `calls_last`: no text may follow its calls.
    """

    def __init__(
        self,
        tools: list[Tool],
        capabilities: TemplateCapabilities,
        parser: str,
        shown: ShownTools,
        count: int,
    ) -> None:
        self.later = self.calls_last = False
        self.parser = parser
        self._shown = shown
        self._tools = tool_forms.by_model_name(tools)
        self._deferred = {t.name: t for t in tools if t.deferred}
        self._capabilities = capabilities
        self._calls: dict[str, tuple[str, str]] = {}
        self._plain: set[str] = set()  # ids of the calls that are shown as text
        self.count = count

    def state(self) -> _WriterState:
        """The state behind the turns so far, on which later ones depend."""
        return _WriterState(self.count, dict(self._calls), set(self._plain))

    def restore(self, state: _WriterState) -> None:
        self.count, self._calls, self._plain = state.number, dict(state.calls), set(state.plain)

    def write(self, turn: ConversationTurn) -> list[dict[str, Any]]:
        role, blocks, _ = turn
        if role == "assistant":
            parts = self._ordered(blocks)
            if len(parts) == 1:
                return self._answer(blocks)
            return list(chain.from_iterable(map(self._answer, parts)))
        if role == "tool":
            return [self._result(b) for b in blocks if isinstance(b, ToolResult)]
        shown: list[Block] = [self._notice(b) if isinstance(b, ToolNotice) else b for b in blocks]
        return [{"role": role, "content": _content(shown)}]

    def mark(self, turn: ConversationTurn, number: int, after_result: bool) -> MarkedAnswer | None:
        """The answer as one that markers stand for; None if the template splits it."""
        calls = [block for block in turn.blocks if isinstance(block, ToolCall)]
        if turn.generated is None or (len(calls) > 1 and not self._capabilities.parallel):
            return None
        thinking = any(isinstance(block, Thinking) for block in turn.blocks)
        form = self._form(thinking, True, bool(calls))
        if form.plain:
            return None
        return MarkedAnswer(
            number,
            turn.generated,
            thinking,
            not (calls and form.split),
            tuple(tool_forms.model_name(call.name, call.namespace) for call in calls),
            after_result,
            self.count,
        )

    def _form(self, thinking: bool, text: bool, calls: bool) -> MessageForm:
        if not self._capabilities.forms:
            return WHOLE
        return self._capabilities.form(AnswerPieces(thinking, text, calls, self.later))

    def _notice(self, notice: ToolNotice) -> Text:
        if notice.removed:
            return Text(f"Tool {notice.name} is no longer available.")
        return self._definition(notice.name)

    def _ordered(self, blocks: list[Block]) -> list[list[Block]]:
        """Split where a template would reorder: templates write thinking, then text, then calls."""
        if not self._capabilities.repeats:
            return [blocks]
        places = [_PLACES.get(type(block), 1) for block in blocks]
        if places == sorted(places):
            return [blocks]
        parts: list[list[Block]] = [[]]
        for block, place, before in zip(blocks, places, [0, *places], strict=False):
            if place < before:
                parts.append([])
            parts[-1].append(block)
        if self.calls_last and len(parts) > 1 and not isinstance(parts[-1][-1], ToolCall):
            rest = parts.pop()
            parts[-1] += rest
        return parts

    def _answer(self, blocks: list[Block]) -> list[dict[str, Any]]:
        """The messages of an answer, in the form that shows all of it."""
        if len(blocks) == 1 and type(blocks[0]) is Text:
            return [{"role": "assistant", "content": blocks[0].text}]
        thoughts, calls, written = list[str](), list[ToolCall](), list[dict[str, Any]]()
        for block in blocks:
            if isinstance(block, ToolCall):
                calls.append(block)
                written.append(self._call(block, self._shown.arguments(block)))
            elif isinstance(block, Thinking):
                thoughts.append(block.text)
        thinking, text = GAP.join(thoughts), _text(blocks)
        form = self._form(bool(thinking), bool(text), bool(calls))
        if calls and (form.plain or self._capabilities.calls is None):
            text = "\n".join(filter(None, [text, calls_text(written, self.parser)]))
            self._plain.update(call.id for call in calls)
            written, form = [], self._form(bool(thinking), True, False)
        return self._capabilities.answer(form, thinking, text, written)

    def marked(self, turn: ConversationTurn, answer: MarkedAnswer) -> list[dict[str, Any]]:
        """The messages with markers in the place of an answer's texts."""
        thinking, text, last = markers(answer.number)
        calls = [block for block in turn.blocks if isinstance(block, ToolCall)]
        written = [self._call(call, last if call is calls[-1] else {}) for call in calls]
        if calls and self._capabilities.calls is None:
            text, written = "\n".join([text, calls_text(written, self.parser)]), []
        form = self._form(answer.thinking, answer.text, bool(written))
        return self._capabilities.answer(
            form, thinking if answer.thinking else "", text if answer.text else "", written
        )

    def _call(self, call: ToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
        name = tool_forms.model_name(call.name, call.namespace)
        stable_id = call_id(self._capabilities.call_ids, name, self.count)
        self.count += 1
        self._calls[call.id] = (stable_id, name)
        written: Any = arguments
        if self._capabilities.calls == "text":
            if isinstance(arguments, RepeatedEntry):
                written = arguments.dumps()
            else:
                written = dumps(arguments)
        function = {"name": name, "arguments": written}
        return {"id": stable_id, "type": "function", "function": function}

    def _result(self, result: ToolResult) -> dict[str, Any]:
        unknown = (call_id(self._capabilities.call_ids, "unknown", self.count), "unknown")
        stable_id, name = self._calls.get(result.call_id, unknown)
        content = _with_error(result.content) if result.is_error else result.content
        blocks: list[Block] = [*content, *map(self._definition, result.references)]
        shown = _content(blocks)
        if self._capabilities.calls is None or result.call_id in self._plain:
            return {"role": "user", "content": _tagged(shown)}
        return {"role": "tool", "tool_call_id": stable_id, "name": name, "content": shown}

    def _definition(self, reference: str) -> Text:
        """The definition of a referenced deferred tool, which the tools section lacks."""
        name = reference.replace(GUARD, "")
        tool = self._deferred.get(name) or self._tools.get(name)
        if tool is None or not tool.deferred:
            return Text(f"Tool {reference} is available.")
        definition = dumps(self._shown.definition(tool))
        return Text(f"Tool {reference} is available:\n{definition}")


# of an answer's blocks in templates; other blocks are in between
_PLACES: dict[type, int] = {Thinking: 0, ToolCall: 2}


def _with_error(content: Sequence[ResultPart]) -> list[ResultPart]:
    """The content of a failed call, which says so: templates know no errors."""
    first = content[0] if content else Text("")
    if not isinstance(first, Text):
        return [Text(ERROR.strip()), *content]
    if "error" in first.text[:ERROR_CHARS].lower():
        return list(content)
    return [Text(f"{ERROR}{first.text}".strip()), *content[1:]]


def _text(blocks: list[Block]) -> str:
    """The texts of an answer in one, with a gap where other blocks separate them."""
    found = [block.text for block in blocks if type(block) is Text]
    if len(found) < 2:
        return found[0] if found else ""
    runs = groupby(blocks, lambda block: isinstance(block, Text))
    texts = (
        "".join(b.text for b in run if isinstance(b, Text)) for is_text, run in runs if is_text
    )
    return GAP.join(filter(None, texts))


def _content(blocks: list[Block]) -> Any:
    """Text as one string, or a list of parts if there is an image."""
    if len(blocks) == 1 and type(blocks[0]) is Text:
        return blocks[0].text
    if not any(isinstance(b, Image) for b in blocks):
        return GAP.join(b.text for b in blocks if isinstance(b, Text))
    return [
        {"type": "image"} if isinstance(b, Image) else {"type": "text", "text": b.text}
        for b in blocks
        if isinstance(b, Image | Text)
    ]


def _tagged(content: Any) -> Any:
    """A result's content as a message of the user."""
    if isinstance(content, str):
        return f"<tool_response>\n{content}\n</tool_response>"
    return [*_parts("<tool_response>\n"), *content, *_parts("\n</tool_response>")]


def _arrange_system(
    entries: list[dict[str, Any]], capabilities: TemplateCapabilities
) -> list[dict[str, Any]]:
    """Join leading system messages; turn later ones into user messages if the template must."""
    lead = 0
    while lead < len(entries) and entries[lead]["role"] == "system":
        lead += 1
    text = GAP.join(m["content"] for m in entries[:lead] if m["content"])
    rest = entries[lead:]
    rest = _later_system(rest, capabilities)
    if not text:
        return rest
    if capabilities.system and (rest or capabilities.lone_system):
        return [{"role": "system", "content": text}, *rest]
    return _merge([{"role": "user", "content": text}, *rest[:1]], capabilities) + rest[1:]


def _later_system(
    entries: list[dict[str, Any]], capabilities: TemplateCapabilities
) -> list[dict[str, Any]]:
    """System messages behind others as user messages, if the template must."""
    if capabilities.late_system:
        return entries
    return [m | {"role": "user"} if m["role"] == "system" else m for m in entries]


def _one_call_each(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates with one call per message: each call is followed by its own result."""
    separate: list[dict[str, Any]] = []
    moved: set[int] = set()
    for index, message in enumerate(entries):
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            if id(message) not in moved:
                separate.append(message)
            continue
        after = (entries[i] for i in range(index + 1, len(entries)))
        following = takewhile(lambda m: m["role"] == "tool", after)
        results = {result["tool_call_id"]: result for result in following}
        for number, call in enumerate(calls):
            holder = message if number == 0 else {"role": "assistant", "content": ""}
            separate.append(holder | {"tool_calls": [call]})
            if call["id"] in results:
                separate.append(results[call["id"]])
                moved.add(id(results[call["id"]]))
    return separate


def _merge(
    entries: list[dict[str, Any]], capabilities: TemplateCapabilities
) -> list[dict[str, Any]]:
    """For templates that require alternating roles: join user text to the message before."""
    runs: list[list[dict[str, Any]]] = []
    for message in entries:
        before = runs[-1][0]["role"] if runs else None
        after_tool = before == "tool" and not capabilities.user_after_tool
        if message["role"] == "user" and (before == "user" or after_tool):
            runs[-1].append(message)
        else:
            runs.append([message])
    return [_joined(run) if len(run) > 1 else run[0] for run in runs]


def _joined(run: list[dict[str, Any]]) -> dict[str, Any]:
    """The first message with all contents: one text, or parts from the first list of parts on."""
    contents = [message["content"] for message in run]
    texts = list(takewhile(lambda content: isinstance(content, str), contents))
    text, rest = GAP.join(texts), contents[len(texts) :]
    if not rest:
        return run[0] | {"content": text}
    lead = _parts(text) if texts else []
    return run[0] | {"content": [*lead, *chain.from_iterable(map(_parts, rest))]}


def _parts(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def _in_parts(
    entries: list[dict[str, Any]], capabilities: TemplateCapabilities
) -> list[dict[str, Any]]:
    """The messages with lists of parts as contents, if the template needs them."""
    if not capabilities.parts:
        return entries
    return [message | {"content": _parts(message["content"])} for message in entries]
