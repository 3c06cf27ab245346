"""KV events of vLLM and SGLang over ZeroMQ: decoding, subscription and replay.

A message is `[topic, sequence number (uint64, big-endian), payload]`, the payload msgpack of
`[time, [events], data-parallel rank]`. Events are maps with their `type`, or arrays that begin with
it. Fields differ between engines and versions, so most are optional here: a request's cache salt is
one of vLLM's `extra_keys` and SGLang's `cache_salt`. A second socket, if the engine has one,
replays messages from a sequence number on.

Of vLLM's fields, `session_id` is not read, since the index knows blocks and not sessions, nor is
`ownership`, which names one of several offloading tiers.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvmesh.bus.messages import MessageDecoder
from kvmesh.worker.adapters.cache_ledger import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    fold_hash,
    medium_tier,
    returned_salt,
)

log = logging.getLogger(__name__)
RECEIVE_QUEUE = 10_000
REPLAY_TIMEOUT_S = 5.0
TAIL_CHECK_S = 2.0
END = (1 << 64) - 1
REMOTE = 3  # the tier
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_FIELDS = {
    "BlockStored": (*_STORED, "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
_WHOLE_PREFIX = {None, "full_attention", "mla_attention", "sink_full_attention", "unknown"}
_DECODER = MessageDecoder()


class EventDecoder:
    """Decodes payloads into neutral events.

    A hybrid model has a cache for each of several groups of layers; the first group seen that
    caches whole prefixes represents all of them.
    """

    def __init__(self) -> None:
        self._group: int | None = None

    def decode(self, payload: bytes) -> list[CacheEvent]:
        """The events of one message, without unknown kinds; raises ValueError if malformed."""
        try:
            batch = _DECODER.decode(payload)
            return [event for raw in batch[1] for event in self._event(_named(raw))]
        except (msgspec.MsgspecError, KeyError, IndexError, TypeError, OverflowError) as error:
            raise ValueError(f"malformed KV event: {error!r}") from error

    def _event(self, event: dict[str, Any]) -> Iterator[CacheEvent]:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            yield AllCleared()
        elif kind == "BlockStored" and self._is_chosen_group(event):
            yield _stored(event)
        elif kind == "BlockRemoved" and event.get("group_idx") in (None, self._group):
            hashes = [fold_hash(value) for value in event["block_hashes"]]
            reason, request = event.get("reason"), event.get("request")
            yield BlocksRemoved(hashes, _tier(event), reason, request)

    def _is_chosen_group(self, event: dict[str, Any]) -> bool:
        group = event.get("group_idx")
        if group is None:
            return True
        if self._group is None and event.get("kv_cache_spec_kind") in _WHOLE_PREFIX:
            self._group = group
        return bool(group == self._group)


def event_endpoints(folder: Path) -> dict[str, str]:
    """Sockets in a private folder: events contain all prompts, and the sockets require no key.

    Engines add a rank to the number at the end, and only to endpoints that have "tcp" in them.
    """
    return {
        "endpoint": f"ipc://{folder}/tcp-events:1",
        "replay_endpoint": f"ipc://{folder}/tcp-replay:1",
    }


def rank_endpoint(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank: the number at its end is the first one's plus the rank.

    Engines leave endpoints without "tcp" in them unchanged.
    """
    head, colon, port = endpoint.rpartition(":")
    if not rank or "tcp" not in endpoint or not port.isdecimal():
        return endpoint
    return f"{head}{colon}{int(port) + rank}"


def _named(raw: Any) -> dict[str, Any]:
    if isinstance(raw, dict):
        return raw
    kind, *values = raw
    return {"type": kind, **dict(zip(_FIELDS.get(kind, ()), values, strict=False))}


def _stored(event: dict[str, Any]) -> BlocksStored:
    parent = event.get("parent_block_hash")
    adapter = event.get("lora_name")
    keys = [[event["cache_salt"]]] if event.get("cache_salt") else event.get("extra_keys")
    return BlocksStored(
        [fold_hash(value) for value in event["block_hashes"]],
        None if parent is None else fold_hash(parent),
        array("I", event["token_ids"]).tobytes(),
        event["block_size"],
        _tier(event),
        _salt(keys, adapter),
        adapter,
    )


