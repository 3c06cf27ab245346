"""Capabilities of a chat template, found by rendering small conversations with it.

Templates differ in what they accept (system messages in the middle, two user messages in a row,
arguments as an object or as text), and only their code states it.
"""

import json
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from kvmesh.frontend.dialects.errors import TemplateError

Entry: TypeAlias = dict[str, Any]
Render = Callable[[list[Entry], list[Entry] | None], str]
ArgumentsForm = Literal["object", "text"]

_KIMI_MARKER = "<|tool_calls_section_begin|>"
_ONE, _TWO, _THREE, _FOUR = "probeone", "probetwo", "probethree", "probefour"
_THOUGHT = "probethought"
_KEY, _VALUE, _NAME = "probekey", "probevalue", "probetool"
_TOOL: Entry = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}


class TemplateCapabilities(Struct, frozen=True):
    """Capabilities of one template.

    - `parts`: content must be a list of parts.
    - `system`, `late_system`: it shows a system message at the start, and later ones.
    - `repeats`: two messages of one role may follow each other.
    - `user_after_tool`: a user message may follow a tool result.
    - `tools`: it shows tool definitions.
    - `calls`: the form of a call's arguments; None if it cannot show calls.
    - `empty`: the content of an assistant message that only calls tools.
    - `text_beside_calls`, `parallel`: a message may have text and calls, or several calls.
    - `thinking_key`: the message field of thinking; `thinking_beside_text`: it shows with text.
    - `drops_thinking`: it shows thinking in the current turn but not in later prompts.
    """

    parts: bool = False
    system: bool = True
    late_system: bool = True
    repeats: bool = True
    user_after_tool: bool = True
    tools: bool = True
    calls: ArgumentsForm | None = "object"
    empty: str | None = ""
    text_beside_calls: bool = True
    parallel: bool = True
    thinking_key: str = "reasoning_content"
    thinking_beside_text: bool = True
    drops_thinking: bool = False
    call_ids: Literal["short", "kimi"] = "short"


def call_id(style: str, name: str, index: int) -> str:
    """The id of a conversation's call number `index`: nine characters, or in Kimi's form."""
    return f"functions.{name}:{index}" if style == "kimi" else f"call{index:05d}"


def probe(render: Render, source: str) -> TemplateCapabilities:
    """Probe the template with text `source` by calling `render`."""
    return _Probe(render, "kimi" if _KIMI_MARKER in source else "short").capabilities()


class _Probe:
    """Renders probe conversations; a probe passes if its texts appear in the output in order."""

    def __init__(self, render: Render, call_ids: Literal["short", "kimi"]) -> None:
        self._render = render
        self._call_ids = call_ids
        self._tools: list[Entry] | None = None
        self._parts = False
        plain = [_message("user", _ONE)]
        if not self._renders(plain, _ONE):
            # the template accepts content only as parts, or fails without tools
            self._parts = self._renders(plain, _ONE, parts=True)
            self._tools = None if self._parts else [_TOOL]

    def capabilities(self) -> TemplateCapabilities:
        user, assistant = _message("user", _TWO), _message("assistant", _THREE)
        calls, empty = self._calls("", None)
        key = self._thinking_key(calls, empty)
        return TemplateCapabilities(
            parts=self._parts,
            system=self._renders_all(_message("system", _ONE), user),
            late_system=self._renders_all(user, assistant, _message("system", _ONE)),
            repeats=self._renders_all(
                _message("user", _ONE), user, assistant, _message("assistant", _FOUR)
            ),
            user_after_tool=self._user_after_tool(calls, empty),
            tools=self._renders([user], _NAME, _TWO, tools=[_TOOL])
            or self._renders([user], _TWO, _NAME, tools=[_TOOL]),
            calls=calls,
            empty=empty,
            text_beside_calls=calls is None or self._calls(_FOUR) == (calls, _FOUR),
            parallel=calls is None or self._parallel(calls, empty),
            thinking_key=key,
            thinking_beside_text=self._thinks(key, calls, _FOUR),
            drops_thinking=self._drops_thinking(key, calls, empty),
            call_ids=self._call_ids,
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

    def _thinking_key(self, calls: ArgumentsForm | None, empty: str | None) -> str:
        for key in ("reasoning_content", "thinking"):
            if self._thinks(key, calls, empty):
                return key
        return "reasoning_content"

    def _thinks(self, key: str, calls: ArgumentsForm | None, content: str | None) -> bool:
        call, result = self._call_and_result(calls, content)
        messages = [_message("user", _ONE), call | {key: _THOUGHT}, result]
        return self._renders(messages, _ONE, _THOUGHT, content or "", _THREE)

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
        if parts or self._parts:
            messages = [_as_parts(message) for message in messages]
        try:
            output = self._render(messages, tools or self._tools)
        except TemplateError:
            return False
        pos = 0
        for text in texts:
            pos = output.find(text, pos)
            if pos < 0:
                return False
            pos += len(text)
        return f"'{_KEY}':" not in output and f'\\"{_KEY}' not in output


def _message(role: str, content: Any) -> Entry:
    return {"role": role, "content": content}


def _as_parts(message: Entry) -> Entry:
    return message | {"content": [{"type": "text", "text": message["content"] or ""}]}
