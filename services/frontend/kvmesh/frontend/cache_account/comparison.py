"""PromptComparison of a prompt with the earlier one of its conversation, token by token. Pure."""

from collections.abc import Callable
from itertools import takewhile

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kvmesh.bus.messages import DIVERGED, PromptChange, SessionPrompt
from kvmesh.frontend.cache_account.differences import PromptDifference
from kvmesh.hashing import TOKEN_BYTES

WINDOW = 4096 * TOKEN_BYTES  # bytes to search for text that has moved
PROBE = 16 * TOKEN_BYTES
EXCERPT_TOKENS = 12


class PromptComparison(Struct, frozen=True, kw_only=True):
    """A prompt beside the earlier one, of `length` tokens with its output.

    They share the first `common` tokens; an engine has computed the first `computed` ones, all but
    the last of the output. `same_salt`: they share blocks. `done`: the earlier
    request had ended. `reason` is that of the tokens lost after the first difference, from which on
    `before` and `after` are the texts.
    """

    request: str
    time: float
    common: int
    length: int
    computed: int
    same_salt: bool = True
    done: bool = True
    change: PromptChange | None = None
    reason: str = DIVERGED
    before: str = ""
    after: str = ""


def compare(
    tokens: bytes,
    salt: int,
    earlier: SessionPrompt,
    find: Callable[[int], PromptDifference],
    decode: Callable[[bytes], str],
) -> PromptComparison:
    """Compare the packed `tokens` of a prompt with an earlier prompt and its output.

    `find` returns the difference that is first seen at a token; `decode` returns tokens' text.
    """
    common = common_tokens(tokens, earlier.tokens, earlier.output)
    length = (len(earlier.tokens) + len(earlier.output)) // TOKEN_BYTES
    change, excerpts, reason = None, ("", ""), DIVERGED
    if common < min(length, len(tokens) // TOKEN_BYTES):
        at, before = common * TOKEN_BYTES, earlier.tokens + earlier.output
        end = at + EXCERPT_TOKENS * TOKEN_BYTES
        excerpts = decode(before[at:end]), decode(tokens[at:end])
        change, reason = find(common)
        if not change.way:
            change = replace(change, way=_way(tokens[at:], before[at:]))
        if change.way == "changed":
            change = replace(change, offset=change.offset + _common_characters(*excerpts))
        if earlier.change is not None and _same_part(change, earlier.change):
            change = replace(change, turns=earlier.change.turns + 1)
    return PromptComparison(
        request=earlier.request,
        time=earlier.time,
        common=common,
        length=length,
        computed=min(common, length - (1 if earlier.output else 0)),
        same_salt=salt == earlier.salt,
        done=earlier.done,
        change=change,
        reason=reason,
        before=excerpts[0],
        after=excerpts[1],
    )


def common_tokens(one: bytes, other: bytes, output: bytes = b"") -> int:
    """The number of leading tokens that two packed prompts share, the other one with its output."""
    if one.startswith(other):
        size = len(other)
        rest = common_tokens(one[size : size + len(output)], output) if output else 0
        return size // TOKEN_BYTES + rest
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size // TOKEN_BYTES
    a, b = np.frombuffer(one, "<u4"), np.frombuffer(other, "<u4")
    shortest = min(len(a), len(b))
    return int((a[:shortest] != b[:shortest]).argmax())


def _common_characters(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _same_part(one: PromptChange, other: PromptChange) -> bool:
    """True if two changes are in the same part; the message that changes moves with the turns."""
    moves = one.part not in ("system", "tool")
    return one.part == other.part and (moves or one.index == other.index)


def _way(after: bytes, before: bytes) -> str:
    """The way in which the text `before` became `after`, from the first difference on."""
    if _contains(before[:WINDOW], after[:PROBE]):
        return "removed"
    return "inserted" if _contains(after[:WINDOW], before[:PROBE]) else "changed"


def _contains(text: bytes, probe: bytes) -> bool:
    at = text.find(probe)
    while at % TOKEN_BYTES and at > 0:
        at = text.find(probe, at + 1)
    return at >= 0 and len(probe) == PROBE


def described(change: PromptChange) -> str:
    """The part that has changed, in words."""
    if change.part == "system":
        return "the system prompt"
    if change.part == "thinking":
        return f"the thinking of message {change.index}"
    names = {"tool": "tool", "message": "message", "call": "the tool call in message"}
    name = names.get(change.part)
    return "the prompt" if name is None else f"{name} {change.index} ({change.name})"
