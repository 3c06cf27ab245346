"""Finds how a template frames an answer, by rendering small conversations. Pure."""

import datetime
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from kvmesh.frontend.conversation import (
    Block,
    Generated,
    GenerateRequest,
    Message,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.dialects.errors import TemplateError
from kvmesh.frontend.dialects.templates.answer_frames import (
    AnswerFrame,
    MarkedAnswer,
    answer_frame,
)
from kvmesh.frontend.dialects.templates.capabilities import TemplateCapabilities, call_id
from kvmesh.frontend.dialects.templates.chat_messages import ends_in_result
from kvmesh.frontend.dialects.tools import model_name
from kvmesh.frontend.turn_memo import NO_MEMO
from kvmesh.runtime.lru import LruCache

CONTINUE = "continue_final_message"
MAX_FRAMES = 1024
MAX_ARGS = 512  # characters of a request's template variables
_USER, _BACK = Message("user", [Text("x")]), Text("y")


class RenderProbe(Protocol):
    """Renders a conversation as the prompt of a request."""

    def __call__(
        self,
        request: GenerateRequest,
        today: datetime.date,
        conversation: list[Message],
        mark: Callable[[MarkedAnswer], bool] | None = None,
        count: int = 0,
        invites: bool = True,
    ) -> str: ...


class Probed(NamedTuple):
    """A request whose answers are framed: by `variables`, None if they are too large."""

    request: GenerateRequest
    variables: tuple[object, ...] | None
    ends: frozenset[str]
    today: datetime.date


class AnswerFrames:
    """The frames of one model's answers. `capabilities`: those of a request."""

    def __init__(
        self, render: RenderProbe, capabilities: Callable[[GenerateRequest], TemplateCapabilities]
    ) -> None:
        self._render = render
        self._capabilities = capabilities
        self._frames: LruCache[object, tuple[AnswerFrame | None]] = LruCache(MAX_FRAMES)
        self._openings: LruCache[object, tuple[str | None]] = LruCache(MAX_FRAMES)
        self._lock = Lock()  # long prompts are rendered in threads

    def of(self, probed: Probed, answer: MarkedAnswer) -> AnswerFrame | None:
        """The frame of an answer; None if the template does not show it as it was generated."""
        if probed.variables is None:
            return None
        shape = (probed.variables, *answer[2:6], answer.generated.opening, probed.ends)
        frame = self._frame(shape, probed, answer, int(answer.after_result))
        if frame is None or not frame.shows_ids:
            return frame
        frame = self._frame((*shape, answer.earlier_calls), probed, answer, answer.earlier_calls)
        if frame is None or not frame.shows_ids:
            return frame
        # the results of the calls name them by these ids
        written = answer.generated.text
        return frame if all(name in written for name in self._ids(probed.request, answer)) else None

    def opening(self, request: GenerateRequest, today: datetime.date) -> str | None:
        """The part of the answer's turn that ends the prompt; None if it cannot be told."""
        if request.template_args.get(CONTINUE):
            return None
        capabilities = self._capabilities(request)
        after_result = ends_in_result(request.messages, len(request.messages), capabilities)
        key = _variables(request), after_result
        known = self._openings.peek(key)
        if known is None:
            small = _small(request)
            start = _start(small, after_result)
            try:
                before = self._render(small, today, start, invites=False)
                whole = self._render(small, today, start)
                known = (whole[len(before) :] if whole.startswith(before) else None,)
            except TemplateError:
                known = (None,)
            with self._lock:
                self._openings.put(key, known)
        return known[0]

    def _frame(
        self, key: object, probed: Probed, answer: MarkedAnswer, earlier_calls: int
    ) -> AnswerFrame | None:
        known = self._frames.peek(key)
        if known is None:
            try:
                known = (self._probe(probed, answer._replace(earlier_calls=earlier_calls)),)
            except TemplateError:
                known = (None,)
            with self._lock:
                self._frames.put(key, known)
        return known[0]

    def _probe(self, probed: Probed, answer: MarkedAnswer) -> AnswerFrame | None:
        request, today = _small(probed.request), probed.today
        blocks: list[Block] = [Thinking("x")] if answer.thinking else []
        blocks += [ToolCall(f"{i}", name, "{}") for i, name in enumerate(answer.calls)]
        results: list[Block] = [ToolResult(f"{i}", [_BACK]) for i in range(len(answer.calls))]
        back = Message("tool", results) if results else Message("user", [_BACK])
        turn = Message("assistant", blocks or [_BACK], Generated("", "", b""))
        start = _start(request, answer.after_result)
        count = answer.earlier_calls - answer.after_result
        before = self._render(request, today, start, count=count, invites=False)
        conversation = [*start, turn, back]
        shown = self._render(request, today, conversation, lambda _: True, count, False)
        return answer_frame(before, answer, shown, probed.ends, self._ids(request, answer))

    def _ids(self, request: GenerateRequest, answer: MarkedAnswer) -> list[str]:
        """The ids of an answer's calls in the prompt."""
        style = self._capabilities(request).call_ids
        return [
            call_id(style, name, answer.earlier_calls + i) for i, name in enumerate(answer.calls)
        ]


def probed(request: GenerateRequest, ends: frozenset[str], today: datetime.date) -> Probed:
    """The request as `AnswerFrames` takes it; `ends` are the tokens that end an answer."""
    variables = _variables(request)
    return Probed(request, variables if len(str(variables)) <= MAX_ARGS else None, ends, today)


def shows_tools(request: GenerateRequest) -> bool:
    """True if the prompt lists tools."""
    return bool(request.tools) and any(not tool.deferred for tool in request.tools)


def _start(request: GenerateRequest, after_result: bool) -> list[Message]:
    """A small conversation before an answer, with one call if a result comes before it."""
    if not after_result:
        return [_USER]
    tool = request.tools[0] if request.tools else None
    name = "x" if tool is None else model_name(tool.name, tool.namespace)
    call = ToolCall("start", name, "{}")
    return [_USER, Message("assistant", [call]), Message("tool", [ToolResult(call.id, [_BACK])])]


def _variables(request: GenerateRequest) -> tuple[object, ...]:
    """All of a request that changes how its answers are framed."""
    return request.thinking, shows_tools(request), repr(_arguments(request))


def _arguments(request: GenerateRequest) -> dict[str, Any]:
    """The variables of the template but for the one that leaves the conversation's end open."""
    return {name: value for name, value in request.template_args.items() if name != CONTINUE}


def _small(request: GenerateRequest) -> GenerateRequest:
    """The request with one tool, if it has any."""
    shown = next((tool for tool in request.tools if not tool.deferred), None)
    tools = [] if shown is None else [shown]
    return replace(request, tools=tools, template_args=_arguments(request), memo=NO_MEMO)
