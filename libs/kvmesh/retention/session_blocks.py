"""Blocks of the latest prompts of each session, to find the blocks that only one session uses.

A block's hash covers all blocks before it, so two prompts share exactly the blocks before the first
index at which they differ. No state is held per block: a request costs one entry, and the users of
a block are searched when needed.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
MAX_BRANCHES = 8
MAX_RELEASED = 256
MAX_COMPARED = 256  # prompts with the same first block, to find how far prompts begin alike


class PromptTail(NamedTuple, Generic[K]):
    """The blocks of a superseded prompt from index `start` on, which no live session uses."""

    prompt: Sequence[K]
    start: int


class _Prompt(Generic[K]):
    """One prompt of a session, from its first block on; `blocks` may grow during generation.

    Another session has used the first `common` blocks, though it may have ended.
    """

    __slots__ = ("blocks", "common", "counted", "session")

    def __init__(self, session: str, blocks: Sequence[K], common: int) -> None:
        self.session = session
        self.blocks = blocks
        self.common = common
        self.counted = len(blocks)


class _Session(Generic[K]):
    """The live prompts of a session, most recently used last.

    `abandoned` are (index, block) of the first blocks that its prompts did not continue.
    """

    __slots__ = ("abandoned", "branching", "prompts", "used")

    def __init__(self) -> None:
        self.prompts: list[_Prompt[K]] = []
        self.abandoned: list[tuple[int, K]] = []
        self.branching = False
        self.used = 0.0


class SessionBlocks(Generic[K]):
    """At most `max_blocks` block hashes, as many sessions, and as many hashes of released ones.

    A session idle for `idle_s` seconds is forgotten: its blocks become ordinary unused ones.
    """

    def __init__(self, idle_s: float, max_blocks: int) -> None:
        self._idle_s = idle_s
        self._max_blocks = max_blocks
        self._counted = 0
        self._sessions: OrderedDict[str, _Session[K]] = OrderedDict()
        self._by_root: dict[K, dict[_Prompt[K], None]] = {}
        self._released: OrderedDict[K, _Prompt[K]] = OrderedDict()  # one prompt of each root
        self._released_counted = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: str) -> bool:
        return session in self._sessions

    def record(self, session: str, prompt: Sequence[K], now: float) -> list[PromptTail[K]]:
        """Record a new prompt of a session; return the tails of earlier prompts it supersedes.

        The new prompt replaces those it extends, and supersedes those with which it shares only a
        prefix (compaction, edited history, dropped thinking). A session that returns to a
        superseded prompt holds several conversations: from then on it supersedes nothing.
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
        if entry.abandoned and not entry.branching:
            entry.branching = any(
                index < len(prompt) and prompt[index] == block for index, block in entry.abandoned
            )
        if entry.prompts:
            common = max(min(p.common, common_prefix(p.blocks, prompt)) for p in entry.prompts)
            superseded = self._replace(entry, prompt)
        else:
            common, superseded = self._common(session, prompt), []
        self._add(entry, _Prompt(session, prompt, common))
        return [
            PromptTail(old.blocks, max(start, self.shared_blocks(old.blocks)))
            for old, start in superseded
        ]

    def shared_blocks(self, prompt: Sequence[K], except_session: str | None = None) -> int:
        """Count the leading blocks of a prompt that live sessions but `except_session` use."""
        others = self._by_root.get(prompt[0], ()) if prompt else ()
        return self._shared(others, prompt, except_session)

    def _shared(
        self, others: Iterable[_Prompt[K]], prompt: Sequence[K], except_session: str | None
    ) -> int:
        found = 0
        for other in others:
            theirs = other.blocks
            if other.session == except_session or found >= min(len(prompt), len(theirs)):
                continue
            if theirs[found] == prompt[found]:
                found = common_prefix(prompt, theirs)
        return found

    def release(self, sessions: Iterable[str]) -> list[PromptTail[K]]:
        """Forget sessions; return the tails that no other session uses. Ignores unknown ones.

        What a session has begun with as an earlier one did is not part of its tail: the next one
        may begin so too.
        """
        gone: list[_Prompt[K]] = []
        for session in sessions:
            entry = self._sessions.pop(session, None)
            for prompt in entry.prompts if entry is not None else ():
                self._remove(prompt)
                gone.append(prompt)
        for prompt in gone:
            self._hand_on(prompt)
            self._remember(prompt)
        return [
            PromptTail(prompt.blocks, max(prompt.common, self.shared_blocks(prompt.blocks)))
            for prompt in gone
        ]

    def _remember(self, gone: _Prompt[K]) -> None:
        released, root = self._released, gone.blocks[0]
        known = released.pop(root, None)
        self._released_counted += gone.counted - (known.counted if known is not None else 0)
        released[root] = gone
        while len(released) > MAX_RELEASED or self._released_counted > self._max_blocks:
            self._released_counted -= released.popitem(last=False)[1].counted

    def _common(self, session: str, prompt: Sequence[K]) -> int:
        """Count the leading blocks that another session uses, or one released lately used."""
        live = self._shared(self._newest(prompt[0]), prompt, session)
        released = self._released.get(prompt[0])
        return live if released is None else max(live, common_prefix(released.blocks, prompt))

    def _hand_on(self, gone: _Prompt[K]) -> None:
        """Tell the sessions that began like a released one, as it may have come after them."""
        if not gone.common:
            return
        for other in self._newest(gone.blocks[0]):
            if other.common < gone.common:
                shared = min(gone.common, common_prefix(other.blocks, gone.blocks))
                other.common = max(other.common, shared)

    def _newest(self, root: K) -> Iterable[_Prompt[K]]:
        """The latest prompts with this first block: all agents of a kind may share it."""
        prompts = self._by_root.get(root)
        return islice(reversed(prompts), MAX_COMPARED) if prompts is not None else ()

    def _replace(self, entry: _Session[K], new: Sequence[K]) -> list[tuple[_Prompt[K], int]]:
        """Remove the prompts that `new` extends or supersedes.

        Returns the superseded ones with the index of the first block that differs.
        """
        superseded: list[tuple[_Prompt[K], int]] = []
        for old in list(entry.prompts):
            shared = common_prefix(old.blocks, new)
            if shared == 0 or shared == len(new) < len(old.blocks):
                continue
            differs = shared < len(old.blocks)
            if differs and entry.branching:
                continue
            entry.prompts.remove(old)
            self._remove(old)
            if differs:
                superseded.append((old, shared))
                first = (shared, old.blocks[shared])
                entry.abandoned = [*entry.abandoned[1 - MAX_BRANCHES :], first]
        return superseded

    def _add(self, entry: _Session[K], prompt: _Prompt[K]) -> None:
        if len(entry.prompts) == MAX_BRANCHES:
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
        """Forget idle sessions, and the oldest beyond the bound; never the newest session."""
        while len(self._sessions) > 1:
            session, entry = next(iter(self._sessions.items()))
            full = self._counted > self._max_blocks or len(self._sessions) > self._max_blocks
            if not full and now - entry.used <= self._idle_s:
                return
            del self._sessions[session]
            for prompt in entry.prompts:
                self._remove(prompt)


def common_prefix(one: Sequence[K], other: Sequence[K]) -> int:
    """Count the leading blocks that two prompts share: O(log n), see the module."""
    most = min(len(one), len(other))
    return bisect_left(range(most), True, key=lambda index: one[index] != other[index])
