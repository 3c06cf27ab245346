"""Record the streams of vLLM: `python -m support.event_streams.record_vllm` in its environment."""

from pathlib import Path
from random import Random
from typing import Any

import vllm
from support.event_streams.keys import MODEL, PLAIN, STRANGERS, TENANTS, Key
from support.event_streams.stream import Answers, StreamWriter
from support.event_streams.vllm_cache import ONE_LAYER, SIZE, SmallScheduler
from support.tiny import tiny_model
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvmesh.hashing import salt

FULL = FullAttentionSpec(block_size=SIZE, **ONE_LAYER)
WINDOW = SlidingWindowSpec(block_size=SIZE, sliding_window=2 * SIZE, **ONE_LAYER)
CHUNKS = ChunkedLocalAttentionSpec(block_size=SIZE, attention_chunk_size=4 * SIZE, **ONE_LAYER)
MLA = MLAAttentionSpec(block_size=SIZE, **(ONE_LAYER | {"head_size": 64}))
ADAPTERS = (
    PLAIN,
    Key(salt(MODEL, "lora-a"), adapter="lora-a"),
    Key(salt(MODEL, "lora-b"), adapter="lora-b"),
)
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
HOST_BYTES = 60 * 2 * SIZE * 32 * 4  # sixty blocks


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

    def live(self, rounds: int, asked: int, resets: bool, **fields: Any) -> None:
        random, cache = self.random, self.cache
        for _ in range(rounds):
            together = [
                cache.request(
                    self.prompt(), random.choice(self.keys), random.randrange(1, SIZE), **fields
                )
                for _ in range(random.randrange(1, 4))
            ]
            cache.run(*together)
            if resets and random.random() < 0.05:
                cache.reset(connector=random.random() < 0.5)
            for _ in range(asked):
                cache.lookup(self.prompt(), random.choice(self.asked))


class Recorder:
    """Records streams with one model's configuration."""

    def __init__(self, model: Path) -> None:
        self.model = model

    def record(
        self,
        mode: str,
        *groups: Any,
        keys: tuple[Key, ...] = (PLAIN,),
        answers: Answers = "exact",
        rounds: int = 60,
        asked: int = 6,
        seed: int = 1,
        resets: bool = True,
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
            tenants=keys is TENANTS,
            answers=answers,
        )
        small = SmallScheduler(writer, self.model, list(groups) or [FULL], **cache)
        Life(small, Random(seed), keys).live(rounds, asked, resets, **(request or {}))
        small.close()
        path = writer.write()
        print(f"{path.name}: {len(writer.stream.steps)} steps, {path.stat().st_size} bytes")


def main() -> None:
    record = Recorder(tiny_model()).record
    record("plain")
    record("tenants", keys=TENANTS)
    record("own-salts", keys=STRANGERS)
    record("adapters", keys=ADAPTERS)
    record("mla", MLA)
    record("data-parallel-rank", rank=1)
    record("windows-alone", WINDOW, answers="less")
    record("chunks-alone", CHUNKS, answers="less")
    record("hybrid", FULL, WINDOW, answers="more")
    record("hybrid-windows-first", WINDOW, FULL, answers="more")
    record("full-report", request={"report": "full"}, answers="more")
    record("draft", draft=True, answers="draft")
    for described in (False, True):
        extra = {"cpu_bytes_to_use": HOST_BYTES, "self_describing_kv_events": described}
        name = "offloading-described" if described else "offloading"
        for keys in ((PLAIN,), TENANTS):
            record(
                name + ("-tenants" if keys is TENANTS else ""),
                connector=OFFLOADING | {"kv_connector_extra_config": extra},
                keys=keys,
            )


if __name__ == "__main__":
    main()
