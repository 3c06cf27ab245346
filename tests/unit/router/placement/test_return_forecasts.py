"""The router core passes route events on to the forecaster, and forecasts to kvbms that ask."""

from random import Random

from support.routing import request, sequence, worker

from kvmesh.bus.messages import Hints, Instance, Outcome, Placement, Role
from kvmesh.router.placement.router import RouterCore
from kvmesh.settings.schema import RouterSettings

EPOCH = 1e9


def core(**settings: bool) -> RouterCore:
    router = RouterCore("m", "r", RouterSettings(**settings), Random(1), EPOCH)  # type: ignore[arg-type]
    for node, expects in (("n", True), ("o", False)):
        router.join(worker(f"worker-{node}", node=node))
        router.join(
            Instance(
                instance=f"kvbm-{node}",
                role=Role.KVBM,
                name=f"kvbm-{node}",
                version="0",
                started=0.0,
                node=node,
                expects_returns=expects,
            )
        )
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


def test_the_kvbm_of_the_workers_node_gets_the_forecast_if_it_expects_returns() -> None:
    router = core()
    finish(router, "1", "worker-n")
    forecasts = router.take_forecasts(6.0)
    assert set(forecasts) == {"kvbm-n"}
    [forecast] = forecasts["kvbm-n"]
    assert (forecast.request, forecast.since) == ("1", EPOCH + 6.0)
    finish(router, "2", "worker-o", first=50)
    assert router.take_forecasts(7.0) == {}


def test_a_worker_of_the_former_release_gets_none() -> None:
    router = core()
    router.join(worker("old", expects_returns=True))
    finish(router, "1", "old")
    assert router.take_forecasts(6.0) == {}


def test_nothing_is_learned_about_agents_from_a_load_test() -> None:
    router = core()
    finish(router, "1", "worker-n", load_test=True)
    assert router.take_forecasts(6.0) == {}
    assert router.speeds.answer == 0
    finish(router, "2", "worker-n")
    [forecast] = router.take_forecasts(6.0)["kvbm-n"]
    assert forecast.request == "2"
    assert router.speeds.answer == 1


def test_forecasts_can_be_turned_off() -> None:
    router = core(forecast_returns=False)
    finish(router, "1", "worker-n")
    assert router.learning.returns is None
    assert router.take_forecasts(6.0) == {}
