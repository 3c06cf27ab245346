"""The processes of a mesh on one machine, and their settings."""

from pathlib import Path

import pytest

from kvmesh.cli.supervisor.plan import (
    first_worker_port,
    frontend_ports,
    most_workers,
    service_specs,
    worker_groups,
)
from kvmesh.settings import Flag, Settings, load
from kvmesh.settings.load import OptionKey


def settings(**flags: str) -> Settings:
    places: dict[OptionKey, Flag] = {}
    for name, text in flags.items():
        section, key = name.split("__")
        places[section, key] = Flag(name, text)
    return load(None, {}, places)


def test_the_default_mesh() -> None:
    specs = service_specs(settings(), {})
    assert [spec.name for spec in specs] == [
        "indexer-0",
        "router-0",
        *(f"worker-{n}" for n in range(4)),
        "frontend-0",
        "dashboard-0",
    ]
    assert [spec.argv[1:] for spec in specs if spec.role == "worker"] == [
        ("-m", "kvmesh.cli.main", "worker", f"--name=worker-{n}") for n in range(4)
    ]


def test_a_process_gets_its_name_and_settings_but_no_stale_variables() -> None:
    chosen = settings(up__workers="2", nats__url="nats://h:1", worker__name="east")
    environ = {"PATH": "/bin", "KVMESH_CONFIG": "/x.toml", "KVMESH_MOCK_BLOCKS": "1"}
    worker = service_specs(chosen, environ)[3]
    assert worker.name == "east-1"
    assert worker.env["PATH"] == "/bin"
    assert load(None, worker.env, {}) == load(
        None,
        {},
        {
            ("up", "workers"): Flag("", "2"),
            ("nats", "url"): Flag("", "nats://h:1"),
            ("worker", "name"): Flag("", "east-1"),
        },
    )


def test_frontends_listen_on_consecutive_ports() -> None:
    chosen = settings(up__frontends="3", up__workers="0", frontend__port="9000")
    specs = [spec for spec in service_specs(chosen, {}) if spec.role == "frontend"]
    ports = [load(None, spec.env, {}).frontend.port for spec in specs]
    assert ports == frontend_ports(chosen) == [9000, 9001, 9002]


def test_metrics_ports_are_consecutive_over_all_roles() -> None:
    chosen = settings(up__workers="2", up__metrics_port="9100")
    found = []
    for spec in service_specs(chosen, {}):
        if spec.role not in ("frontend", "dashboard"):
            own = getattr(load(None, spec.env, {}), spec.role)
            found.append((spec.name, own.metrics_port))
    assert found == [
        ("indexer-0", 9100),
        ("router-0", 9101),
        ("worker-0", 9102),
        ("worker-1", 9103),
    ]


def test_with_prefill_workers_the_others_decode() -> None:
    chosen = settings(up__workers="2", up__prefill_workers="1")
    workers = [spec for spec in service_specs(chosen, {}) if spec.role == "worker"]
    assert {spec.name: load(None, spec.env, {}).worker.serves for spec in workers} == {
        "worker-prefill-0": "prefill",
        "worker-0": "decode",
        "worker-1": "decode",
    }


def test_a_planner_starts_after_what_it_scales_and_scales_the_workers_of_this_mesh() -> None:
    chosen = settings(up__planner="true", up__workers="2", up__max_workers="5")
    planner = service_specs(chosen, {})[-2]
    assert (planner.name, planner.role) == ("planner-0", "planner")
    own = load(None, planner.env, {}).planner
    assert (own.name, own.connector) == ("planner-0", "processes")
    assert own.pools == ["workers:serves=aggregated", "min=1", "max=5"]


def test_a_planner_scales_prefill_and_decode_workers_apart() -> None:
    chosen = settings(up__planner="true", up__workers="9", up__prefill_workers="1")
    own = load(None, service_specs(chosen, {})[-2].env, {}).planner
    assert ",".join(own.pools) == (
        "prefill:serves=prefill,min=1,max=8,kind=worker,"
        "decode:serves=decode,min=1,max=9,kind=worker"
    )
    assert [most_workers(chosen, group) for group in worker_groups(chosen)] == [8, 9]


