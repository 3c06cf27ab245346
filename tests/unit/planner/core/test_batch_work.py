"""Requests of batch classes: the fleet does not grow for them, unless a promise names them."""

from msgspec.structs import replace
from support.planned_model import PlannedModel, decision, freed, outcome, wait

from kvmesh.bus.messages import SeqPrefilled
from kvmesh.planner.core.batch_work import LONGEST_PREFILL_S
from kvmesh.planner.core.promises import Promise

BATCH = frozenset({"batch"})
PROMISES = [Promise("ttft", 0.9, 5.0)]


def planned(promises: list[Promise]) -> PlannedModel:
    made = PlannedModel(promises=promises, interval_s=10.0, batch_classes=BATCH)
    made.start("workers", 2)
    made.run(150, 0.5)
    return made


def test_the_fleet_grows_for_batch_work_only_if_a_promise_names_it() -> None:
    left, named = planned(PROMISES), planned([*PROMISES, Promise("ttft", 0.9, 6.0, "", "batch")])
    for made in (left, named):
        made.run(200, 6.0, request_class="batch")
    assert max(left.sizes) <= 2
    assert max(named.sizes) > 4


def test_batch_requests_that_wait_are_no_backlog() -> None:
    made = planned(PROMISES)
    before = made.wanted
    for number in range(200):
        entry = wait(f"b-{number}", made.now - 100, 50_000)
        made.core.on_sequence(replace(entry, fair_class="key\x1fbatch", tier=-1))
    assert made.decide().wanted == before
    assert made.core.traffic.waiting == 0
    made.core.on_sequence(wait("other", made.now))
    assert made.core.traffic.waiting == 1


def test_prompts_of_batch_requests_in_engines_are_no_backlog() -> None:
    made = planned(PROMISES)
    batch = made.core.batch
    for number in range(3):
        event = decision(f"b-{number}", made.now, 100_000, request_class="batch")
        made.core.on_route(event, made.now)
    assert batch.prefill_tokens == 300_000
    made.core.on_sequence(SeqPrefilled("b-0"))
    made.core.on_sequence(freed("b-1"))
    assert batch.prefill_tokens == 100_000
    made.core.on_route(outcome("b-2", made.now), made.now)
    assert batch.prefill_tokens == 0
    made.core.on_route(decision("lost", made.now, 4096, request_class="batch"), made.now)
    made.now += LONGEST_PREFILL_S + 1
    made.decide()
    assert batch.prefill_tokens == 0


def test_a_class_of_a_key_is_one_too() -> None:
    made = planned(PROMISES)
    event = decision("b", made.now)
    event = replace(event, hints=replace(event.hints, tenant="batch"))
    assert made.core.batch.on_route(event, made.now)
