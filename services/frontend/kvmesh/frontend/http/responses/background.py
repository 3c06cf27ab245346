"""Background responses: they go on without their client, and without their frontend."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
from aiohttp import web
from msgspec.structs import replace

from kvmesh.bus.errors import BusError, Conflict, NotFound, cause
from kvmesh.frontend.apis.base import RequestStamp
from kvmesh.frontend.errors import ApiError, InvalidRequest, Unavailable
from kvmesh.frontend.http.responses.log import (
    MAX_BEGUN,
    EventRecord,
    ResponseLog,
    RunHead,
    events,
)
from kvmesh.frontend.http.responses.store import ResponseNotFound, ResponseStore
from kvmesh.frontend.http.sse import EventStream, StreamSupervisor
from kvmesh.runtime.background import BackgroundTasks

log = logging.getLogger(__name__)
WRITE_S = 0.25  # between two records
POLL_S = 0.25  # of records that another frontend writes
MAX_TAKEOVERS = 5  # during one stream
# A line alone: OpenAI's client takes an empty one for an event once it has read an id.
KEEPALIVE = b": keep-alive\n"


class Run:
    """The sink of one response that this frontend generates; `rendered` counts its tokens."""

    def __init__(self, log: ResponseLog, head: RunHead, revision: int, first: int = 0) -> None:
        self.log = log
        self.head = head
        self._revision = revision
        self._next = first
        self._frames: list[bytes] = []
        self._cuts: list[int] = []
        self._stored = 0
        self.muted = False  # while it renders again what the records have
        self.tokens: Callable[[], list[int]] = list
        self.rendered: Callable[[], int] = int
        self._over = False
        self._changed = asyncio.Event()

    @property
    def writable(self) -> bool:
        return True

    def write(self, frame: bytes) -> None:
        if not self.muted:
            self._frames.append(frame)
            self._cuts.append(self.rendered())
            self._changed.set()

    def replayed(self, tokens: int) -> None:
        """The records have this many tokens."""
        self.muted, self._stored = False, tokens

    def end(self, last: bytes) -> None:
        """Write the last events."""
        self.write(last)
        self._over = True

    async def store(self) -> None:
        """Store the events until the end; raises Conflict if this frontend is to stop."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            over = self._over
            frames, self._frames = b"".join(self._frames), []
            cuts, self._cuts = self._cuts, []
            upto = max(cuts, default=self._stored)
            tokens, self._stored = self.tokens()[self._stored : upto], upto
            await self.log.append(self._next, EventRecord(frames, tokens, cuts, over))
            self._next += 1
            if over:
                *_, (_, _, response) = events(frames)
                done = replace(self.head, owner="", body=b"", headers={}, response=response)
                await self.log.replace(done, self._revision)
                return
            await asyncio.sleep(WRITE_S)


Resume = Callable[[str, RunHead, Run, Sequence[EventRecord]], Awaitable[None]]


