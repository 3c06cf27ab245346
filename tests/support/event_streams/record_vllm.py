"""Record the streams of vLLM: `python -m support.event_streams.record_vllm` in its environment."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvmesh.hashing import salt
from support.event_streams.keys import MODEL, PLAIN, STRANGERS, TENANTS, Key, tenant
from support.event_streams.stream import StreamWriter
from support.event_streams.vllm_cache import BLOCK_BYTES, ONE_LAYER, SIZE, SmallScheduler
from support.tiny import tiny_model

FULL = FullAttentionSpec(block_size=SIZE, **ONE_LAYER)
WINDOW = SlidingWindowSpec(block_size=SIZE, sliding_window=2 * SIZE, **ONE_LAYER)
CHUNKS = ChunkedLocalAttentionSpec(block_size=SIZE, attention_chunk_size=4 * SIZE, **ONE_LAYER)
STATES = MambaSpec(
    block_size=SIZE, shapes=((8, 8),), dtypes=(torch.float32,), mamba_cache_mode="align"
)
MLA = MLAAttentionSpec(block_size=SIZE, **(ONE_LAYER | {"head_size": 64}))
ADAPTERS = (
    PLAIN,
    Key(salt(MODEL, "lora-a"), adapter="lora-a"),
    Key(salt(MODEL, "lora-b"), adapter="lora-b"),
)
MIXED = (
    *(*ADAPTERS, *TENANTS[1:], Key(0, "mine", adapter="lora-b")),
    tenant("acme", 0xC3)._replace(adapter="lora-a"),
)
GUESSES = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
HOST_BYTES = 60 * BLOCK_BYTES


class Life:
    """Requests with common beginnings, one to three at a time; no prompt is looked up meanwhile."""

    def __init__(self, cache: SmallScheduler, random: Random, keys: tuple[Key, ...]) -> None:
        self.cache, self.random, self.keys = cache, random, keys
        self.asked = [key for key in keys if key.salt]
        self.roots = [[100 * n + i % 7 for i in range(3 * SIZE + n)] for n in range(1, 4)]

    def prompt(self) -> list[int]:
        random = self.random
        tokens = list(random.choice(self.roots))
        for _ in range(random.randrange(4)):
            tokens += [1000 + random.randrange(3)] * random.randrange(1, 2 * SIZE + 2)
        return tokens

    def live(
        self,
        rounds: int,
        asked: int,
        resets: bool,
        images: bool = False,
        embeddings: bool = False,
        answer: int = SIZE,
        choices: int = 1,
        **fields: Any,
    ) -> None:
        """`answer` bounds its tokens; longer ones than a block are looked up, too."""
        random, cache = self.random, self.cache
        if embeddings:  # vLLM has zeros in the place of their tokens
            self.roots.append([0] * (3 * SIZE + 4))
        for _ in range(rounds):
            together = []
            for _ in range(random.randrange(1, 4)):
                tokens, key = self.prompt(), random.choice(self.keys)
                most = random.randrange(1, answer)
                together += [cache.request(tokens, key, most, **fields) for _ in range(choices)]
            if images:
                tokens = self.prompt()
                image = cache.image(random.choice("ab"))
                together.append(cache.request(tokens, random.choice(self.keys), mm_features=image))
            if embeddings:
                together += self.embedded(self.prompt())
            cache.run(*together)
            cache.settle()
            if resets and random.random() < 0.15:
                cache.reset(connector=random.random() < 0.5)
            for _ in range(asked):
                ended = answer > SIZE and random.random() < 0.5
                tokens = random.choice(cache.ended[-8:]) if ended else self.prompt()
                cache.lookup(tokens, random.choice(self.asked))

    def embedded(self, tokens: list[int]) -> list[Any]:
        """Prompts of embeddings: one without tokens, one that has some in between."""
        vectors = torch.full((len(tokens), 4), float(self.random.randrange(3)))
        are_tokens = [number % 40 < 8 for number in range(len(tokens))]
        key = self.random.choice(self.keys)
        mixed: dict[str, Any] = {"prompt_embeds": vectors, "prompt_is_token_ids": are_tokens}
        return [
            self.cache.request(None, key, prompt_embeds=vectors),
            self.cache.request(tokens, key, **mixed),
        ]


class Recorder:
    """Records streams with one model's configuration."""

    def __init__(self, model: Path) -> None:
        self.model = model

    def record(
        self,
        mode: str,
        *groups: Any,
        keys: tuple[Key, ...] = (PLAIN,),
        rounds: int = 60,
        asked: int = 6,
        seed: int = 1,
        resets: bool = True,
        lives: int = 1,
        request: dict[str, Any] | None = None,
        **cache: Any,
    ) -> None:
        writer = StreamWriter(
            engine="vllm",
            version=vllm.__version__,
            mode=mode,
            how=f"the package's own scheduler, {[type(group).__name__ for group in groups]}",
            block_size=SIZE,
            model=MODEL,
            counted=True,
            tenants=any(key.salt and key.cache_salt for key in keys),
        )
        random = Random(seed)

        def live() -> None:
            small = SmallScheduler(writer, self.model, list(groups) or [FULL], **cache)
            Life(small, random, keys).live(rounds, asked, resets, **(request or {}))
            small.close()

        writer.record(lives, live)


