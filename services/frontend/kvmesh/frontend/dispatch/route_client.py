"""Client of the routers: queries one for a placement, and another if it does not reply in time.

A router replies at once, with a placement or with `Parked` if the request waits in its queue. The
frontend retains all that it needs to repeat a query, since routers may freeze, restart or leave
meanwhile. An abandoned attempt is freed whenever a router places it.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from kvmesh.bus.client import Bus, RawMessage
from kvmesh.bus.discovery.peer_choice import Peers
from kvmesh.bus.errors import MessageTooLarge
from kvmesh.bus.messages import (
    Instance,
    MessageDecoder,
    Parked,
    Ping,
    Refused,
    Role,
    Routed,
    RouteNews,
    RouteRequest,
    SeqFree,
    UnknownBase,
)
from kvmesh.bus.ticks import next_tick
from kvmesh.frontend import metrics
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.hashing import HASH_BYTES
from kvmesh.prompt_delta.hashes import SentHashes
from kvmesh.runtime.lru import LruCache

log = logging.getLogger(__name__)
TICK_S = 0.1
ACK_S = 0.75  # for a router to reply, with a placement or `Parked`
DOUBT_S = 0.3  # without a reply, after which a router is pinged: its reply follows the others
SILENT_S = 1.0  # without a message from a router, after which its queries move to others
LATEST = 2  # times its deadline: the longest wait of a query of a process that reads late
MARGIN_S = 1.0  # beyond the deadline, for the router's own refusal
RECENT_S = 0.05  # a request that takes longer to read or prepare is of another instant
MAX_ABANDONED = 16_384  # abandoned attempts whose late placement is still freed
ANY_ROUTER = ""  # in place of an instance: the queue group of all routers
NO_ROUTER = Refused(code="unavailable", reason="no router is running")
_replies: MessageDecoder[RouteNews] = MessageDecoder(RouteNews)
Compose = Callable[[bool, float | None], RouteRequest]


def _unix_time() -> float:
    return time.time()  # looked up at each call, since the simulation replaces it


class Arrivals:
    """Requests on their way to a query, by any key, in the order of their arrival."""

    def __init__(self) -> None:
        self._since: dict[object, float] = {}

    def add(self, request: object, now: float) -> None:
        self._since[request] = now

    def discard(self, request: object) -> None:
        """The request queries a router now, or has ended; unknown ones are ignored."""
        self._since.pop(request, None)

    def any_recent(self, now: float) -> bool:
        """True if a recent request will soon query a router."""
        latest = next(reversed(self._since.values()), None)
        return latest is not None and now - latest < RECENT_S


@dataclass(eq=False, slots=True)
class RouteQuery:
    """A query in progress.

    `compose(new_attempt, arrived)` makes its message, under a new attempt id if `new_attempt`;
    `arrived` is the Unix time at which the request first entered a queue. `deadline` is on the
    client's clock, `ends` on the loop's. `abandoned` lists
    attempts to free once a later one is in a queue.
    """

    model: str
    compose: Compose
    request: RouteRequest
    deadline: float
    reply: asyncio.Future[Routed | Refused]
    created: float
    arrived: float | None
    ends: float
    router: str = ANY_ROUTER
    token: str = ""
    sent_at: float = 0.0
    parked: bool = False
    declined: set[str] = field(default_factory=set)
    abandoned: list[str] = field(default_factory=list)


class RouteClient:
    """All route queries of one frontend.

    Its clock stops while this process does not run, reads late or has no connection: replies sent
    meanwhile may still be unread. `turn_time`, in Unix seconds, decides which router's turn it is.
    """

    def __init__(
        self,
        bus: Bus,
        events: SequenceEventPublisher,
        turn_time: Callable[[], float] = _unix_time,
    ) -> None:
        self._bus = bus
        self._events = events
        self._turn_time = turn_time
        self._loop = asyncio.get_running_loop()
        self._inbox = bus.new_inbox()
        self._names = itertools.count(1)
        self._queries: dict[str, RouteQuery] = {}
        self._new: list[RouteQuery] = []
        self.arrivals = Arrivals()
        self._sent_prompts = SentHashes()
        self._completing: set[str] = set()
        self._abandoned: LruCache[str, tuple[str, str]] = LruCache(MAX_ABANDONED)
        self._pings: dict[str, tuple[str, float]] = {}
        self._any = asyncio.Event()  # query to check
        self._clock = 0.0
        self.routers = Peers(SILENT_S)

    async def open(self) -> None:
        """Subscribe to replies; call it before the first query."""
        await self._bus.subscribe_raw(f"{self._inbox}.*", self._receive)
        self._bus.on_reconnect.append(self._repeat_all)

    async def request(
        self, model: str, compose: Compose, timeout: float, arrived: float | None = None
    ) -> Routed | Refused:
        """The reply to the composed message, within `timeout` seconds and a margin.

        Raises MessageTooLarge, or MsgspecError for a malformed reply.
        """
        query = RouteQuery(
            model,
            compose,
            compose(False, arrived),
            self._clock + timeout + MARGIN_S,
            self._loop.create_future(),
            time.time(),
            arrived,
            self._loop.time() + LATEST * (timeout + MARGIN_S),
        )
        if not self._new:
            self._loop.call_soon(self._loop.call_soon, self._send_new)
        self._new.append(query)
        try:
            return await query.reply
        finally:
            self._abandon(query)
            self._free_abandoned(query)

    def joined(self, card: Instance) -> None:
        if card.role is Role.ROUTER:
            self.routers.joined(card.instance)
            if card.completes_prompts:
                self._completing.add(card.instance)

    def left(self, card: Instance) -> None:
        """A lease has ended: move the queries of a router to the others."""
        if card.role is Role.ROUTER:
            self.routers.left(card.instance)
            self._completing.discard(card.instance)
            for query in self._sent_to(card.instance):
                self._requery(query)

    def stop(self) -> None:
        """Refuse all queries in progress."""
        for query in [*self._new, *self._queries.values()]:
            self._expire(query, "The server is stopping.")

    # queries

    def _send_new(self) -> None:
        """Send the queries of this instant; one of which no other is to follow says so.

        The loop has read its sockets since the first of them, so requests that came with it, or
        while it was prepared, are here or among the arrivals.
        """
        new, self._new = [query for query in self._new if not query.reply.done()], []
        alone = len(new) == 1 and not self.arrivals.any_recent(self._loop.time())
        if alone:
            new[0].request = replace(new[0].request, alone=True)
        for query in new:
            self._send(query)
        if alone:  # what earlier requests have left to send needs no write of its own
            self._events.flush()

    def _send(self, query: RouteQuery) -> None:
        """Query the router whose turn it is; refuse if all have declined."""
        router = self.routers.choose_at(self._turn_time(), query.declined)
        if router is None and ANY_ROUTER in query.declined:
            self._end(query, NO_ROUTER)
        else:
            self._send_to(query, ANY_ROUTER if router is None else router)

    def _send_to(self, query: RouteQuery, router: str) -> None:
        self._queries.pop(query.token, None)
        query.token = str(next(self._names))
        query.router, query.parked = router, False
        query.sent_at = self._clock
        self._queries[query.token] = query
        self._any.set()
        subjects, model = self._bus.subjects, query.model
        subject = (
            subjects.router(model) if router == ANY_ROUTER else subjects.router_at(model, router)
        )
        try:
            self._bus.post(subject, self._shortened(query), f"{self._inbox}.{query.token}")
        except MessageTooLarge as error:
            self._fail(query, error)

    def _shortened(self, query: RouteQuery) -> RouteRequest:
        """The request without the hashes that its router has of the session's last prompt."""
        request, session = query.request, query.request.hints.session
        if not session or query.router not in self._completing:
            return request
        key, hashes = (query.router, request.salt, session), request.sequence_hashes
        base, shared = self._sent_prompts.base_of(key, hashes)
        self._sent_prompts.store(key, hashes)
        if not shared:
            return request
        rest = hashes[shared * HASH_BYTES :]
        return replace(request, sequence_hashes=rest, base=base, shared=shared)

    def _requery(self, query: RouteQuery) -> None:
        """Query another router with a new attempt: the previous router may place the old one."""
        self._abandon(query)
        query.abandoned.append(query.request.request)
        query.arrived = query.arrived or query.created
        query.request = query.compose(True, query.arrived)
        metrics.route_retries.labels(query.model).inc()
        self._send(query)

    def _abandon(self, query: RouteQuery) -> None:
        """Forget the latest attempt's token, but remember to free the attempt if it is placed."""
        if self._queries.pop(query.token, None) is not None:
            self._abandoned.put(query.token, (query.model, query.request.request))

    def _free_abandoned(self, query: RouteQuery) -> None:
        """Free abandoned attempts in all routers.

        Call it only once a later attempt is queued or placed, or the query has ended: the request
        must not lose its position in the queue.
        """
        for attempt in query.abandoned:
            self._events.event(query.model, SeqFree(attempt))
        query.abandoned.clear()

    def _end(self, query: RouteQuery, reply: Routed | Refused) -> None:
        self._queries.pop(query.token, None)
        if not query.reply.done():
            query.reply.set_result(reply)

    def _expire(self, query: RouteQuery, reason: str) -> None:
        self._abandon(query)
        self._end(query, Refused(code="deadline", reason=reason))

    def _fail(self, query: RouteQuery, error: Exception) -> None:
        self._queries.pop(query.token, None)
        if not query.reply.done():
            query.reply.set_exception(error)

    def _sent_to(self, router: str) -> list[RouteQuery]:
        return [each for each in self._queries.values() if each.router == router]

    def _repeat_all(self) -> None:
        """Replies were lost with the connection: repeat the same attempts to the same routers."""
        for query in list(self._queries.values()):
            if query.router in self.routers:
                self._send_to(query, query.router)
            else:
                self._requery(query)

    # replies

    def _receive(self, msg: RawMessage) -> None:
        token = msg.subject.rpartition(".")[2]
        silent = msg.headers is not None and msg.headers.get("Status") == "503"
        if token in self._pings:
            self._on_pong(token, msg, silent)
            return
        query = self._queries.get(token)
        if query is None:
            if not silent:
                self._late_reply(token, msg)
            return
        if silent:
            self._on_declined(query)
            return
        try:
            reply = _replies.decode(msg.data)
        except msgspec.MsgspecError as error:
            self._fail(query, error)
            return
        self.routers.replied(query.router, self._clock, self._clock - query.sent_at)
        if isinstance(reply, UnknownBase):
            request = query.request
            self._sent_prompts.forget((query.router, request.salt, request.hints.session or ""))
            self._send_to(query, query.router)
            return
        if isinstance(reply, Parked):
            query.parked, query.arrived = True, reply.arrived
            self._free_abandoned(query)
        elif isinstance(reply, Refused) and reply.moved:
            query.arrived = query.arrived or query.created
            self._on_declined(query)
        else:
            self._end(query, reply)

    def _on_declined(self, query: RouteQuery) -> None:
        """The router has dropped the query or is gone: send the same attempt to another one."""
        query.declined.add(query.router)
        query.request = query.compose(False, query.arrived)
        self._send(query)

    def _late_reply(self, token: str, msg: RawMessage) -> None:
        """A router has replied to an abandoned attempt: free it, since it will not run."""
        abandoned = self._abandoned.peek(token)
        if abandoned is None:
            return
        model, attempt = abandoned
        log.debug("a router replied too late to %s", attempt)
        self._events.event(model, SeqFree(attempt))

    def _on_pong(self, token: str, msg: RawMessage, silent: bool) -> None:
        router, sent = self._pings.pop(token)
        if silent:
            return
        if self.routers.replied(router, self._clock, self._clock - sent):
            log.info("router %s replies again", router)
        for query in self._sent_to(router):
            # a router replies to queries before pings, so the query or its reply was lost
            if not query.parked and query.sent_at < sent - DOUBT_S:
                self._send_to(query, router)

    # timeouts

    async def run(self) -> None:
        """Check the queries periodically until cancelled."""
        previous = self._loop.time()
        while True:
            if not (self._queries or self.routers.suspects_any):
                self._any.clear()
                await self._any.wait()
                previous = self._loop.time()
            await next_tick(TICK_S)
            now = self._loop.time()
            if self._bus.connected and not self._bus.promptness.late:
                self._tick(min(now - previous, 2 * TICK_S))
            elif self._bus.connected:
                self._expire_late(now)
            self._bus.promptness.check()
            previous = now

    def _expire_late(self, now: float) -> None:
        """No wait is endless, also while this process reads late."""
        for query in list(self._queries.values()):
            if now > query.ends:
                self._expire(query, "This frontend is overloaded.")

    def _tick(self, passed: float) -> None:
        self._clock += passed
        for query in list(self._queries.values()):
            if self._clock > query.deadline:
                self._expire(query, "No router has replied in time.")
            elif self._is_overdue(query):
                self._on_silence(query)
        self._ping()

    def _is_overdue(self, query: RouteQuery) -> bool:
        if query.router == ANY_ROUTER:
            return self.routers.trusts_any(query.declined)
        if query.parked:
            return self.routers.silent(query.router, self._clock)
        return self._clock - query.sent_at > ACK_S

    def _on_silence(self, query: RouteQuery) -> None:
        """Query another router if one is trusted; otherwise wait for this one."""
        router = query.router
        if self.routers.suspect(router):
            log.warning("router %s does not reply: querying others", router)
            metrics.router_timeouts.inc()
        if self.routers.trusts_any(query.declined):
            self._requery(query)

    def _ping(self) -> None:
        old = self._clock - 60.0
        for token in [token for token, (_, sent) in self._pings.items() if sent < old]:
            del self._pings[token]
        doubtful = self._clock - DOUBT_S
        busy = {
            query.router
            for query in self._queries.values()
            if query.parked or query.sent_at < doubtful
        }
        for router in self.routers.to_probe(self._clock, busy):
            token = str(next(self._names))
            self._pings[token] = router, self._clock
            self._bus.post(self._bus.subjects.ping(router), Ping(), f"{self._inbox}.{token}")