class BackgroundResponses:
    """The background responses that this frontend generates or sends.

    `resume` goes on with a response whose frontend is gone. `is_live` tells whether a frontend,
    by its instance, is.
    """

    def __init__(
        self,
        instance: str,
        store: ResponseStore,
        supervisor: StreamSupervisor,
        is_live: Callable[[str], bool],
    ) -> None:
        self.instance = instance
        self._store = store
        self._supervisor = supervisor
        self._is_live = is_live
        self._tasks = BackgroundTasks()
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._leaving = False

    def start(self, response_id: str, run: Run, work: Awaitable[None]) -> None:
        """Generate a response, and store its events, as a task of its own."""

        async def both() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(run.store())
                group.create_task(_awaited(work))

        async def guarded() -> None:
            try:
                await both()
            except* Conflict:
                log.info(
                    "response %s was cancelled, or another frontend goes on with it", response_id
                )
            except* BusError as errors:
                log.warning("response %s ends: %s", response_id, cause(errors.exceptions[0]))
            finally:
                self._runs.pop(response_id, None)

        self._runs[response_id] = self._tasks.start(guarded(), "background response")

    async def begin(
        self,
        response_id: str,
        tenant: str,
        stamp: RequestStamp,
        body: bytes,
        headers: dict[str, str],
        begun: bytes,
        target: str,
    ) -> Run:
        """Store the head of a new response, whose first events are `begun`.

        Raises Unavailable, or ApiError (413) for events that no record holds.
        """
        if self._leaving:
            raise Unavailable("The server is stopping.")
        if len(begun) > MAX_BEGUN:
            reason = "The request is too large for a response that is generated in the background."
            raise ApiError("too_large", reason, param="background")
        response = next(found for _, _, found in events(begun))
        head = RunHead(self.instance, stamp.token, stamp.created, body, headers, response, target)
        stored = self._store.log(response_id, tenant)
        try:
            run = Run(stored, head, await stored.begin(head))
        except BusError as error:
            raise Unavailable(f"Cannot store the response: {cause(error)}") from error
        run.write(begun)
        return run

    async def stop(self) -> None:
        """Leave all responses to the other frontends, from now on."""
        self._leaving = True
        runs = list(self._runs.values())
        for task in runs:
            task.cancel()
        if runs:
            await asyncio.wait(runs)

    async def response(self, response_id: str, tenant: str, resume: Resume) -> bytes:
        """The response object so far; raises ResponseNotFound or Unavailable.

        A response whose frontend is gone goes on here.
        """
        head, revision = await self._head(response_id, tenant)
        if head.owner and not self._is_running(response_id, head.owner):
            stored, records = self._store.log(response_id, tenant), list[EventRecord]()
            while (record := await stored.record(len(records))) is not None:
                records.append(record)
            await self._go_on(response_id, stored, head, revision, records, resume)
        return head.response

    async def _go_on(
        self,
        response_id: str,
        stored: ResponseLog,
        head: RunHead,
        revision: int,
        records: Sequence[EventRecord],
        resume: Resume,
    ) -> None:
        """Take over a response, unless another frontend is faster."""
        owned = replace(head, owner=self.instance)
        try:
            revision = await stored.replace(owned, revision)
        except Conflict:
            return
        run = Run(stored, owned, revision, len(records))
        log.info("going on with response %s, whose frontend is gone", response_id)
        if head.body:
            self.start(response_id, run, resume(response_id, owned, run, tuple(records)))
        else:
            error = {"code": "server_error", "message": "The server that generated it is gone."}
            failed = msgspec.json.decode(head.response) | {"status": "failed", "error": error}
            number = 1 + max((n for r in records for n, _, _ in events(r.frames)), default=-1)
            event = {"type": "response.failed", "sequence_number": number, "response": failed}
            run.write(b"event: response.failed\ndata: %b\n\n" % msgspec.json.encode(event))
            run.end(b"")
            self.start(response_id, run, _nothing())

    async def delete(self, response_id: str, tenant: str) -> None:
        """Stop a response, and delete all of it; raises as `response` does.

        The record that stops a frontend which still generates it stays.
        """
        _, stopped_at = await self._stop(response_id, tenant)
        await self._store.purge(response_id, tenant, stopped_at)

    async def cancel(self, response_id: str, tenant: str) -> bytes:
        """Stop a response; returns it as it is then. Raises as `response` does."""
        return (await self._stop(response_id, tenant))[0]

    async def _stop(self, response_id: str, tenant: str) -> tuple[bytes, int | None]:
        """The response as it is then, and the revision of the record that stops its frontend."""
        while True:
            head, revision = await self._head(response_id, tenant)
            if not head.owner:
                return head.response, None
            cancelled = head.response.replace(b'"in_progress"', b'"cancelled"', 1)
            ended = replace(head, owner="", body=b"", headers={}, response=cancelled)
            stored = self._store.log(response_id, tenant)
            try:
                await stored.replace(ended, revision)
                stopped_at = await self._end_records(stored)
            except Conflict:
                continue
            except BusError as error:
                raise Unavailable(f"Cannot change stored responses: {error}") from error
            if (task := self._runs.get(response_id)) is not None:
                task.cancel()
            return cancelled, stopped_at

    async def _end_records(self, stored: ResponseLog) -> int | None:
        """Take the next number, so that the frontend that generates stops; returns its revision.

        None if the response has ended.
        """
        number = 0
        while True:
            record = await stored.record(number)
            if record is None:
                try:
                    return await stored.append(number, EventRecord(b"", [], [], True))
                except Conflict:
                    continue
            if record.ends:
                return None
            number += 1

    async def follow(
        self, http: web.Request, response_id: str, tenant: str, after: int, resume: Resume
    ) -> web.StreamResponse:
        """Stream the events behind number `after`, to the end of the response."""
        head, _ = await self._head(response_id, tenant)
        stored, stream = self._store.log(response_id, tenant), EventStream(http)
        await stream.open(KEEPALIVE, lambda: None)
        self._supervisor.add(stream, KEEPALIVE, lambda: None)
        records: list[EventRecord] = []
        takeovers = 0
        try:
            while True:
                record = await stored.record(len(records))
                if record is None:
                    await asyncio.sleep(POLL_S)
                    head, revision = await self._head(response_id, tenant)
                    if not head.owner and await stored.record(len(records)) is None:
                        return await stream.close(b"")
                    if head.owner and not self._is_running(response_id, head.owner):
                        if (takeovers := takeovers + 1) > MAX_TAKEOVERS:
                            raise Unavailable("The response cannot be continued.")
                        await self._go_on(response_id, stored, head, revision, records, resume)
                    continue
                records.append(record)
                for number, frame, _ in events(record.frames):
                    if number > after:
                        stream.write(b"id: %d\n%b" % (number, frame))
                while not stream.writable:
                    await asyncio.sleep(POLL_S)
                if record.ends:
                    return await stream.close(b"")
        except (ApiError, BusError) as error:
            log.warning("cannot go on with the stream of %s: %s", response_id, cause(error))
            stream.cut()
            raise ConnectionResetError from error
        finally:
            self._supervisor.remove(stream)

    def _is_running(self, response_id: str, owner: str) -> bool:
        if self._leaving:  # whoever goes on with it, this frontend does not
            return True
        if owner == self.instance:
            return response_id in self._runs
        return self._is_live(owner)

    async def _head(self, response_id: str, tenant: str) -> tuple[RunHead, int]:
        try:
            return await self._store.log(response_id, tenant).head()
        except NotFound:
            raise ResponseNotFound(response_id) from None
        except BusError as error:
            raise Unavailable(f"Cannot read stored responses: {error}") from error


# besides X-headers: the client's program and, of Codex, the session
KEPT = frozenset(("user-agent", "session-id", "thread-id"))
SECRET = ("auth", "cookie", "key", "password", "secret", "token")  # in names of headers


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that say how to answer, and whose request it is; never those with credentials."""
    names = {name.lower(): value for name, value in headers.items()}
    return {
        name: value
        for name, value in names.items()
        if name in KEPT or (name.startswith("x-") and not any(word in name for word in SECRET))
    }


async def _nothing() -> None:
    return


async def _awaited(work: Awaitable[None]) -> None:
    await work


def starting_after(http: web.Request) -> int:
    """The number of the last event that the client has; -1 for none. Raises InvalidRequest."""
    text = http.query.get("starting_after") or http.headers.get("Last-Event-ID") or "-1"
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest("`starting_after` must be a number.", "starting_after") from None
