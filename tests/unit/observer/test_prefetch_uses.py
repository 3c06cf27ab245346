"""The request that uses a prefetch, from routing decisions, and how `kvmesh explain` shows it."""

import io
from array import array
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from kvmesh.bus.messages import Candidate, Decision, Hints, Outcome, PrefetchTerms
from kvmesh.cli.explain import own_id, show
from kvmesh.observer.prefetch_uses import MAX_OPEN, PrefetchUses

SIZE = 16


def candidate(worker: str, *overlap: int) -> Candidate:
    return Candidate(
        instance=f"{worker}-1", worker=worker, rank=0, overlap=[*overlap, 0, 0, 0][:4],
        prefill=0.0, decode=0.0, requests=0, cost=1.0,
    )  # fmt: skip


def decision(request: str, hashes: range | list[int], worker: str = "a", **fields: Any) -> Decision:
    made = Decision(
        request=request, model="m", time=100.0, router="r", policy="kv", chosen=candidate(worker),
        candidates=[], tokens=SIZE * len(hashes) + 5, max_tokens=1, block_size=SIZE,
        sequence_hashes=array("Q", hashes).tobytes(),
    )  # fmt: skip
    return replace(made, **fields)


def prefetch(name: str = "pf_1", blocks: int = 10, **fields: Any) -> Decision:
    """It finds 2 blocks in the engine and 3 on the host, and may compute 4."""
    terms = PrefetchTerms(compute=4 * SIZE + 3)
    given = {"prefetch": terms, "chosen": candidate("a", 2, 3), **fields}
    return decision(name, range(blocks), **given)


def outcome(request: str, *tiers: int) -> Outcome:
    return Outcome(
        request=request, instance="a-1", time=103.0, cached_tokens=sum(tiers), output_tokens=1,
        ttft_s=0.1, total_s=0.2, finish="stop", cached_tiers=list(tiers),
    )  # fmt: skip


def used(*events: Decision | Outcome) -> tuple[PrefetchUses, int]:
    """The uses, and the tokens of `pf_1` that were used."""
    uses = PrefetchUses()
    for event in events:
        uses.add(event)
    use = uses.of_prefetch("pf_1")
    assert use is not None
    return uses, use.used_tokens


@pytest.mark.parametrize(
    ("tiers", "tokens"), [((9, 0), 7), ((5, 4), 3), ((12, 0), 7), ((2, 0), 0), ((0, 5), 0)]
)
def test_tokens_that_the_request_found_in_the_engine_are_used(
    tiers: tuple[int, ...], tokens: int
) -> None:
    found = outcome("c", *(SIZE * blocks for blocks in tiers))
    uses, count = used(prefetch(), decision("c", range(12)), found)
    assert count == SIZE * tokens
    (use,) = uses.of_request("c")
    assert (use.first_token, use.tokens_to_load) == (2 * SIZE, 3 * SIZE)
    assert use.tokens_to_compute == 4 * SIZE


def test_an_engine_that_counts_no_tiers_is_believed() -> None:
    found = replace(outcome("c"), cached_tokens=9 * SIZE)
    assert used(prefetch(), decision("c", range(12)), found)[1] == 7 * SIZE


def test_the_first_request_with_the_prompt_ends_a_prefetch() -> None:
    shorter, later = decision("c", range(8)), decision("d", range(14))
    unrelated = decision("b", [0, 1, 2, 99])
    uses, _ = used(prefetch(), unrelated, decision("x", []), shorter, later)
    assert [use.prefetch.request for use in uses.of_request("c")] == ["pf_1"]
    assert not uses.of_request("b")
    assert not uses.of_request("d")


def test_another_prompt_of_the_session_ends_it_without_a_use() -> None:
    hints = Hints(session="s")
    asked, real = prefetch(hints=hints), decision("c", [0, 1, 2, 99], hints=hints)
    uses, count = used(asked, real, outcome("c", 3 * SIZE, 0))
    assert count == SIZE  # a block that both prompts share and the engine did not have
    assert uses.of_request("c")[0].differs
    assert "16 of them used, as its prompt differs after 48 tokens" in text(uses, asked)


def test_a_request_placed_elsewhere_uses_nothing() -> None:
    uses, count = used(prefetch(), decision("c", range(12), "b"), outcome("c", 9 * SIZE))
    assert count == 0
    assert "none used, as it was placed on b" in text(uses, prefetch())


def test_the_last_attempt_of_a_request_counts() -> None:
    first, second = decision("c", range(12), "b"), decision("c.1", range(12), "a")
    assert used(prefetch(), first, second, outcome("c.1", 9 * SIZE))[1] == 7 * SIZE


def test_the_prefill_worker_is_the_one_that_prefetches() -> None:
    apart: dict[str, Any] = {"prefill": candidate("p", 1), "chosen": candidate("d")}
    asked, real = prefetch(**apart), decision("c", range(12), prefill=candidate("p", 5))
    assert used(asked, real, outcome("c", 5 * SIZE))[1] == 4 * SIZE


def test_prefetches_that_wait_are_bounded() -> None:
    uses = PrefetchUses()
    for number in range(MAX_OPEN + 1):
        uses.add(prefetch(f"pf_{number}"))
    assert uses.of_prefetch("pf_0") is None
    assert uses.of_prefetch(f"pf_{MAX_OPEN}") is not None


def text(uses: PrefetchUses, *events: Decision | Outcome) -> str:
    out = io.StringIO()
    show(events, Console(file=out, width=160, highlight=False), uses)
    return out.getvalue()


def test_a_request_shows_its_prefetch_and_a_prefetch_its_request() -> None:
    asked, real, found = prefetch(), decision("c", range(12), time=102.5), outcome("c", 144, 0)
    uses, _ = used(asked, real, found)
    for shown in (text(uses, real, found), text(uses, asked)):
        assert "on a rank 0 (a-1): 112 tokens (32 to 144), 48 to be loaded and 64 to be" in shown
        assert "  c came 2.50 s later: 112 of them used\n" in shown
    assert "a prefetch: to be loaded now, computing 67 tokens at most, for 60 s" in text(
        uses, asked
    )


def test_a_prefetch_without_a_request_or_a_purpose_is_shown() -> None:
    asked = prefetch(chosen=candidate("a", 10))
    uses, _ = used(asked)
    assert "nothing was to be loaded or computed" in text(uses, asked)
    assert "no request with its prompt or of its session has come" in text(uses, asked)
    uses, _ = used(asked, decision("c", range(10)))
    assert "  c came 0.0 ms later and has not ended\n" in text(uses, asked)


def test_the_id_of_the_api_is_that_of_the_decision() -> None:
    assert own_id("pf_12.worker-0-ab") == "pf_12"
    assert own_id("chat-1.1") == "chat-1.1"
