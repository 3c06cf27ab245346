"""The last prompt of each session, so that a session can be named instead of its prompt."""

from collections import Counter, OrderedDict

import msgspec

from kvmesh.bus.client import Bus, Reply
from kvmesh.bus.errors import RequestTimeout
from kvmesh.bus.messages import SessionPrompt, SessionQuery, owner
from kvmesh.frontend.namespaces import SEPARATOR

ENTRY_BYTES = 500
ASK_S = 0.5
_queries = msgspec.msgpack.Decoder(SessionQuery)
_prompts = msgspec.msgpack.Decoder(SessionPrompt)


class LastPrompts:
    """At most `limit` bytes; what is too much, the owner with the most gives up, longest unused.

    Sessions are named within tenants. Each frontend knows what passed through itself, and asks the
    others for the rest.
    """

    def __init__(self, bus: Bus, limit: int) -> None:
        self._bus = bus
        self._limit = limit
        self._held: dict[str, OrderedDict[tuple[str, str], SessionPrompt]] = {}
        self._bytes: Counter[str] = Counter()
        self._total = 0

    async def open(self) -> None:
        """Answer other frontends."""
        await self._bus.serve(self._bus.subjects.sessions, _queries, self._answer)

    def remember(self, model: str, session: str, prompt: SessionPrompt) -> None:
        key, whose = (model, session), _owner(session)
        held = self._held.setdefault(whose, OrderedDict())
        self._count(whose, _size(prompt) - _size(held.pop(key, None)))
        held[key] = prompt
        while self._total > self._limit:
            self._give_up(self._bytes.most_common(1)[0][0])

    def _give_up(self, whose: str) -> None:
        _, oldest = self._held[whose].popitem(last=False)
        self._count(whose, -_size(oldest))
        if not self._held[whose]:
            del self._held[whose], self._bytes[whose]

    def _count(self, whose: str, size: int) -> None:
        self._bytes[whose] += size
        self._total += size

    def _known(self, model: str, session: str) -> SessionPrompt | None:
        held = self._held.get(_owner(session))
        return None if held is None else held.get((model, session))

    async def find(self, model: str, session: str) -> SessionPrompt | None:
        """None if no frontend knows the session."""
        known = self._known(model, session)
        if known is not None:
            return known
        query = SessionQuery(model, session)
        try:
            return await self._bus.request(self._bus.subjects.sessions, query, _prompts, ASK_S)
        except RequestTimeout:
            return None

    def _answer(self, query: SessionQuery, reply: Reply) -> None:
        known = self._known(query.model, query.session)
        if known is not None:
            reply(known)


def _owner(session: str) -> str:
    """Of whose tenant a session is, by its name on the wire."""
    tenant, apart, _ = session.partition(SEPARATOR)
    return owner(tenant) if apart else ""


def _size(prompt: SessionPrompt | None) -> int:
    return 0 if prompt is None else ENTRY_BYTES + len(prompt.tokens)
