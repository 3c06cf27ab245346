"""Detection of engines that compute prompts without publishing KV events."""

from typing import Any

from kvmesh.bus.messages import Load
from kvmesh.worker.health.event_silence import SILENT_BLOCKS, SILENT_REQUESTS, EventSilence

SIZE = 16


def load(instance: str = "w-1", **fields: Any) -> Load:
    zeros = dict.fromkeys(Load.__struct_fields__, 0) | {"step_s": 0.0, "busy_s": 0.0}
    return Load(**{**zeros, "instance": instance, **fields})


def computed(requests: int, blocks: int, aborted: int = 0) -> Load:
    tokens = (blocks + requests + aborted) * SIZE
    return load(requests=requests, computed_tokens=tokens, aborted=aborted)


def test_an_engine_that_computes_without_an_event_is_silent_until_the_next_one() -> None:
    silence = EventSilence("worker-0", SIZE)
    assert silence.check([computed(0, 0)], {}) == {}
    assert silence.check([computed(SILENT_REQUESTS, SILENT_BLOCKS - 1)], {}) == {}
    assert silence.check([computed(SILENT_REQUESTS - 1, SILENT_BLOCKS)], {}) == {}
    found = silence.check([computed(SILENT_REQUESTS, SILENT_BLOCKS)], {0: 0})
    assert list(found) == ["0"]
    assert "worker-0 rank 0 computes prompts and publishes no KV events" in found["0"]
    assert silence.check([computed(SILENT_REQUESTS, SILENT_BLOCKS)], {0: 1}) == {}
    assert silence.check([computed(2 * SILENT_REQUESTS, 2 * SILENT_BLOCKS - 1)], {0: 1}) == {}
    assert silence.check([computed(2 * SILENT_REQUESTS, 2 * SILENT_BLOCKS)], {0: 1})


def test_an_engine_without_events_is_silent_however_many_requests_are_aborted() -> None:
    silence = EventSilence("worker-0", SIZE)
    looks = [
        computed(n, n * SILENT_BLOCKS // SILENT_REQUESTS, aborted=n)
        for n in range(SILENT_REQUESTS + 1)
    ]
    found = [bool(silence.check([at], {})) for at in looks]
    assert found == [False] * SILENT_REQUESTS + [True]


def test_cached_waiting_and_aborted_prompts_do_not_count_as_computed() -> None:
    silence = EventSilence("worker-0", SIZE)
    silence.check([computed(0, 0)], {})
    many = 10 * SILENT_BLOCKS * SIZE
    cases: list[dict[str, Any]] = [
        {"cached_tokens": many},
        {"prefill_tokens": many},
        {"aborted": SILENT_REQUESTS},
    ]
    for fields in cases:
        assert (
            silence.check([load(requests=SILENT_REQUESTS, prompt_tokens=many, **fields)], {}) == {}
        )


def test_aborted_prompts_shorter_than_a_block_are_no_blocks() -> None:
    silence = EventSilence("worker-0", SIZE)
    silence.check([computed(0, 0)], {})
    short = (10 * SILENT_BLOCKS + SILENT_REQUESTS) * (SIZE - 1)
    report = load(requests=SILENT_REQUESTS, aborted=10 * SILENT_BLOCKS, computed_tokens=short)
    assert silence.check([report], {}) == {}
