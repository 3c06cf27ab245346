"""Pools with a profile are planned before their first worker, and without live step times."""

from msgspec.structs import replace
from support.planned_model import BLOCK, START, LinearEngine, PlannedModel, worker_card

from kvmesh.planner.config import plan_options
from kvmesh.planner.core.pool_view import PoolView
from kvmesh.planner.core.promises import Promise
from kvmesh.planner.profiles import unfit_profile
from kvmesh.settings.schema import PlannerSettings


class WithoutStepTimes(PlannedModel):
    """Its engines report loads without the time that they spend in steps."""

    def loads(self, **changes: int) -> None:
        for instance in [name for names in self.workers.values() for name in names]:
            self.core.on_load(replace(LinearEngine(instance).load(**changes), busy_s=0.0))


def view(profile: str = "h100-llama-3.1-8b") -> PoolView:
    (pool,) = plan_options(PlannerSettings(pools=[f"p:profile={profile}"]))[1]
    return PoolView(pool, 60.0)


def test_the_limits_of_a_pool_without_workers_are_those_of_its_profile() -> None:
    one = view()
    kind = one.kind()
    assert kind is not None
    assert (kind.step_tokens, kind.max_sequences) == (8192, 256)
    assert kind.kv_tokens > 400_000
    one.joined(worker_card("a"), START, begun=False)
    kind = one.kind()
    assert kind is not None
    assert kind.kv_tokens == 16_384 * BLOCK  # as its card says
    assert (one.step_times is not None, one.samples) == (True, 0)


def test_workers_of_another_speed_are_noticed() -> None:
    one = view()
    assert unfit_profile(one) == ""
    one.joined(worker_card("a"), START, begun=False)
    assert "KV tokens; a worker has 1,048,576" in unfit_profile(one)
    one = view("h200-llama-3.1-8b")
    one.joined(worker_card("a"), START, begun=False)
    assert unfit_profile(one) == ""
    engine = LinearEngine("a")
    for _ in range(12):
        one.on_load(engine.load())
    assert one.step_times is not None
    assert one.step_times.factor > 2
    assert "times the step times of profile h200-llama-3.1-8b of pool p" in unfit_profile(one)


def test_a_pool_of_engines_without_step_times_grows_by_its_profile() -> None:
    promise = Promise("ttft", 0.95, 2.0)
    sizes = {}
    for extra in ("", ",profile=a100-llama-3.1-8b"):
        model = WithoutStepTimes(f"workers:max=16{extra}", promises=[promise])
        model.start("workers", 1)
        model.run(240, 4.0)
        sizes[extra] = model.wanted["workers"]
    assert sizes[""] == 1
    assert sizes[",profile=a100-llama-3.1-8b"] > 1
