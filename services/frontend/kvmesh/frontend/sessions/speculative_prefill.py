"""Speculative prefill: the beginning of a conversation's next prompt, computed before it comes.

Pure: what the next prompt begins with, what of it is new to the engine, and what became of it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.frontend.conversation import (
    Block,
    GenerateRequest,
    Message,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.dialects.templates.chat_template import CONTINUE
from kvmesh.hashing import HASH_BYTES
from kvmesh.retention.session_blocks import common_prefix

MAX_OPEN = 1024
LIFETIME_S = 900.0
CUT = "\ue000kvmesh-next\ue000"


def successor(request: GenerateRequest, answer: list[Block]) -> GenerateRequest | None:
    """The request that probably follows `answer`, with a `CUT` where only the caller knows more.

    None if there is nothing to predict.
    """
    if not _gives_thinking_back(request):
        answer = [block for block in answer if not isinstance(block, Thinking)]
    if not answer or not request.messages or request.template_args.get(CONTINUE):
        return None
    calls = [block.id for block in answer if isinstance(block, ToolCall)]
    results: list[Block] = [ToolResult(call, [Text(CUT)]) for call in calls]
    after = Message("tool", results) if results else Message("user", [Text(CUT)])
    messages = [*request.messages, Message("assistant", answer), after]
    return replace(request, messages=messages)


def _gives_thinking_back(request: GenerateRequest) -> bool:
    """What the client did with earlier answers; clients that have had none may well do it."""
    answers = [message for message in request.messages if message.role == "assistant"]
    return not answers or any(
        isinstance(block, Thinking) for message in answers for block in message.blocks
    )


class Speculation(Struct, frozen=True):
    """A prefetch under way, of `blocks` of which the first `base` were in the engine before.

    `known` is the hash of the last of these and `end` that of the very last; `asked` tokens were
    to be computed.
    """

    id: str
    tenant: str
    instance: str
    model: str
    known: bytes
    base: int
    end: bytes
    blocks: int
    asked: int
    expires: float

    def fits(self, sequence: bytes) -> bool:
        """Whether a prompt (packed sequence hashes) begins with all of it."""
        return sequence[(self.blocks - 1) * HASH_BYTES : self.blocks * HASH_BYTES] == self.end

    def useful(self, cached: int, block_size: int) -> int:
        """How much of it the real prompt found, which had `cached` tokens."""
        return min(max(cached - self.base * block_size, 0), self.asked)


def shared(one: bytes, other: bytes) -> int:
    """How many leading blocks two prompts have in common, by their packed sequence hashes."""
    return common_prefix(memoryview(one).cast("Q"), memoryview(other).cast("Q"))


class SpeculativePrefills:
    """What is under way, found by the prompt that it was for; at most `most`."""

    def __init__(self, most: int = MAX_OPEN) -> None:
        self._most = most
        self._open: OrderedDict[tuple[str, bytes], Speculation] = OrderedDict()
        self._bases: Counter[int] = Counter()

    def add(self, made: Speculation) -> Iterator[Speculation]:
        """Yields those that it takes the place of."""
        place = made.tenant, made.known
        if place in self._open:
            yield self._remove(place)
        if len(self._open) >= self._most:
            yield self._remove(next(iter(self._open)))
        self._open[place] = made
        self._bases[made.base] += 1

    def take(self, tenant: str, sequence: bytes) -> Speculation | None:
        """The one that was made for this prompt (packed sequence hashes), if any."""
        for base in self._bases:
            place = tenant, sequence[(base - 1) * HASH_BYTES : base * HASH_BYTES]
            if place in self._open:
                return self._remove(place)
        return None

    def lapse(self, now: float) -> Iterator[Speculation]:
        """Those for which no prompt came, oldest first."""
        while self._open and next(iter(self._open.values())).expires <= now:
            yield self._remove(next(iter(self._open)))

    def _remove(self, place: tuple[str, bytes]) -> Speculation:
        made = self._open.pop(place)
        self._bases[made.base] -= 1
        if not self._bases[made.base]:
            del self._bases[made.base]
        return made
