"""Capabilities of a chat template, found by rendering small conversations with it.

Templates differ in what they accept (system messages in the middle, two user messages in a row,
arguments as an object or as text), and only their code states it.
"""

import json
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from jinja2.exceptions import SecurityError
from msgspec import Struct

from kvmesh.frontend.dialects.errors import TemplateError
from kvmesh.frontend.dialects.plain_tools import calls_text
from kvmesh.frontend.dialects.templates.answer_forms import (
    WHOLE,
    AnswerPieces,
    MessageForm,
    answer_messages,
    candidates,
)

Entry: TypeAlias = dict[str, Any]
Render = Callable[[list[Entry], list[Entry] | None], str]
ArgumentsForm = Literal["object", "text"]

_KIMI_MARKER = "<|tool_calls_section_begin|>"
_ONE, _TWO, _THREE, _FOUR = "probeone", "probetwo", "probethree", "probefour"
_FIVE, _SIX = "probefive", "probesix"
_THOUGHT, _SAID = "probethought", "probesaid"
_THINKING_KEYS = ("reasoning_content", "thinking", "reasoning")
_KEY, _VALUE, _NAME = "probekey", "probevalue", "probetool"
_TOOL: Entry = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": ""}},
            "required": [],
        },
    },
}


class TemplateCapabilities(Struct, frozen=True):
    """Capabilities of one template with some values of its variables.

    - `parts`: content must be a list of parts.
    - `system`, `late_system`: it shows a system message at the start, and later ones;
      `lone_system`: also one that is the whole conversation.
    - `repeats`: two messages of one role may follow each other.
    - `user_after_tool`: a user message may follow a tool result.
    - `tools`: it shows tool definitions; `takes_tools`: it does not fail with them.
    - `calls`: the form of a call's arguments; None if it cannot show calls.
    - `empty`: the content of an assistant message that only calls tools.
    - `parallel`: a message may have several calls; `text_after_calls`: a message with text may come
      between calls and their results.
    - `thinking_key`: the message field of thinking; `lone_thinking`: a message may have only that.
    - `forms`: the form of answers that are not to be shown as one message with all pieces.
    - `image_results`: a tool result may have images.
    - `drops_thinking`: it shows thinking in the current turn but not in later prompts.
    - `fault`: what is wrong with it, if it fails; else empty.
    """

    parts: bool = False
    system: bool = True
    lone_system: bool = True
    late_system: bool = True
    repeats: bool = True
    user_after_tool: bool = True
    tools: bool = True
    takes_tools: bool = True
    calls: ArgumentsForm | None = "object"
    empty: str | None = ""
    parallel: bool = True
    text_after_calls: bool = True
    thinking_key: str = "reasoning_content"
    lone_thinking: bool = True
    forms: dict[AnswerPieces, MessageForm] = {}
    image_results: bool = True
    drops_thinking: bool = False
    call_ids: Literal["short", "kimi"] = "short"
    fault: str = ""

    def form(self, pieces: AnswerPieces) -> MessageForm:
        """The form of an answer with these pieces."""
        return self.forms.get(pieces, WHOLE)

    def answer(
        self, form: MessageForm, thinking: str, text: str, calls: list[Entry]
    ) -> list[Entry]:
        """The messages of an answer in this form; none if it has thinking only and cannot."""
        if not (text or calls or self.lone_thinking):
            return []
        return answer_messages(form, self.thinking_key, self.empty, thinking, text, calls)


def call_id(style: str, name: str, index: int) -> str:
    """The id of a conversation's call number `index`: nine characters, or in Kimi's form."""
    return f"functions.{name}:{index}" if style == "kimi" else f"call{index:05d}"


def probe(render: Render, source: str, parser: str) -> TemplateCapabilities:
    """Probe the template with text `source` by calling `render`; `parser`: of calls as text."""
    return _Probe(render, "kimi" if _KIMI_MARKER in source else "short", parser).capabilities()


