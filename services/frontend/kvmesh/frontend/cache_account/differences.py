"""The first difference of a prompt from the earlier one: its part, and the reason. Pure."""

from collections.abc import Callable, Sequence
from itertools import chain, islice, takewhile
from typing import NamedTuple

from msgspec.structs import replace

from kvmesh.bus.messages import (
    CALL_REWRITTEN,
    DIVERGED,
    RERENDERED,
    THINKING_NOT_RETURNED,
    PromptChange,
    PromptParts,
    SessionPrompt,
)
from kvmesh.frontend.cache_account.fingerprints import (
    PartDifference,
    message_differences,
    messages_of,
    tool_difference,
    visible_tools,
)
from kvmesh.frontend.cache_account.prompt_parts import (
    char_offset,
    has_near,
    locate,
    start_of_message,
    start_of_tool,
)
from kvmesh.frontend.conversation import (
    GAP,
    Block,
    GenerateRequest,
    Message,
    Text,
    Thinking,
    ToolCall,
)
from kvmesh.frontend.dialects.templates.prompt_json import dumps
from kvmesh.frontend.dialects.tools import arguments, model_name
from kvmesh.frontend.tokenizer.prefix_cache import EncodedPrompt
from kvmesh.hashing import TOKEN_BYTES

TAIL = 32  # tokens that templates add at the end of a prompt, for the answer to begin with
MAX_CHANGED = 64  # messages to choose among


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


class PromptDifference(NamedTuple):
    """A change, and the reason of the tokens that are lost after it. `way` may be unknown ("")."""

    change: PromptChange
    reason: str = DIVERGED


class AnswerForm(NamedTuple):
    """The form of a model's answers: `generated` parses an earlier prompt's output, if it is known.

    `begins_thinking`: the earlier prompt's end opens thinking. `drops_thinking`: prompts show the
    thinking of the current turn only.
    """

    generated: Callable[[SessionPrompt], Sequence[Block]]
    begins_thinking: Callable[[SessionPrompt], bool]
    drops_thinking: bool


class ComparedPrompt(NamedTuple):
    """A request with its parts and its rendered prompt, to compare with an earlier one."""

    request: GenerateRequest
    parts: PromptParts | None
    encoded: EncodedPrompt | None
    decode: Callable[[bytes], str]
    answers: AnswerForm

    def difference(self, earlier: SessionPrompt, token: int) -> PromptDifference:
        """The difference from the earlier prompt, which is first seen at index `token`."""
        if self.parts is None or self.encoded is None or earlier.parts is None:
            return PromptDifference(locate(self.request, self.encoded, self.decode, token))
        offset = char_offset(self.encoded, self.decode, token)
        found = _Finder(self, self.parts, earlier.parts, self.encoded.text, token, offset)
        return found.difference(earlier)


class _Finder(NamedTuple):
    prompt: ComparedPrompt
    parts: PromptParts
    before: PromptParts
    text: str
    token: int
    offset: int

    def difference(self, earlier: SessionPrompt) -> PromptDifference:
        prompted = len(earlier.tokens) // TOKEN_BYTES
        at_answer = self.token >= prompted - TAIL
        if self.token < prompted:
            found = self._edited()
            hidden = found is not None and found.part == "thinking" and self._drops
            if found is not None and not (hidden and at_answer):
                return self._of_part(found)
        if at_answer and messages_of(self.parts) > messages_of(self.before):
            return self._of_answer(earlier)
        return self._rerendered()

    @property
    def _drops(self) -> bool:
        return self.prompt.answers.drops_thinking

    @property
    def _messages(self) -> list[Message]:
        return self.prompt.request.messages

    def _edited(self) -> PartDifference | None:
        """The part of the request that differs; of several, the one at the offset."""
        messages = list(islice(message_differences(self.parts, self.before), MAX_CHANGED))
        tool = tool_difference(self.parts, self.before)
        if tool is not None and (not messages or self._is_at_tools(tool, messages[0])):
            return tool
        if len(messages) < 2:
            return next(iter(messages), None)
        found = locate(self.prompt.request, self.prompt.encoded, self.prompt.decode, self.token)
        number = found.index or 0
        reached = [each for each in messages if each.index <= number and each.part != "system"]
        return reached[-1] if found.part == "message" and reached else messages[0]

    def _is_at_tools(self, tool: PartDifference, message: PartDifference) -> bool:
        """True if the offset is closer behind the tool than behind the message."""
        return self._start(tool) >= self._start(message)

    def _start(self, found: PartDifference) -> int:
        """The start of a part that contains the offset, or before which one is missing; or -1."""
        if found.part != "tool":
            messages = self._messages
            if found.number >= len(messages):
                return -1
            return start_of_message(messages[found.number], self.text, self.offset)
        tools = visible_tools(self.prompt.request)
        if found.number >= len(tools):
            return -1
        tool = tools[found.number]
        return start_of_tool(model_name(tool.name, tool.namespace), self.text, self.offset)

    def _of_part(self, found: PartDifference) -> PromptDifference:
        start = self._start(found) if found.way == "changed" and found.part != "thinking" else -1
        change = PromptChange(
            token=self.token,
            part=found.part,
            way=found.way,
            index=found.index,
            name=found.name,
            offset=max(self.offset - start, 0) if start >= 0 else 0,
        )
        removed = found.part == "thinking" and found.way == "removed"
        return PromptDifference(change, THINKING_NOT_RETURNED if removed else DIVERGED)

    def _of_answer(self, earlier: SessionPrompt) -> PromptDifference:
        """The difference of the answer to the earlier prompt, as the client has returned it."""
        number = messages_of(self.before)
        returned = list(takewhile(lambda m: m.role == "assistant", self._messages[number:]))
        following = next(iter(self._messages[number + len(returned) :]), None)
        shows = not (self._drops and following is not None and following.role == "user")
        blocks = list(chain.from_iterable(message.blocks for message in returned))
        generated = self.prompt.answers.generated(earlier) if returned and earlier.output else []
        if not returned:
            found = REMOVED
        elif generated:
            found = answer_difference(generated, blocks, shows)
        elif shows and not thinking_of(blocks):
            opened = self.prompt.answers.begins_thinking(earlier)
            found = NOT_RETURNED if opened else SAME
        else:
            found = SAME
        systems = sum(message.role == "system" for message in self._messages[:number])
        return self._answered(found, number - systems, thinking_of(generated or blocks))

    def _answered(self, found: AnswerDifference, index: int, thinking: str) -> PromptDifference:
        hidden = found is SAME and self._hides(thinking)
        change = PromptChange(
            token=self.token,
            part="thinking" if hidden else found.part,
            way=found.way,
            index=index,
            name=found.name,
        )
        return PromptDifference(change, found.reason)

    def _hides(self, thinking: str) -> bool:
        """True if the template leaves out this thinking."""
        return self._drops and bool(thinking) and not has_near(self.text, thinking, self.offset)

    def _rerendered(self) -> PromptDifference:
        """The part about the offset, of which the template writes the same in another form."""
        found = locate(self.prompt.request, self.prompt.encoded, self.prompt.decode, self.token)
        found = replace(found, way="rerendered", offset=0)
        if found.part == "message" and found.index is not None:
            # hidden thinking stands before the text by which its message is located
            conversation = [message for message in self._messages if message.role != "system"]
            near = list(enumerate(conversation))[found.index : found.index + 2]
            hiding = (i for i, message in near if self._hides(thinking_of(message.blocks)))
            if (index := next(hiding, None)) is not None:
                name = conversation[index].role
                found = replace(found, part="thinking", index=index, name=name)
        return PromptDifference(found, RERENDERED)
