"""Rendering of decisions and outcomes by `kvmesh explain`."""

import io
import math

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from kvmesh.bus.messages import (
    CacheAccount,
    CacheLoss,
    Candidate,
    ComputedAhead,
    Decision,
    Hints,
    Outcome,
    RouteEvent,
)
from kvmesh.cli.explain import best_rejected, show


def candidate(worker: str, cost: float, overlap: int = 0) -> Candidate:
    return Candidate(
        instance=f"{worker}-1", worker=worker, rank=0, overlap=[overlap, 0, 3, 0], prefill=1.0,
        decode=12.0, requests=2, cost=cost,
    )  # fmt: skip


DECISION = Decision(
    request="chatcmpl-1", model="m", time=0.0, router="r", policy="kv",
    chosen=candidate("a", 10.0, 8), candidates=[candidate("a", 10.0, 8), candidate("b", 18.5)],
    tokens=170, sequence_hashes=b"\0" * 80, max_tokens=5, block_size=16, eligible=7, wait_s=1.25,
    index_s=0.0004, note="session affinity",
)  # fmt: skip
OUTCOME = Outcome(
    request="chatcmpl-1", instance="a-1", time=1.0, cached_tokens=128, output_tokens=1234,
    ttft_s=0.05, total_s=3.0, finish="stop",
)  # fmt: skip


def text(*events: RouteEvent) -> str:
    out = io.StringIO()
    show(events, Console(file=out, width=160, highlight=False))
    return out.getvalue()


@pytest.mark.parametrize(
    "part",
    [
        "chatcmpl-1: 170 tokens of m, 10 full blocks",
        "to a rank 0 (a-1) by kv",
        "waited 1.25 s in the queue, 0.4 ms for the index",
        "note: session affinity",
        "8.5 cheaper than the best alternative, b rank 0",
        "disk blocks",
        "and 5 more",
        "stop on a-1",
        "first token after 50.0 ms, all 1,234 after 3.00 s",
        "cached 128 prompt tokens, expected 176",
    ],
)
def test_the_text_has_the_essentials(part: str) -> None:
    assert part in text(DECISION, OUTCOME)


def test_what_was_computed_ahead_is_shown_with_its_use() -> None:
    ahead = ComputedAhead(prefetch="sp_1", after="chatcmpl-0", first=512, tokens=640, used=608)
    shown = text(DECISION, replace(OUTCOME, ahead=ahead))
    assert "640 tokens (512 to 1,152) were to be computed ahead after chatcmpl-0" in shown
    assert "chatcmpl-0: 608 of them used\n" in shown
    useless = text(DECISION, replace(OUTCOME, ahead=replace(ahead, used=0, differs=True)))
    assert "chatcmpl-0: none used, as this prompt differs from the predicted one\n" in useless


def test_unused_tiers_are_omitted() -> None:
    assert "host blocks" not in text(DECISION)


def test_a_choice_against_the_cost_is_stated() -> None:
    expensive = msgspec.structs.replace(DECISION, chosen=DECISION.candidates[1])
    assert "8.5 more expensive than the best alternative, a rank 0" in text(expensive)
    alone = msgspec.structs.replace(DECISION, candidates=[])
    assert best_rejected(alone) is None
    assert "▸" in text(alone)


def test_an_outcome_without_a_decision_or_token_is_shown() -> None:
    lost = msgspec.structs.replace(OUTCOME, ttft_s=None, finish="error")
    assert "no token, all" in text(lost)


def test_the_caller_is_shown_as_people_name_it() -> None:
    hints = Hints(session="tag\x1fs-1", tenant="gold", fair_class="x", priority=2)
    assert "  session s-1, class gold/x, priority 2\n" in text(replace(DECISION, hints=hints))
    sent = replace(OUTCOME, tenant="team-a", key="ci", client="mine", device_s=0.25)
    assert "  tenant team-a, key ci, client's id mine, 250.0 ms of device time" in text(sent)
    assert "tenant" not in text(DECISION, OUTCOME)


@pytest.mark.parametrize("time", [math.nan, math.inf, -1e300, 1e18])
def test_a_removal_at_an_impossible_time_is_shown_without_it(time: float) -> None:
    loss = CacheLoss(first=0, tokens=9, reason="evicted", worker="w", tier=0, time=time)
    cache = CacheAccount(prompt_tokens=170, losses=[loss], new=161)
    assert "(w, engine memory)" in text(DECISION, replace(OUTCOME, cache=cache))


def test_names_with_control_characters_are_escaped() -> None:
    outcome = replace(OUTCOME, tenant="\x1b[31mred\nx")
    assert "tenant \\x1b[31mred\\nx" in text(DECISION, outcome)
