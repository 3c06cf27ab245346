"""Answers as they were generated: in memory, and in a bucket that all frontends share.

A frontend stores what it has generated, and reads the answers of conversations that others have
served, or that it served before it restarted, once they continue here.
"""

import asyncio
import logging
from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import zstandard
from msgspec import Struct

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.jetstream import Bucket
from kvmesh.bus.errors import BusError, NotFound, cause
from kvmesh.bus.messages import owner
from kvmesh.bus.storage.buckets import evicting_bucket
from kvmesh.frontend import metrics
from kvmesh.frontend.answers.answer import Answer, AnswerNames, AnswerRun, answers_in, is_call
from kvmesh.frontend.answers.restore import KnownAnswer
from kvmesh.frontend.auth.bucket_quota import owner_of
from kvmesh.frontend.conversation import Block, Generated, Message, Text, Thinking, ToolCall
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.runtime.fair_lru import FairLru
from kvmesh.runtime.lru import LruCache

log = logging.getLogger(__name__)
READ_S = 0.5  # a prompt does not wait longer for its answers
WRITE_S = 5.0
GATHER_S = 0.003  # then answers leave with the events of their requests, in one write
CONFIRM_S = 5.0  # a server that has just stored an answer is trusted with more
PAUSE_S = 10.0  # without reading, after a failure
ABSENT_S = 600.0
FRESH_S = 1.0  # another frontend may be storing it
ARRIVING_S = (
    0.03  # until the newest answer, which another frontend has just stored, is in the bucket
)
MAX_ABSENT = 16_384
MAX_SERVED = 16_384
MAX_READ = 256  # answers of one request
AT_ONCE = 16
MAX_WRITES = 256
MAX_ANSWER = 8 << 20  # bytes before compression
_Part = tuple[str, ...]  # kind, then the fields of a block
Name = tuple[str, str]  # tenant, name within its answers


class _StoredAnswer(Struct, array_like=True):
    """An answer in the bucket, with the tenant that it belongs to."""

    tenant: str
    files: str
    parts: list[_Part]
    opening: str
    text: str
    tokens: bytes
    forced: bool = False


_decoder = msgspec.msgpack.Decoder(_StoredAnswer)
_encode = msgspec.msgpack.Encoder().encode
_compress = zstandard.ZstdCompressor(level=1).compress


