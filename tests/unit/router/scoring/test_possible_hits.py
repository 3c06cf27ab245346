"""Blocks that a decision could have had: on which rank, and why that one was not chosen."""

from random import Random
from typing import Any

from support.routing import BLOCK, Placement, overlaps, request, sequence, worker

from kvmesh.bus.messages import Elsewhere, PossibleHits, Removal
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.scoring.overlaps import Overlaps
from kvmesh.settings.schema import RouterSettings

TEN = sequence(*range(10))


def core(*names: str, **settings: Any) -> RouterCore:
    router = RouterCore("m", "r", RouterSettings(**settings), Random(1))
    for name in names:
        router.join(worker(name))
    return router


def possible(router: RouterCore, held: Overlaps | None, **changes: Any) -> PossibleHits | None:
    return router.decide(request("1", TEN, **changes), held, 0.0).possible


def elsewhere(router: RouterCore, held: Overlaps, **changes: Any) -> Elsewhere | None:
    found = possible(router, held, **changes)
    assert found is not None
    return found.elsewhere


def test_nothing_is_possible_elsewhere_if_the_best_rank_is_chosen() -> None:
    found = possible(core("a", "b"), overlaps({"a": (4,), "b": (2,)}))
    assert found == PossibleHits(chosen=4)


def test_without_the_index_nothing_is_known() -> None:
    assert possible(core("a"), None) is None


def place(router: RouterCore, name: str, blocks: bytes, to: str) -> None:
    placed = request(name, blocks, placement=Placement(instance=to))
    router.commit(router.decide(placed, None, 0.0), 0.0)


def test_a_loaded_rank_is_passed_over_for_its_load() -> None:
    router = core("a", "b")
    for number in range(20):
        place(router, f"r{number}", sequence(100 + number, *range(200, 220)), "a")
    assert elsewhere(router, overlaps({"a": (6,)})) == Elsewhere(
        instance="a", rank=0, blocks=6, reason="load"
    )


def test_a_rank_that_may_not_run_the_request_has_a_reason() -> None:
    router, held = core("a", "b"), overlaps({"a": (6,)})
    cases = {
        "constraints": Placement(instance="b"),
        "excluded": Placement(exclude=["a"]),
    }
    for reason, placement in cases.items():
        found = elsewhere(router, held, placement=placement)
        assert found is not None
        assert found.reason == reason
    router.join(worker("a", draining=True))
    found = elsewhere(router, held)
    assert found is not None
    assert found.reason == "draining"
    found = elsewhere(router, overlaps({"gone": (6,)}))
    assert found is not None
    assert found.reason == "gone"


def test_a_rank_of_another_role_has_a_reason() -> None:
    router, held = core(), overlaps({"a": (6,)})
    router.join(worker("a", serves="decode", needs_handoff=True))
    router.join(worker("p", serves="prefill"))
    found = possible(router, held)
    assert found is not None
    assert found.elsewhere == Elsewhere(instance="a", rank=0, blocks=6, reason="role")


def test_a_busy_rank_has_a_reason() -> None:
    router = core("a", "b", busy_blocks=1)
    place(router, "x", TEN, "a")
    found = elsewhere(router, overlaps({"a": (6,)}))
    assert found is not None
    assert found.reason == "busy"


def test_what_running_requests_compute_is_not_held() -> None:
    router = core("a")
    router.commit(router.decide(request("0", TEN), None, 0.0), 0.0)
    decision = router.decide(request("1", TEN), Overlaps([], b""), 0.0)
    assert sum(decision.chosen.overlap) == 10
    assert decision.possible == PossibleHits(chosen=0, running=10)


def test_the_removals_of_the_index_are_passed_on() -> None:
    removals = [Removal(2, 3, "a", 0, 5.0, "evicted", "r")]
    held = overlaps({"a": (2,)})._replace(removals=removals, since=1.0)
    assert possible(core("a"), held) == PossibleHits(chosen=2, removals=removals, since=1.0)


def test_prompts_of_partial_blocks_have_no_further_blocks() -> None:
    found = possible(core("a"), overlaps({"a": (10,)}), tokens=10 * BLOCK + 5)
    assert found == PossibleHits(chosen=10)
