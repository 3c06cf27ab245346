"""The workers that start and stop at run time: names, ports, order and bounds."""

import msgspec

from kvmesh.bus.messages import DesiredFleet, FleetReport
from kvmesh.cli.supervisor.fleet import Fleet, FleetChange
from kvmesh.cli.supervisor.plan import worker_groups
from kvmesh.settings import Settings, load
from kvmesh.settings.schema import UpSettings


def fleet(workers: int = 2, prefill: int = 0, port: int = 0) -> Fleet:
    settings = Settings(up=UpSettings(workers=workers, prefill_workers=prefill))
    groups = worker_groups(settings)
    return Fleet(groups, port, {group.pool: 4 for group in groups}, {})


def desired(revision: int, stop: tuple[str, ...] = (), **pools: int) -> DesiredFleet:
    return DesiredFleet(revision=revision, pools=pools, stop=list(stop))


def started(change: FleetChange) -> list[str]:
    return [spec.name for spec in change.start]


def test_a_new_fleet_reports_the_workers_of_the_start() -> None:
    assert fleet(workers=2, prefill=1).report() == FleetReport(
        revision=0,
        pools={"prefill": 1, "decode": 2},
        workers={"prefill": ["worker-prefill-0"], "decode": ["worker-0", "worker-1"]},
    )


def test_a_pool_grows_by_the_lowest_free_numbers_and_shrinks_from_the_end() -> None:
    under = fleet()
    assert started(under.apply(desired(1, workers=4))) == ["worker-2", "worker-3"]
    assert under.apply(desired(2, workers=2)).stop == ["worker-3", "worker-2"]
    assert under.report().pools == {"workers": 2}
    assert started(under.apply(desired(3, workers=3))) == ["worker-4"]  # 2 and 3 still end
    under.ended("worker-2")
    assert started(under.apply(desired(4, workers=4))) == ["worker-2"]


def test_the_named_workers_stop_first() -> None:
    under = fleet(workers=4)
    change = under.apply(desired(1, ("worker-1", "elsewhere", "worker-0"), workers=1))
    assert change.stop == ["worker-1", "worker-0", "worker-3"]
    assert under.report().workers == {"workers": ["worker-2"]}
    assert under.apply(desired(2, ("worker-2",), workers=1)) == FleetChange()  # it does not shrink


def test_the_same_fleet_again_changes_nothing() -> None:
    under = fleet()
    under.apply(desired(1, workers=3))
    assert under.apply(desired(2, workers=3)) == FleetChange()
    assert under.report().revision == 2


def test_pools_change_together_and_others_not() -> None:
    under = fleet(workers=1, prefill=1)
    change = under.apply(desired(1, decode=2, prefill=2))
    assert started(change) == ["worker-1", "worker-prefill-1"]
    serves = [load(None, spec.env, {}).worker.serves for spec in change.start]
    assert serves == ["decode", "prefill"]
    assert under.apply(desired(2, prefill=0)).stop == ["worker-prefill-1", "worker-prefill-0"]
    assert under.report().pools == {"prefill": 0, "decode": 2}


def test_more_than_the_bound_and_unknown_pools_are_errors_of_the_report() -> None:
    under = fleet()
    assert started(under.apply(desired(1, workers=9, gpu=1))) == ["worker-2", "worker-3"]
    report = under.report()
    assert (report.revision, report.pools) == (1, {"workers": 4})
    assert report.error == "9 workers of pool workers exceed 4; no pool gpu; kvmesh up runs workers"
    under.apply(desired(2, workers=4))
    assert under.report().error == ""


def test_an_earlier_fleet_is_acknowledged_but_not_run() -> None:
    under = fleet()
    under.pass_over(desired(7, workers=4))
    assert (under.report().revision, under.report().pools) == (7, {"workers": 2})


def test_a_worker_that_rejects_its_settings_is_reported() -> None:
    under = fleet()
    assert under.retired("worker-1")
    assert not under.retired("worker-1")
    assert not under.retired("frontend-0")
    report = under.report()
    assert (report.pools, report.error) == ({"workers": 1}, "worker-1 rejects its settings")
    under.ended("worker-1")
    assert started(under.apply(desired(1, workers=2))) == ["worker-1"]


def test_ports_are_those_that_no_worker_has() -> None:
    under = fleet(workers=2, port=9100)
    change = under.apply(desired(1, workers=4))
    ports = [load(None, spec.env, {}).worker.metrics_port for spec in change.start]
    assert ports == [9102, 9103]
    under.apply(desired(2, ("worker-0",), workers=3))
    under.ended("worker-0")
    (again,) = under.apply(desired(3, workers=4)).start
    assert (again.name, load(None, again.env, {}).worker.metrics_port) == ("worker-0", 9100)


def test_a_new_worker_has_the_settings_of_the_others() -> None:
    settings = Settings(up=UpSettings(workers=1))
    worker = msgspec.structs.replace(settings.worker, labels=["zone=a"])
    groups = worker_groups(msgspec.structs.replace(settings, worker=worker))
    under = Fleet(groups, 0, {"workers": 4}, {"PATH": "/bin", "KVMESH_WORKER_LABELS": "zone=b"})
    (spec,) = under.apply(desired(1, workers=2)).start
    assert spec.env["PATH"] == "/bin"
    own = load(None, spec.env, {}).worker
    assert (own.name, own.labels) == ("worker-1", ["zone=a"])
