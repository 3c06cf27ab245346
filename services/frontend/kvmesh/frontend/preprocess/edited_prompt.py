"""Applies a request's edits of its conversation, and counts what they save.

Edits that depend on tokens count them only if the body is large enough for the trigger.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvmesh.frontend.apis.messages.context_management import CLEAR_THINKING, CLEAR_TOOL_USES
from kvmesh.frontend.conversation import (
    DEFAULT_COMPACT,
    Block,
    ClearToolUses,
    ContextEdits,
    GenerateRequest,
    Message,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.errors import ContextExceeded, InvalidRequest
from kvmesh.frontend.fair_threads import Steps
from kvmesh.frontend.preprocess.context_edits import (
    PLACEHOLDER,
    Place,
    TokenWeights,
    clear_tool_uses,
    drop_thinking,
)

TEMPLATE_BYTES = 4096  # that a template may add to the body's
# tokens of a template around a block, about those of ChatML
FRAMES: dict[type, int] = {Text: 5, Thinking: 5, ToolCall: 16, ToolResult: 10}
NEAR = 0.9  # share of the trigger from which single blocks are counted
LONGEST = 4  # contexts of tokens to count in single blocks; further ones are estimated
CHARS = 4  # per token, estimated
STEP_TOKENS = 4096  # of small blocks to count without a pause


class PromptCounter(NamedTuple):
    """Counts the tokens of a rendered conversation, and of one text; both raise ContextExceeded
    or InvalidRequest.

    `context` is the model's, in tokens.
    """

    context: int
    prompt: Callable[[list[Message]], Steps[int]]
    text: Callable[[str], Steps[int]]


def apply_edits(
    request: GenerateRequest, edits: ContextEdits, drops_thinking: bool, counter: PromptCounter
) -> Steps[None]:
    """Edit the messages of `request` and record in `edits` what was applied.

    `drops_thinking`: the template itself drops old thinking.
    """
    original = request.messages
    without, turns = original, 0
    if edits.thinking is not None:
        without, turns = drop_thinking(original, edits.thinking)
    edited, uses, freed = without, 0, 0
    if edits.tool_uses is not None and (
        yield from _may_exceed(request, without, edits.tool_uses, counter)
    ):
        whole = not drops_thinking and edits.thinking is None
        weights = yield from _weights(without, edits.tool_uses, whole, counter)
        edited, cleared = clear_tool_uses(without, edits.tool_uses, weights)
        inputs = edits.tool_uses.inputs
        uses = len(cleared)
        freed = sum(weights.freed(u, inputs is None or u.name in inputs) for u in cleared)
    if not turns and not uses:
        return
    request.messages = edited
    after = yield from _count(edited, counter)
    if after is None:
        return  # the error of this prompt follows
    between = (yield from _count(without, counter)) if uses else after
    between = after + freed if between is None else between
    before = (yield from _count(original, counter)) if turns else between
    edits.original_tokens = between if before is None else before
    edits.applied = [
        *_applied(CLEAR_THINKING, "thinking_turns", turns, edits.original_tokens - between),
        *_applied(CLEAR_TOOL_USES, "tool_uses", uses, between - after),
    ]


def note_compaction(request: GenerateRequest, tokens: int, context: int) -> None:
    """Note whether a prompt of so many tokens exceeds the trigger of the request's compaction."""
    edits = request.context_edits
    if edits is not None and edits.compact is not None:
        trigger = edits.compact.tokens or min(DEFAULT_COMPACT, context * 3 // 4)
        edits.compacts = edits.compact.always or tokens > trigger


def _applied(kind: str, what: str, count: int, tokens: int) -> list[dict[str, Any]]:
    if not count:
        return []
    return [{"type": kind, f"cleared_{what}": count, "cleared_input_tokens": max(tokens, 0)}]


def _count(messages: list[Message], counter: PromptCounter) -> Steps[int | None]:
    """Tokens of the prompt; None if it exceeds the context or cannot be tokenized as it is."""
    try:
        return (yield from counter.prompt(messages))
    except (ContextExceeded, InvalidRequest):
        return None


def _may_exceed(
    request: GenerateRequest, messages: list[Message], edit: ClearToolUses, counter: PromptCounter
) -> Steps[bool]:
    """False if the prompt cannot exceed the trigger."""
    if edit.tokens is None:
        return True
    if request.body_bytes + TEMPLATE_BYTES <= edit.tokens:
        return False  # no token is shorter than a byte
    count = yield from _count(messages, counter)
    return count is None or count > NEAR * edit.tokens


def _weights(
    messages: Sequence[Message], edit: ClearToolUses, thinking: bool, counter: PromptCounter
) -> Steps[TokenWeights]:
    """Tokens of the blocks, so that a block weighs the same in all later requests.

    Thinking weighs nothing unless `thinking`, as it may be gone from later prompts.
    """
    if edit.tokens is None and not edit.at_least:
        return TokenWeights()
    users = (index for index, message in enumerate(messages) if message.role == "user")
    first = next(users, -1) + 1
    start = (yield from _count(list(messages[:first]), counter)) if first else 0
    start = counter.context if start is None else start
    blocks: dict[Place, int] = {}
    left, step = LONGEST * counter.context, 0
    yield
    for index in range(first, len(messages)):
        for position, block in enumerate(messages[index].blocks):
            if isinstance(block, Thinking) and not thinking:
                continue
            text = _text(block)
            size = (yield from _text_tokens(text, counter)) if left > 0 else len(text) // CHARS
            left, step = left - size, step + size
            if step > STEP_TOKENS:
                step = 0
                yield
            blocks[index, position] = size + FRAMES.get(type(block), 0)
    placeholder = yield from counter.text(PLACEHOLDER)
    return TokenWeights(start, blocks, placeholder + FRAMES[ToolResult])


def _text_tokens(text: str, counter: PromptCounter) -> Steps[int]:
    try:
        return (yield from counter.text(text)) if text else 0
    except (ContextExceeded, InvalidRequest):
        return max(counter.context, len(text) // CHARS)


def _text(block: Block) -> str:
    if isinstance(block, Text | Thinking):
        return block.text
    if isinstance(block, ToolCall):
        return block.name + block.arguments
    if isinstance(block, ToolResult):
        return "\n\n".join(part.text for part in block.content if isinstance(part, Text))
    return ""
