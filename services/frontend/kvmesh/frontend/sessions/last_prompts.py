"""The last prompts of each session: callers name them by the session, and accounts compare them.

A session holds several conversations if subagents or forks share its name; the last prompt of each
is stored.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from kvmesh.bus.client import Bus, Reply
from kvmesh.bus.errors import RequestTimeout
from kvmesh.bus.messages import (
    MessageDecoder,
    PromptChange,
    SessionPrompt,
    SessionQuery,
    session_owner,
)
from kvmesh.runtime.lru import LruCache

ENTRY_BYTES = 2000  # more than the longest name of a session
CONVERSATIONS = 4  # of one session
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
    rest.
    """

    def __init__(self, bus: Bus, limit: int) -> None:
        self._bus = bus
        self._limit = limit
        self._sessions: dict[str, LruCache[SessionKey, tuple[SessionPrompt, ...]]] = {}
        self._bytes = 0
        self._of_request: dict[str, SessionKey] = {}

    async def open(self) -> None:
        """Reply to other frontends' queries."""
        await self._bus.serve(self._bus.subjects.sessions, _queries, self._reply)

    def store(self, model: str, session: str, prompt: SessionPrompt) -> None:
        """Store a prompt as the newest of its session and of its conversation."""
        key = SessionKey(model, session)
        others = [p for p in self._stored(key) if p.conversation != prompt.conversation]
        self._put(key, (*others[1 - CONVERSATIONS :], prompt))

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
        if any(prompt.request == request for prompt in prompts):
            self._put(key, tuple(change(p) if p.request == request else p for p in prompts))

    def earlier(self, model: str, session: str, conversation: int) -> SessionPrompt | None:
        """The last prompt of a conversation, if it is stored here."""
        return _of_conversation(self._stored(SessionKey(model, session)), conversation)

    def newest(self, model: str, session: str) -> SessionPrompt | None:
        """The last prompt of a session, if it is stored here."""
        return _of_conversation(self._stored(SessionKey(model, session)), None)

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
        self, model: str, session: str, conversation: int | None = None, request: str = ""
    ) -> SessionPrompt | None:
        """The last prompt, or that of a conversation, on another frontend.

        This frontend gets the query, too: the prompt of the asking `request` is no reply.
        """
        query = SessionQuery(model, session, conversation, request)
        subject = self._bus.subjects.sessions
        try:
            return await self._bus.request(subject, query, _prompts, QUERY_TIMEOUT_S)
        except RequestTimeout:
            return None

    def _reply(self, query: SessionQuery, reply: Reply) -> None:
        stored = self._stored(SessionKey(query.model, query.session))
        found = _of_conversation(stored, query.conversation)
        if found is not None and not (query.request and found.request == query.request):
            reply(found)

    def _stored(self, key: SessionKey) -> tuple[SessionPrompt, ...]:
        sessions = self._sessions.get(session_owner(key.session))
        return () if sessions is None else sessions.peek(key) or ()

    def _put(self, key: SessionKey, prompts: tuple[SessionPrompt, ...]) -> None:
        sessions = self._sessions.setdefault(
            session_owner(key.session), LruCache(sys.maxsize, _size)
        )
        self._forget_requests(sessions.peek(key) or ())
        before = sessions.size
        sessions.put(key, prompts)
        self._of_request.update((p.request, key) for p in prompts if p.request)
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
    prompts: tuple[SessionPrompt, ...], conversation: int | None
) -> SessionPrompt | None:
    """The newest prompt, or that of a conversation."""
    matching = (p for p in reversed(prompts) if conversation in (None, p.conversation))
    return next(matching, None)


def _size(_key: SessionKey, prompts: tuple[SessionPrompt, ...]) -> int:
    return sum(ENTRY_BYTES + len(prompt.tokens) + len(prompt.output) for prompt in prompts)
