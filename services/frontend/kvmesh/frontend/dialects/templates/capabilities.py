"""What a chat template puts up with, found out by rendering small conversations with it.

Templates differ in what they accept (system messages in the middle, two user messages in a row,
arguments as an object or as text) and say so nowhere but in their code.
"""

import json
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from kvmesh.frontend.dialects.errors import TemplateError

Entry: TypeAlias = dict[str, Any]
Render = Callable[[list[Entry], list[Entry] | None], str]
CallForm = Literal["object", "text"]

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
    """What holds of a template.

    `tools`: it shows the tools it is given. `calls` is how arguments are wanted, None if tool
    calls cannot be shown at all; `empty` the content of an assistant message that only calls
    tools; `text_beside_calls` whether it may say something as well, `parallel` whether it may
    call several. `thinking_key` names the thinking of a message, which stands beside text only
    if `thinking_beside_text`, and which is shown within a turn but not in later ones if it
    `drops_thinking`. `parts`: content must be a list. `repeats`: two messages of one role may
    follow each other.
    """

    parts: bool = False
    system: bool = True
    late_system: bool = True
    repeats: bool = True
    user_after_tool: bool = True
    tools: bool = True
    calls: CallForm | None = "object"
    empty: str | None = ""
    text_beside_calls: bool = True
    parallel: bool = True
    thinking_key: str = "reasoning_content"
    thinking_beside_text: bool = True
    drops_thinking: bool = False
    call_ids: Literal["short", "kimi"] = "short"


def call_id(style: str, name: str, place: int) -> str:
    """The id of the conversation's call number `place`: nine characters, or as Kimi writes it."""
    return f"functions.{name}:{place}" if style == "kimi" else f"call{place:05d}"


def probe(render: Render, source: str) -> TemplateCapabilities:
    """The habits of the template whose text is `source` and which `render` renders."""
    return _Probe(render, "kimi" if _KIMI_MARKER in source else "short").habits()


class _Probe:
    """One template under examination. `texts` must show, in that order, or else it fails."""

    def __init__(self, render: Render, call_ids: Literal["short", "kimi"]) -> None:
        self._render = render
        self._call_ids = call_ids
        self._tools: list[Entry] | None = None
        self._parts = False
        plain = [_says("user", _ONE)]
        if not self._shows(plain, _ONE):
            # It takes content as parts only, or fails without tools.
            self._parts = self._shows(plain, _ONE, parts=True)
            self._tools = None if self._parts else [_TOOL]

    def habits(self) -> TemplateCapabilities:
        user, assistant = _says("user", _TWO), _says("assistant", _THREE)
        calls, empty = self._calls("", None)
        key = self._thinking_key(calls, empty)
        return TemplateCapabilities(
            parts=self._parts,
            system=self._says_all(_says("system", _ONE), user),
            late_system=self._says_all(user, assistant, _says("system", _ONE)),
            repeats=self._says_all(_says("user", _ONE), user, assistant, _says("assistant", _FOUR)),
            user_after_tool=self._user_after_tool(calls, empty),
            tools=self._shows([user], _NAME, _TWO, tools=[_TOOL])
            or self._shows([user], _TWO, _NAME, tools=[_TOOL]),
            calls=calls,
            empty=empty,
            text_beside_calls=calls is None or self._calls(_FOUR) == (calls, _FOUR),
            parallel=calls is None or self._parallel(calls, empty),
            thinking_key=key,
            thinking_beside_text=self._thinks(key, calls, _FOUR),
            drops_thinking=self._drops_thinking(key, calls, empty),
            call_ids=self._call_ids,
        )

    def _calls(self, *contents: str | None) -> tuple[CallForm | None, str | None]:
        """The first form of arguments, and content beside them, with which all of a call shows."""
        forms: tuple[CallForm, ...] = ("object", "text")
        for form in forms:
            for content in contents:
                messages = [_says("user", _ONE), *self._exchange(form, content)]
                if self._shows(messages, _ONE, content or "", _NAME, _VALUE, _THREE):
                    return form, content
        return None, ""

    def _user_after_tool(self, calls: CallForm | None, empty: str | None) -> bool:
        messages = [_says("user", _TWO), *self._exchange(calls, empty), _says("user", _FOUR)]
        return self._shows(messages, _TWO, _THREE, _FOUR)

    def _parallel(self, calls: CallForm, empty: str | None) -> bool:
        first, result = self._exchange(calls, empty)
        twice = first | {"tool_calls": first["tool_calls"] * 2}
        return self._shows([_says("user", _ONE), twice, result, result], _VALUE, _VALUE)

    def _thinking_key(self, calls: CallForm | None, empty: str | None) -> str:
        for key in ("reasoning_content", "thinking"):
            if self._thinks(key, calls, empty):
                return key
        return "reasoning_content"

    def _thinks(self, key: str, calls: CallForm | None, content: str | None) -> bool:
        said, result = self._exchange(calls, content)
        messages = [_says("user", _ONE), said | {key: _THOUGHT}, result]
        return self._shows(messages, _ONE, _THOUGHT, content or "", _THREE)

    def _drops_thinking(self, key: str, calls: CallForm | None, empty: str | None) -> bool:
        thought = _says("assistant", _TWO) | {key: _THOUGHT}
        later = [_says("user", _ONE), thought, _says("user", _THREE)]
        return self._thinks(key, calls, empty) and not self._shows(later, _ONE, _THOUGHT, _THREE)

    def _exchange(self, form: CallForm | None, content: str | None) -> tuple[Entry, Entry]:
        """An assistant's tool call and its result."""
        arguments = {_KEY: _VALUE}
        written: Any = json.dumps(arguments) if form == "text" else arguments
        found = call_id(self._call_ids, _NAME, 0)
        call = {"id": found, "type": "function", "function": {"name": _NAME, "arguments": written}}
        result = {"tool_call_id": found, "name": _NAME}
        return (
            _says("assistant", content) | {"tool_calls": [call]},
            _says("tool", _THREE) | result,
        )

    def _says_all(self, *messages: Entry) -> bool:
        return self._shows(list(messages), *(message["content"] for message in messages))

    def _shows(
        self,
        messages: list[Entry],
        *texts: str,
        tools: list[Entry] | None = None,
        parts: bool = False,
    ) -> bool:
        """Whether the texts show in their order, and no call as Python's repr or encoded twice."""
        if parts or self._parts:
            messages = [_as_parts(message) for message in messages]
        try:
            output = self._render(messages, tools or self._tools)
        except TemplateError:
            return False
        place = 0
        for text in texts:
            place = output.find(text, place)
            if place < 0:
                return False
            place += len(text)
        return f"'{_KEY}':" not in output and f'\\"{_KEY}' not in output


def _says(role: str, content: Any) -> Entry:
    return {"role": role, "content": content}


def _as_parts(message: Entry) -> Entry:
    return message | {"content": [{"type": "text", "text": message["content"] or ""}]}
