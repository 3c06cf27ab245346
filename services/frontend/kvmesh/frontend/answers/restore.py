"""Puts answers as they were generated in the place of those that a client returns. Pure.

The engine's cache holds an answer as it was generated. A prompt that shows it otherwise is computed
again from there on.
"""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from kvmesh.bus.messages import ShownAnswers
from kvmesh.frontend.answers.answer import Answer, AnswerRun
from kvmesh.frontend.answers.equivalence import AnswerComparison
from kvmesh.frontend.conversation import (
    Block,
    CacheControl,
    Generated,
    GenerateRequest,
    Message,
    Text,
    Thinking,
    ToolCall,
)

RETURNED = ("unchanged", "without_thinking", "rewritten", "edited")


class KnownAnswer:
    """A stored answer, and what was found of the last form in which a client has returned it."""

    __slots__ = ("answer", "calls", "returned", "same", "shown", "thinking")

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.returned = 0
        self.same = False
        self.thinking = False
        self.calls = False
        self.shown: Message | None = None  # the last message that showed it

    def message(self, blocks: list[Block], generated: Generated | None) -> Message:
        """The message that shows it, the same object in each turn."""
        message = Message("assistant", blocks, generated)
        if self.shown != message:
            self.shown = message
        return self.shown or message

    def compare(self, returned: list[Block], comparison: AnswerComparison) -> bool:
        """Compare a form in which a client returns the answer; False if it was the last one."""
        # the same form may mean another thing to a request with other tools
        form = hash((*map(_content, returned), comparison.schemas(returned)))
        if self.returned == form:
            return False
        generated = self.answer.blocks
        self.same = comparison.same(generated, returned)
        # what is told apart for want of time is compared again
        self.returned = 0 if comparison.exhausted and not self.same else form
        self.thinking = _has_thinking(generated) and not _has_thinking(returned)
        self.calls = _spelled(generated) != _spelled(returned)
        return True

    @property
    def verdict(self) -> str:
        """One of RETURNED."""
        if not self.same:
            return "edited"
        return "rewritten" if self.calls else "without_thinking" if self.thinking else "unchanged"


def restore(
    request: GenerateRequest,
    found: Sequence[tuple[AnswerRun, KnownAnswer]],
    files: str,
    forced: bool,
    note: Callable[[str], None] = lambda _: None,
) -> ShownAnswers | None:
    """Replace the messages of those of the stored answers that the model `files` has generated.

    `forced`: `tool_choice` makes the engine write calls in another syntax. Answers written so are
    shown so to such requests alone: those to others must not imitate them. `note` gets the verdict
    on each answer that is returned in a form not seen before. Returns None if none of the answers
    is stored.
    """
    answers = thinking = calls = edited = 0
    messages: list[Message] = []
    comparison = AnswerComparison(request)
    done = 0
    for run, known in found:
        if known.answer.files != files:
            continue
        if known.compare(run.blocks, comparison):
            note(known.verdict)
        if not known.same:
            edited += 1
            continue
        answer = known.answer
        answers += 1
        thinking += known.thinking
        calls += known.calls
        blocks = _with_marks(answer.blocks, run.blocks)
        generated = None if answer.forced and not forced else answer.generated
        messages += request.messages[done : run.first]
        messages.append(known.message(blocks, generated))
        done = run.end
    if answers:
        request.messages = [*messages, *request.messages[done:]]
    if not answers and not edited:
        return None
    return ShownAnswers(answers=answers, thinking=thinking, calls=calls, edited=edited)


def _content(block: Block) -> tuple[object, ...]:
    if isinstance(block, ToolCall):
        return block.id, block.name, block.namespace, block.arguments
    return type(block), getattr(block, "text", None)


def _has_thinking(blocks: Sequence[Block]) -> bool:
    return any(isinstance(block, Thinking) and block.text for block in blocks)


def _spelled(blocks: Sequence[Block]) -> list[str]:
    """The arguments of calls, but for the blanks between their values."""
    return [_compact(block.arguments) for block in blocks if isinstance(block, ToolCall)]


def _compact(arguments: str) -> str:
    return "".join(arguments.split())


def _with_marks(generated: Sequence[Block], returned: Sequence[Block]) -> list[Block]:
    """The generated blocks with the cache marks of the returned ones."""
    blocks = list(generated)
    for block in returned:
        mark = getattr(block, "cache", None)
        if mark is not None:
            _mark(blocks, block, mark)
    return blocks


def _mark(blocks: list[Block], marked: Block, mark: CacheControl) -> None:
    """Mark the last generated block of the kind of `marked`, or the call of its id."""
    for index in range(len(blocks) - 1, -1, -1):
        block = blocks[index]
        if isinstance(block, ToolCall) and isinstance(marked, ToolCall):
            if block.id == marked.id:
                blocks[index] = replace(block, cache=mark)
                return
        elif isinstance(block, Text) and isinstance(marked, Text):
            blocks[index] = replace(block, cache=mark)
            return