class _Probe:
    """Renders probe conversations; a probe passes if its texts appear in the output in order."""

    def __init__(self, render: Render, call_ids: Literal["short", "kimi"], parser: str) -> None:
        self._render = render
        self._call_ids = call_ids
        self._parser = parser
        self._unsafe = ""
        self._arguments: ArgumentsForm | None = None
        self._empty: str | None = None
        self._key: str | None = None
        self._tools: list[Entry] | None = None
        self._parts = False
        plain = [_message("user", _ONE)]
        if not self._renders(plain, _ONE):
            # the template accepts content only as parts, or fails without tools
            self._parts = self._renders(plain, _ONE, parts=True)
            self._tools = None if self._parts else [_TOOL]

    def capabilities(self) -> TemplateCapabilities:
        user, assistant = _message("user", _TWO), _message("assistant", _THREE)
        self._arguments, self._empty = calls, empty = self._calls("", None)
        fault = "" if calls else self._fault()
        self._key = key = self._thinking_key(calls, empty)
        return TemplateCapabilities(
            parts=self._parts,
            system=self._shows_system(calls, empty),
            lone_system=all(
                self._renders([_message("system", _ONE)], _ONE, tools=tools)
                for tools in (None, [_TOOL])
            ),
            late_system=self._renders_all(user, assistant, _message("system", _ONE)),
            repeats=self._renders_all(
                _message("user", _ONE), user, assistant, _message("assistant", _FOUR)
            ),
            user_after_tool=self._user_after_tool(calls, empty),
            tools=self._renders([user], _NAME, _TWO, tools=[_TOOL])
            or self._renders([user], _TWO, _NAME, tools=[_TOOL]),
            takes_tools=_TWO in self._output([user], [_TOOL]),
            calls=calls,
            empty=empty,
            parallel=calls is None or self._parallel(calls, empty),
            text_after_calls=calls is None or self._text_after_calls(calls, empty),
            thinking_key=key or _THINKING_KEYS[0],
            lone_thinking=self._lone_thinking(key or _THINKING_KEYS[0]),
            forms=self._forms(),
            image_results=calls is None or self._image_results(calls, empty),
            drops_thinking=key is not None and self._drops_thinking(key, calls, empty),
            call_ids=self._call_ids,
            fault=fault,
        )

    def _calls(self, *contents: str | None) -> tuple[ArgumentsForm | None, str | None]:
        """The first form of arguments and content for which a call appears completely."""
        forms: tuple[ArgumentsForm, ...] = ("object", "text")
        for form in forms:
            for content in contents:
                messages = [_message("user", _ONE), *self._call_and_result(form, content)]
                if self._renders(messages, _ONE, content or "", _NAME, _VALUE, _THREE):
                    return form, content
        return None, ""

    def _fault(self) -> str:
        """The fault of a template that shows no calls, unless it merely has none."""
        if not self._renders([_message("user", _ONE)], _ONE):
            return f"shows no message of a user. {self._unsafe}".strip(". ")
        return f"cannot show tool calls, which become text: {self._unsafe}" if self._unsafe else ""

    def _shows_system(self, calls: ArgumentsForm | None, empty: str | None) -> bool:
        """True if a system message stays at the start as the conversation goes on."""
        start = [_message("system", _ONE), _message("user", _TWO)]
        again = [_message("assistant", _FOUR), _message("user", _FIVE)]
        loop = [] if calls is None else [*self._call_and_result(calls, empty)]
        return (
            self._renders(start, _ONE, _TWO)
            and self._renders([*start, *again], _ONE, _TWO, _FOUR, _FIVE)
            and (calls is None or self._renders([*start, *loop], _ONE, _TWO, _THREE))
        )

    def _text_after_calls(self, calls: ArgumentsForm, empty: str | None) -> bool:
        call, result = self._call_and_result(calls, empty)
        messages = [_message("user", _ONE), call, _message("assistant", _FOUR), result]
        return self._renders(messages, _ONE, _VALUE, _FOUR, _THREE)

    def _user_after_tool(self, calls: ArgumentsForm | None, empty: str | None) -> bool:
        messages = [
            _message("user", _TWO),
            *self._call_and_result(calls, empty),
            _message("user", _FOUR),
        ]
        return self._renders(messages, _TWO, _THREE, _FOUR)

    def _parallel(self, calls: ArgumentsForm, empty: str | None) -> bool:
        first, result = self._call_and_result(calls, empty)
        twice = first | {"tool_calls": first["tool_calls"] * 2}
        return self._renders([_message("user", _ONE), twice, result, result], _VALUE, _VALUE)

    def _thinking_key(self, calls: ArgumentsForm | None, empty: str | None) -> str | None:
        """The field whose thinking is shown beside calls, or else beside text."""
        for key in _THINKING_KEYS:
            if self._thinks(key, calls, empty):
                return key
        for key in _THINKING_KEYS:
            said = _message("assistant", _TWO) | {key: _THOUGHT}
            for after in ([], [_message("user", _THREE)]):
                if self._renders([_message("user", _ONE), said, *after], _THOUGHT, _TWO):
                    return key
        return None

    def _thinks(self, key: str, calls: ArgumentsForm | None, content: str | None) -> bool:
        call, result = self._call_and_result(calls, content)
        messages = [_message("user", _ONE), call | {key: _THOUGHT}, result]
        return self._renders(messages, _ONE, _THOUGHT, content or "", _THREE)

    def _lone_thinking(self, key: str) -> bool:
        thought = _message("assistant", "") | {key: _THOUGHT}
        messages = [_message("user", _ONE), thought, _message("user", _TWO)]
        return self._renders(messages, _ONE, _TWO)

    def _forms(self) -> dict[AnswerPieces, MessageForm]:
        """The forms of answers other than one message with all pieces."""
        found: dict[AnswerPieces, MessageForm] = {}
        shapes = ((True, True, False), (True, False, True), (False, True, True), (True, True, True))
        for shape in shapes:
            if shape[2] and self._arguments is None:
                continue
            before = WHOLE
            for later in (False, True):
                pieces = AnswerPieces(*shape, later)
                before = self._form(pieces, before)
                if before != WHOLE:
                    found[pieces] = before
        return found

    def _form(self, pieces: AnswerPieces, first: MessageForm) -> MessageForm:
        """The first form, from `first` on, that shows all pieces, or at least all but thinking."""
        shown = [True, False] if pieces.thinking and self._key is not None else [False]
        for with_thinking in shown:
            forms = candidates(pieces, shown=with_thinking)
            for form in sorted(forms, key=lambda form: form != first):
                if self._answers(form, pieces, with_thinking):
                    return form
        return WHOLE

    def _answers(self, form: MessageForm, pieces: AnswerPieces, thinking: bool) -> bool:
        """True if an answer in this form shows its pieces, with `thinking` also that."""
        call, result = self._call_and_result(self._arguments, None)
        calls, text = call["tool_calls"] if pieces.calls else [], _SAID if pieces.text else ""
        if form.plain:
            text, calls = f"{text}\n{calls_text(calls, self._parser)}", []
            result = _message("user", _THREE)
        thought = _THOUGHT if pieces.thinking else ""
        key = self._key or _THINKING_KEYS[0]
        answer = answer_messages(form, key, self._empty, thought, text, calls)
        shown = [_SAID] if pieces.text else []
        if pieces.calls:
            # a template may accept such an answer once, but not again in the same turn
            answer = [*answer, result] * 2
            shown = [*shown, _NAME, _VALUE, _THREE] * 2
        if pieces.later:
            after = [_message("assistant", _FIVE)] if pieces.calls else []
            after.append(_message("user", _SIX))
            answer += after
            shown += [message["content"] for message in after]
        shown = [_ONE, *([_THOUGHT] if thinking else []), *shown]
        return self._renders([_message("user", _ONE), *answer], *shown)

    def _image_results(self, calls: ArgumentsForm, empty: str | None) -> bool:
        call, result = self._call_and_result(calls, empty)
        before = [_message("user", _ONE), call]
        parts = [{"type": "image"}, {"type": "text", "text": _THREE}]
        shown = self._output([*before, result | {"content": parts}], None)
        plain = self._output([*before, result], None)
        raw = "'type'" in shown or '"type"' in shown
        return _THREE in shown and len(shown) > len(plain) and not raw

    def _drops_thinking(self, key: str, calls: ArgumentsForm | None, empty: str | None) -> bool:
        thought = _message("assistant", _TWO) | {key: _THOUGHT}
        later = [_message("user", _ONE), thought, _message("user", _THREE)]
        return self._thinks(key, calls, empty) and not self._renders(later, _ONE, _THOUGHT, _THREE)

    def _call_and_result(
        self, form: ArgumentsForm | None, content: str | None
    ) -> tuple[Entry, Entry]:
        """An assistant's tool call and its result."""
        arguments = {_KEY: _VALUE}
        value: Any = json.dumps(arguments) if form == "text" else arguments
        identifier = call_id(self._call_ids, _NAME, 0)
        function = {"name": _NAME, "arguments": value}
        call = {"id": identifier, "type": "function", "function": function}
        result = {"tool_call_id": identifier, "name": _NAME}
        return (
            _message("assistant", content) | {"tool_calls": [call]},
            _message("tool", _THREE) | result,
        )

    def _renders_all(self, *messages: Entry) -> bool:
        return self._renders(list(messages), *(message["content"] for message in messages))

    def _renders(
        self,
        messages: list[Entry],
        *texts: str,
        tools: list[Entry] | None = None,
        parts: bool = False,
    ) -> bool:
        """True if the texts appear in order and no call as Python's repr or encoded twice."""
        output = self._output(messages, tools, parts)
        pos = 0
        for text in texts:
            pos = output.find(text, pos)
            if pos < 0:
                return False
            pos += len(text)
        return bool(output) and f"'{_KEY}':" not in output and f'\\"{_KEY}' not in output

    def _output(self, messages: list[Entry], tools: list[Entry] | None, parts: bool = False) -> str:
        """The prompt; empty if the template fails."""
        if parts or self._parts:
            messages = [_as_parts(message) for message in messages]
        try:
            return self._render(messages, tools or self._tools)
        except TemplateError as error:
            if isinstance(error.__cause__, SecurityError):
                self._unsafe = str(error)
            return ""


def _message(role: str, content: Any) -> Entry:
    return {"role": role, "content": content}


def _as_parts(message: Entry) -> Entry:
    content = message["content"]
    if isinstance(content, list):
        return message
    return message | {"content": [{"type": "text", "text": content or ""}]}
