"""A publisher of KV events like vLLM's and SGLang's: numbered messages, with replay."""

import asyncio
from array import array
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvmesh.hashing import block_hashes
from support.wait import PATIENCE_S

END = b"\xff" * 8


class EngineCache:
    """The block hashes of an engine, chained over tokens; `events` are maps in vLLM's form."""

    def __init__(self, block_size: int, key: str = "") -> None:
        self.block_size = block_size
        self._seed = hash_text(key)

    def hashes(self, tokens: list[int], extra: str | None = None) -> list[int]:
        packed = array("I", tokens).tobytes()
        salt = self._seed ^ hash_text(extra or "")
        return list(array("Q", block_hashes(packed, self.block_size, salt)[1]))

    def stored(
        self, tokens: list[int], start: int = 0, extra: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        """The blocks of a prompt from block `start` on."""
        names = self.hashes(tokens, extra)
        first = None if extra is None or start else [extra]
        return {
            "type": "BlockStored",
            "block_hashes": names[start:],
            "parent_block_hash": names[start - 1] if start else None,
            "token_ids": tokens[start * self.block_size : len(names) * self.block_size],
            "block_size": self.block_size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [first, *([None] * (len(names) - start - 1))],
            **fields,
        }

    def removed(
        self, tokens: list[int], *positions: int, extra: str | None = None
    ) -> dict[str, Any]:
        names = self.hashes(tokens, extra)
        return {
            "type": "BlockRemoved",
            "block_hashes": [names[position] for position in positions],
            "medium": "GPU",
        }


def hash_text(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) if text else 0


class ZmqPublisher:
    """Publishes on `endpoint`; repeats the newest `retained` messages on `replay` on request."""

    def __init__(
        self, folder: Path, retained: int = 1000, prefix: str = "", rank: str = ""
    ) -> None:
        self.endpoint = f"ipc://{folder}/{prefix}events{rank}"
        self.replay = f"ipc://{folder}/{prefix}replay{rank}"
        self.sent: dict[int, bytes] = {}
        self.next = 0
        self._retained = retained
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.bind(self.endpoint)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.replay)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._serve())

    async def subscribed(self) -> None:
        """Wait for a subscriber."""
        await asyncio.wait_for(self._pub.recv(), PATIENCE_S)

    async def send(self, *events: Any, lose: bool = False) -> None:
        """Publish one message; `lose` numbers and stores it without sending."""
        payload = msgspec.msgpack.encode([0.0, list(events), 0])
        await self.send_raw(payload, lose)

    async def send_raw(self, payload: bytes, lose: bool = False) -> None:
        number = self.next.to_bytes(8, "big")
        self.sent[self.next] = payload
        self.sent.pop(self.next - self._retained, None)
        self.next += 1
        if not lose:
            await self._pub.send_multipart([b"", number, payload])

    def restart_numbering(self) -> None:
        self.next = 0
        self.sent.clear()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._context.destroy(linger=0)

    async def _serve(self) -> None:
        while True:
            client, _, first = await self._router.recv_multipart()
            for number, payload in list(self.sent.items()):
                if number >= int.from_bytes(first, "big"):
                    answer = [client, b"", b"", number.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(answer)
            await self._router.send_multipart([client, b"", b"", END, b""])
