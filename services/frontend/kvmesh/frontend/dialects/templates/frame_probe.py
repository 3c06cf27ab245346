"""Finds how a template frames an answer, by rendering small conversations. Pure."""

import datetime
from collections.abc import Callable
from typing import Protocol

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
from kvmesh.runtime.lru import LruCache

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


class AnswerFrames:
    """The frames of one model's answers. `capabilities` returns those with or without tools."""

    def __init__(
        self, render: RenderProbe, capabilities: Callable[[bool], TemplateCapabilities]
    ) -> None:
        self._render = render
        self._capabilities = capabilities
        self._frames: LruCache[object, tuple[AnswerFrame | None]] = LruCache(MAX_FRAMES)
        self._openings: LruCache[object, str] = LruCache(MAX_FRAMES)

    def finder(
        self, request: GenerateRequest, ends: frozenset[str], today: datetime.date
    ) -> Callable[[MarkedAnswer], AnswerFrame | None]:
        """A function that returns the frame of an answer in the request's prompt.

        It returns None if the template does not show the answer as it was generated.
        """
        variables = _variables(request)
        if len(str(variables)) > MAX_ARGS:
            return lambda _: None

        def find(answer: MarkedAnswer) -> AnswerFrame | None:
            shape = (variables, *answer[2:5], answer.generated.opening, ends)
            frame = self._frame(shape, request, answer, 0, ends, today)
            if frame is None or not frame.shows_ids:
                return frame
            # the results of the calls name them by these ids
            if not all(name in answer.generated.text for name in self._ids(request, answer)):
                return None
            count = answer.earlier_calls
            return self._frame((*shape, count), request, answer, count, ends, today)

        return find

    def opening(self, request: GenerateRequest, today: datetime.date) -> str:
        """The end of the request's prompt from the answer's turn on; "" if it cannot be told."""
        key = _variables(request)
        known = self._openings.get(key)
        if known is None:
            small = _small(request)
            try:
                before = self._render(small, today, [_USER], invites=False)
                whole = self._render(small, today, [_USER])
            except TemplateError:
                before, whole = "", ""
            known = whole[len(before) :] if whole.startswith(before) else ""
            self._openings.put(key, known)
        return known

    def _frame(
        self,
        key: object,
        request: GenerateRequest,
        answer: MarkedAnswer,
        earlier_calls: int,
        ends: frozenset[str],
        today: datetime.date,
    ) -> AnswerFrame | None:
        known = self._frames.get(key)
        if known is None:
            answer = answer._replace(earlier_calls=earlier_calls)
            try:
                known = (self._probe(_small(request), answer, ends, today),)
            except TemplateError:
                known = (None,)
            self._frames.put(key, known)
        return known[0]

    def _probe(
        self,
        request: GenerateRequest,
        answer: MarkedAnswer,
        ends: frozenset[str],
        today: datetime.date,
    ) -> AnswerFrame | None:
        blocks: list[Block] = [Thinking("x")] if answer.thinking else []
        blocks += [ToolCall(f"{i}", name, "{}") for i, name in enumerate(answer.calls)]
        results: list[Block] = [ToolResult(f"{i}", [_BACK]) for i in range(len(answer.calls))]
        back = Message("tool", results) if results else Message("user", [_BACK])
        turn = Message("assistant", blocks or [_BACK], Generated("", "", b""))
        count = answer.earlier_calls
        before = self._render(request, today, [_USER], count=count, invites=False)
        conversation = [_USER, turn, back]
        shown = self._render(request, today, conversation, lambda _: True, count, False)
        return answer_frame(before, answer, shown, ends, self._ids(request, answer))

    def _ids(self, request: GenerateRequest, answer: MarkedAnswer) -> list[str]:
        """The ids of an answer's calls in the prompt."""
        style = self._capabilities(shows_tools(request)).call_ids
        return [
            call_id(style, name, answer.earlier_calls + i) for i, name in enumerate(answer.calls)
        ]


def shows_tools(request: GenerateRequest) -> bool:
    """True if the prompt lists tools."""
    return any(not tool.deferred for tool in request.tools)


def _variables(request: GenerateRequest) -> tuple[object, ...]:
    """All of a request that changes how its answers are framed."""
    return request.thinking, shows_tools(request), repr(request.template_args)


def _small(request: GenerateRequest) -> GenerateRequest:
    """The request with one tool, if it has any."""
    shown = next((tool for tool in request.tools if not tool.deferred), None)
    return replace(request, tools=[] if shown is None else [shown])
