"""Served cached tokens beside the expected ones, and what the doctor finds in them."""

from typing import Any

import pytest

from kvmesh.bus.messages import Candidate, Decision, Outcome, PossibleHits, RankEvents, encode
from kvmesh.cli.doctor.cache_checks import caches
from kvmesh.cli.doctor.facts import Facts
from kvmesh.cli.status.served import ServedByWorker, WorkerCache, cache_rows
from kvmesh.observer.decision_text import outcome_lines
from kvmesh.placement_rules.served import ServedTokens, expected_tokens

SIZE = 16
INSTANCE = "w-0-ab"


def decision(
    name: str, overlap: list[int], running: int = 0, time: float = 0.0, hashes: bytes = b""
) -> Decision:
    chosen = Candidate(
        instance=INSTANCE,
        worker="w-0",
        rank=0,
        overlap=overlap,
        prefill=0.0,
        decode=0.0,
        requests=0,
        cost=0.0,
    )
    return Decision(
        request=name,
        model="m",
        time=time,
        router="r",
        policy="p",
        chosen=chosen,
        candidates=[chosen],
        tokens=330,
        sequence_hashes=hashes,
        max_tokens=1,
        block_size=SIZE,
        possible=PossibleHits(chosen=sum(overlap), running=running),
    )


def outcome(name: str, tiers: list[int], **fields: Any) -> Outcome:
    given = {"prompt_tokens": 330, **fields}
    return Outcome(
        request=name,
        instance=INSTANCE,
        time=10.0,
        cached_tokens=sum(tiers),
        cached_tiers=tiers,
        output_tokens=1,
        ttft_s=0.1,
        total_s=0.2,
        finish="stop",
        **given,
    )


@pytest.mark.parametrize(
    ("overlap", "prompt", "expected"),
    [([2, 1], 330, [32, 16]), ([20], 320, [304]), ([10, 10], 320, [160, 144]), ([3], 0, [0])],
)
def test_the_last_token_of_a_prompt_is_computed(
    overlap: list[int], prompt: int, expected: list[int]
) -> None:
    assert expected_tokens(overlap, SIZE, prompt) == expected


def follow(*pairs: tuple[Decision, Outcome]) -> ServedByWorker:
    served = ServedByWorker()
    for placed, ended in pairs:
        served.add(encode(placed))
        served.add(encode(ended))
    return served


def test_blocks_that_a_router_predicts_are_not_announced() -> None:
    assert expected_tokens([4, 2, 1], SIZE, 330, 5) == [64, 16, 0]
    assert expected_tokens([4], SIZE, 330, 0) == [0]


def test_surplus_and_lack_are_told_by_tier() -> None:
    served = follow(
        (decision("a", [4, 2]), outcome("a", [64, 32])),
        (decision("b", [0]), outcome("b", [0, 320])),
        (decision("c", [4]), outcome("c", [0])),
    )
    found = served.since(5.0)[INSTANCE]
    assert (found.requests, found.difference) == (3, [-64, 320])
    assert (found.unexpected, found.missing) == (320, 64)
    assert served.since(11.0) == {}
    served.retain(["another"])
    assert served.since(5.0) == {}


def test_prompts_that_say_nothing_are_left_out() -> None:
    split = decision("a", [0])
    served = follow(
        (Decision(**{**_fields(split), "prefill": split.chosen}), outcome("a", [64])),
        (decision("b", [0]), outcome("b", [64], attempts=2)),
        (decision("c", [0]), outcome("c", [64], prompt_tokens=0)),
        (decision("d", [0]), outcome("d", [])),
    )
    assert served.since(0.0) == {}


def _fields(placed: Decision) -> dict[str, Any]:
    return {name: getattr(placed, name) for name in Decision.__struct_fields__}


@pytest.mark.parametrize(("begun", "unexpected"), [(5.0, 160), (10.5, 320)])
def test_tokens_that_a_running_request_computed_are_no_surprise(
    begun: float, unexpected: int
) -> None:
    hashes = bytes(range(160))
    other = hashes[:80] + bytes(80)
    served = ServedByWorker()
    served.add(encode(decision("first", [0], time=0.0, hashes=hashes)))
    served.add(encode(decision("second", [0], time=begun, hashes=other)))
    served.add(encode(outcome("first", [0])))
    served.add(encode(outcome("second", [320])))
    assert served.since(0.0)[INSTANCE].unexpected == unexpected


