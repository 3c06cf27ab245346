"""Which blocks the newest prompts of each session are, so that it can be said what only it uses.

A hash of a block names all blocks before it, so two prompts have in common exactly what is before
the first place where they differ. Nothing is counted per block: a request costs one entry, and who
else uses a block is found when it is asked.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
BRANCHES = 8


class PromptTail(NamedTuple, Generic[K]):
    """What comes after the first `kept` blocks of a prompt that nobody will extend."""

    prompt: Sequence[K]
    kept: int


class _Prompt(Generic[K]):
    """One prompt of a session, from the root on; `blocks` may grow as tokens are generated."""

    __slots__ = ("blocks", "counted", "session")

    def __init__(self, session: str, blocks: Sequence[K]) -> None:
        self.session = session
        self.blocks = blocks
        self.counted = len(blocks)


class _Session(Generic[K]):
    """Prompts that are continued, last used last; `left` are first blocks of what was not."""

    __slots__ = ("branching", "left", "prompts", "used")

    def __init__(self) -> None:
        self.prompts: list[_Prompt[K]] = []
        self.left: list[tuple[int, K]] = []
        self.branching = False
        self.used = 0.0


class SessionBlocks(Generic[K]):
    """At most `blocks` block names and as many sessions; idle after `idle_s` seconds is forgotten.

    Who is forgotten shares nothing any more: its blocks are as any that were once used.
    """

    def __init__(self, idle_s: float, blocks: int) -> None:
        self._idle_s = idle_s
        self._most = blocks
        self._counted = 0
        self._sessions: OrderedDict[str, _Session[K]] = OrderedDict()
        self._by_root: dict[K, dict[_Prompt[K], None]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: str) -> bool:
        return session in self._sessions

    def record(self, session: str, prompt: Sequence[K], now: float) -> list[PromptTail[K]]:
        """A prompt of a session begins; returns tails of its earlier ones that this one leaves.

        What the new prompt contains as a whole it replaces; what begins like it and then differs is
        left (compaction, edited history, thinking that was dropped). But a session that comes back
        to what it seemed to have left holds several conversations: from then on it leaves nothing.
        """
        entry = self._sessions.get(session)
        if entry is None:
            entry = self._sessions[session] = _Session()
        else:
            self._sessions.move_to_end(session)
        entry.used = now
        self._forget_idle(now)
        if not prompt:
            return []
        if entry.left and not entry.branching:
            entry.branching = any(
                place < len(prompt) and prompt[place] == block for place, block in entry.left
            )
        left = self._replace(entry, prompt) if entry.prompts else ()
        self._add(entry, _Prompt(session, prompt))
        return [PromptTail(old.blocks, max(at, self.shared(old.blocks))) for old, at in left]

    def shared(self, prompt: Sequence[K], but: str | None = None) -> int:
        """How many leading blocks of a prompt live sessions other than `but` use."""
        found = 0
        for other in self._by_root.get(prompt[0], ()) if prompt else ():
            theirs = other.blocks
            if other.session == but or found >= min(len(prompt), len(theirs)):
                continue
            if theirs[found] == prompt[found]:
                found = common_prefix(prompt, theirs)
        return found

    def release(self, sessions: Iterable[str]) -> list[PromptTail[K]]:
        """Forget sessions; returns the tails that no other session uses. Unknown ones are fine."""
        gone: list[_Prompt[K]] = []
        for session in sessions:
            entry = self._sessions.pop(session, None)
            for prompt in entry.prompts if entry is not None else ():
                self._remove(prompt)
                gone.append(prompt)
        return [PromptTail(prompt.blocks, self.shared(prompt.blocks)) for prompt in gone]

    def _replace(self, entry: _Session[K], new: Sequence[K]) -> list[tuple[_Prompt[K], int]]:
        """Take out the prompts that `new` continues or leaves; returns the latter."""
        left: list[tuple[_Prompt[K], int]] = []
        for old in list(entry.prompts):
            at = common_prefix(old.blocks, new)
            if at == 0 or at == len(new) < len(old.blocks):
                continue
            leaves = at < len(old.blocks)
            if leaves and entry.branching:
                continue
            entry.prompts.remove(old)
            self._remove(old)
            if leaves:
                left.append((old, at))
                entry.left = [*entry.left[1 - BRANCHES :], (at, old.blocks[at])]
        return left

    def _add(self, entry: _Session[K], prompt: _Prompt[K]) -> None:
        if len(entry.prompts) == BRANCHES:
            self._remove(entry.prompts.pop(0))
        entry.prompts.append(prompt)
        self._by_root.setdefault(prompt.blocks[0], {})[prompt] = None
        self._counted += prompt.counted

    def _remove(self, prompt: _Prompt[K]) -> None:
        root = prompt.blocks[0]
        del self._by_root[root][prompt]
        if not self._by_root[root]:
            del self._by_root[root]
        self._counted -= prompt.counted

    def _forget_idle(self, now: float) -> None:
        """The newest session stays, whatever its size."""
        while len(self._sessions) > 1:
            session, entry = next(iter(self._sessions.items()))
            full = self._counted > self._most or len(self._sessions) > self._most
            if not full and now - entry.used <= self._idle_s:
                return
            del self._sessions[session]
            for prompt in entry.prompts:
                self._remove(prompt)


def common_prefix(one: Sequence[K], other: Sequence[K]) -> int:
    """How many leading blocks two prompts have in common: O(log n), see the module."""
    most = min(len(one), len(other))
    return bisect_left(range(most), True, key=lambda place: one[place] != other[place])
