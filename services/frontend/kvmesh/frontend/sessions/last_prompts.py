"""The last prompts of each session: callers name them by the session, and accounts compare them.

A session holds several conversations if side requests, subagents or forks share its name; the last
prompt of each is stored, and of two that run side by side with the same key both.
"""

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from kvmesh.bus.client import Bus, Reply
from kvmesh.bus.errors import RequestTimeout
from kvmesh.bus.messages import (
    MessageDecoder,
    PromptChange,
    PromptParts,
    SessionPrompt,
    SessionQuery,
    session_owner,
)
from kvmesh.frontend.cache_account.comparison import common_tokens
from kvmesh.frontend.cache_account.fingerprints import has_turns, likeness, messages_of
from kvmesh.frontend.preprocess.conversation_key import MASK
from kvmesh.hashing import TOKEN_BYTES
from kvmesh.runtime.lru import LruCache

ENTRY_BYTES = 2000  # more than the longest name of a session
NAME_BYTES = 64  # of a tool's name, beside its characters
PROMPTS = 8  # of one session
HALF = 0.5  # of an earlier prompt's messages, which a similar one has at least
ANSWER_END = 9  # tokens of an answer to search for, with the one that ends it
QUERY_TIMEOUT_S = 0.5
_queries = MessageDecoder(SessionQuery)
_prompts = MessageDecoder(SessionPrompt)


class SessionKey(NamedTuple):
    """A session of one model; sessions are named within tenants."""

    model: str
    session: str


class LastPrompts:
    """The prompts, at most `limit` bytes: the owner with the most loses its least recent session.

    Each frontend stores the prompts that it has served and queries the other frontends for the
    rest, unless it is `alone`.
    """

    def __init__(self, bus: Bus, limit: int, alone: Callable[[], bool] = lambda: False) -> None:
        self._bus = bus
        self._alone = alone
        self._limit = limit
        self._sessions: dict[str, LruCache[SessionKey, tuple[SessionPrompt, ...]]] = {}
        self._bytes = 0
        self._of_request: dict[str, SessionKey] = {}

    async def open(self) -> None:
        """Reply to other frontends' queries."""
        await self._bus.serve(self._bus.subjects.sessions, _queries, self._reply)

    def store(
        self, model: str, session: str, prompt: SessionPrompt, earlier: SessionPrompt | None = None
    ) -> None:
        """Store a prompt as the newest of its session, in place of the one that it continues.

        Beyond the bound, the oldest is dropped of those that side requests usually send: prompts
        without an earlier turn, and without tools.
        """
        key = SessionKey(model, session)
        kept = list(self._stored(key))
        if earlier is not None and _continues(prompt, earlier):
            kept = [each for each in kept if each.request != earlier.request]
        if len(kept) == PROMPTS:
            kept.remove(min(kept, key=_worth))
        self._put(key, (*kept, prompt))

    def complete(self, model: str, session: str, request: str, output: bytes) -> None:
        """Add the output of a request to its prompt, if that is stored still."""
        self._update(
            SessionKey(model, session), request, lambda p: replace(p, output=output, done=True)
        )

    def note_change(
        self, model: str, session: str, request: str, change: PromptChange | None
    ) -> None:
        """Add the change of a request's prompt to it, if that is stored still."""
        self._update(SessionKey(model, session), request, lambda p: replace(p, change=change))

    def _update(
        self, key: SessionKey, request: str, change: Callable[[SessionPrompt], SessionPrompt]
    ) -> None:
        prompts = self._stored(key)
        for index, prompt in enumerate(prompts):
            if prompt.request == request:
                self._replace(key, (*prompts[:index], change(prompt), *prompts[index + 1 :]))
                return

    def earlier(self, model: str, session: str, prompt: SessionPrompt) -> SessionPrompt | None:
        """The prompt stored here of the same conversation, with which this one shares most."""
        stored = _of_conversation(self._stored(SessionKey(model, session)), prompt.conversation)
        if len(stored) < 2:
            return stored[0] if stored else None
        return max(stored, key=lambda p: common_tokens(prompt.tokens, p.tokens, p.output))

    def alike(self, model: str, session: str, prompt: SessionPrompt) -> SessionPrompt | None:
        """The newest prompt stored here with the same first message and most tokens in place."""
        for stored in reversed(self._stored(SessionKey(model, session))):
            same = (stored.conversation ^ prompt.conversation) & MASK == 0
            if same and _are_alike(stored.tokens, prompt.tokens):
                return stored
        return None

    def similar(self, model: str, session: str, prompt: SessionPrompt) -> SessionPrompt | None:
        """The prompt stored here that shares most messages with this one, of any conversation.

        So a conversation is found whose system prompt, tools or first message have changed. None
        if no prompt is similar: a side request is another conversation.
        """
        stored = self._stored(SessionKey(model, session))
        return _similar(stored, prompt.parts, prompt.tokens)

    def newest(self, model: str, session: str) -> SessionPrompt | None:
        """The last prompt of a session, if it is stored here."""
        return next(iter(self._stored(SessionKey(model, session))[::-1]), None)

    def of_request(self, request: str, owned_by: str) -> tuple[str, SessionPrompt] | None:
        """The model and the prompt of a request, if it is its conversation's last, stored here.

        None if it is not a request of the owner.
        """
        key = self._of_request.get(request)
        if key is None or session_owner(key.session) != owned_by:
            return None
        prompts = self._stored(key)
        found = next((p for p in prompts if p.request == request), None)
        return None if found is None else (key.model, found)

    async def find(self, model: str, session: str) -> SessionPrompt | None:
        """The last prompt of a session, here or on another frontend; None if no frontend has it."""
        return self.newest(model, session) or await self.find_elsewhere(model, session)

    async def find_elsewhere(
        self,
        model: str,
        session: str,
        conversation: int | None = None,
        request: str = "",
        parts: PromptParts | None = None,
    ) -> SessionPrompt | None:
        """The last prompt, or that of a conversation, on another frontend; with `parts`, a similar.

        This frontend gets the query, too: the prompt of the asking `request` is no reply.
        """
        if self._alone():
            return None
        query = SessionQuery(model, session, conversation, request, parts)
        subject = self._bus.subjects.sessions
        try:
            return await self._bus.request(subject, query, _prompts, QUERY_TIMEOUT_S)
        except RequestTimeout:
            return None

    def _reply(self, query: SessionQuery, reply: Reply) -> None:
        stored = self._stored(SessionKey(query.model, query.session))
        others = [p for p in stored if not query.request or p.request != query.request]
        if query.parts is not None:
            found = _similar(others, query.parts)
        else:
            found = next(iter(_of_conversation(others, query.conversation)), None)
        if found is not None:
            reply(found)

    def _stored(self, key: SessionKey) -> tuple[SessionPrompt, ...]:
        sessions = self._sessions.get(session_owner(key.session))
        return () if sessions is None else sessions.peek(key) or ()

    def _put(self, key: SessionKey, prompts: tuple[SessionPrompt, ...]) -> None:
        self._forget_requests(self._stored(key))
        for prompt in prompts:
            if prompt.request:
                self._of_request[prompt.request] = key
        self._replace(key, prompts)

    def _replace(self, key: SessionKey, prompts: tuple[SessionPrompt, ...]) -> None:
        """Store the prompts of a session in place of those of the same requests."""
        owned_by = session_owner(key.session)
        sessions = self._sessions.get(owned_by)
        if sessions is None:
            sessions = self._sessions[owned_by] = LruCache(sys.maxsize, _size)
        before = sessions.size
        sessions.put(key, prompts)
        self._bytes += sessions.size - before
        while self._bytes > self._limit:
            self._evict(max(self._sessions, key=lambda owner: self._sessions[owner].size))

    def _evict(self, owned_by: str) -> None:
        sessions = self._sessions[owned_by]
        key, prompts = sessions.evict()
        self._forget_requests(prompts)
        self._bytes -= _size(key, prompts)
        if not sessions:
            del self._sessions[owned_by]

    def _forget_requests(self, prompts: tuple[SessionPrompt, ...]) -> None:
        for prompt in prompts:
            self._of_request.pop(prompt.request, None)