def main() -> None:
    record = Recorder(tiny_model()).record
    if hasattr(VllmConfig, "num_hash_lookahead_tokens"):  # vLLM 0.33, for what differs there
        record("draft-lookahead", draft=True)
        record("draft-lookahead-tenants", draft=True, keys=TENANTS)
        record("draft-lookahead-images", draft=True, request={"images": True})
        return
    record("plain")
    record("tenants", keys=TENANTS)
    record("own-salts", keys=STRANGERS)
    record("adapters", keys=ADAPTERS)
    record("restarts", lives=3, rounds=20, keys=TENANTS)
    record("mla", MLA)
    record("data-parallel-rank", rank=1)
    record("windows-alone", WINDOW, blocks=24, resets=False)
    record("chunks-alone", CHUNKS)
    record("hybrid", FULL, WINDOW)
    record("hybrid-windows-first", WINDOW, FULL)
    record("full-report", resets=False, request={"report": "full"})
    record("hybrid-states", FULL, STATES)
    record("hybrid-states-parts", FULL, STATES, unit=SIZE // 2)
    long = {"answer": 4 * SIZE}
    record("preempted", keys=TENANTS, blocks=14, resets=False, request=long)
    record("steps-ahead", keys=ADAPTERS, scheduler=AsyncScheduler, request=long)
    record("draft", draft=True)
    record("guesses", request={"answer": 3 * SIZE}, speculative_config=GUESSES)
    record("choices", keys=TENANTS, request={"choices": 3, "answer": 3 * SIZE})
    record("embeddings", keys=TENANTS, request={"embeddings": True}, enable_prompt_embeds=True)
    record("images", request={"images": True})
    record("mixed", keys=MIXED, request={"images": True} | long)
    record_offloading(record)


def record_offloading(record: Callable[..., None]) -> None:
    for described in (False, True):
        extra = {"cpu_bytes_to_use": HOST_BYTES, "self_describing_kv_events": described}
        name = "offloading-described" if described else "offloading"
        record(name, connector=_offloading(extra), resets=False)
        record(f"{name}-tenants", connector=_offloading(extra), resets=False, keys=TENANTS)
        record(f"{name}-reset", connector=_offloading(extra))
        chunks = _offloading(extra | {"block_size": 4 * SIZE})
        record(f"{name}-chunks", connector=chunks, resets=False)
        late = {"connector": _offloading(extra), "late": True, "blocks": 16, "resets": False}
        record(f"{name}-late", **late)
        record(f"{name}-late-tenants", keys=TENANTS, **late)
    host = {"cpu_bytes_to_use": HOST_BYTES, "self_describing_kv_events": True}
    mixed: dict[str, Any] = {"keys": MIXED, "request": {"images": True}, "resets": False}
    record("mixed-offloading", connector=_offloading(host), late=True, blocks=16, **mixed)
    record("simple-offloading", connector=_simple(), **mixed)
    record("simple-offloading-lazy", connector=_simple(lazy_offload=True), blocks=20, **mixed)
    file = {"kv_offload_backend": "disk", "disk_path": "unused", "disk_capacity_bytes": HOST_BYTES}
    record("simple-offloading-disk", connector=_simple(**file), keys=TENANTS)
    record_disk(record, "disk", resets=False)
    record_disk(record, "disk-tenants", keys=TENANTS, resets=False)
    record_disk(record, "disk-restarts", keys=TENANTS, lives=2)


def record_disk(record: Callable[..., None], mode: str, **life: Any) -> None:
    """Host memory of thirty blocks, and files."""
    with tempfile.TemporaryDirectory() as files:
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": HOST_BYTES // 2,
            "self_describing_kv_events": True,
            "secondary_tiers": [{"type": "fs", "root_dir": files, "enable_kv_events": True}],
        }
        record(mode, connector=_offloading(extra), **life)


def _simple(**extra: Any) -> dict[str, Any]:
    extra["cpu_bytes_to_use"] = HOST_BYTES
    return _offloading(extra) | {"kv_connector": "SimpleCPUOffloadConnector"}


def _offloading(extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


if __name__ == "__main__":
    main()
