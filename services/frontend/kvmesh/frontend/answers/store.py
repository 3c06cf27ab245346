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
from kvmesh.frontend.answers.answer import Answer, is_call
from kvmesh.frontend.answers.restore import KnownAnswer
from kvmesh.frontend.auth.bucket_quota import owner_of
from kvmesh.frontend.conversation import Block, Generated, Text, Thinking, ToolCall
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
        self.enabled = max_bytes > 0
        self._bucket: Bucket | None = None
        if self.enabled and stored_bytes:
            name = bus.subjects.answers_bucket
            self._bucket = evicting_bucket(bus, name, ttl_s, stored_bytes)
        self._unsent: list[tuple[str, str, Answer]] = []
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

    async def find(self, tenant: str, names: Sequence[str]) -> dict[str, KnownAnswer]:
        """Those of the answers that are stored, after READ_S at the latest.

        `names` are in the order of the conversation; the newest MAX_READ that are not in memory are
        read from the bucket.
        """
        found = self._in_memory(tenant, names)
        if len(found) < len(names):
            read = await self._fetch(tenant, [n for n in names if n not in found])
            found |= self._in_memory(tenant, read)
        return found

    def _in_memory(self, tenant: str, names: Sequence[str]) -> dict[str, KnownAnswer]:
        keys = [(tenant, name) for name in names]
        found = self._known.get_all(owner(tenant), keys)
        return {name: known for (_, name), known in found.items()}

    async def _fetch(self, tenant: str, missing: list[str]) -> list[str]:
        """Read the missing answers that may be stored; returns their names."""
        now = asyncio.get_running_loop().time()
        wanted = [n for n in missing if (self._absent.get((tenant, n)) or 0.0) <= now]
        bucket = self._bucket
        if not wanted or bucket is None or not self._bus.connected or now < self._paused_until:
            return []
        limit = asyncio.Semaphore(AT_ONCE)
        try:
            async with asyncio.timeout(READ_S):
                newest = missing[-1]
                reads = [
                    self._read(bucket, tenant, n, limit, FRESH_S if n is newest else ABSENT_S)
                    for n in wanted[-MAX_READ:]
                ]
                ended = await asyncio.gather(*reads, return_exceptions=True)
                # none of the reads is left behind by the failure of another
                for failure in filter(None, ended):
                    raise failure
                if newest in wanted and is_call(newest) and self.lookup(tenant, newest) is None:
                    await asyncio.sleep(ARRIVING_S)
                    await self._read(bucket, tenant, newest, limit, FRESH_S)
            self._failing = False
        except (BusError, TimeoutError) as error:
            self._paused_until = now + PAUSE_S
            self._warn("cannot read generated answers", error)
        return wanted

    def record(self, tenant: str, name: str, answer: Answer) -> None:
        """Store an answer that this frontend has generated."""
        self._known.put(owner(tenant), (tenant, name), KnownAnswer(answer))
        self._absent.pop((tenant, name))
        if self._bucket is None or not self._bus.connected or len(self._unsent) >= MAX_WRITES:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_later(GATHER_S, self._send)
        self._unsent.append((tenant, name, answer))

    def _send(self) -> None:
        """Send the recorded answers to the bucket."""
        unsent, self._unsent = self._unsent, []
        now = asyncio.get_running_loop().time()
        for tenant, name, answer in unsent:
            subject = f"$KV.{self._bus.subjects.answers_bucket}.{_key(tenant, name)}"
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
        self,
        bucket: Bucket,
        tenant: str,
        name: str,
        limit: asyncio.Semaphore,
        absent_s: float,
    ) -> None:
        """Read an answer; if it is absent, it is not looked up again for `absent_s`."""
        async with limit:
            try:
                answer = _unpacked((await bucket.get(_key(tenant, name))).value or b"", tenant)
            except NotFound:
                answer = None
        if answer is None:
            self._absent.put((tenant, name), asyncio.get_running_loop().time() + absent_s)
            return
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


def _key(tenant: str, name: str) -> str:
    digest = blake2b(f"{tenant}\0{name}".encode(), digest_size=16).hexdigest()
    return f"{owner_of(tenant)}.{digest}"


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
