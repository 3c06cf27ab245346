"""SGLang's own caches before the worker's adapter, and the recorded streams beside them."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.event_streams import stream
from support.event_streams.keys import PLAIN, Key
from support.event_streams.stream import Message, StreamWriter

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]


def a_cache(**arguments: Any) -> tuple[Any, StreamWriter]:
    cache = import_module("support.event_streams.sglang_cache")
    writer = StreamWriter(
        engine="sglang", version="", mode="", how="", block_size=4, model="m", counted=False
    )
    return cache.SmallCache(writer, page=4, **arguments), writer


@pytest.mark.parametrize("core", ["rust", "python", "radix"])
def test_a_block_keeps_the_highest_priority_ever(core: str) -> None:
    cache, writer = a_cache(tokens=64, core=core, eviction_policy="priority")
    old, new = list(range(8)), list(range(100, 108))
    cache.insert(old, PLAIN, priority=9)
    cache.insert(old, PLAIN, priority=0)
    cache.insert(new, PLAIN, priority=1)
    cache.evict(8)
    cache.lookup(old, PLAIN)
    cache.lookup(new, PLAIN)
    assert [step.tiers[0] for step in writer.stream.steps if hasattr(step, "tiers")] == [8, 0]
    cache.close()


def test_an_extra_key_alone_does_not_name_a_block() -> None:
    cache, writer = a_cache(tokens=64)
    for key in (PLAIN, Key(0, None, "mine")):
        cache.insert(list(range(8)), key)
    payloads = [step.payload for step in writer.stream.steps if isinstance(step, Message)]
    first, second = (payload.split(b"BlockStored")[1] for payload in payloads[-2:])
    assert first == second
    cache.close()


def test_the_streams_are_those_of_the_installed_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = {path.name: path for path in stream.stream_files() if path.name.startswith("sglang-")}
    monkeypatch.setattr(stream, "FOLDER", tmp_path)
    import_module("support.event_streams.record_sglang").main()
    made = {path.name: path for path in tmp_path.glob("*.gz")}
    assert made.keys() == kept.keys()
    for name, path in made.items():
        assert stream.read_stream(path) == stream.read_stream(kept[name]), name