def _of_conversation(
    prompts: Sequence[SessionPrompt], conversation: int | None
) -> list[SessionPrompt]:
    """The prompts of a conversation, or all; the newest first."""
    return [p for p in reversed(prompts) if conversation in (None, p.conversation)]


def _are_alike(one: bytes, other: bytes) -> bool:
    """True if two packed prompts are equal in more than half of the places of the longer one."""
    a, b = np.frombuffer(one, "<u4"), np.frombuffer(other, "<u4")
    count = min(len(a), len(b))
    return 2 * int((a[:count] == b[:count]).sum()) > max(len(a), len(b))


def _similar(
    prompts: Sequence[SessionPrompt], parts: PromptParts | None, tokens: bytes = b""
) -> SessionPrompt | None:
    """The prompt that shares most messages, if that are more than half of its own.

    Half is enough for one whose answer is in the `tokens`: a short prompt has few messages beside
    the edited one, and that of a title has half of them, too.
    """
    if parts is None:
        return None
    alike = [(likeness(parts, p.parts), p) for p in reversed(prompts) if p.parts is not None]
    best, found = max(alike, key=lambda each: each[0], default=(0.0, None))
    if found is None or best < HALF:
        return None
    answer = found.output[-ANSWER_END * TOKEN_BYTES : -TOKEN_BYTES]
    return found if best > HALF or (answer and answer in tokens) else None


def _continues(prompt: SessionPrompt, earlier: SessionPrompt) -> bool:
    """True unless both may go on: two conversations begin with the same prompt."""
    if prompt.parts is None or earlier.parts is None:
        return True
    return messages_of(prompt.parts) > messages_of(earlier.parts)


def _worth(prompt: SessionPrompt) -> tuple[bool, bool]:
    parts = prompt.parts
    return (False, False) if parts is None else (has_turns(parts), bool(parts.tools))


def _size(_key: SessionKey, prompts: tuple[SessionPrompt, ...]) -> int:
    return _bytes(prompts[0]) if len(prompts) == 1 else sum(map(_bytes, prompts))


def _bytes(prompt: SessionPrompt) -> int:
    size, parts = ENTRY_BYTES + len(prompt.tokens) + len(prompt.output), prompt.parts
    if parts is None:
        return size
    size += len(parts.tool_hashes) + len(parts.messages)
    tools = parts.tools
    return size + NAME_BYTES * len(tools) + sum(map(len, tools)) if tools else size
