"""Bodies of conversations: a turn repeats the last one's body, and only what it adds is decoded.

An earlier body and a later one that begins with the same bytes have the same items in their list of
messages, as far as these are within the common bytes. Such items are cut out of the later body, and
a marker that no client can guess takes their place. If the decoded list begins with the marker, the
items were at its start. In all other cases, errors among them, the whole body is decoded.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Raw, Struct

from kvmesh.bus.messages import owner
from kvmesh.frontend.apis.base import decode
from kvmesh.frontend.apis.content.tagged import Reading
from kvmesh.frontend.conversation import GenerateRequest, Message
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.json_bounds import MAX_VALUES, is_light, separators
from kvmesh.frontend.turn_memo import TurnMemo
from kvmesh.runtime.fair_lru import FairLru

MIN_BYTES = 64 << 10  # shorter bodies are decoded in little time
LIGHT_BYTES = 1 << 20  # of a body whose new part may be light to work on
MAX_BYTES = 2 << 20  # longer bodies would occupy the event loop for too long
WINDOW = 64  # bytes before a power of two by which an earlier body is found
SIZE = 4  # times its bytes: an earlier body with its messages and what their memo holds of them
ITEM_BYTES = 1000
VALUE_BYTES = 16  # for each separator; templates show arguments of calls as values
PROBE = 64  # bytes of an item that are searched
_COMMA = re.compile(rb"[ \t\n\r]*,[ \t\n\r]*")

Key = tuple[str, str, int, bytes]


B = TypeVar("B", bound=Struct)
Field: TypeAlias = Literal["messages", "input"]  # of a body that holds its items


class _Messages(Struct):
    messages: list[Raw]


class _Input(Struct):
    input: list[Raw]


_frames: dict[Field, msgspec.json.Decoder[Any]] = {
    "messages": msgspec.json.Decoder(_Messages),
    "input": msgspec.json.Decoder(_Input),
}


class EarlierBody(NamedTuple):
    """A body up to the end of its last item, and the messages that were made of its items.

    `start` is the offset of the first item, `ends` are those behind each; `made` counts the
    messages of the items up to each. `values` is the estimated number of JSON values.
    """

    body: bytes
    start: int
    ends: Sequence[int]
    made: Sequence[int]
    messages: Sequence[Message]
    values: int
    memo: TurnMemo

    def shared(self, body: bytes) -> int:
        """The number of leading items that `body` repeats and continues with a comma."""
        if body.startswith(self.body):
            count = len(self.ends)
        else:
            size = min(len(body), len(self.body))
            new, old = (np.frombuffer(each, np.uint8, size) for each in (body, self.body))
            differs = new != old
            same = int(differs.argmax()) if differs.any() else size
            count = bisect_right(self.ends, same)
        if count and _COMMA.match(body, self.ends[count - 1]) is None:
            count -= 1
        return count if count and self.ends[count - 1] >= MIN_BYTES else 0


class TurnBody:
    """One body. `known` are the messages of its first `count` items, which are not decoded again.

    `rest` is the body without them.
    """

    def __init__(
        self, body: bytes, turns: "Turns | None" = None, key: tuple[str, str] = ("", "")
    ) -> None:
        self._turns = turns
        self._secret = turns.secret if turns is not None else ""
        self._field: Field = "messages"
        self._key = key
        self.body = self.rest = body
        self.count = 0
        self.known: Sequence[Message] = ()
        self.memo = TurnMemo()
        self._earlier: EarlierBody | None = None
        self._made: tuple[Sequence[int], Sequence[Message]] | None = None

    def continue_from(self, earlier: EarlierBody) -> None:
        count = earlier.shared(self.body)
        after = _COMMA.match(self.body, earlier.ends[count - 1]) if count else None
        if after is None:
            return
        rest = b"%b%b,%b" % (self.body[: earlier.start], self._marker, self.body[after.end() :])
        if earlier.values + separators(rest) > MAX_VALUES:
            return
        self.count, self.rest, self._earlier = count, rest, earlier
        self.known, self.memo = earlier.messages[: earlier.made[count - 1]], earlier.memo

    @property
    def _marker(self) -> bytes:
        return b'{"role":"user","content":"%b"}' % self._secret.encode()

    @property
    def is_light(self) -> bool:
        """True if the event loop may work on what is new in the body."""
        return is_light(self.rest) and (not self.count or len(self.body) < LIGHT_BYTES)

    def decode(self, decoder: "msgspec.json.Decoder[B]", field: Field = "messages") -> B:
        """The body, in whose `field` the first `count` items are missing; raises InvalidRequest."""
        self._field = field
        if self.count:
            try:
                parsed = decode(decoder, self.rest)
            except InvalidRequest:
                pass  # the whole body decides
            else:
                items = getattr(parsed, field)
                if isinstance(items, list) and items and self._is_marker(items[0]):
                    del items[0]
                    return parsed
            self._start_anew()
        return decode(decoder, self.body)

    def _is_marker(self, item: Any) -> bool:
        if isinstance(item, Raw):
            return bytes(item) == self._marker
        return bool(item.content == self._secret)

    def items(self) -> list[Raw]:
        """The first `count` items."""
        if self._earlier is None:
            return []
        ends = self._earlier.ends[: self.count]
        commas = [_COMMA.match(self.body, end) for end in ends[:-1]]
        starts = [self._earlier.start, *(comma.end() for comma in commas if comma is not None)]
        return [Raw(self.body[a:b]) for a, b in zip(starts, ends, strict=True)]

    def _start_anew(self) -> None:
        self.count, self.rest, self.known = 0, self.body, ()
        self.memo, self._earlier = TurnMemo(), None

    def make(self, messages: Sequence[Sequence[Message]], reading: Reading) -> list[Message]:
        """All messages, of which these were made of the new items, those of each apart.

        An item of which `reading` holds more than messages must be read again with each turn.
        """
        made = [*self.known]
        for found in messages:
            made += found
        if reading.is_plain:
            self._made = [*accumulate(map(len, messages), initial=len(self.known))][1:], made
        return made

    def keep(self, request: GenerateRequest, tenant: str) -> None:
        """Have the next turn of this body's conversation continue from it.

        A body that names another tenant than its headers do is not kept: whoever may send such
        headers must not see by the time of an answer that another tenant has sent the same.
        """
        if self._turns is None or self._made is None or request.cache_salt != tenant:
            return
        found = self._measured(*self._made) if _is_kept(self.body) else None
        if found is not None:
            request.memo = self.memo
            self._turns.put(self._key, found, self._earlier)

    def _measured(self, made: Sequence[int], messages: Sequence[Message]) -> EarlierBody | None:
        """The body with the offsets of its items; None if they are not where they seem to be."""
        try:
            frame: Struct = _frames[self._field].decode(self.rest)
            items = [*map(bytes, getattr(frame, self._field))]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        body, earlier = self.body, self._earlier
        if earlier is None:
            start = end = body.find(items[0][:PROBE])  # a short text is found faster
            before, ends, counts = 0, list[int](), list[int]()
        else:
            del items[0]  # the marker
            start, end = earlier.start, earlier.ends[self.count - 1]
            before, ends = end, [*earlier.ends[: self.count]]
            counts = [*earlier.made[: self.count]]
        for item in items:
            if ends:
                comma = _COMMA.match(body, end)
                if comma is None:
                    return None
                end = comma.end()
            if not body.startswith(item, end):
                return None
            end += len(item)
            ends.append(end)
        values = separators(body[before:end]) + (earlier.values if earlier is not None else 0)
        return EarlierBody(body[:end], start, ends, [*counts, *made], messages, values, self.memo)


class Turns:
    """The last bodies of conversations, bounded by `max_bytes`; by tenant, so that none sees or
    times what another has sent.

    `secret` makes the marker; no client may guess it.
    """

    def __init__(self, max_bytes: int, secret: str) -> None:
        self.secret = secret
        self._bodies: FairLru[Key, EarlierBody] = FairLru(max_bytes, _size)

    @property
    def size(self) -> int:
        """About the bytes in memory."""
        return self._bodies.size

    def open(self, tenant: str, api: str, body: bytes) -> TurnBody:
        """The body as a turn of a conversation that the tenant has begun in this API."""
        turn = TurnBody(body, self, (tenant, api))
        size = 1 << len(body).bit_length() - 1 if _is_kept(body) else 0
        while size >= MIN_BYTES:
            key = tenant, api, size, body[size - WINDOW : size]
            earlier = self._bodies.get(owner(tenant), key)
            if earlier is not None:
                turn.continue_from(earlier)
                break
            size >>= 1
        return turn

    def put(self, key: tuple[str, str], body: EarlierBody, before: EarlierBody | None) -> None:
        """Keep a body in place of the one that it continues."""
        of = owner(key[0])
        if before is not None:
            self._bodies.pop(of, (*key, *_place(before.body)))
        if len(body.body) >= MIN_BYTES:
            self._bodies.put(of, (*key, *_place(body.body)), body)


def _is_kept(body: bytes) -> bool:
    return MIN_BYTES <= len(body) <= MAX_BYTES


def _place(body: bytes) -> tuple[int, bytes]:
    size = 1 << len(body).bit_length() - 1
    return size, body[size - WINDOW : size]


def _size(_: Key, body: EarlierBody) -> int:
    sizes = SIZE * len(body.body), ITEM_BYTES * len(body.ends), VALUE_BYTES * body.values
    return sum(sizes)
