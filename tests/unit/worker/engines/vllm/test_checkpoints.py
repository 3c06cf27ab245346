"""Ends of retained prefixes, where vLLM is to keep states and windows."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvmesh.bus.messages import Retain
from kvmesh.retention.token_ranges import DEFAULTS
from kvmesh.worker.adapters.request_origin import RequestOrigin
from kvmesh.worker.engines.vllm.retention.checkpoints import RetainedPrefixes, retained_prefixes
from kvmesh.worker.engines.vllm.retention.hinted_requests import HintedRequests

SIZE = 16
TOKENS = 100


class SlidingWindowSpec:
    """Known by its name, as vLLM's is."""


class FullAttentionSpec:
    """As above."""


def retention(pinned: int = 0) -> Any:
    return SimpleNamespace(
        group_sizes=[SIZE, SIZE],
        hash_size=SIZE,
        defaults=DEFAULTS,
        has_pins=pinned > 0,
        pinned_end=lambda prompt, now: min(pinned, SIZE * len(prompt)),
    )


def request(*ranges: Retain, **fields: Any) -> Any:
    origin = RequestOrigin(request="r", salt=7, prompt_tokens=TOKENS, retention=list(ranges))
    default = {
        "request_id": "r",
        "num_tokens": TOKENS,
        "num_prompt_tokens": TOKENS,
        "prompt_token_ids": list(range(TOKENS)),
        "mm_features": [],
        "kv_transfer_params": {"kvmesh": msgspec.to_builtins(origin)},
        "sampling_params": None,
        "cache_salt": None,
        "lora_request": None,
        "session_id": None,
    }
    return SimpleNamespace(**{**default, **fields})


def end(asked: Any, pinned: int = 0, dropped: int = 0) -> int:
    return RetainedPrefixes(retention(pinned), HintedRequests(), dropped).end(asked, 0.0)


def kept(stop: int | None, priority: int = 80) -> Retain:
    return Retain(0, stop, priority, explicit=True)


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([], 0),
        ([kept(None)], 0),
        ([kept(TOKENS)], 0),
        ([kept(15)], 0),
        ([kept(50)], 48),
        ([kept(50, priority=20)], 0),
        ([kept(32), kept(70)], 64),
    ],
)
def test_the_last_range_counts_down_to_whole_blocks(ranges: list[Retain], expected: int) -> None:
    assert end(request(*ranges)) == expected


def test_a_longer_pin_counts() -> None:
    assert end(request(kept(50)), pinned=64) == 64
    assert end(request(kept(50)), pinned=32) == 48
    assert end(request(), pinned=96) == 96


def test_a_draft_model_needs_a_block_before() -> None:
    assert end(request(kept(50)), dropped=1) == 32
    assert end(request(kept(20)), dropped=1) == 0


def test_hints_of_a_server_count() -> None:
    hint = msgspec.json.encode({"retention": [{"start": 0, "end": 50, "priority": 80}]})
    sampling = SimpleNamespace(extra_args={"kvmesh": hint.decode()})
    assert end(request(kv_transfer_params=None, sampling_params=sampling)) == 48
    sampling = SimpleNamespace(extra_args={"kvmesh": "{"})
    assert end(request(kv_transfer_params=None, sampling_params=sampling)) == 0


def test_other_requests_retain_nothing() -> None:
    assert end(request(kept(50), kv_transfer_params=None)) == 0
    assert end(request(kept(50), kv_transfer_params={"kvmesh": {"salt": "?"}})) == 0
    assert end(request(kept(50), mm_features=["image"])) == 0


def test_a_request_is_read_once_while_it_waits() -> None:
    prefixes = RetainedPrefixes(retention(), HintedRequests(), 0)
    assert prefixes.end(request(kept(50)), 0.0) == 48
    assert prefixes.end(request(), 0.0) == 48
    prefixes.forget("r")
    assert prefixes.end(request(), 0.0) == 0


def test_full_attention_needs_nothing() -> None:
    config = SimpleNamespace(speculative_config=None)
    for specs, needed in (([FullAttentionSpec()], False), ([SlidingWindowSpec()], True)):
        made = retained_prefixes(config, specs, retention(), HintedRequests())
        assert (made is not None) == needed
