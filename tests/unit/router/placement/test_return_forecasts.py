"""The router core passes route events on to the forecaster, and forecasts to workers that ask."""

from random import Random

import pytest
from support.routing import request, sequence, worker

from kvmesh.bus.messages import Hints, Instance, Outcome, Placement, Role
from kvmesh.router.placement.router import RouterCore
from kvmesh.settings.schema import RouterSettings

EPOCH = 1e9


def core(**settings: bool) -> RouterCore:
    router = RouterCore("m", "r", RouterSettings(**settings), Random(1), EPOCH)  # type: ignore[arg-type]
    router.join(worker("a", expects_returns=True))
    router.join(worker("b"))
    return router


def finish(router: RouterCore, name: str, on: str, first: int = 0, load_test: bool = False) -> None:
    placed = router.decide(
        request(
            name,
            sequence(*range(first, first + 10)),
            placement=Placement(instance=on),
            hints=Hints(load_test=load_test),
        ),
        None,
        5.0,
    )
    router.learn(placed, 5.0)
    outcome = Outcome(
        request=name,
        instance=on,
        time=EPOCH + 6.0,
        cached_tokens=0,
        output_tokens=1,
        ttft_s=None,
        total_s=1.0,
        finish="stop",
        load_test=load_test,
    )
    router.learn(outcome, 6.0)


def trust(router: RouterCore) -> None:
    assert router.learning.returns is not None
    router.learning.returns.shadow.returns = 1000
    router.learning.returns.shadow.hits_by_value = 1e9


def test_a_worker_that_expects_returns_gets_the_forecast() -> None:
    router = core()
    trust(router)
    finish(router, "1", "a")
    [forecast] = router.take_forecasts(6.0)["a"]
    assert (forecast.request, forecast.since) == ("1", EPOCH + 6.0)
    assert router.learning.returns is not None
    assert router.learning.returns.shadow.capacity == 2 * 1024
    finish(router, "2", "b", first=50)
    assert router.take_forecasts(7.0) == {}


@pytest.mark.parametrize("expects", [True, False])
def test_the_kvbm_of_the_workers_node_gets_it_too(expects: bool) -> None:
    router = core()
    router.join(worker("c", node="n", expects_returns=expects))
    for node, instance, kvbm_expects in (("n", "k", True), ("n", "old", False), ("o", "l", True)):
        router.join(
            Instance(
                instance=instance,
                role=Role.KVBM,
                name=instance,
                version="0",
                started=0.0,
                node=node,
                expects_returns=kvbm_expects,
            )
        )
    trust(router)
    finish(router, "1", "c")
    forecasts = router.take_forecasts(6.0)
    assert set(forecasts) == ({"c", "k"} if expects else {"k"})
    assert forecasts["k"][0].request == "1"


def test_nothing_is_learned_about_agents_from_a_load_test() -> None:
    router = core()
    trust(router)
    finish(router, "1", "a", load_test=True)
    assert router.take_forecasts(6.0) == {}
    assert router.speeds.answer == 0
    finish(router, "2", "a")
    [forecast] = router.take_forecasts(6.0)["a"]
    assert forecast.request == "2"
    assert router.speeds.answer == 1


def test_forecasts_can_be_turned_off() -> None:
    router = core(forecast_returns=False)
    finish(router, "1", "a")
    assert router.learning.returns is None
    assert router.take_forecasts(6.0) == {}