def _tier(event: dict[str, Any]) -> int:
    """The tier of an event's blocks; those that vLLM offloads to another node are remote."""
    return REMOTE if event.get("locality") == "REMOTE" else medium_tier(event.get("medium"))


def _salt(extra_keys: list[list[Any] | None] | None, adapter: str | None) -> int | None:
    """The mesh's salt, if one of the first block's keys is the engine's cache salt."""
    keys = (extra_keys[0] or ()) if extra_keys else ()
    salts = (returned_salt(key) for key in keys if isinstance(key, str) and key != adapter)
    return next((salt for salt in salts if salt is not None), None)


class ZmqSubscriber:
    """Follows one rank's publisher and delivers every message once, in order.

    `on_payload` gets each payload. `on_restart` is called when the publisher restarts, `on_gap`
    with the number of messages lost for good. The queue is bounded: ZeroMQ drops messages that do
    not fit, and the subscriber requests them again by sequence number.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str | None,
        topic: str,
        on_payload: Callable[[bytes], None],
        on_restart: Callable[[], None],
        on_gap: Callable[[int], None],
    ) -> None:
        self._endpoint = endpoint
        self._replay_endpoint = replay
        self._topic = topic
        self._on_payload = on_payload
        self._on_restart = on_restart
        self._on_gap = on_gap
        self._context = zmq.asyncio.Context()
        self._task: asyncio.Task[None] | None = None
        self._next_seq = 0
        self._replayed: set[int] = set()

    def start(self) -> None:
        """Subscribe; raises zmq.ZMQError for an invalid endpoint."""
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt_string(zmq.SUBSCRIBE, self._topic)
        socket.connect(self._endpoint)
        self._task = asyncio.create_task(self._run(socket), name="kv event subscriber")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._context.destroy(linger=0)

    async def _run(self, socket: zmq.asyncio.Socket) -> None:
        await self._catch_up(None)
        while True:
            if not await socket.poll(TAIL_CHECK_S * 1000):
                await self._catch_up(None)
                continue
            frames = await socket.recv_multipart()
            if len(frames) < 2 or len(frames[-2]) != 8:
                log.warning("ignored a message of %d frames: not a KV event", len(frames))
                continue
            await self._on_message(int.from_bytes(frames[-2], "big"), frames[-1])

    async def _on_message(self, seq: int, payload: bytes) -> None:
        if seq in self._replayed:
            self._replayed.discard(seq)
            return
        if seq < self._next_seq:
            log.info("the KV event publisher at %s restarted", self._endpoint)
            self._next_seq = 0
            self._replayed.clear()
            self._on_restart()
        if seq > self._next_seq:
            await self._catch_up(seq)
        self._next_seq = seq + 1
        self._on_payload(payload)

    async def _catch_up(self, before: int | None) -> None:
        """Replay missed messages: up to message `before`, or all published so far."""
        found = await self._replay(self._next_seq, before)
        end = max([*found, self._next_seq - 1]) + 1 if before is None else before
        missing = end - self._next_seq - len(found)
        if missing:
            self._on_gap(missing)
        for seq in sorted(found):
            self._on_payload(found[seq])
            if before is None:
                self._replayed.add(seq)
        self._next_seq = end
        self._replayed = {seq for seq in self._replayed if seq > end - RECEIVE_QUEUE}

    async def _replay(self, first: int, before: int | None) -> dict[int, bytes]:
        if self._replay_endpoint is None:
            return {}
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._replay_endpoint)
        found: dict[int, bytes] = {}
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", first.to_bytes(8, "big")])
                while (frames := await socket.recv_multipart())[-2] != END.to_bytes(8, "big"):
                    seq = int.from_bytes(frames[-2], "big")
                    if seq >= first and (before is None or seq < before):
                        found[seq] = frames[-1]
        except TimeoutError:
            log.warning("no replay of KV events from %s", self._replay_endpoint)
        finally:
            socket.close()
        return found