def test_explain_names_tokens_from_a_tier_that_announces_nothing() -> None:
    lines = outcome_lines(outcome("a", [64, 256]), decision("a", [4]))
    assert "256 of them were served from a tier that announces nothing" in lines
    lines = outcome_lines(outcome("a", [64, 256]), decision("a", [4], running=20))
    reason = "computed just before by another request, or served from a tier that announces nothing"
    assert f"256 of them were {reason}" in lines
    assert not any(
        "announces" in line for line in outcome_lines(outcome("a", [64]), decision("a", [4]))
    )


def cache(prompts: int, expected: int, served: int, *events: RankEvents) -> WorkerCache:
    total = ServedTokens()
    for _ in range(prompts):
        total.add([expected], [0, served])
    return WorkerCache(INSTANCE, total, list(events))


def texts(*found: WorkerCache, severity: str = "fault") -> list[str]:
    facts = Facts(namespace="kvmesh", caches=list(found))
    return [each.text for each in caches(facts) if each.severity == severity]


def test_an_empty_ledger_of_an_engine_that_serves_cached_tokens_is_a_fault() -> None:
    [text] = texts(cache(2, 0, 320, RankEvents(rank=0, kept=[0, 0, 0, 0])))
    assert "its ledger is empty" in text
    assert texts(cache(2, 0, 0, RankEvents(rank=0, kept=[0, 0, 0, 0]))) == []
    assert texts(cache(2, 0, 320)) == [], "too few prompts"


def test_events_are_told_by_medium_and_reason() -> None:
    ranks = [
        RankEvents(rank=0, kept=[800, 0, 0, 0], lost={"tokens": [600, 0, 0, 0]}),
        RankEvents(rank=1, kept=[12, 0, 0, 0], lost={"tokens": [0, 40, 0, 0]}, malformed=3),
    ]
    expected = (
        "events by medium: engine memory 812 kept, 600 dropped (tokens); host memory 0 kept,"
        " 40 dropped (tokens); 3 messages malformed"
    )
    assert texts(cache(1, 0, 0, *ranks)) == [expected]
    few = RankEvents(rank=0, kept=[800, 10, 0, 0], lost={"tokens": [0, 1, 0, 0]})
    assert texts(cache(1, 0, 0, few)) == []
    [note] = texts(cache(1, 0, 0, few), severity="note")
    assert (
        note == "events by medium: engine memory 800 kept; host memory 10 kept, 1 dropped (tokens)"
    )


def test_what_the_index_cannot_know_is_told_with_its_cause() -> None:
    rank = RankEvents(rank=0, kept=[800, 0, 0, 0], limits=["draft", "windows", "new"], unplaced=7)
    notes = texts(cache(1, 0, 0, rank), severity="note")
    assert notes[0] == "7 blocks wait for a KV event that says what precedes them"
    assert "has a draft model" in notes[1]
    assert "(limit windows)" in notes[3]
    assert "limit new" in notes[2]
    assert texts(cache(1, 0, 0, rank)) == []


def test_a_wrong_index_shows_in_what_is_served() -> None:
    [lacks] = texts(cache(8, 16, 320))
    assert "served 2,432 cached tokens that routers did not expect" in lacks
    assert "engine memory -128, host memory +2,560" in lacks
    [has] = texts(cache(8, 320, 64))
    assert "did not serve 2,048 cached tokens" in has
    assert texts(cache(8, 320, 320)) == texts(cache(7, 0, 320)) == []
    assert "8 prompts" in texts(cache(8, 320, 320), severity="ok")[0]


def test_rows_of_workers_without_prompts_or_events() -> None:
    lost = {"reset": [0, 3, 0, 0]}
    events = {"x": [RankEvents(rank=0, kept=[5, 0, 0, 0], lost=lost, malformed=2)], "mock": []}
    total = ServedTokens()
    total.add([32], [16, 32])
    rows = {row.instance: row for row in cache_rows({"y": total}, events)}
    assert rows.keys() == {"x", "y"}
    assert (rows["x"].kept_blocks, rows["x"].prompts) == ([5, 0, 0, 0], 0)
    assert rows["x"].dropped_blocks == "3 reset (host memory), 2 malformed"
    y = rows["y"]
    assert (y.engine_difference, y.host_difference, y.unexpected_tokens) == (-16, 32, 16)
    assert y.kept_blocks is None
