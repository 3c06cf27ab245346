"""Compose streams of engines that do not run here: `python -m support.event_streams.made_by_hand`.

LMCache 0.5.6 (`v1/cache_engine.py`, `integration/vllm/vllm_multi_process_adapter.py`) announces
chunks of 256 tokens: in vLLM's process with the token after each, no removals, and no parent of a
chunk that continues what an earlier call has stored; in its own process with removals.
TensorRT-LLM's events have the form of `KVCacheEventSerializer`.
"""

import json
from random import Random
from typing import Any

import msgspec

from support.event_streams.keys import MODEL, PLAIN
from support.event_streams.stream import StreamWriter

SIZE, CHUNK = 16, 256
ENCODER = msgspec.msgpack.Encoder()


def prompts(random: Random, size: int) -> list[int]:
    tokens = [random.randrange(3)] * (2 * size)
    for _ in range(random.randrange(4)):
        tokens += [10 + random.randrange(3)] * random.randrange(1, 2 * size)
    return tokens


def name(tokens: list[int]) -> int:
    """A hash of all tokens up to a block's end, the same in every run."""
    return int.from_bytes(msgspec.msgpack.encode(tokens)[-4:] + len(tokens).to_bytes(2, "big")) ^ (
        sum((n + 1) * token for n, token in enumerate(tokens)) << 20
    )


def leading(tokens: list[int], size: int, held: dict[int, Any]) -> int:
    """The tokens of the leading chunks that are held."""
    count = 0
    while (end := count + size) <= len(tokens) and name(tokens[:end]) in held:
        count = end
    return count


def lmcache(in_process: bool) -> None:
    writer = StreamWriter(
        engine="lmcache",
        version="0.5.6",
        mode="in-process" if in_process else "multi-process",
        how="composed by hand from the sources",
        block_size=SIZE,
        model=MODEL,
        counted=True,
    )
    random, held = Random(1), dict[int, Any]()
    for _ in range(40):
        tokens, events, before = prompts(random, CHUNK), list[dict[str, Any]](), 0
        for start in range(0, len(tokens) - CHUNK + 1, CHUNK):
            end = start + CHUNK
            if (chunk := name(tokens[:end])) not in held:
                held[chunk] = True
                events.append(
                    {
                        "type": "BlockStored",
                        "block_hashes": [chunk],
                        "parent_block_hash": _parent(tokens[:start], before, in_process),
                        "token_ids": tokens[start : end + in_process],
                        "block_size": CHUNK,
                        "lora_id": None,
                        "medium": "cpu" if in_process else "CPU",
                        "lora_name": None,
                    }
                )
                before = chunk
        if held and not in_process and random.random() < 0.4:
            gone = random.choice(sorted(held))
            del held[gone]
            events.append({"type": "BlockRemoved", "block_hashes": [gone], "medium": "CPU"})
        writer.message(ENCODER.encode([1.0, events, 0]))
        for _ in range(4):
            asked = prompts(random, CHUNK)
            writer.lookup(asked, PLAIN.salt, 0, leading(asked, CHUNK, held))
    print(writer.write().name)


def _parent(tokens: list[int], before: int, in_process: bool) -> int | None:
    """The parent that an event names; in vLLM's process that of the call before, or 0."""
    if not tokens:
        return None
    return before if in_process else name(tokens)


class TensorRtCache:
    """Blocks of device memory, and of the host's into which eviction moves them."""

    def __init__(self, writer: StreamWriter, rank: int | None) -> None:
        self.writer, self.level, self.number = writer, dict[int, int](), 0
        self._rank = {} if rank is None else {"attention_dp_rank": rank}

    def store(self, tokens: list[int]) -> None:
        first, blocks = leading(tokens, SIZE, self.level), list[dict[str, Any]]()
        for start in range(first, len(tokens) - SIZE + 1, SIZE):
            block = name(tokens[: start + SIZE])
            self.level[block] = 0
            blocks.append(
                {
                    "type": "stored_block",
                    "block_hash": block,
                    "tokens": [
                        {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                        for token in tokens[start : start + SIZE]
                    ],
                    "cache_level": 0,
                    "priority": 35,
                }
            )
        if blocks:
            parent = name(tokens[:first]) if first else None
            self.publish({"type": "stored", "parent_hash": parent, "blocks": blocks})

    def move(self, block: int, to: int) -> None:
        """Move a block between levels; -1 removes it."""
        before = self.level.pop(block)
        if to < 0:
            self.publish({"type": "removed", "block_hashes": [block]})
            return
        self.level[block] = to
        change = {"type": "event_diff", "new_value": to, "old_value": before}
        self.publish(
            {"type": "updated", "block_hash": block, "cache_level": change, "priority": None}
        )

    def publish(self, data: dict[str, Any]) -> None:
        event = {"event_id": self.number, "data": data, "window_size": 512, **self._rank}
        self.number += 1
        self.writer.message(json.dumps(event).encode())


def lookup(writer: StreamWriter, tokens: list[int], caches: list[TensorRtCache]) -> None:
    """The tokens that the caches have together."""
    held = {block: level for cache in caches for block, level in cache.level.items() if level}
    device = {b: 0 for cache in caches for b, level in cache.level.items() if not level}
    found = leading(tokens, SIZE, device)
    writer.lookup(tokens, PLAIN.salt, found, leading(tokens, SIZE, held | device) - found)


def tensorrt_llm(mode: str, ranks: list[int | None]) -> None:
    writer = StreamWriter(
        engine="tensorrt_llm",
        version="1.2",
        mode=mode,
        how="composed by hand in the form of the sources",
        block_size=SIZE,
        model=MODEL,
        counted=True,
    )
    random, caches = Random(1), [TensorRtCache(writer, rank) for rank in ranks]
    for cache in caches:
        cache.publish({"type": "created", "num_blocks_per_cache_level": [64, 32]})
    for number in range(60 * len(caches)):
        cache = caches[number % len(caches)]
        cache.store(prompts(random, SIZE))
        for _ in range(random.randrange(3)):
            block = random.choice(sorted(cache.level))
            cache.move(block, 1 - cache.level[block] if random.random() < 0.6 else -1)
        for _ in range(4):
            lookup(writer, prompts(random, SIZE), caches)
    print(writer.write().name)


if __name__ == "__main__":
    lmcache(in_process=True)
    lmcache(in_process=False)
    tensorrt_llm("host", [None])
    tensorrt_llm("attention-ranks", [0, 1])
