"""Blocks of the latest prompts of each session, to find those that one session uses or has left.

A block's hash covers all blocks before it, so two prompts share exactly the blocks before the first
index at which they differ. No state is held per block: a request costs one entry, and the users of
a block are searched when needed.

A session may hold several conversations, told apart by 64 bits, of which the upper 32 identify the
agent: its tools and its system text. A prompt that differs from an earlier one proves nothing: the
rest of the earlier one is *doubtful*, until a later prompt confirms that or returns to it.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
N = TypeVar("N", int, str)
MAX_BRANCHES = 8
MAX_KNOWN = 32  # requests, and conversations that go on side by side, of one session
AGENT_BITS = 32  # of a conversation's key, below those of its agent
MAX_RELEASED = 256
MAX_COMPARED = 256  # prompts with the same first block, to find how far prompts begin alike


class PromptTail(NamedTuple, Generic[K]):
    """The blocks of a prompt from index `start` on."""

    prompt: Sequence[K]
    start: int


class TailChanges(NamedTuple, Generic[K]):
    """Tails of a session's earlier prompts about which a new one says something.

    Those `doubted` may be dead: no live prompt uses them. Those `restored` were doubted before.
    Those `dropped` are dead, since a later prompt has confirmed the doubt.
    """

    doubted: list[PromptTail[K]]
    restored: list[PromptTail[K]]
    dropped: list[PromptTail[K]]


class _Doubt:
    """A prompt is doubted from index `start` on, where a later one differs.

    `beside`: that is a prompt of another conversation, whose next one confirms nothing. `ahead`: it
    was computed ahead of the conversation's next prompt, which will tell.
    """

    __slots__ = ("ahead", "beside", "start")

    def __init__(self, start: int, beside: bool, ahead: bool) -> None:
        self.start = start
        self.beside = beside
        self.ahead = ahead


class _Prompt(Generic[K]):
    """One prompt of a session, from its first block on; `blocks` may grow during generation.

    Another session has used the first `common` blocks, though it may have ended. The client itself
    has sent the first `sent` blocks: the others were generated or predicted.
    """

    __slots__ = ("blocks", "common", "conversation", "counted", "doubt", "sent", "session")

    def __init__(self, session: str, conversation: int, blocks: Sequence[K], common: int) -> None:
        self.session = session
        self.conversation = conversation
        self.blocks = blocks
        self.common = common
        self.counted = len(blocks)
        self.sent = 0
        self.doubt: _Doubt | None = None

    @property
    def agent(self) -> int:
        return self.conversation >> AGENT_BITS

    def is_of(self, session: str | None, conversation: int | None) -> bool:
        """True for a prompt of a session, and of one conversation of it unless that is None."""
        return self.session == session and conversation in (None, self.conversation)


class _Session(Generic[K]):
    """The live prompts of a session, most recently used last.

    `branching` are conversations that have returned to a prompt that they had left, `parallel`
    agents of which an earlier conversation has gone on beside a later one: none of them leaves a
    prompt for good. `requests` are the latest ones.
    """

    __slots__ = ("branching", "parallel", "prompts", "requests", "used")

    def __init__(self) -> None:
        self.prompts: list[_Prompt[K]] = []
        self.branching: list[int] = []
        self.parallel: list[int] = []
        self.requests: list[str] = []
        self.used = 0.0

    def doubts(self, new: _Prompt[K], old: _Prompt[K]) -> bool:
        """True if a prompt that differs from an earlier one may have taken its place."""
        if new.conversation == old.conversation:
            return new.conversation not in self.branching
        known = new.conversation != 0 and old.conversation != 0
        return known and new.agent == old.agent and new.agent not in self.parallel


class SessionBlocks(Generic[K]):
    """At most `max_blocks` block hashes, as many sessions, and as many hashes of released ones.

    A session idle for `idle_s` seconds is forgotten: its blocks become ordinary unused ones.
    """

    def __init__(self, idle_s: float, max_blocks: int) -> None:
        self._idle_s = idle_s
        self._max_blocks = max_blocks
        self._counted = 0
        self._sessions: OrderedDict[str, _Session[K]] = OrderedDict()
        self._by_root: dict[K, dict[_Prompt[K], K | None]] = {}  # with the second block, if known
        self._released: OrderedDict[K, _Prompt[K]] = OrderedDict()  # one prompt of each root
        self._released_counted = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: str) -> bool:
        return session in self._sessions

    def record(
        self,
        session: str,
        prompt: Sequence[K],
        now: float,
        conversation: int = 0,
        tentative: bool = False,
        request: str | None = None,
        ahead: bool = False,
    ) -> TailChanges[K]:
        """Record a new prompt of a session's conversation, 0 if that is not known for certain.

        The prompt replaces those of its conversation that it extends, and casts doubt on those of
        its agent with which it shares only a prefix (compaction, edited history, dropped thinking).
        The next prompt that extends a new line of the same conversation confirms its doubts. A
        conversation that returns to a doubted prompt branches: from then on it doubts none of its
        own. The agent of a conversation that returns beside a later one has several, which doubt
        each other no more.

        A `tentative` prompt says nothing about others: it is no new turn of a conversation. Nor
        does more of the prompt of a `request` that is known. The doubts of one that is computed
        `ahead` of its request last until the next prompt of its conversation.
        """
        entry = self._sessions.get(session)
        if entry is None:
            entry = self._sessions[session] = _Session()
        else:
            self._sessions.move_to_end(session)
        entry.used = now
        self._forget_idle(now)
        if not prompt:
            return TailChanges([], [], [])
        if request is not None:
            tentative = tentative or request in entry.requests
            _note(entry.requests, request)
        own = [p for p in entry.prompts if p.blocks[0] == prompt[0]]
        if own:
            common = max([min(p.common, common_prefix(p.blocks, prompt)) for p in own])
        else:
            common = self._common(session, prompt)
        new = _Prompt(session, conversation, prompt, common)
        restored: list[PromptTail[K]] = []
        confirmed: list[tuple[_Prompt[K], int]] = []
        if not (tentative or ahead):
            new.sent = len(prompt)
            restored = self._restore(entry, new)
            confirmed = self._confirm(entry, new)
        self._replace(entry, new)
        doubted = self._doubt(entry, new, ahead) if ahead or not tentative else []
        self._add(entry, new)
        return TailChanges(
            [self._unused(old, start, self._live(entry, old)) for old, start in doubted],
            restored,
            [self._unused(old, start, self._by_root[old.blocks[0]]) for old, start in confirmed],
        )

    def _restore(self, entry: _Session[K], new: _Prompt[K]) -> list[PromptTail[K]]:
        """Note what a new prompt returns to; the tails that are not doubtful any more."""
        blocks = new.blocks
        restored: list[PromptTail[K]] = []
        for old in entry.prompts:
            if old.doubt is None or old.conversation != new.conversation:
                continue
            start = old.doubt.start
            if old.doubt.ahead:
                restored.append(PromptTail(old.blocks, start))
                old.doubt = None
            elif old.doubt.beside:
                _note(entry.parallel, new.agent)
            elif start < len(blocks) and blocks[start] == old.blocks[start]:
                _note(entry.branching, new.conversation)
        for old in entry.prompts:
            if old.doubt is None:
                continue
            if old.doubt.beside:
                settled = old.agent in entry.parallel
            else:
                settled = old.conversation in entry.branching
            if settled:
                restored.append(PromptTail(old.blocks, old.doubt.start))
                old.doubt = None
        return restored

    def _confirm(self, entry: _Session[K], new: _Prompt[K]) -> list[tuple[_Prompt[K], int]]:
        """Remove the doubted prompts whose conversation goes on without them.

        That is, if the new prompt extends one that the client has sent, beyond the difference.
        Returns them with the index of the first block that differs. A prompt of no certain
        conversation confirms nothing.
        """
        if not new.conversation:
            return []
        doubted = [
            old
            for old in entry.prompts
            if old.doubt is not None and old.conversation == new.conversation
        ]
        if not doubted:
            return []
        blocks = new.blocks
        extended = max(
            [
                old.sent
                for old in entry.prompts
                if old.conversation == new.conversation
                and 0 < old.sent < len(blocks)
                and old.blocks[old.sent - 1] == blocks[old.sent - 1]
            ],
            default=0,
        )
        starts = [(old, common_prefix(old.blocks, blocks)) for old in doubted]
        confirmed = [(old, start) for old, start in starts if 0 < start < extended]
        for old, _ in confirmed:
            entry.prompts.remove(old)
            self._remove(old)
        return confirmed

    def _replace(self, entry: _Session[K], new: _Prompt[K]) -> None:
        """Remove the prompts of the conversation that a new one extends."""
        for old in list(entry.prompts):
            if old.conversation != new.conversation or old.doubt is not None:
                continue
            end = len(old.blocks)
            if end <= len(new.blocks) and old.blocks[end - 1] == new.blocks[end - 1]:
                new.sent = max(new.sent, old.sent)
                entry.prompts.remove(old)
                self._remove(old)

    def _doubt(
        self, entry: _Session[K], new: _Prompt[K], ahead: bool
    ) -> list[tuple[_Prompt[K], int]]:
        """Doubt the prompts with which a new one shares only a prefix, from its end on."""
        doubted: list[tuple[_Prompt[K], int]] = []
        for old in entry.prompts:
            if old.doubt is not None or not entry.doubts(new, old):
                continue
            start = common_prefix(old.blocks, new.blocks)
            if 0 < start < min(len(old.blocks), len(new.blocks)):
                same = old.conversation == new.conversation
                if ahead and not same:
                    continue
                old.doubt = _Doubt(start, not same, ahead)
                doubted.append((old, start))
        return doubted

    def _live(self, entry: _Session[K], old: _Prompt[K]) -> list[_Prompt[K]]:
        """The session's own prompts, and the latest that begin like `old`, but no doubted ones."""
        known = (*entry.prompts, *self._newest(old.blocks[0]))
        return [prompt for prompt in known if prompt.doubt is None]

    def _unused(self, prompt: _Prompt[K], start: int, users: Iterable[_Prompt[K]]) -> PromptTail[K]:
        """The blocks of a prompt from `start` on that none of these others uses.

        Nor has another session begun with them.
        """
        blocks, found = prompt.blocks, max(start, prompt.common)
        end = len(blocks)
        for user in users:
            theirs = user.blocks
            if found < end and found < len(theirs) and theirs[found] == blocks[found]:
                found = common_prefix(blocks, theirs)
        return PromptTail(blocks, found)

    def shared_blocks(
        self,
        prompt: Sequence[K],
        except_session: str | None = None,
        except_conversation: int | None = None,
    ) -> int:
        """Count the leading blocks of a prompt that live sessions but `except_session` use.

        With `except_conversation`, other conversations of that session count, too.
        """
        others = self._by_root.get(prompt[0]) if prompt else None
        if others is None:
            return 0
        return self._shared(others, len(others), prompt, except_session, except_conversation)

    def _shared(
        self,
        others: dict[_Prompt[K], K | None],
        latest: int,
        prompt: Sequence[K],
        except_session: str | None,
        except_conversation: int | None = None,
    ) -> int:
        """Count the leading blocks that the latest others share, which begin with the same block.

        Each comes with its second block, by which most are told apart.
        """
        found, end = 0, len(prompt)
        second = prompt[1] if end > 1 else None
        seconds = islice(reversed(others.items()), latest)
        for other in [each for each, theirs in seconds if theirs == second or theirs is None]:
            blocks = other.blocks
            if other.is_of(except_session, except_conversation):
                continue
            if found < end and found < len(blocks) and blocks[found] == prompt[found]:
                found = common_prefix(prompt, blocks)
        if found:
            return found
        known = islice(reversed(others), latest)
        return int(any(not each.is_of(except_session, except_conversation) for each in known))

    def release(self, sessions: Iterable[str]) -> list[PromptTail[K]]:
        """Forget sessions; return the tails that no other session uses. Ignores unknown ones.

        What a session has begun with as an earlier one did is not part of its tail: the next one
        may begin so too.
        """
        gone: list[_Prompt[K]] = []
        for session in sessions:
            entry = self._sessions.pop(session, None)
            for prompt in reversed(entry.prompts) if entry is not None else ():
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
        prompts = self._by_root.get(prompt[0])
        live = self._shared(prompts, MAX_COMPARED, prompt, session) if prompts is not None else 0
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

    def _add(self, entry: _Session[K], prompt: _Prompt[K]) -> None:
        if len(entry.prompts) == MAX_BRANCHES:
            doubted = [old for old in entry.prompts if old.doubt is not None]
            oldest = doubted[0] if doubted else entry.prompts[0]
            entry.prompts.remove(oldest)
            self._remove(oldest)
        entry.prompts.append(prompt)
        blocks = prompt.blocks
        second = blocks[1] if len(blocks) > 1 else None
        self._by_root.setdefault(blocks[0], {})[prompt] = second
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


def _note(known: list[N], value: N) -> None:
    """Add a value to those known, as the latest; the oldest beyond MAX_KNOWN is forgotten."""
    if value not in known:
        known.append(value)
        if len(known) > MAX_KNOWN:
            del known[0]
