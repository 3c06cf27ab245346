"""Speculative prefill: predict the request that follows an answer. Pure."""

from msgspec.structs import replace

from kvmesh.frontend.answers.answer import Answer
from kvmesh.frontend.conversation import (
    Block,
    GenerateRequest,
    Message,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.dialects.templates.frame_probe import CONTINUE
from kvmesh.frontend.preprocess.preprocessor import CUT
from kvmesh.frontend.turn_memo import NO_MEMO


def successor(
    request: GenerateRequest, answer: list[Block], kept: Answer | None = None
) -> GenerateRequest | None:
    """The request that probably follows `answer`, with a `CUT` where the client's text begins.

    `kept` is the answer as it is stored, so that later prompts show all of it. None if nothing can
    be predicted.
    """
    if kept is None and not request.returns_thinking:
        answer = [block for block in answer if not isinstance(block, Thinking)]
    if not answer or not request.messages or request.template_args.get(CONTINUE):
        return None
    calls = [block.id for block in answer if isinstance(block, ToolCall)]
    results: list[Block] = [ToolResult(call, [Text(CUT)]) for call in calls]
    following = Message("tool", results) if results else Message("user", [Text(CUT)])
    messages = [
        *request.messages,
        Message("assistant", answer, kept.generated if kept else None),
        following,
    ]
    return replace(request, messages=messages, memo=NO_MEMO)  # others will follow
