"""Edits of a conversation that grows: which tool results and which thinking to clear. Pure.

A client sends its whole history with every request, and each request is edited anew. So the edit
replays the requests of the conversation: what an earlier one cleared stays cleared, and more is
cleared only where the prompt has exceeded the trigger again. The prompts of two turns then differ
at most where the later one clears more, and the cache holds in between. All that the replay counts
depends on the messages before it alone.
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.frontend.conversation import (
    Block,
    ClearThinking,
    ClearToolUses,
    Message,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)

PLACEHOLDER = "[tool result cleared]"
NO_ARGUMENTS = "{}"

Place = tuple[int, int]  # indices of a message and of a block in it


class ToolUse(Struct):
    """A tool call, and its result if that has come and may be cleared."""

    name: str
    call: Place
    result: Place | None = None


class TokenWeights(Struct):
    """Tokens of the start of a prompt, of each block behind it by its place, of the placeholder."""

    start: int = 0
    blocks: dict[Place, int] = {}
    placeholder: int = 0

    def freed(self, use: ToolUse, inputs: bool) -> int:
        """Tokens that clearing this use frees."""
        result = self.blocks.get(use.result, 0) - self.placeholder if use.result else 0
        return result + (self.blocks.get(use.call, 0) if inputs else 0)


def drop_thinking(messages: Sequence[Message], edit: ClearThinking) -> tuple[list[Message], int]:
    """The messages without the thinking of old turns, and the number of turns that lost any.

    A turn begins with a message of the user that answers no tool call.
    """
    turns: dict[int, list[int]] = {}
    turn = 0
    for index, message in enumerate(messages):
        if message.role == "user" and not _has_results(message):
            turn += 1
        elif message.role == "assistant" and _has_thinking(message):
            turns.setdefault(turn, []).append(index)
    old = list(turns.values())[: -edit.keep]
    edited = list(messages)
    for index in (index for turn_messages in old for index in turn_messages):
        blocks = messages[index].blocks
        edited[index] = Message("assistant", [b for b in blocks if type(b) is not Thinking])
    return edited, len(old)


def clear_tool_uses(
    messages: Sequence[Message], edit: ClearToolUses, weights: TokenWeights
) -> tuple[list[Message], list[ToolUse]]:
    """The messages with old tool results cleared, and the uses that were."""
    cleared = _Replay(messages, edit, weights).run()
    places = {use.result for use in cleared}
    places |= {use.call for use in cleared if _clears_inputs(use, edit)}
    edited = list(messages)
    for index in {place[0] for place in places if place}:
        blocks = enumerate(messages[index].blocks)
        changed = [_cleared(b) if (index, at) in places else b for at, b in blocks]
        edited[index] = Message(messages[index].role, changed)
    return edited, cleared


class _Replay:
    """The requests of one conversation, each cleared as it was when it was the newest."""

    def __init__(
        self, messages: Sequence[Message], edit: ClearToolUses, weights: TokenWeights
    ) -> None:
        self._messages = messages
        self._edit = edit
        self._weights = weights
        self._tokens = weights.start
        self._uses: list[ToolUse] = []
        self._by_id: dict[str, ToolUse] = {}
        self._unseen = 0
        self._old = 0  # uses that are no longer among the newest
        self._clearable: list[ToolUse] = []
        self._freed = 0  # tokens of `_clearable`
        self._cleared: list[ToolUse] = []

    def run(self) -> list[ToolUse]:
        """The uses cleared in the newest request."""
        before = ""
        for index, message in enumerate(self._messages):
            if message.role == "assistant" and before != "assistant":
                self._request()
                self._unseen = 0
            before = message.role
            for position, block in enumerate(message.blocks):
                self._add((index, position), block)
        if before != "assistant":
            self._request()
        return self._cleared

    def _add(self, place: Place, block: Block) -> None:
        self._tokens += self._weights.blocks.get(place, 0)
        if isinstance(block, ToolCall):
            self._by_id[block.id] = use = ToolUse(block.name, place)
            self._uses.append(use)
        elif isinstance(block, ToolResult) and (found := self._by_id.get(block.call_id)):
            self._unseen += 1
            if not block.references:  # referenced tools stay available
                found.result = place

    def _request(self) -> None:
        """Clear what exceeds `keep` if the prompt up to here exceeds the trigger."""
        # the model has yet to read the results behind its last message
        keep = max(self._edit.keep, self._unseen)
        while self._old < len(self._uses) - keep:
            use = self._uses[self._old]
            self._old += 1
            if use.result is not None and use.name not in self._edit.exclude:
                self._clearable.append(use)
                self._freed += self._weights.freed(use, _clears_inputs(use, self._edit))
        if self._clearable and self._exceeds() and self._freed >= self._edit.at_least:
            self._cleared += self._clearable
            self._tokens -= self._freed
            self._clearable, self._freed = [], 0

    def _exceeds(self) -> bool:
        if self._edit.uses is not None:
            return len(self._uses) - len(self._cleared) > self._edit.uses
        return self._edit.tokens is not None and self._tokens > self._edit.tokens


def _clears_inputs(use: ToolUse, edit: ClearToolUses) -> bool:
    return edit.inputs is None or use.name in edit.inputs


def _cleared(block: Block) -> Block:
    if isinstance(block, ToolResult):
        return replace(block, content=[Text(PLACEHOLDER)])
    return replace(block, arguments=NO_ARGUMENTS) if isinstance(block, ToolCall) else block


def _has_results(message: Message) -> bool:
    return any(isinstance(block, ToolResult) for block in message.blocks)


def _has_thinking(message: Message) -> bool:
    return any(isinstance(block, Thinking) and block.text for block in message.blocks)