class AnswerStore:
    """At most `max_bytes` of answers in memory, and `stored_bytes` for `ttl_s` in the bucket.

    Losing an answer costs time: the prompt then shows what the client has sent.
    """

    def __init__(self, bus: Bus, max_bytes: int, stored_bytes: int, ttl_s: float) -> None:
        self._bus = bus
        self._known: FairLru[Name, KnownAnswer] = FairLru(max_bytes, _size)
        self._absent: LruCache[Name, float] = LruCache(MAX_ABSENT)
        self._served: LruCache[int, str] = LruCache(MAX_SERVED)
        self.names = AnswerNames()
        self.enabled = max_bytes > 0
        self._bucket: Bucket | None = None
        if self.enabled and stored_bytes:
            name = bus.subjects.answers_bucket
            self._bucket = evicting_bucket(bus, name, ttl_s, stored_bytes)
        self._unsent: list[tuple[str, str, Answer]] = []  # tenant, key, answer
        self._tasks = BackgroundTasks()
        self._paused_until = 0.0
        self._confirmed_at = -CONFIRM_S
        self._failing = False

    @property
    def size(self) -> int:
        """About the bytes of the answers in memory."""
        return self._known.size

    def lookup(self, tenant: str, name: str) -> KnownAnswer | None:
        """The answer, if it is in memory."""
        return self._known.get(owner(tenant), (tenant, name))

    async def find(
        self, tenant: str, conversation: int, runs: Sequence[AnswerRun]
    ) -> dict[str, KnownAnswer]:
        """Those of the answers that are stored, by name, after READ_S at the latest.

        `runs` are in the order of the conversation; the newest MAX_READ that are not in memory are
        read from the bucket.
        """
        found = self._in_memory(tenant, [run.name for run in runs])
        if len(found) < len(runs):
            missing = [run for run in runs if run.name not in found]
            found |= self._in_memory(tenant, await self._fetch(tenant, conversation, missing))
        return found

    def _in_memory(self, tenant: str, names: Sequence[str]) -> dict[str, KnownAnswer]:
        keys = [(tenant, name) for name in names]
        found = self._known.get_all(owner(tenant), keys)
        return {name: known for (_, name), known in found.items()}

    async def _fetch(self, tenant: str, conversation: int, missing: list[AnswerRun]) -> list[str]:
        """Read the missing answers that may be stored; returns their names."""
        now = asyncio.get_running_loop().time()
        wanted = [run.name for run in missing if self._may_be_stored(tenant, run, now)]
        bucket = self._bucket
        if not wanted or bucket is None or not self._bus.connected or now < self._paused_until:
            return []
        newest = missing[-1].name
        keys = {name: _key(tenant, conversation, name) for name in wanted[-MAX_READ:]}
        limit = asyncio.Semaphore(AT_ONCE)
        try:
            async with asyncio.timeout(READ_S):
                if len(keys) > 1 and not await self._has_any(keys[wanted[-1]]):
                    keys = {}
                reads = [self._read(bucket, tenant, n, key, limit) for n, key in keys.items()]
                ended = await asyncio.gather(*reads, return_exceptions=True)
                # none of the reads is left behind by the failure of another
                for failure in filter(None, ended):
                    raise failure
                if newest in wanted and is_call(newest) and self.lookup(tenant, newest) is None:
                    await asyncio.sleep(ARRIVING_S)
                    key = _key(tenant, conversation, newest)
                    await self._read(bucket, tenant, newest, key, limit)
            self._failing = False
            for name in wanted:
                if self.lookup(tenant, name) is None:
                    until = now + (FRESH_S if name is newest else ABSENT_S)
                    self._absent.put((tenant, name), until)
        except (BusError, TimeoutError) as error:
            self._paused_until = now + PAUSE_S
            self._warn("cannot read generated answers", error)
        return wanted

    def _may_be_stored(self, tenant: str, run: AnswerRun, now: float) -> bool:
        """False if the bucket lacked it, or if this frontend has given another answer there."""
        return (
            self._served.get(run.place) in (None, run.name)
            and (self._absent.get((tenant, run.name)) or 0.0) <= now
        )

    async def _has_any(self, key: str) -> bool:
        """True if there are answers of the same conversation as the one of a key."""
        bucket = self._bus.subjects.answers_bucket
        others = f"$KV.{bucket}.{key.rpartition('.')[0]}.>"
        try:
            await self._bus.js.get_msg(f"KV_{bucket}", seq=1, subject=others, next=True)
        except NotFound:
            return False
        return True

    def served(self, tenant: str, messages: Sequence[Message], name: str) -> None:
        """This frontend has answered these messages: no other has an answer to them.

        `name` is that of the recorded answer, empty if it is shown as clients return it.
        """
        number = answers_in(messages)
        self._served.put(self.names.place(tenant, messages, len(messages), number), name)

    def record(self, tenant: str, conversation: int, name: str, answer: Answer) -> None:
        """Store an answer that this frontend has generated; `conversation` is the key by which
        `find` asks for it."""
        self._known.put(owner(tenant), (tenant, name), KnownAnswer(answer))
        self._absent.pop((tenant, name))
        if self._bucket is None or not self._bus.connected or len(self._unsent) >= MAX_WRITES:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_later(GATHER_S, self._send)
        self._unsent.append((tenant, _key(tenant, conversation, name), answer))

    def _send(self) -> None:
        """Send the recorded answers to the bucket."""
        unsent, self._unsent = self._unsent, []
        now = asyncio.get_running_loop().time()
        for tenant, key, answer in unsent:
            subject = f"$KV.{self._bus.subjects.answers_bucket}.{key}"
            packed = _packed(tenant, answer)
            if len(packed) > self._bus.max_payload:
                continue
            if now < self._confirmed_at + CONFIRM_S:
                self._bus.post(self._bus.js.stored_through(subject), msgspec.Raw(packed))
            elif len(self._tasks) < MAX_WRITES:
                self._tasks.start(self._write(subject, packed))

    async def close(self) -> None:
        self._send()
        await self._tasks.wait(WRITE_S)
        await self._tasks.close()

    async def _read(
        self, bucket: Bucket, tenant: str, name: str, key: str, limit: asyncio.Semaphore
    ) -> None:
        """Read an answer, if it is stored."""
        async with limit:
            try:
                answer = _unpacked((await bucket.get(key)).value or b"", tenant)
            except NotFound:
                return
        if answer is not None:
            metrics.read_answers.inc()
            self._known.put(owner(tenant), (tenant, name), KnownAnswer(answer))

    async def _write(self, subject: str, packed: bytes) -> None:
        """Store an answer; those of the next CONFIRM_S are sent without waiting for the server."""
        try:
            async with asyncio.timeout(WRITE_S):
                await self._bus.store(subject, packed, WRITE_S)
            self._failing, self._confirmed_at = False, asyncio.get_running_loop().time()
        except (BusError, TimeoutError) as error:
            self._warn("cannot store generated answers", error)

    def _warn(self, what: str, error: Exception) -> None:
        """Log the first failure of a series."""
        if not self._failing:
            log.warning("%s: %s; prompts show what clients return", what, cause(error))
        self._failing = True


def _size(_key: Name, known: KnownAnswer) -> int:
    return known.answer.size


def _key(tenant: str, conversation: int, name: str) -> str:
    digest = blake2b(f"{tenant}\0{name}".encode(), digest_size=16).hexdigest()
    return f"{owner_of(tenant)}.{conversation:x}.{digest}"


def _packed(tenant: str, answer: Answer) -> bytes:
    made = answer.generated or Generated("", "", b"")
    parts = [_part(block) for block in answer.blocks]
    stored = _StoredAnswer(
        tenant, answer.files, parts, made.opening, made.text, made.tokens, answer.forced
    )
    return _compress(_encode(stored))


def _unpacked(packed: bytes, tenant: str) -> Answer | None:
    """The answer; None if it is malformed, of another version or of another tenant."""
    try:
        if not 0 < zstandard.frame_content_size(packed) <= MAX_ANSWER:
            return None
        stored = _decoder.decode(zstandard.ZstdDecompressor().decompress(packed))
        blocks = [_block(part) for part in stored.parts]
    except (zstandard.ZstdError, msgspec.MsgspecError, ValueError, IndexError, TypeError):
        return None
    if stored.tenant != tenant or len(stored.tokens) % 4:
        return None
    made = Generated(stored.opening, stored.text, stored.tokens)
    generated = made if made.tokens else None
    return Answer(stored.files, blocks, generated, stored.forced)


def _part(block: Block) -> _Part:
    if isinstance(block, ToolCall):
        kind = "custom" if block.custom else "call"
        return kind, block.id, block.name, block.arguments, block.namespace or ""
    if isinstance(block, Thinking):
        return "thinking", block.text
    return "text", block.text if isinstance(block, Text) else ""


def _block(part: _Part) -> Block:
    kind, *fields = part
    if kind in ("call", "custom"):
        name, tool, arguments, namespace = fields
        return ToolCall(name, tool, arguments, namespace or None, kind == "custom")
    if kind == "thinking":
        return Thinking(fields[0])
    return Text(fields[0])
