"""Subscriptions and publishes that the server refuses, each tried again until it is permitted.

A server drops a refused subscription, also one that a reload of its configuration has refused, and
nothing else would ever subscribe again.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from msgspec import MsgspecError
from nats.errors import Error as NatsError

from kvmesh.bus.backoff import Backoff
from kvmesh.bus.connection.direct_client import DirectClient, PermissionDenied
from kvmesh.bus.connection.refused.granted import lacking
from kvmesh.bus.connection.refused.violations import Violation
from kvmesh.bus.connection.translation import RECEIVE
from kvmesh.bus.errors import NotPermitted, cause
from kvmesh.bus.faults import REFUSED, BusFaults
from kvmesh.bus.metrics import BusCounts
from kvmesh.bus.permissions import USER_INFO, Permissions, covers, sample_of
from kvmesh.bus.ticks import next_tick

log = logging.getLogger(__name__)
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 10.0
REPEAT_S = 10.0
CHECK_S, ASK_S = 10.0, 2.0
UNTOLD_S = 600.0  # between questions to a server that does not permit them: it logs each


class Refusals:
    """The refusals of one connection, reported as faults of kind REFUSED."""

    def __init__(self, client: DirectClient, faults: BusFaults, counts: BusCounts) -> None:
        self._client = client
        self._faults = faults
        self._counts = counts
        self._needed: tuple[str, ...] = ()
        self._subscriptions: dict[int, str] = {}
        self._publishes: dict[str, str] = {}  # a subject to try again, by pattern
        self._lacking = Permissions((), ())  # subjects that may not have been used yet
        self._elsewhere: dict[str, dict[str, str]] = {}  # of processes that belong to this one
        self._again: set[int | str] = set()  # refused since the last attempt began
        self._soon, self._reconnected = asyncio.Event(), asyncio.Event()
        self._listener: Callable[[Violation], None] | None = None
        self._task: asyncio.Task[None] | None = None

    def need(self, patterns: Iterable[str]) -> None:
        """The subjects on which this process publishes.

        A refusal of another subject is no fault: a peer may have named it for a reply.
        """
        self._needed = tuple(patterns)

    @property
    def needs_any(self) -> bool:
        """True once this process has said on which subjects it publishes."""
        return bool(self._needed)

    def is_needed(self, subject: str) -> bool:
        """True if this process needs to publish on a subject, so that a refusal is a fault."""
        return any(covers(pattern, subject) for pattern in self._needed)

    async def watch(self, table: Permissions) -> None:
        """Compare a table with what the server permits, until cancelled.

        A refused publish shows only when it is tried, which for some subjects is rarely.
        """
        while True:
            told = await self.compare(table)
            await next_tick(CHECK_S if told else UNTOLD_S, self._reconnected)
            self._reconnected.clear()

    async def compare(self, table: Permissions) -> bool:
        """Report the subjects of a table that the server says it does not permit.

        False if the server does not permit the question: a process works without it.
        """
        try:
            reply = await self._client.request(USER_INFO, timeout=ASK_S)
            self._lacking = lacking(reply.data, table)
        except PermissionDenied:
            self._lacking = Permissions((), ())
            self._changed()
            return self._client.inbox_refused
        except (NatsError, OSError, MsgspecError) as error:  # none: it has no system account
            log.debug("the server does not state the permissions: %s", cause(error))
            return True
        self._changed()
        return True

    def add(self, source: str, elsewhere: Mapping[str, str]) -> None:
        """Have all refusals of another connection among these, in place of its former ones."""
        self._elsewhere.pop(source, None)
        if elsewhere:
            self._elsewhere[source] = dict(elsewhere)
        self._changed()

    @contextmanager
    def heard_by(self, listener: Callable[[Violation], None]) -> Iterator[None]:
        """Have `listener` called with everything that is refused meanwhile, as by a probe."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def note(self, found: Violation) -> bool:
        """Record what the server has refused; False if it concerns nothing of this process."""
        if self._listener is not None:
            self._listener(found)
            return True
        if found.reply:
            return True  # the publish that tried whether it is permitted
        if found.publish:
            return self._publish_refused(found.subject)
        sids = self._client.subscriptions(found.subject, found.sid)
        for sid, subject in sids.items():
            self._refused(sid)
            self._subscriptions[sid] = subject
            self._client.inbox_refused |= subject == self._client.own_inbox
        if self._client.inbox_refused:
            self._client.fail_waiting(PermissionDenied(self._client.own_inbox, listens=True))
        self._changed()
        return bool(sids)

    def try_soon(self) -> None:
        """Try again now: the connection is new, perhaps with other permissions."""
        self._soon.set()
        self._reconnected.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _publish_refused(self, subject: str) -> bool:
        pattern = next((p for p in self._needed if covers(p, subject)), None)
        if pattern is None:
            return False
        self._refused(pattern)
        if pattern not in self._publishes:
            spelled = self._client.spelled(subject)
            self._publishes[pattern] = spelled or sample_of(pattern)
        self._changed()
        return True

    def _refused(self, key: int | str) -> None:
        self._counts.refusals += 1
        self._again.add(key)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._try_until_permitted(), name="refusals")

    async def _try_until_permitted(self) -> None:
        backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        while (self._subscriptions or self._publishes) and not self._client.is_closed:
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.delay()):
                    await self._soon.wait()
            self._soon.clear()
            if not self._client.is_connected:
                continue
            try:
                async with asyncio.timeout(REPEAT_S):
                    await self._try_again()
            except (NatsError, OSError, TimeoutError) as error:
                log.debug("refused subjects not tried again: %s", cause(error))

    async def _try_again(self) -> None:
        """Repeat everything refused; the server's errors precede the end of the round trip."""
        left = self._client.subscriptions()
        self._subscriptions = {s: name for s, name in self._subscriptions.items() if s in left}
        tried: set[int | str] = {*self._subscriptions, *self._publishes}
        self._again = set()
        for sid in self._subscriptions:
            await self._client.subscribe_again(sid)
        for subject in self._publishes.values():
            await self._client.probe(subject)
        await self._client.round_trip()
        for key in tried - self._again:
            if isinstance(key, int):
                self._subscriptions.pop(key, None)
            else:
                self._publishes.pop(key, None)
        self._client.inbox_refused = self._client.own_inbox in self._subscriptions.values()
        self._changed()

    def _changed(self) -> None:
        inbox = self._client.inbox_prefix
        found = {about: text for each in self._elsewhere.values() for about, text in each.items()}
        listens = list(self._subscriptions.values())
        unused = [p for p in self._lacking.subscribe if not any(covers(p, s) for s in listens)]
        for subject in (*listens, *unused):
            error = NotPermitted(subject, "subscribe to")
            if subject.startswith(inbox):  # inboxes differ by connection and reader
                error = NotPermitted(f"{inbox}>", RECEIVE)
            found[f"subscribe {error.subject}"] = str(error)
        for pattern in (*self._publishes, *self._lacking.publish):
            found[f"publish {pattern}"] = str(NotPermitted(pattern))
        self._faults.update(REFUSED, found)
