"""The record of a decision has its inputs, its candidates and what is kept of the promises."""

import msgspec
from support.planned_model import PlannedModel, outcome, wait

from kvmesh.bus.messages import ScalingDecision
from kvmesh.planner.actions import Decided
from kvmesh.planner.core.promises import Promise
from kvmesh.planner.record import scaling_decision


def test_a_record_of_a_growing_model() -> None:
    promises = [Promise("ttft", 0.95, 2.0), Promise("ttft", 0.5, 60.0, "", "batch")]
    model = PlannedModel("workers:max=16,cost=2", promises=promises, interval_s=10.0)
    model.start("workers", 1)
    model.run(100, 0.3)
    core, before = model.core, dict(model.wanted)
    core.on_sequence(wait("w", model.now, cost=100))
    core.wake(2, model.now)
    for number in range(200):
        model.request(request_class="batch", at=model.now - number / 100)
    model.now += 10
    plan = core.decide(model.now)
    decided = Decided("m", plan, before, True, True)
    record = scaling_decision(core, decided, "p-1", model.now)
    pool = record.pools["workers"]
    assert record.changed
    assert (pool.ready, pool.before, pool.wanted) == (1, before["workers"], plan.wanted["workers"])
    assert pool.starting == pool.wanted - pool.ready
    assert record.cost == 2 * pool.wanted
    assert record.time == model.now
    assert record.signals["waiting_requests"] == 1
    assert record.signals["waiting_tokens"] == 100
    assert record.signals["oldest_wait_s"] == 10
    assert record.signals["waking_requests"] == 2
    assert record.signals["prompt_tokens"] > 3000
    assert record.kept.keys() == {"ttft p95=2s", "ttft batch:p50=60s"}
    assert 0.9 < record.kept["ttft p95=2s"] < 1.0  # one request waits for longer
    assert record.kept["ttft batch:p50=60s"] == 1.0
    assert record.candidates
    for candidate in record.candidates:
        assert candidate.shares.keys() == candidate.quantiles.keys() == record.kept.keys()
    sizes = [candidate.workers["workers"] for candidate in record.candidates]
    assert sizes == sorted(sizes)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=ScalingDecision) == record
    assert msgspec.json.encode(record)


def test_a_record_without_any_message() -> None:
    model = PlannedModel("workers:min=0")
    model.core.on_route(outcome("unknown", model.now), model.now)
    plan = model.core.decide(model.now)
    record = scaling_decision(model.core, Decided("m", plan, {}, False, True), "p-1", model.now)
    assert (record.kept, record.candidates, record.stop, record.cost) == ({}, [], [], 0.0)
    assert record.pools["workers"].wanted == 0


def test_a_clock_that_is_set_back_changes_the_time_of_the_record_only() -> None:
    model = PlannedModel("workers:min=0")
    model.start("workers", 1)
    model.run(100, 1.0)
    model.core.on_sequence(wait("w", model.now))
    model.now -= 50_000
    plan = model.core.decide(model.now)
    record = scaling_decision(model.core, Decided("m", plan, {}, False, True), "p-1", model.now)
    assert record.time == model.now
    assert 0 <= record.signals["oldest_wait_s"] < 60
    assert len(record.kept) == 1