def test_a_planner_keeps_the_connector_and_the_pools_that_are_set() -> None:
    pools = "workers:min=2"
    chosen = settings(up__planner="true", planner__connector="command", planner__pools=pools)
    own = load(None, service_specs(chosen, {})[-2].env, {}).planner
    assert (own.connector, own.pools) == ("command", [pools])


@pytest.mark.parametrize(("planner", "first"), [("false", 9102), ("true", 9103)])
def test_the_workers_have_the_last_metrics_ports(planner: str, first: int) -> None:
    chosen = settings(up__metrics_port="9100", up__planner=planner)
    ports = [
        load(None, spec.env, {}).worker.metrics_port
        for spec in service_specs(chosen, {})
        if spec.role == "worker"
    ]
    assert first_worker_port(chosen) == first
    assert ports == list(range(first, first + 4))
    assert first_worker_port(settings()) == 0


def test_a_block_manager_comes_before_the_workers_of_its_node() -> None:
    chosen = settings(up__kvbm="true", up__workers="1", kvbm__node="east")
    specs = service_specs(chosen, {})
    assert [spec.name for spec in specs] == [
        "indexer-0",
        "router-0",
        "kvbm-0",
        "worker-0",
        "frontend-0",
        "dashboard-0",
    ]
    assert load(None, specs[3].env, {}).worker.node == "east"


def test_the_dashboard_asks_for_the_keys_of_the_frontends(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    chosen = settings(frontend__keys_file=str(keys), frontend__keys_bucket="true")
    own = load(None, service_specs(chosen, {})[-1].env, {}).dashboard
    assert (own.keys_file, own.keys_bucket) == (keys, True)
    other = settings(frontend__keys_file=str(keys), dashboard__keys_bucket="true")
    own = load(None, service_specs(other, {})[-1].env, {}).dashboard
    assert (own.keys_file, own.keys_bucket) == (None, True)


def test_the_dashboard_can_be_left_out() -> None:
    roles = {spec.role for spec in service_specs(settings(up__dashboard="false"), {})}
    assert "dashboard" not in roles


def test_parked_workers_run_beside_those_that_serve_and_all_start_parked() -> None:
    own = settings(up__planner="true", up__workers="2", up__parked="1", up__max_workers="3")
    specs = service_specs(own, {})
    workers = [spec for spec in specs if spec.role == "worker"]
    assert [spec.name for spec in workers] == ["worker-0", "worker-1", "worker-2"]
    assert {spec.env["KVMESH_WORKER_PARKED"] for spec in workers} == {"True"}
    (planner,) = (spec for spec in specs if spec.role == "planner")
    assert "max=3,parked=1" in planner.env["KVMESH_PLANNER_POOLS"]
    (group,) = worker_groups(own)
    assert most_workers(own, group) == 4
    assert (group.count, group.processes) == (2, 3)


def test_the_planner_may_have_workers_sleep() -> None:
    own = settings(up__planner="true", up__workers="2", up__asleep="3", up__max_workers="4")
    (group,) = worker_groups(own)
    assert (group.processes, group.settings.worker.parked) == (2, False)
    planner = next(spec for spec in service_specs(own, {}) if spec.role == "planner")
    assert "max=4,asleep=3" in planner.env["KVMESH_PLANNER_POOLS"]


def test_pools_that_are_set_say_how_many_are_parked() -> None:
    pools = "workers:min=1,max=4,parked=2"
    own = settings(up__planner="true", up__workers="1", up__parked="9", planner__pools=pools)
    (group,) = worker_groups(own)
    assert (group.parked, group.settings.worker.parked) == (2, True)
    without = settings(up__workers="1", up__parked="2")
    (group,) = worker_groups(without)
    assert (group.parked, group.settings.worker.parked) == (0, False), "nobody promotes"
