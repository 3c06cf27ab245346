"""The last answer as a client returned it, beside what the model had written. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from kvmesh.bus.messages import CALL_REWRITTEN, DIVERGED, RERENDERED, THINKING_NOT_RETURNED
from kvmesh.frontend.conversation import GAP, Block, Text, Thinking, ToolCall
from kvmesh.frontend.dialects.templates.prompt_json import dumps
from kvmesh.frontend.dialects.tools import arguments, model_name


class AnswerDifference(NamedTuple):
    """The first difference: a reason of lost tokens, and the `name` of a call that is rewritten.

    `part` and `way` are as in `PromptChange`.
    """

    reason: str
    part: str
    way: str
    name: str = "assistant"


NOT_RETURNED = AnswerDifference(THINKING_NOT_RETURNED, "thinking", "not_returned")
REMOVED = AnswerDifference(DIVERGED, "message", "removed")
_CHANGED = AnswerDifference(DIVERGED, "message", "changed")
SAME = AnswerDifference(RERENDERED, "message", "rerendered")


def answer_difference(
    generated: Sequence[Block], returned: Sequence[Block], shows_thinking: bool
) -> AnswerDifference:
    """The difference between an answer and what the client returned of it; `SAME` if there is none.

    Then the template writes it in another form. So it does if it does not show the thinking of
    earlier answers, whether that is returned or not.
    """
    thought, thinking = thinking_of(generated), thinking_of(returned)
    if thought and not thinking and shows_thinking:
        return NOT_RETURNED
    if shows_thinking and thought != thinking:
        return _CHANGED
    before, after = _calls(generated), _calls(returned)
    if after and not before:
        return SAME  # constrained decoding wrote the calls as a list of JSON objects
    if _text(generated) != _text(returned):
        return _CHANGED
    for old, new in zip(before, after, strict=False):
        if (old.name, old.namespace) != (new.name, new.namespace):
            return _CHANGED
        if _form(old) != _form(new):
            name = model_name(new.name, new.namespace)
            return AnswerDifference(CALL_REWRITTEN, "call", "rewritten", name)
    return SAME if len(before) == len(after) else _CHANGED


def thinking_of(blocks: Sequence[Block]) -> str:
    """The thinking of an answer, without spaces around it; empty if it has none."""
    return GAP.join(block.text for block in blocks if isinstance(block, Thinking)).strip()


def _text(blocks: Sequence[Block]) -> str:
    return GAP.join(block.text for block in blocks if isinstance(block, Text)).strip()


def _calls(blocks: Sequence[Block]) -> list[ToolCall]:
    return [block for block in blocks if isinstance(block, ToolCall)]


def _form(call: ToolCall) -> str:
    """The arguments in one form: spaces and escapes do not count, the order of keys does."""
    return dumps(arguments(call))
