"""Record the streams of SGLang: `python -m support.event_streams.record_sglang` in its environment.

Each stream is a random life of a real cache of SGLang on the CPU (see `sglang_cache`): prompts with
common beginnings are inserted, evicted, loaded back, and looked up. A seed decides everything.
"""

from random import Random
from types import SimpleNamespace
from typing import Any

import sglang

from kvmesh.hashing import salt
from support.event_streams.keys import MODEL, PLAIN, STRANGERS, TENANTS, Key, tenant
from support.event_streams.sglang_cache import SmallCache
from support.event_streams.stream import StreamWriter


class Life:
    """Prompts are branches of a few conversations, whose turns share their beginnings."""

    def __init__(self, cache: SmallCache, random: Random, keys: list[Key], page: int) -> None:
        self.cache, self.random, self.keys, self.page = cache, random, keys, page
        self.asked = [key for key in keys if key.salt]
        self.roots = [[100 * n + i % 7 for i in range(3 * page + n)] for n in range(1, 4)]

    def prompt(self) -> list[int]:
        random = self.random
        tokens = list(random.choice(self.roots))
        for _ in range(random.randrange(4)):
            turn = random.randrange(3)
            tokens += [1000 + turn] * random.randrange(1, 2 * self.page + 2)
        return tokens

    def live(self, operations: int, every: int = 5, asked: int = 6) -> None:
        random, cache = self.random, self.cache
        for number in range(operations):
            chance, key = random.random(), random.choice(self.keys)
            if chance < 0.6:
                cache.insert(self.prompt(), key, priority=random.randrange(3))
            elif chance < 0.75:
                count = self.page * random.randrange(1, 9)
                if cache.has_windows and random.random() < 0.5:
                    cache.evict(0, windows=count)
                else:
                    cache.evict(count)
            elif chance < 0.9 and cache.has_host:
                cache.load_back(self.prompt(), key)
            elif chance < 0.97 and cache.has_host:
                cache.evict_host(self.page * random.randrange(1, 9))
            elif chance > 0.995:
                cache.reset()
            if number % every == every - 1:
                for _ in range(asked):
                    cache.lookup(self.prompt(), random.choice(self.asked))


def record(
    mode: str,
    *,
    page: int = 4,
    keys: tuple[Key, ...] = (PLAIN,),
    operations: int = 120,
    lives: int = 1,
    prepare: Any = None,
    seed: int = 1,
    every: int = 5,
    asked: int = 6,
    **cache: Any,
) -> None:
    writer = StreamWriter(
        engine="sglang",
        version=sglang.__version__,
        mode=mode,
        how=f"the package's own cache, {cache}",
        block_size=page,
        model=MODEL,
        counted=False,
        tenants=any(key.salt and key.cache_salt for key in keys),
    )
    random = Random(seed)

    def live() -> None:
        small = SmallCache(writer, tokens=48 * page, page=page, **cache)
        if prepare is not None:
            prepare(small)
        Life(small, random, list(keys), page).live(operations, every, asked)
        small.close()

    writer.record(lives, live)


def main() -> None:
    record("plain")
    record("plain-python-core", core="python")
    record("plain-radix-cache", core="radix")
    record("pages-of-one", page=1)
    record("pages-of-64", page=64, operations=60)
    record("tenants", keys=TENANTS)
    record("own-salts", keys=STRANGERS)
    record("extra-keys", keys=(PLAIN, Key(0, None, "mine")))
    record("restarts", lives=3, operations=50, keys=TENANTS)
    record("mla", pool="mla")
    record("data-parallel-rank", rank=1)
    record("priorities", eviction_policy="priority")
    record("draft", eagle=True)
    record("draft-radix-cache", eagle=True, core="radix")
    record("draft-pages-of-one", eagle=True, page=1)
    record("draft-tenants", eagle=True, keys=TENANTS)
    for number, (policy, keys) in enumerate(
        [("write_through", (PLAIN,)), ("write_back", (PLAIN,)), ("write_through", TENANTS)]
    ):
        record(
            f"hicache-{policy.replace('_', '-')}{'-tenants' if keys is TENANTS else ''}",
            hicache=policy,
            keys=keys,
            operations=400,
            every=1,
            seed=number,
        )
    record("hicache-write-back-tenants", hicache="write_back", keys=TENANTS)
    record("hicache-selective", hicache="write_through_selective")
    record("hicache-draft", hicache="write_back", eagle=True)
    record("hicache-mla", hicache="write_through", pool="mla")
    record("windows-alone", core="windows", window=8)
    record("hybrid-windows", page=1, pool="swa", window=4)
    record("hybrid-windows-hicache", page=1, pool="swa", window=4, hicache="write_through")
    record("adapters", keys=_adapters(), prepare=_name_adapters)
    record(
        "adapters-hicache",
        keys=_adapters(),
        prepare=_name_adapters,
        hicache="write_through",
    )
    mixed: dict[str, Any] = {"hicache": "write_back", "prepare": _name_adapters, "lives": 2}
    record("hicache-mixed", keys=_mixed(), **mixed)
    record("hicache-mixed-draft", keys=_mixed(), eagle=True, **mixed)


ADAPTERS = {"f" * 32: "lora-a", "e" * 32: "lora-b"}


def _adapters() -> tuple[Key, ...]:
    """Requests of adapters: SGLang names each load of one by an id in the request's extra key."""
    named = tuple(Key(salt(MODEL, name), None, lora) for lora, name in ADAPTERS.items())
    return (PLAIN, *named)


def _mixed() -> tuple[Key, ...]:
    """Requests of tenants, adapters, both, and of other clients."""
    of_both = tenant("acme", 0xC3)._replace(extra_key=next(iter(ADAPTERS)))
    return (*_adapters(), *TENANTS[1:], of_both, Key(0, "mine"))


def _name_adapters(cache: SmallCache) -> None:
    for lora, name in ADAPTERS.items():
        cache.names.register(SimpleNamespace(lora_id=lora, extra_key=lora), name)


if __name__ == "__main__":
    main()
